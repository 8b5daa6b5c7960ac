"""Build a result on a shared file system in one process while the others, of this job or another, wait.

The lock is a file that its owner creates and rewrites every few seconds; waiting processes watch it change. It only
needs atomic creation (``O_EXCL``), which NFS and Lustre support, while ``flock`` is often disabled. The lock only saves
work: if a live owner is taken for dead, both build the same bytes, and files appear atomically.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape, glob
from typing import Any, BinaryIO, TypeVar

# Two processes need the same result:
#
#   A   load: nothing   create STEM.lock   load again, build and store        remove STEM.lock
#   B   load: nothing   STEM.lock exists   load every 0.2 s, watch A's heartbeat     load: found
#
# If A dies, its heartbeat stops, or on one host its process id is gone: B removes the lock, and builds.

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_POLL = 0.2
_SUFFIX = ".incomplete"


def load_or_build_once(
    stem: str,
    load: Callable[[], T | None],
    build: Callable[[], T],
    *,
    heartbeat_seconds: float = 5.0,
    stale_after: float = 120.0,
) -> T:
    """The result of ``load``, or of ``build``, which stores it; one process at a time builds under a ``stem``.

    The others wait until ``load`` succeeds or the building process has ended, or has not renewed the lock for
    ``stale_after`` seconds: long, since a shuffle of billions blocks the interpreter for a while. Raises
    :class:`OSError` if the directory is not writable.
    """
    lock = f"{stem}.lock"
    watch: _Watch | None = None
    while (found := load()) is None:
        os.makedirs(os.path.dirname(lock) or ".", exist_ok=True)
        if _take(lock):
            with _renewed(lock, heartbeat_seconds):
                found = load()  # it may have been completed just before the lock was free
                return build() if found is None else found
        watch = watch or _Watch(lock, stale_after)
        if not watch.owner_is_alive():
            watch.remove_leftovers(stem)
        time.sleep(_POLL)
    return found


def write_atomically(path: str, write: Callable[[BinaryIO], T], sync: bool = True) -> T:
    """Write a temporary file with ``write``, sync it, and rename it; returns the result of ``write``.

    Without ``sync`` a power failure may leave a damaged file, which its reader must detect.
    """
    temporary = f"{path}.{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
    try:
        with open(temporary, "wb") as file:
            result = write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        return result
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def _take(lock: str) -> bool:
    """Create the lock; False if it exists."""
    try:
        with open(lock, "x", encoding="utf-8") as file:
            file.write(_heartbeat())
    except FileExistsError:
        return False
    return True


def _heartbeat() -> str:
    """Owner and time of a renewal; a waiting process compares it only with its previous value."""
    return json.dumps({"host": _host(), "process": os.getpid(), "time": time.time()})


def _host() -> str:
    """Host or container whose process ids are comparable."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


@contextmanager
def _renewed(lock: str, heartbeat_seconds: float) -> Iterator[None]:
    """Rewrite the lock periodically, and remove it at the end."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(heartbeat_seconds):
            # Without creating it: a waiter may have removed it.
            with suppress(OSError), open(lock, "r+", encoding="utf-8") as file:
                file.write(_heartbeat())
                file.truncate()

    heartbeats = threading.Thread(target=beat, daemon=True)
    heartbeats.start()
    try:
        yield
    finally:
        done.set()
        heartbeats.join()
        with suppress(FileNotFoundError):
            os.remove(lock)


class _Watch:
    """A lock as seen by a waiting process."""

    def __init__(self, lock: str, stale_after: float) -> None:
        self._lock, self._stale_after = lock, stale_after
        self._text = ""
        self._seen = time.monotonic()
        _logger.info("Waiting for another process to build %s", lock.removesuffix(".lock"))

    def owner_is_alive(self) -> bool:
        """Whether the lock is free, or was renewed recently."""
        try:
            with open(self._lock, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            return True
        # Clocks of two hosts differ: only a change of the text counts, timed by this process.
        if text != self._text:
            self._text, self._seen = text, time.monotonic()
        return time.monotonic() - self._seen < self._stale_after and not self._owner_has_ended()

    def remove_leftovers(self, stem: str) -> None:
        """Remove the lock, and its owner's temporary files if the owner has certainly ended."""
        _logger.warning("The process that built %s has ended (%s): building it again", stem, self._text)
        leftovers = []
        if self._owner_has_ended():
            leftovers = glob(f"{escape(stem)}*.{self._owner()['process']}-*{_SUFFIX}")
        for path in (*leftovers, self._lock):
            with suppress(FileNotFoundError):
                os.remove(path)

    def _owner_has_ended(self) -> bool:
        owner = self._owner()
        if owner.get("host") != _host():
            return False
        try:
            os.kill(owner["process"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _owner(self) -> dict[str, Any]:
        try:
            owner: dict[str, Any] = json.loads(self._text)
        except ValueError:
            return {}  # half written
        return owner
