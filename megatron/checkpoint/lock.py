"""The run lock: one run per checkpoint directory (``DIR/.run.lock``); the lock of a dead run is taken over.

No file system has a rename that depends on another file, so a lock alone cannot stop a suspended owner that wakes up
late. Therefore the token in the lock is read right before a checkpoint is renamed (:func:`check_token`); only the time
between the two is unprotected.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.files import explained
from megatron.errors import CheckpointError, DirectoryInUseError
from megatron.operation.lease import RENEWAL, Claim, Lease, Owner, clear_drafts, owner_at

LOCK = ".run.lock"
LEASE = 60.0
"""Seconds for which a lock is valid without renewal."""
POLL = 0.5
"""Seconds between two polls of a waiting run."""


class LockLostError(DirectoryInUseError):
    """Another run has taken over the lock: this run must not save any more."""


class LockAttempt:
    """An attempt to lock ``root``: call :meth:`poll` until it returns the lock or raises.

    The lock is renewed every ``renewal`` seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic, renewal: float = RENEWAL) -> None:
        self._root, self._claim = root, Claim(root / LOCK, LEASE, renewal, clock)

    def poll(self) -> Lease | None:
        """Return the lock, or None while it is unknown whether its owner is alive.

        Raises :class:`DirectoryInUseError` with the owner if it is alive.
        """
        with explained("lock", self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            found = self._claim.poll()
        if isinstance(found, Lease):
            clear_drafts(found.path)
            return found
        if found == "unknown":
            return None
        if found == "contested":
            raise DirectoryInUseError(f"Another run is taking over {self._root} right now: choose another --save.")
        reason = "is running" if found == "alive" else "renewed its lock while this run was waiting for it"
        raise DirectoryInUseError(
            f"{self._root} is in use by {_name(self._claim.owner)}, which {reason}: stop that run, or use another "
            "--save."
        )

    @property
    def reason_to_wait(self) -> str:
        """The reason why :meth:`poll` waits, as a sentence."""
        return (
            f"{self._root} is locked by {_name(self._claim.owner)}, of which this host cannot know whether it runs: "
            f"waiting at most {self._claim.patience:.0f} s for the lock to change; after that it is taken over"
        )


def _name(owner: Owner | None) -> str:
    return "another run" if owner is None else f"process {owner.pid} on {owner.host}"


def check_token(root: Path, token: str) -> None:
    """Raise :class:`CheckpointError` unless the lock on ``root`` has ``token``. Call it right before every rename."""
    with explained("read", root / LOCK):
        owner = owner_at(root / LOCK)
    if owner is None:
        raise CheckpointError(f"{root / LOCK} names no run, so nothing is saved: do not remove the file during a run.")
    if owner.token != token:
        raise _lost(root, owner)


def check_lock(lock: Lease) -> None:
    """Raise :class:`LockLostError` if another run has taken over the lock; call it before every save."""
    owner: Owner | None = None  # an unreadable lock is not lost: check_token refuses it
    with suppress(OSError):
        owner = owner_at(lock.path)
    if lock.is_lost or (owner is not None and owner.token != lock.token):
        raise _lost(lock.path.parent, owner)


def _lost(root: Path, owner: Owner | None) -> LockLostError:
    return LockLostError(
        f"{root} was taken over by {_name(owner)}, after this run had not renewed its lock for {LEASE:.0f} s: this run "
        "saves nothing more there; decide which of the two runs should continue."
    )
