"""A result on a shared file system that one process builds while the others, of this job or another, wait.

The lock is a file that its holder creates and rewrites every few seconds; waiters see it change. It needs no more of
a file system than that a file is created once (``O_EXCL``), which NFS and Lustre do, where ``flock`` is often switched
off. It saves work and no more: should a holder be taken for dead that is not, both build the same bytes, and files
appear under their names in one atomic step.
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

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_BEAT = 5.0  # seconds between two signs of life of a holder
_STALE_AFTER = 120.0  # seconds without one; a shuffle of billions holds the interpreter for a while
_POLL = 0.2
_SUFFIX = ".incomplete"


def load_or_build_once(stem: str, load: Callable[[], T | None], build: Callable[[], T]) -> T:
    """What ``load`` finds, or what ``build`` makes and stores; at a time one process builds under a ``stem``.

    The others wait until ``load`` finds it, or until the one that builds has gone. Raises :class:`OSError` where
    the directory cannot be written.
    """
    lock = f"{stem}.lock"
    watch: _Watch | None = None
    while (found := load()) is None:
        os.makedirs(os.path.dirname(lock) or ".", exist_ok=True)
        if _take(lock):
            with _held(lock):
                found = load()  # it may have been completed just before the lock was free
                return build() if found is None else found
        watch = watch or _Watch(lock)
        if not watch.holder_lives():
            watch.remove_what_it_left(stem)
        time.sleep(_POLL)
    return found


def write_atomically(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, bring it to the disk, then give it that name."""
    temporary = f"{path}.{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def _take(lock: str) -> bool:
    """Create the lock; False where there is one already."""
    try:
        with open(lock, "x", encoding="utf-8") as file:
            file.write(_sign_of_life())
    except FileExistsError:
        return False
    return True


def _sign_of_life() -> str:
    """Who holds a lock, and when (which a waiter compares only with the former reading)."""
    return json.dumps({"host": _host(), "process": os.getpid(), "time": time.time()})


def _host() -> str:
    """Where a process number means a process: containers of one host may share its name, but not their processes."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


@contextmanager
def _held(lock: str) -> Iterator[None]:
    """Rewrite the lock now and then; remove it in the end."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT):
            # Without creating it: a waiter may have removed it.
            with suppress(OSError), open(lock, "r+", encoding="utf-8") as file:
                file.write(_sign_of_life())
                file.truncate()

    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    try:
        yield
    finally:
        done.set()
        beats.join()
        with suppress(FileNotFoundError):
            os.remove(lock)


class _Watch:
    """A waiter's view of a lock."""

    def __init__(self, lock: str) -> None:
        self._lock = lock
        self._text = ""
        self._seen = time.monotonic()
        _logger.info("Waiting for another process to build %s", lock.removesuffix(".lock"))

    def holder_lives(self) -> bool:
        """Whether the lock is free, or its holder has shown a sign of life lately."""
        try:
            with open(self._lock, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            return True
        if text != self._text:
            self._text, self._seen = text, time.monotonic()
        return time.monotonic() - self._seen < _STALE_AFTER and not self._is_known_to_be_gone()

    def remove_what_it_left(self, stem: str) -> None:
        """The lock; and the holder's temporary files, where it is certain that it has gone."""
        _logger.warning("Whoever built %s has gone (%s): building it again", stem, self._text)
        leftovers = []
        if self._is_known_to_be_gone():
            leftovers = glob(f"{escape(stem)}*.{self._holder()['process']}-*{_SUFFIX}")
        for path in (*leftovers, self._lock):
            with suppress(FileNotFoundError):
                os.remove(path)

    def _is_known_to_be_gone(self) -> bool:
        holder = self._holder()
        if holder.get("host") != _host():
            return False
        try:
            os.kill(holder["process"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _holder(self) -> dict[str, Any]:
        try:
            holder: dict[str, Any] = json.loads(self._text)
        except ValueError:
            return {}  # half written
        return holder
