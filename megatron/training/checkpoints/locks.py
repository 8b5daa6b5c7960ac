"""Locks on the directories of ``--save`` and ``--redundant-save``."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron.checkpoint.lock import POLL, LockAttempt, RunLock
from megatron.core.control import run_on_rank0
from megatron.errors import ConfigError
from megatron.operation.signals import StopRequested
from megatron.training.checkpoints.save_directories import check_url_writable
from megatron.training.context import RunContext
from megatron.urls import is_url


@contextmanager
def save_directories_locked(context: RunContext) -> Iterator[Sequence[RunLock]]:
    """Lock the directories that this run saves to; rank 0 holds the locks.

    Raises :class:`StopRequested` when a signal ends the wait for a lock.
    """
    config, control = context.config.checkpoint, context.control
    locks: list[RunLock] = []

    def poll(attempt: LockAttempt) -> str | None:
        lock = attempt.poll()
        if lock is None:
            return attempt.reason_to_wait
        locks.append(lock)
        return None

    try:
        places = [("--save", config.save), *(("--redundant-save", place) for place in config.redundant_save)]
        for flag, place in places:
            if place is not None and is_url(place):
                run_on_rank0(control, partial(check_url_writable, flag, place))
            elif place is not None:
                run_on_rank0(control, partial(check_save_directory, flag, Path(place)))
                wait_on_all_ranks(partial(poll, LockAttempt(Path(place))), context)
        yield locks
    finally:
        for lock in locks:
            lock.release()


def wait_on_all_ranks(poll: Callable[[], str | None], context: RunContext) -> None:
    """Call ``poll`` on rank 0 until it returns no reason to wait; a collective."""
    is_logged = False
    while (reason := run_on_rank0(context.control, poll)) is not None:
        if not is_logged:
            context.log_rank0(reason)
            is_logged = True
        received = [name for name in context.control.all_gather_object(context.signals.received) if name is not None]
        if received:
            raise StopRequested(f"signal {received[0]} before training began: {reason}")
        time.sleep(POLL)


def check_save_directory(flag: str, directory: Path) -> None:
    """Raise :class:`ConfigError` unless the directory of ``flag`` can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory} cannot be written to ({error.strerror}): use another directory, or make it writable."
        ) from error
