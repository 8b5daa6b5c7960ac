"""One run per directory: a lock that says whose it is, and that a dead owner does not keep.

    DIR/.run.lock    {"host": ..., "pid": ..., "process": ..., "token": ..., "renewed": seconds since the epoch}

The owner renews it every few seconds. It is stale when it was not renewed for the length of a lease, or at once when
its process is known to be gone because it ran on this very host.
"""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.checkpoint.files import explained
from megatron.config.errors import CheckpointError

LOCK = ".run.lock"
LEASE = 60.0
"""Seconds for which a lock holds without being renewed."""
_RENEWALS = 6  # in a lease
_DRAFT = re.compile(re.escape(LOCK) + r"\.[0-9a-f]{8}")


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    host: str
    pid: int
    process: str
    """Tells the process from an earlier or later one with the same number."""
    token: str
    renewed: float
    """When it was last renewed, in seconds since the epoch."""

    @classmethod
    def this_process(cls) -> "Owner":
        """A new lock of ours."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _process_identity(pid), secrets.token_hex(8), time.time())

    def is_gone(self) -> bool:
        """Whether nobody holds the lock any more."""
        if self.host == socket.gethostname() and self.process != _process_identity(self.pid):
            return True
        return time.time() - self.renewed > LEASE


def _process_identity(pid: int) -> str:
    """The boot of the host and the start of the process in it; empty if none runs, or no telling."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name of the program stands in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, started = fields[0], fields[19]
    except (OSError, IndexError):
        return ""
    # One that has ended stays listed until its parent takes notice, which in a container may be never.
    return "" if state in "ZX" else f"{boot}/{started}"


class RunLock:
    """The lock on the checkpoints under ``root``, held from the making of this object until :meth:`release`.

    Raises :class:`CheckpointError` naming the owner when another run has it.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / LOCK
        self._owner = Owner.this_process()
        self._is_released = threading.Event()
        self._is_lost = False
        with explained("lock", root):
            root.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self._clear_drafts()
        # A daemon: a process that ends without releasing must not live on for its lock.
        self._renewing = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._renewing.start()

    def _acquire(self) -> None:
        for _ in range(3):
            if self._create():
                return
            owner = self._read(self._path)
            if owner is not None and not owner.is_gone():
                raise CheckpointError(
                    f"{self._path.parent} is in use by process {owner.pid} on {owner.host}, which renewed its lock "
                    f"{max(0.0, time.time() - owner.renewed):.0f} s ago: end that run, or choose another --save."
                )
            self._remove(owner)
        raise CheckpointError(f"Another run is taking over {self._path.parent} right now: choose another --save.")

    def _create(self) -> bool:
        """Put our lock in place, whole at once; False when there is one."""
        with self._draft(self._owner) as draft:
            try:
                os.link(draft, self._path)
            except (FileExistsError, FileNotFoundError):
                # A draft is only taken away by the run that has got the lock.
                return False
        return True

    @contextmanager
    def _draft(self, owner: Owner) -> Iterator[Path]:
        """A file that says who ``owner`` is; gone afterwards, even where a full disk let it become but an empty one."""
        draft = self._path.with_name(f"{LOCK}.{secrets.token_hex(4)}")
        try:
            draft.write_text(json.dumps(asdict(owner)))
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def _clear_drafts(self) -> None:
        """Remove what runs that were killed have left, but nothing of a live one; what cannot be removed stays."""
        with suppress(OSError):
            for path in self._path.parent.iterdir():
                if _DRAFT.fullmatch(path.name):
                    owner = self._read(path)
                    if owner is None or owner.is_gone():
                        path.unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path) -> Owner | None:
        """Who holds the lock; None when it is gone or says nothing that makes sense."""
        try:
            return Owner(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _remove(self, stale: Owner | None) -> None:
        """Take a stale lock away, unless another run has put its own in the place by now."""
        taken = self._path.with_name(f"{LOCK}.{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            os.rename(self._path, taken)
            if self._read(taken) != stale:
                with suppress(FileExistsError):
                    os.link(taken, self._path)
            taken.unlink()

    def _renew(self) -> None:
        while not self._is_released.wait(LEASE / _RENEWALS):
            # A file system that fails for a moment must not end the run; one that fails for a lease loses the lock.
            with suppress(OSError):
                current = self._read(self._path)
                if current is not None and current.token != self._owner.token:
                    self._is_lost = True
                    return
                with self._draft(replace(self._owner, renewed=time.time())) as draft:
                    os.replace(draft, self._path)

    def check(self) -> None:
        """Raise :class:`CheckpointError` when another run has taken the lock over; ask before every save."""
        current = self._read(self._path)
        if self._is_lost or (current is not None and current.token != self._owner.token):
            holder = "another run" if current is None else f"process {current.pid} on {current.host}"
            raise CheckpointError(
                f"{self._path.parent} was taken over by {holder}, after this run had not renewed its lock for "
                f"{LEASE:.0f} s: nothing more is saved there; find out which run shall go on."
            )

    def release(self) -> None:
        """Give the lock back."""
        self._is_released.set()
        self._renewing.join()
        current = self._read(self._path)
        if current is not None and current.token == self._owner.token:
            self._path.unlink(missing_ok=True)
