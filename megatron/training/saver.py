"""Saving: at once or in the background, a second copy, and what may be deleted for it."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from megatron.checkpoint.background import BackgroundCopy, BackgroundProcess, BackgroundSaving
from megatron.checkpoint.checkpointing import verify_share
from megatron.checkpoint.directory import iteration_directory, locate_checkpoint, remove_checkpoint
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.lock import RunLock
from megatron.checkpoint.retention import Retention
from megatron.checkpoint.storage import file_of_rank
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import CheckpointError
from megatron.core.communication import Communicator
from megatron.training.launch import on_first_rank, together
from megatron.training.state import RunState

Say = Callable[[str], None]
_logger = logging.getLogger(__name__)


class Saver:
    """Saves a run under ``--save``; every rank has one, and all but ``poll`` and ``close`` are collective calls.

    ``locks`` are those of the directories, on the rank that holds them.
    """

    def __init__(self, config: CheckpointConfig, world: Communicator, locks: Sequence[RunLock], say: Say) -> None:
        assert config.save is not None
        root = Path(config.save)
        self._root, self._config, self._world, self._locks, self._say = root, config, world, locks, say
        self._pruning = Pruning(config, root, world, say)
        self._background = BackgroundSaves(config, root, world, say) if config.async_save else None
        self._mirror = Mirror(config, Path(config.redundant_save), world, say) if config.redundant_save else None
        self.last_saved: int | None = None
        """The iteration of the newest checkpoint that is known to be complete."""

    def save(self, state: RunState, wait: bool = False) -> None:
        """Save ``state``; with ``--async-save``, unless told to ``wait``, it is only copied aside when this returns."""
        iteration = state.progress.iteration
        on_first_rank(self._world, self._check_locks)
        self.finish()
        if self._background is None or wait:
            self._say(f"saved checkpoint {state.save(self._config)}")
            self._has_saved(iteration)
        else:
            self._background.save(state)
        if self._mirror is not None:
            self._mirror.settle(wait=False)
            self._mirror.start(iteration_directory(self._root, iteration), iteration)

    def poll(self) -> None:
        """Look after what is under way; never waits."""
        if self._background is not None:
            self._background.poll()

    def finish_copies(self) -> None:
        """Wait for the copy under way, and see to it that there is one of the newest checkpoint."""
        if self._mirror is None:
            return
        self._mirror.settle(wait=True)
        if self.last_saved is not None and self._mirror.last_started != self.last_saved:
            self._mirror.start(iteration_directory(self._root, self.last_saved), self.last_saved)
            self._mirror.settle(wait=True)

    def close(self) -> None:
        """End what runs in the background, however the training ended."""
        if self._background is not None:
            self._background.close()
        if self._mirror is not None:
            self._mirror.close()

    def _check_locks(self) -> None:
        for lock in self._locks:
            lock.check()

    def finish(self) -> None:
        """Wait for the save under way."""
        if self._background is None or self._background.saving is None:
            return
        iteration = self._background.saving.iteration
        if self._background.finish() is None:
            self._pruning.retention.confirm(iteration)
            self._has_saved(iteration)
        elif self._mirror is not None:
            # It waits for a checkpoint that will never be there.
            self._mirror.abandon()

    def _has_saved(self, iteration: int) -> None:
        self.last_saved = iteration
        self._pruning.prune(iteration)


class BackgroundSaves:
    """The saves of ``--async-save``, of which at most one is under way."""

    def __init__(self, config: CheckpointConfig, root: Path, world: Communicator, say: Say) -> None:
        self._config, self._root, self._world, self._say = config, root, world, say
        self._process = BackgroundProcess(config.async_save_timeout)
        self._is_reported = False
        self._failures_in_a_row = 0
        self.saving: BackgroundSaving | None = None
        """The one that :meth:`finish` has not been called for."""

    def save(self, state: RunState) -> None:
        """Copy the state aside and begin to write it; all ranks call it."""
        assert self.saving is None
        saving = BackgroundSaving(self._root, state.progress.iteration, self._process, read_back=self._config.deletes)
        state.save(self._config, saving)
        self.saving, self._is_reported = saving, False

    def poll(self) -> None:
        """Say once what has become of it, as far as this rank knows."""
        if self.saving is None or self._is_reported:
            return
        failure = self.saving.poll()
        if failure is not None:
            _logger.warning("Rank %d cannot save iteration %d: %s", self._world.rank, self.saving.iteration, failure)
            self._is_reported = True
        elif self.saving.is_over:
            self._say_saved(self.saving.iteration)

    def finish(self) -> str | None:
        """Wait for it on all ranks; what went wrong, if anything. The second failure in a row is a
        :class:`CheckpointError`."""
        assert self.saving is not None
        saving, self.saving = self.saving, None
        failure = _first(self._world.all_gather_object(saving.finish_own()))
        if failure is None:
            failure = on_first_rank(self._world, saving.finish)
        if failure is None:
            self._failures_in_a_row = 0
            self._say_saved(saving.iteration)
            return None
        saving.abandon()
        self._failures_in_a_row += 1
        if self._failures_in_a_row > 1:
            raise CheckpointError(f"Iteration {saving.iteration} is not saved, nor was the one before it: {failure}")
        if self._world.rank == 0:
            _logger.warning("Iteration %d is not saved, training goes on: %s", saving.iteration, failure)
        return failure

    def _say_saved(self, iteration: int) -> None:
        if not self._is_reported:
            self._say(f"saved checkpoint {iteration_directory(self._root, iteration)}")
        self._is_reported = True

    def close(self) -> None:
        """End the process; where the run breaks off, a save that needs nothing more of the ranks is completed."""
        if self.saving is not None and self.saving.finish_own() is None and self._world.rank == 0:
            self.saving.finish()
            self.poll()
        self._process.close()


class Mirror:
    """The copies under ``--redundant-save``; one that fails or falls behind costs a warning, not the run."""

    def __init__(self, config: CheckpointConfig, root: Path, world: Communicator, say: Say) -> None:
        self._root, self._world, self._say = root, world, say
        self._process = BackgroundProcess(config.async_save_timeout)
        self._pruning = Pruning(config, root, world, say)
        self._copy: BackgroundCopy | None = None
        self.last_started: int | None = None
        """The iteration that was last copied, or tried to be."""

    def start(self, source: Path, iteration: int) -> None:
        """Copy the checkpoint at ``source`` as soon as it is complete; all ranks call it.

        Where the last copy is still under way, there is a warning instead.
        """
        if self._copy is not None:
            self._warn(f"iteration {iteration} is not mirrored: the copy of {self._copy.iteration} is still under way")
            return
        self.last_started = iteration
        copy = BackgroundCopy(self._root, iteration, self._process)
        try:
            directory = on_first_rank(self._world, copy.begin)
        except CheckpointError as error:
            self._warn(f"iteration {iteration} is not mirrored: {error}")
            return
        copy.start(source, file_of_rank(self._world.rank), directory)
        self._copy = copy

    def settle(self, wait: bool) -> None:
        """Take note of a copy that is over, or ``wait`` until it is; all ranks call it."""
        copy = self._copy
        if copy is None:
            return
        failure = _first(self._world.all_gather_object(copy.finish_own() if wait else copy.poll()))
        if failure is None and wait:
            failure = on_first_rank(self._world, copy.finish)
        if failure is None and not on_first_rank(self._world, lambda: copy.is_over):
            return
        if failure is not None:
            self.abandon()
            self._warn(f"iteration {copy.iteration} is not mirrored: {failure}")
            return
        self._copy = None
        self._say(f"mirrored checkpoint {iteration_directory(self._root, copy.iteration)}")
        self._pruning.retention.confirm(copy.iteration)
        try:
            self._pruning.prune(copy.iteration)
        except CheckpointError as error:
            self._warn(f"nothing is deleted under {self._root}: {error}")

    def abandon(self) -> None:
        """Give the copy under way up."""
        if self._copy is not None:
            self._copy.abandon()
        self._copy = None

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            _logger.warning("%s", text)

    def close(self) -> None:
        """End the process."""
        self._process.close()


class Pruning:
    """Deletes what ``--save-retain-last`` and ``--save-retain-interval`` do not keep under one directory."""

    def __init__(self, config: CheckpointConfig, root: Path, world: Communicator, say: Say) -> None:
        self._deletes, self._root, self._world, self._say = config.deletes, root, world, say
        self.retention = Retention(config.save_retain_last, config.save_retain_interval, self._verify)

    def prune(self, newest: int) -> None:
        """Delete what may go now that ``newest`` is saved; all ranks call it."""
        if not self._deletes:
            return
        there = on_first_rank(self._world, lambda: list_checkpoints(self._root))
        # What is beyond was abandoned for an older checkpoint: it must not count as the newest.
        superfluous = self.retention.superfluous([iteration for iteration in there if iteration <= newest])
        if self._world.rank == 0:
            for iteration in superfluous:
                remove_checkpoint(locate_checkpoint(self._root, iteration))
                self._say(f"deleted checkpoint {iteration_directory(self._root, iteration)}")

    def _verify(self, iteration: int) -> None:
        together(self._world, partial(verify_share, self._root, iteration, self._world.rank, self._world.size))


def _first(failures: Iterable[str | None]) -> str | None:
    """The first failure and whose it is."""
    return next((f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None), None)
