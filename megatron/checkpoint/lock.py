"""The run lock: one run per checkpoint directory; the lock of a dead run is taken over.

    DIR/.run.lock    {"host", "pid", "process", "namespace", "token", "renewals", "renewed"}

The owner rewrites the file every few seconds. Clocks of two hosts are never compared: a waiting run checks whether the
file changes during one lease of its own monotonic clock. Only in the same boot and the same PID namespace can the
owner's process be looked up, which decides at once.

No file system has a rename that depends on another file, so a lock alone cannot stop a suspended owner that wakes up
late. Therefore the token in the lock is read right before a checkpoint is renamed (:func:`check_token`); only the time
between the two is unprotected.
"""

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megatron.checkpoint.files import explained
from megatron.errors import CheckpointError, DirectoryInUseError

LOCK = ".run.lock"
LEASE = 60.0
"""Seconds for which a lock is valid without renewal."""
RENEWAL = 5.0
"""Seconds between two renewals."""
POLL = 0.5
"""Seconds between two polls of a waiting run."""
RELEASE_SECONDS = 10.0
"""Seconds for which a release waits for a renewal under way."""
_DRAFT = re.compile(re.escape(LOCK) + r"\.[0-9a-f]{8}")


class LockLostError(DirectoryInUseError):
    """Another run has taken over the lock: this run must not save any more."""


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
        try:
            # The program's name is in parentheses and may contain any characters.
            fields = Path(f"{self.proc}/{process}/stat").read_text().rpartition(")")[2].split()
            return fields[0], fields[19]
        except (OSError, IndexError):
            return "", ""

    def fate(self, pid: int, start: str) -> Literal["alive", "gone", "unknown"]:
        """Whether the process ``pid`` of this PID namespace that began at ``start`` is alive."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "gone"
        except PermissionError:
            pass  # another user's process
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


def _owner_at(path: Path) -> Owner | None:
    """Owner of the lock at ``path``; None for a missing or invalid file."""
    found = _look(path)
    return None if found is None else found.owner


class LockAttempt:
    """An attempt to lock ``root``: call :meth:`poll` until it returns the lock or raises.

    The lock is renewed every ``renewal`` seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic, renewal: float = RENEWAL) -> None:
        self._root, self._path, self._clock, self._renewal = root, root / LOCK, clock, renewal
        self._first: _Sighting | None = None
        self._since = 0.0

    def poll(self) -> "RunLock | None":
        """Return the lock, or None while it is unknown whether its owner is alive.

        Raises :class:`DirectoryInUseError` with the owner if it is alive.
        """
        with explained("lock", self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            for _ in range(3):
                found = _look(self._path)
                if found is None:
                    owner = Owner.this_process()
                    if _create(self._path, owner):
                        _clear_drafts(self._path)
                        return RunLock(self._path, owner, renewal=self._renewal)
                elif self._may_be_held(found):
                    return None
                else:
                    _remove(self._path, found)
        raise DirectoryInUseError(f"Another run is taking over {self._root} right now: choose another --save.")

    def _may_be_held(self, found: _Sighting) -> bool:
        """Whether to keep waiting; raises if the owner is alive."""
        owner = found.owner
        if owner is None:
            return False
        fate = owner.fate()
        if fate == "gone":
            return False
        reason = "which is running"
        if fate == "unknown":
            if self._first is None:
                self._first, self._since = found, self._clock()
            if found == self._first:
                return self._clock() - self._since <= LEASE + RENEWAL
            reason = "which renewed its lock while this run was waiting for it"
        raise DirectoryInUseError(
            f"{self._root} is in use by process {owner.pid} on {owner.host}, {reason}: stop that run, or use another "
            "--save."
        )

    @property
    def reason_to_wait(self) -> str:
        """The reason why :meth:`poll` waits, as a sentence."""
        owner = None if self._first is None else self._first.owner
        assert owner is not None
        return (
            f"{self._root} is locked by process {owner.pid} on {owner.host}, of which this host cannot know whether it "
            f"runs: waiting at most {LEASE + RENEWAL:.0f} s for the lock to change; after that it is taken over"
        )


def _create(path: Path, owner: Owner) -> bool:
    """Create the lock file atomically; False if there is one."""
    with _draft(path, owner) as draft:
        try:
            os.link(draft, path)
        except (FileExistsError, FileNotFoundError):
            return False  # the run that has the lock removes the drafts of all others
    return True


@contextmanager
def _draft(path: Path, owner: Owner) -> Iterator[Path]:
    """A temporary file with ``owner``; always removed afterwards."""
    draft = path.with_name(f"{LOCK}.{secrets.token_hex(4)}")
    try:
        draft.write_text(json.dumps(asdict(owner)))
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _clear_drafts(path: Path) -> None:
    """Remove drafts of killed runs. A live run whose draft is removed does not get the lock."""
    with suppress(OSError):
        for draft in path.parent.iterdir():
            if _DRAFT.fullmatch(draft.name):
                owner = _owner_at(draft)
                if owner is None or owner.fate() != "alive":
                    draft.unlink(missing_ok=True)


def _remove(path: Path, stale: _Sighting) -> bool:
    """Remove a stale lock; False if it has changed or is gone."""
    taken = path.with_name(f"{LOCK}.{secrets.token_hex(4)}")
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


def check_token(root: Path, token: str) -> None:
    """Raise :class:`CheckpointError` unless the lock on ``root`` has ``token``. Call it right before every rename."""
    with explained("read", root / LOCK):
        owner = _owner_at(root / LOCK)
    if owner is None:
        raise CheckpointError(f"{root / LOCK} names no run, so nothing is saved: do not remove the file during a run.")
    if owner.token != token:
        raise _lost(root, owner)


def _lost(root: Path, owner: Owner | None) -> LockLostError:
    other = "another run" if owner is None else f"process {owner.pid} on {owner.host}"
    return LockLostError(
        f"{root} was taken over by {other}, after this run had not renewed its lock for {LEASE:.0f} s: this run saves "
        "nothing more there; decide which of the two runs should continue."
    )


class RunLock:
    """The lock on the checkpoints of a directory, held until :meth:`release`."""

    def __init__(
        self, path: Path, owner: Owner, clock: Callable[[], float] = time.monotonic, renewal: float = RENEWAL
    ) -> None:
        self.root = path.parent
        self.token = owner.token
        """Random; no other lock has it."""
        self._path, self._owner, self._clock, self._renewal = path, owner, clock, renewal
        self._renewed_at = clock()
        self._is_released = threading.Event()
        self._is_lost = False
        # A daemon, so that a process that does not release its lock can end.
        self._renewing = threading.Thread(target=self._keep, name="run lock", daemon=True)
        self._renewing.start()

    # Only a run that waited for a whole lease takes a lock over, so an owner that renews in time never loses it:
    #
    #   owner     renews, renews, ... │ suspended                         │ another token: LockLostError
    #   waiting                       │ no change for LEASE + RENEWAL     │ takes over, saves
    #                                 └ by the clock of the waiting run ──┘

    def _keep(self) -> None:
        while not self._is_released.wait(self._renewal) and not self._is_lost:
            # A short failure of the file system does not end the run; a failure for a whole lease loses the lock.
            with suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        found = _look(self._path)
        owner = None if found is None else found.owner
        if owner is not None and owner.token != self.token:
            self._is_lost = True
            return
        self._owner = replace(self._owner, renewed=time.time(), renewals=self._owner.renewals + 1)
        if found is not None:
            try:
                with _draft(self._path, self._owner) as draft:
                    now = self._clock()
                    if now - self._renewed_at <= LEASE:
                        os.replace(draft, self._path)
                    elif _remove(self._path, found):
                        # Another run may take the lock at the same time; only one link succeeds.
                        os.link(draft, self._path)
                    else:
                        return  # it was taken since it was read
            except FileExistsError:
                return
            except OSError:
                # A full disk has no space for a draft. A new modification time is a change, too.
                now = self._clock()
                os.utime(self._path)
        elif (now := self._clock()) - self._renewed_at > LEASE:
            # Another run may have taken the lock, saved, and released it.
            self._is_lost = True
            return
        elif not _create(self._path, self._owner):
            return
        # The time before the change: waiting runs may see it before this run continues.
        self._renewed_at = now

    def check(self) -> None:
        """Raise :class:`LockLostError` if another run has taken over the lock; call it before every save."""
        owner: Owner | None = None  # an unreadable lock is not lost: check_token refuses it
        with suppress(OSError):
            owner = _owner_at(self._path)
        if self._is_lost or (owner is not None and owner.token != self.token):
            raise _lost(self.root, owner)

    def release(self, patience: float = RELEASE_SECONDS) -> None:
        """Remove the lock, unless another run owns it, or the file system stalls for ``patience`` seconds."""
        self._is_released.set()
        self._renewing.join(patience)
        if self._renewing.is_alive():
            return  # the lock ends with its lease
        with suppress(OSError):
            owner = _owner_at(self._path)
            if owner is not None and owner.token == self.token:
                self._path.unlink(missing_ok=True)
