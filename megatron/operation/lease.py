"""A lease: a lock file that its owner rewrites, and that another process takes over when the owner has ended.

    {"host", "pid", "process", "namespace", "token", "renewals", "renewed"}

The owner rewrites the file every few seconds. Clocks of two hosts are never compared: a waiting process checks whether
the file changes during one lease of its own monotonic clock. Only in the same boot and the same PID namespace can the
owner's process be looked up, which decides at once.

A lock of the file system (``flock``) is often disabled on clusters. There are two policies: the run lock refuses a
second run (``checkpoint/lock.py``), and processes that need the same result wait for it (``data/storage.py``).
"""

import errno
import json
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron.operation.processes import is_running, stat_of

RENEWAL = 5.0
"""Seconds between two renewals."""
RELEASE_SECONDS = 10.0
"""Seconds for which a release waits for a renewal under way."""
# Errors of os.link where files have one name only, as in directories that an object store is mounted at.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

Rival = Literal["alive", "renewed", "unknown", "contested"]
"""Why a lease cannot be taken: its owner runs on this host, or renewed it during the wait; it may be alive; or several
processes are taking it."""


@dataclass(frozen=True)
class ProcessTable:
    """The processes of this host, from procfs at ``proc``, or from sysctl and ps where there is none (macOS)."""

    proc: str = "/proc"

    @property
    def has_proc(self) -> bool:
        return os.path.isdir(self.proc)

    def boot(self) -> str:
        """Boot id of this host; empty if the system has none."""
        try:
            return Path(f"{self.proc}/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return "" if self.has_proc else _printed_by("sysctl", "-n", "kern.bootsessionuuid")

    def namespace(self) -> str:
        """PID namespace of this process; empty if it cannot be read."""
        return _link(f"{self.proc}/self/ns/pid") if self.has_proc else "none"

    def start_of(self, process: str) -> tuple[str, str]:
        """State of a process and its start (on Linux in clock ticks since boot); empty if the system hides it."""
        if not self.has_proc:
            pid = str(os.getpid()) if process == "self" else process
            state, _, start = _printed_by("ps", "-o", "stat=", "-o", "lstart=", "-p", pid).partition(" ")
            return state[:1], " ".join(start.split())
        fields = stat_of(process, self.proc)
        return (fields[0], fields[19]) if fields else ("", "")

    def fate(self, pid: int, start: str) -> Literal["alive", "gone", "unknown"]:
        """Whether the process ``pid`` of this PID namespace that began at ``start`` is alive."""
        if not is_running(pid):
            return "gone"
        if self.has_proc and _link(f"{self.proc}/self") != str(os.getpid()):
            return "unknown"  # a container may see the /proc of its host
        state, actual_start = self.start_of(str(pid))
        if not state:
            return "unknown"  # /proc may hide the processes of other users
        # An ended process is listed until its parent waits for it, in a container possibly forever.
        return "alive" if actual_start == start and state not in "ZX" else "gone"


def _link(path: str) -> str:
    """Target of a symbolic link; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _printed_by(*command: str) -> str:
    """The output of a program; empty if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(command, capture_output=True, text=True, timeout=10, env=environment).stdout.strip()
    return ""


THIS_HOST = ProcessTable()


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    process: str
    """Boot id of the host and start time of the process; a later process with the same pid differs."""
    token: str
    """Random for every lock."""
    renewed: float
    """Wall-clock time of the last renewal, for people."""
    namespace: str = ""
    """PID namespace of ``pid``; empty in files of older versions."""
    renewals: int = 0

    @classmethod
    def this_process(cls, table: ProcessTable = THIS_HOST) -> "Owner":
        """A new lock of this process."""
        identity, token = f"{table.boot()}/{table.start_of('self')[1]}", secrets.token_hex(8)
        return cls(socket.gethostname(), os.getpid(), identity, token, time.time(), table.namespace())

    def fate(self, table: ProcessTable = THIS_HOST) -> Literal["alive", "gone", "unknown"]:
        """Whether the process is alive, if this can be determined from here."""
        boot, _, start = self.process.partition("/")
        if not boot or boot != table.boot() or self.namespace not in ("", table.namespace()):
            return "unknown"
        fate = table.fate(self.pid, start)
        # A file of an older version lacks the namespace of its pid, which may be another process here.
        return "unknown" if fate == "gone" and not self.namespace else fate


@dataclass(frozen=True)
class _Sighting:
    """Content and time of a lock file at one moment; two unequal sightings mean that the file was rewritten."""

    text: bytes
    modified: int

    @property
    def owner(self) -> Owner | None:
        """Owner of the lock; None for an invalid file."""
        try:
            return Owner(**json.loads(self.text))
        except (ValueError, TypeError, RecursionError):
            return None


def _look(path: Path) -> _Sighting | None:
    """The lock file at ``path``; None if it does not exist. Other failures raise ``OSError``."""
    try:
        with path.open("rb") as file:
            return _Sighting(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def owner_at(path: Path) -> Owner | None:
    """Owner of the lease at ``path``; None for a missing or invalid file."""
    found = _look(path)
    return None if found is None else found.owner


@dataclass
class Claim:
    """A process that wants the lease at ``path``: call :meth:`poll` until it returns the lease."""

    path: Path
    seconds: float
    """Length of the lease: it is valid for this time without renewal."""
    renewal: float = RENEWAL
    """Seconds between two renewals."""
    clock: Callable[[], float] = time.monotonic
    needs_links: bool = True
    """Without hard links the file is not created together with its content, and two may get the lease."""
    on_stale: Callable[[Owner | None], object] = lambda owner: None
    """Called when this process has removed a stale lease of ``owner``; None for an invalid file."""
    owner: Owner | None = field(default=None, init=False)
    """Owner of the lease when it was last seen."""
    _seen: _Sighting | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)

    @property
    def patience(self) -> float:
        """Seconds without a change after which the lease is stale."""
        return self.seconds + self.renewal

    def poll(self) -> "Lease | Rival":
        """Take the lease if it is free or stale."""
        for _ in range(3):
            found = _look(self.path)
            if found is None:
                owner = Owner.this_process()
                if _create(self.path, owner, self.needs_links):
                    return Lease(self, owner)
            elif (rival := self._rival(found)) is not None:
                return rival
            elif _remove(self.path, found):
                self.on_stale(found.owner)
        return "contested"

    def _rival(self, found: _Sighting) -> Rival | None:
        """What is known of the owner; None if the lease is stale."""
        self.owner = found.owner
        fate = "gone" if self.owner is None else self.owner.fate()
        if fate == "gone":
            return None
        is_renewed = self._seen not in (None, found)
        if found != self._seen:
            self._seen, self._since = found, self.clock()
        if self.clock() - self._since > self.patience:
            return None
        return "alive" if fate == "alive" else "renewed" if is_renewed else "unknown"


def _create(path: Path, owner: Owner, needs_links: bool = True) -> bool:
    """Create the lock file atomically; False if there is one."""
    with _draft(path, owner) as draft, suppress(FileExistsError):
        try:
            os.link(draft, path)
        except FileNotFoundError:
            return False  # the owner of the lease removes the drafts of all others
        except OSError as error:
            if needs_links or error.errno not in _NO_LINKS:
                raise
            with path.open("x") as file:
                json.dump(asdict(owner), file)
        return True
    return False


@contextmanager
def _draft(path: Path, owner: Owner) -> Iterator[Path]:
    """A temporary file with ``owner``; always removed afterwards."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(json.dumps(asdict(owner)))
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def clear_drafts(path: Path) -> None:
    """Remove drafts of killed processes. A live process whose draft is removed does not get the lease."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}")
    with suppress(OSError):
        for draft in path.parent.iterdir():
            if name.fullmatch(draft.name):
                owner = owner_at(draft)
                if owner is None or owner.fate() != "alive":
                    draft.unlink(missing_ok=True)


def _remove(path: Path, stale: _Sighting) -> bool:
    """Remove a stale lock file; False if it has changed or is gone."""
    taken = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        os.rename(path, taken)
    except FileNotFoundError:
        return False
    with suppress(FileNotFoundError):
        is_stale = _look(taken) == stale
        if not is_stale:
            with suppress(FileExistsError):
                os.link(taken, path)
        taken.unlink()
        return is_stale
    return False


class Lease:
    """The lease of this process, renewed until :meth:`release`."""

    def __init__(self, claim: Claim, owner: Owner) -> None:
        self.path = claim.path
        self.token = owner.token
        """Random; no other lease has it."""
        self._owner, self._seconds, self._renewal, self._clock = owner, claim.seconds, claim.renewal, claim.clock
        self._renewed_at = self._clock()
        self._is_released = threading.Event()
        self.is_lost = False
        """Whether a renewal found that another process has taken over the lease."""
        # A daemon, so that a process that does not release its lease can end.
        self._renewing = threading.Thread(target=self._keep, name=f"renews {self.path.name}", daemon=True)
        self._renewing.start()

    # Only a process that waited for a whole lease takes it over, so an owner that renews in time never loses it:
    #
    #   owner     renews, renews, ... │ suspended                         │ another token: is_lost
    #   waiting                       │ no change for seconds + renewal   │ takes over
    #                                 └ by the clock of the waiting one ──┘

    def _keep(self) -> None:
        while not self._is_released.wait(self._renewal) and not self.is_lost:
            # A short failure of the file system does not end the lease; a failure for a whole lease does.
            with suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        found = _look(self.path)
        owner = None if found is None else found.owner
        if owner is not None and owner.token != self.token:
            self.is_lost = True
            return
        self._owner = replace(self._owner, renewed=time.time(), renewals=self._owner.renewals + 1)
        if found is not None:
            try:
                with _draft(self.path, self._owner) as draft:
                    now = self._clock()
                    if now - self._renewed_at <= self._seconds:
                        os.replace(draft, self.path)
                    elif _remove(self.path, found):
                        # Another process may take it at the same time; only one link succeeds.
                        os.link(draft, self.path)
                    else:
                        return  # it was taken since it was read
            except FileExistsError:
                return
            except OSError:
                # A full disk has no space for a draft. A new modification time is a change, too.
                now = self._clock()
                os.utime(self.path)
        elif (now := self._clock()) - self._renewed_at > self._seconds:
            # Another process may have taken and released it.
            self.is_lost = True
            return
        elif not _create(self.path, self._owner):
            return
        # The time before the change: waiting processes may see it before this one continues.
        self._renewed_at = now

    def release(self, patience: float = RELEASE_SECONDS) -> None:
        """Remove the file, unless it is another process's, or the file system stalls for ``patience`` seconds."""
        self._is_released.set()
        self._renewing.join(patience)
        if self._renewing.is_alive():
            return  # the lease ends by itself
        with suppress(OSError):
            owner = owner_at(self.path)
            if owner is not None and owner.token == self.token:
                self.path.unlink(missing_ok=True)
