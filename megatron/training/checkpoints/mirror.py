"""Copies of finished checkpoints in the directories and URLs of ``--redundant-save``."""

import logging
import secrets
from pathlib import Path

from megatron.checkpoint.background import BackgroundProcess, CopyTask, Retained, UploadTask
from megatron.checkpoint.checkpointing import file_of_rank
from megatron.checkpoint.directory import iteration_directory
from megatron.checkpoint.remote_path import RemotePath, UnreachableError
from megatron.core.control import first_failure, run_on_rank0
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.checkpoints.save_directories import Pruning
from megatron.training.context import RunContext
from megatron.urls import is_url

_logger = logging.getLogger(__name__)


def check_url_writable(flag: str, url: str) -> None:
    """Raise :class:`ConfigError` unless small files can be written, read and deleted at ``url``.

    A store that does not answer is only a warning: it may answer at the first save.
    """
    name = f".write-check-{secrets.token_hex(4)}"
    root = RemotePath(url.rstrip("/"))
    try:
        (root / name).write_bytes(b"")
        (root / name).read_bytes()
        root.remove([name])
    except UnreachableError as error:
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
        self._retained = Retained(config.save_retain_last, config.save_retain_interval) if config.deletes else None
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
        """Abandon the copy under way."""
        if self._copy is not None:
            self._copy.abandon()
        self._copy = None

    def close(self) -> None:
        """End the background process."""
        self._process.close()
