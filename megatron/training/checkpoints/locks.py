"""Locks on the directories that a run saves to."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron.checkpoint.lock import POLL, LockAttempt, RunLock
from megatron.core.run_on_ranks import run_on_rank0
from megatron.errors import ConfigError
from megatron.training.checkpoints.mirror import check_url_writable
from megatron.training.context import RunContext
from megatron.training.signals import StopRequested
from megatron.urls import is_url


@contextmanager
def save_directories_locked(context: RunContext) -> Iterator[Sequence[RunLock]]:
    """Keep other runs from saving where this one does; the locks are the first rank's.

    Raises :class:`StopRequested` when a signal ends the wait for a lock.
    """
    config, world = context.config.checkpoint, context.world
    locks: list[RunLock] = []

    def lock_directory(flag: str, directory: Path) -> None:
        run_on_rank0(world, lambda: check_save_directory(flag, directory))
        attempt = LockAttempt(directory)

        def poll() -> str | None:
            lock = attempt.poll()
            if lock is None:
                return attempt.reason_to_wait
            locks.append(lock)
            return None

        wait_on_all_ranks(poll, context)

    try:
        places = [("--save", config.save), *(("--redundant-save", place) for place in config.redundant_save)]
        for flag, directory in places:
            if directory is None:
                continue
            if is_url(directory):
                run_on_rank0(world, partial(check_url_writable, flag, directory))
            else:
                lock_directory(flag, Path(directory))
        yield locks
    finally:
        for lock in locks:
            lock.release()


def wait_on_all_ranks(poll: Callable[[], str | None], context: RunContext) -> None:
    """Call ``poll`` on the first rank until it has no reason to wait any more; all ranks wait with it."""
    is_logged = False
    while (reason := run_on_rank0(context.world, poll)) is not None:
        if not is_logged:
            context.log_rank0(reason)
            is_logged = True
        received = [name for name in context.world.all_gather_object(context.signals.received) if name is not None]
        if received:
            raise StopRequested(f"signal {received[0]} before training began: {reason}")
        time.sleep(POLL)


def check_save_directory(flag: str, directory: Path) -> None:
    """Find out now, not at the first save, whether the directory of ``flag`` can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory} cannot be written to ({error.strerror}): use another directory, or make it writable."
        ) from error
