"""Lock a directory as a run does, in one process; and checkpoints without tensors."""

import time
from pathlib import Path

from megatron.checkpoint.directory import commit, new_saving_directory
from megatron.checkpoint.lock import LEASE, LOCK, POLL, try_lock
from megatron.checkpoint.manifest import Manifest, encode_manifest
from megatron.operation.lease import RENEWAL, Claim, Lease


def acquire(root: Path, renewal: float = RENEWAL) -> Lease:
    """Lock the checkpoints in ``root``; waits while the owner of the present lock may be dead."""
    claim = Claim(root / LOCK, LEASE, renewal)
    while isinstance(lock := try_lock(claim), str):
        time.sleep(POLL)
    return lock


def write_checkpoint(root: Path, iteration: int, label: str = "") -> None:
    """Save a checkpoint without tensors, whose state is ``label``."""
    saving = new_saving_directory(root, iteration)
    (saving / "rank_00000.safetensors").write_text(label)
    commit(saving, root, iteration, encode_manifest(Manifest({}, (), {"label": label})))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
