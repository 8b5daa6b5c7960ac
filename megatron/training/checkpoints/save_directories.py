"""The directories and URLs that a run saves to: locked and checked, copied to (``--redundant-save``), and pruned."""

import logging
import secrets
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron.checkpoint.background import BackgroundProcess, CopyTask, UploadTask
from megatron.checkpoint.checkpointing import file_of_rank
from megatron.checkpoint.directory import Retention, iteration_directory, locate_checkpoint, remove_checkpoint
from megatron.checkpoint.files import RemotePath, UnreachableError
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.checkpoint.lock import LEASE, LOCK, POLL, try_lock
from megatron.core.control import first_failure, run_on_all_ranks, run_on_rank0
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.operation.lease import Claim, Lease
from megatron.operation.signals import StopRequested
from megatron.training.context import RunContext
from megatron.urls import is_url

_logger = logging.getLogger(__name__)


@contextmanager
def save_directories_locked(context: RunContext) -> Iterator[Sequence[Lease]]:
    """Lock the directories that this run saves to; rank 0 holds the locks.

    Raises :class:`StopRequested` when a signal ends the wait for a lock.
    """
    config, control = context.config.checkpoint, context.control
    locks: list[Lease] = []
    try:
        places = [("--save", config.save), *(("--redundant-save", place) for place in config.redundant_save)]
        for flag, place in places:
            if place is not None and is_url(place):
                run_on_rank0(control, partial(check_url_writable, flag, place))
            elif place is not None:
                run_on_rank0(control, partial(check_writable, flag, Path(place)))
                _lock(Path(place), locks, context)
        yield locks
    finally:
        for lock in locks:
            lock.release()


def _lock(root: Path, locks: list[Lease], context: RunContext) -> None:
    """Lock ``root`` on rank 0, and wait while the owner of its lock may be alive; a collective."""
    claim, is_logged = Claim(root / LOCK, LEASE), False

    def poll() -> str | None:
        found = try_lock(claim)
        if isinstance(found, str):
            return found
        locks.append(found)
        return None

    while (reason := run_on_rank0(context.control, poll)) is not None:
        if not is_logged:
            context.log_rank0(reason)
            is_logged = True
        received = [name for name in context.control.all_gather_object(context.signals.received) if name is not None]
        if received:
            raise StopRequested(f"signal {received[0]} before training began: {reason}")
        time.sleep(POLL)


def check_writable(flag: str, directory: Path) -> None:
    """Raise :class:`ConfigError` unless files can be written to ``directory``, which ``flag`` names."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory} cannot be written to ({error.strerror}): use another directory, or make it writable."
        ) from error


# --- deletion -----------------------------------------------------------------------------------------------


class Pruning:
    """Deletes the checkpoints of one directory that the flags do not retain."""

    def __init__(self, context: RunContext, root: Path) -> None:
        config = context.config.checkpoint
        self._deletes, self._root = config.deletes, root
        self._control, self._log_rank0 = context.control, context.log_rank0
        self.retention = Retention(config.save_retain_last, config.save_retain_interval, self._verify)

    def prune(self, newest: int, in_use: Collection[int] = (), safe_before: int | None = None) -> None:
        """Delete old checkpoints after ``newest`` was saved, except those ``in_use`` and the newest ``safe_before``."""
        if not self._deletes:
            return
        there = run_on_rank0(self._control, lambda: list_checkpoints(self._root))
        # Iterations above ``newest`` were abandoned when the run returned to an older checkpoint.
        superfluous = self.retention.superfluous([iteration for iteration in there if iteration <= newest])
        kept = {*in_use, *([] if safe_before is None else [one for one in there if one <= safe_before][-1:])}

        def delete() -> None:
            for iteration in (iteration for iteration in superfluous if iteration not in kept):
                remove_checkpoint(locate_checkpoint(self._root, iteration))
                self._log_rank0(f"deleted checkpoint {iteration_directory(self._root, iteration)}")

        # The others wait, because rank 0 may take long: in a collective of training they would time out.
        run_on_rank0(self._control, delete)

    def _verify(self, iteration: int) -> None:
        rank, size = self._control.rank, self._control.size
        run_on_all_ranks(self._control, partial(verify_share, self._root, iteration, rank, size))


# --- copies -------------------------------------------------------------------------------------------------


def check_url_writable(flag: str, url: str) -> None:
    """Raise :class:`ConfigError` unless small files can be written, read and deleted at ``url``."""
    name = f".write-check-{secrets.token_hex(4)}"
    root = RemotePath(url.rstrip("/"))
    try:
        (root / name).write_bytes(b"")
        (root / name).read_bytes()
        root.remove([name])
    except UnreachableError as error:  # it may answer at the first save
        _logger.warning("%s %s may not be writable: %s", flag, url, error)
    except (CheckpointError, DataError, OSError) as error:
        raise ConfigError(f"{flag} cannot be used: {error}") from error


class Mirror:
    """The copies in one place of ``--redundant-save``; a copy that fails or is late is a warning.

    ``lock_token``: the token of the lock on the place; for a URL, which has no lock, of the lock on ``--save``.
    """

    def __init__(self, context: RunContext, place: str, lock_token: str | None) -> None:
        config, self._control, self._log_rank0 = context.config.checkpoint, context.control, context.log_rank0
        self._warn = context.warn_rank0
        self._place, self._lock_token = place, lock_token
        self._process = BackgroundProcess(config.async_save_timeout)
        self._retained = (config.save_retain_last, config.save_retain_interval) if config.deletes else None
        # At a URL the background process deletes.
        self._pruning = None if is_url(place) else Pruning(context, Path(place))
        self._copy: CopyTask | UploadTask | None = None
        self.last_started: int | None = None
        """The iteration of the last copy, finished or not."""

    @property
    def under_way(self) -> int | None:
        """The iteration that is being copied, whose checkpoint must not be deleted."""
        return None if self._copy is None else self._copy.iteration

    def start(self, source: Path, iteration: int) -> None:
        """Start to copy the checkpoint at ``source``, or warn if the last copy is still under way; a collective."""
        if self._copy is not None:
            under_way = f"the copy of {self._copy.iteration} is still under way"
            self._warn(f"iteration {iteration} is not mirrored to {self._place}: {under_way}")
            return
        self.last_started = iteration
        copy: CopyTask | UploadTask
        if is_url(self._place):
            copy = UploadTask(self._place, iteration, self._process, self._lock_token, self._retained)
        else:
            copy = CopyTask(Path(self._place), iteration, self._process, self._lock_token)
        try:
            target = run_on_rank0(self._control, lambda: str(copy.begin()))
        except CheckpointError as error:
            self._warn(f"iteration {iteration} is not mirrored to {self._place}: {error}")
            return
        copy.start(source, file_of_rank(self._control.rank), target)
        self._copy = copy

    def settle(self, wait: bool) -> None:
        """Finish a copy that is complete or has failed; ``wait`` for it if it is under way. A collective."""
        copy = self._copy
        if copy is None:
            return
        failure = first_failure(self._control.all_gather_object(copy.finish_own() if wait else copy.poll()))
        if failure is None and wait:
            failure = run_on_rank0(self._control, copy.finish)
        if failure is None and not run_on_rank0(self._control, lambda: copy.is_over):
            return
        if failure is not None:
            self.abandon()
            self._warn(f"iteration {copy.iteration} is not mirrored to {self._place}: {failure}")
            return
        self._copy = None
        self._log_rank0(f"mirrored checkpoint {self._place}/{iteration_directory(Path(), copy.iteration).name}")
        for note in self._process.take_notes():
            self._log_rank0(note)
        if self._pruning is None:
            return
        self._pruning.retention.confirm(copy.iteration)
        try:
            self._pruning.prune(copy.iteration)
        except CheckpointError as error:
            self._warn(f"nothing is deleted under {self._place}: {error}")

    def abandon(self) -> None:
        if self._copy is not None:
            self._copy.abandon()
        self._copy = None

    def close(self) -> None:
        self._process.close()
