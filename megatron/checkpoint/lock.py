"""The run lock: one run per checkpoint directory (``DIR/.run.lock``); the lock of a dead run is taken over.

No file system has a rename that depends on another file, so a lock alone cannot stop a suspended owner that wakes up
late. Therefore the token in the lock is read right before a checkpoint is renamed (:func:`check_token`); only the time
between the two is unprotected.
"""

from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.files import explained
from megatron.errors import CheckpointError, DirectoryInUseError
from megatron.operation.lease import Claim, Lease, Owner, clear_drafts, owner_at

LOCK = ".run.lock"
LEASE = 60.0
"""Seconds for which a lock is valid without renewal."""
POLL = 0.5
"""Seconds between two polls of a waiting run."""


class LockLostError(DirectoryInUseError):
    """Another run has taken over the lock: this run must not save any more."""


def try_lock(claim: Claim) -> Lease | str:
    """Take the lock of ``claim``, or say why it waits: it is unknown whether the owner is alive. Poll again then.

    Raises :class:`DirectoryInUseError` with the owner if it is alive.
    """
    root = claim.path.parent
    with explained("lock", root):
        root.mkdir(parents=True, exist_ok=True)
        found = claim.poll()
    if isinstance(found, Lease):
        clear_drafts(found.path)
        return found
    if found == "unknown":
        return (
            f"{root} is locked by {_name(claim.owner)}, of which this host cannot know whether it runs: waiting at "
            f"most {claim.patience:.0f} s for the lock to change; after that it is taken over"
        )
    if found == "contested":
        raise DirectoryInUseError(f"Another run is taking over {root} right now: choose another --save.")
    reason = "is running" if found == "alive" else "renewed its lock while this run was waiting for it"
    raise DirectoryInUseError(
        f"{root} is in use by {_name(claim.owner)}, which {reason}: stop that run, or use another --save."
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
