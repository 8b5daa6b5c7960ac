"""Lock a directory as a run does, in one process."""

import time
from pathlib import Path

from megatron.checkpoint.lock import POLL, RENEWAL, LockAttempt, RunLock


def acquire(root: Path, renewal: float = RENEWAL) -> RunLock:
    """Lock the checkpoints in ``root``; waits while the owner of the present lock may be dead."""
    attempt = LockAttempt(root, renewal=renewal)
    while (lock := attempt.poll()) is None:
        time.sleep(POLL)
    return lock
