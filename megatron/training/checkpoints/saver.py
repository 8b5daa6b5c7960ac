"""Saves of a run, synchronous or in the background, and their copies."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess
from megatron.checkpoint.checkpointing import SyncSaveBackend
from megatron.checkpoint.directory import clear_leftovers, iteration_directory
from megatron.checkpoint.files import explained, path_of
from megatron.checkpoint.lock import check_lock
from megatron.checkpoint.tokenizer_files import keep_copy
from megatron.core.control import first_failure, run_on_rank0
from megatron.errors import CheckpointError, UserError
from megatron.features.spikes.flags import DETECTION_DELAY
from megatron.operation.lease import Lease
from megatron.training.checkpoints.save_directories import Mirror, Pruning
from megatron.training.checkpoints.state import RunState
from megatron.training.context import RunContext
from megatron.urls import is_url

_logger = logging.getLogger(__name__)

LAST_SAVE_ATTEMPTS = 3
LAST_SAVE_PAUSE = 5.0
"""Seconds between two attempts at the last save; launchers kill a run about 30 s after SIGTERM."""


class Saver:
    """Saves a run under ``--save``; all methods but ``poll`` and ``close`` are collectives.

    A save that fails is a warning, until more than ``--max-failed-saves`` in a row have failed. ``locks`` are the locks
    of the directories, on rank 0.
    """

    def __init__(self, context: RunContext, locks: Sequence[Lease]) -> None:
        config = context.config.checkpoint
        assert config.save is not None
        root = Path(config.save)
        self._root, self._config, self._control, self._log_rank0 = root, config, context.control, context.log_rank0
        self._warn, self._heartbeat = context.warn_rank0, context.heartbeat
        self._operation = context.config.operation
        # The lock of a mirror is compared when a copy is committed there: without it only the copy fails.
        self._locks = [lock for lock in locks if lock.path.parent == root]
        self._pruning = Pruning(context, root)
        tokens = {lock.path.parent: lock.token for lock in locks}
        self._lock_token = tokens.get(root)
        self._background = BackgroundSaves(context, root, self._lock_token) if config.async_save else None
        self._mirrors = [
            Mirror(context, place, self._lock_token if is_url(place) else tokens.get(Path(place)))
            for place in config.redundant_save
        ]
        self._failures: list[str] = []
        """The failures of the saves since the last successful one."""
        self.last_saved: int | None = None
        """The iteration of the last complete checkpoint."""

    def save(self, state: RunState) -> None:
        """Save ``state`` at a save interval; with ``--async-save``, return when it is copied to host memory."""
        iteration = state.progress.iteration
        run_on_rank0(self._control, self._check_locks)
        self._finish(f"Training continues; the next attempt is now, after iteration {iteration}.")
        self._stop_after_too_many()
        try:
            # The attempt whose failure would end the run is synchronous.
            if self._background is None or len(self._failures) == self._config.max_failed_saves > 0:
                self._save_now(state)
            else:
                self._background.save(state)
        except CheckpointError as error:
            schedule = self._config.save_schedule
            assert schedule is not None
            next_attempt = (
                f"Training continues; the next attempt is after iteration {schedule.next_due(iteration)}. The run ends "
                f"when more than {self._config.max_failed_saves} saves in a row have failed (--max-failed-saves)."
            )
            self._note_failure(iteration, str(error), next_attempt)
            self._stop_after_too_many()
            return
        self._start_copies(iteration)

    def save_last(self, state: RunState) -> None:
        """Save ``state`` at the end of a run, unless it is saved already, and wait for all saves and copies."""
        iteration = state.progress.iteration
        self._finish("The next attempt is now, at the end of the run.")
        if iteration != self.last_saved:
            self._save_with_retries(state)
            self._start_copies(iteration)
        for mirror in self._mirrors:
            mirror.settle(wait=True)
        behind = [mirror for mirror in self._mirrors if self.last_saved not in (None, mirror.last_started)]
        for mirror in behind:
            assert self.last_saved is not None
            mirror.start(iteration_directory(self._root, self.last_saved), self.last_saved)
        for mirror in behind:
            mirror.settle(wait=True)

    def clear_leftovers(self) -> None:
        """Remove what a crash left in ``--save``, as the next save would: this process has none."""

        def clear() -> None:
            self._check_locks()
            with explained("write", self._root):
                clear_leftovers(self._root)

        run_on_rank0(self._control, clear)

    def settle(self) -> None:
        """Wait for the save and the copies under way."""
        self._finish("Training returns to an earlier checkpoint.")
        for mirror in self._mirrors:
            mirror.settle(wait=True)

    def _save_with_retries(self, state: RunState) -> None:
        iteration = state.progress.iteration
        for attempt in range(1, LAST_SAVE_ATTEMPTS + 1):
            run_on_rank0(self._control, self._check_locks)
            try:
                self._save_now(state)
                return
            except CheckpointError as error:
                if attempt == LAST_SAVE_ATTEMPTS:
                    raise CheckpointError(
                        f"Iteration {iteration}, the last of this run, is not saved, after {attempt} attempts: {error} "
                        f"{self._newest()}"
                    ) from error
                self._note_failure(iteration, str(error), f"The next attempt is in {LAST_SAVE_PAUSE:.0f} s.")
            time.sleep(LAST_SAVE_PAUSE)

    def _save_now(self, state: RunState) -> None:
        iteration, heartbeat = state.progress.iteration, self._heartbeat

        def mark() -> None:
            heartbeat.committed(iteration, heartbeat.step_ns)

        # Rank 0 marks before its collectives with the other ranks, one of which may have ended meanwhile.
        saving = SyncSaveBackend(self._root, iteration, self._lock_token, on_commit=mark)
        self._log_rank0(f"saved checkpoint {state.save(saving)}")
        if self._control.rank != 0:
            mark()
        self._has_saved(iteration)

    def poll(self) -> None:
        """Report a save that has finished or failed in the background, without waiting."""
        if self._background is not None:
            self._background.poll()

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        for mirror in self._mirrors:
            mirror.close()

    def _finish(self, next_attempt: str) -> None:
        """Wait for the save under way."""
        if self._background is None or self._background.saving is None:
            return
        iteration = self._background.saving.iteration
        failure = self._background.finish()
        if failure is None:
            self._pruning.retention.confirm(iteration)
            self._has_saved(iteration)
            return
        for mirror in self._mirrors:
            if mirror.under_way == iteration:
                mirror.abandon()
        self._note_failure(iteration, failure, next_attempt)

    def _start_copies(self, iteration: int) -> None:
        for mirror in self._mirrors:
            mirror.settle(wait=False)
            mirror.start(iteration_directory(self._root, iteration), iteration)

    def _check_locks(self) -> None:
        for lock in self._locks:
            check_lock(lock)

    def _has_saved(self, iteration: int) -> None:
        self.last_saved = iteration
        self._failures = []
        under_way = [mirror.under_way for mirror in self._mirrors]
        in_use = [copied for copied in under_way if copied is not None]
        # A spike that is not noticed yet may have begun DETECTION_DELAY iterations ago: keep a checkpoint from before.
        margin = self._operation.rollback_margin + DETECTION_DELAY
        safe_before = iteration - margin if self._operation.rolls_back else None
        try:
            self._pruning.prune(iteration, in_use, safe_before)
        except CheckpointError as error:
            self._warn(f"Nothing is deleted under {self._root}: {error}")

    def _note_failure(self, iteration: int, failure: str, next_attempt: str) -> None:
        """Warn, or raise if another run has taken the lock."""
        run_on_rank0(self._control, self._check_locks)
        self._failures.append(failure)
        self._warn(f"Iteration {iteration} is not saved: {failure} {self._newest()} {next_attempt}")

    def _stop_after_too_many(self) -> None:
        if len(self._failures) > self._config.max_failed_saves:
            raise CheckpointError(
                f"The last {len(self._failures)} saves failed, more than --max-failed-saves "
                f"{self._config.max_failed_saves} allows: {self._failures[-1]} {self._newest()}"
            )

    def _newest(self) -> str:
        if self.last_saved is None:
            return "This run has saved no checkpoint yet."
        return f"The newest checkpoint is of iteration {self.last_saved}."


class BackgroundSaves:
    """The saves of ``--async-save``, of which at most one is under way."""

    def __init__(self, context: RunContext, root: Path, lock_token: str | None) -> None:
        self._config, self._control, self._log_rank0 = context.config.checkpoint, context.control, context.log_rank0
        self._root, self._lock_token, self._heartbeat = root, lock_token, context.heartbeat
        self._process = BackgroundProcess(self._config.async_save_timeout)
        self._is_reported = False
        self._step_ns = 0
        """The heartbeat's time of training when the state was copied."""
        self.saving: AsyncSaveBackend | None = None
        """The save for which :meth:`finish` has not been called."""

    def save(self, state: RunState) -> None:
        """Copy the state to host memory and start to write it; a collective."""
        assert self.saving is None
        self._step_ns = self._heartbeat.step_ns
        saving = AsyncSaveBackend(
            self._root, state.progress.iteration, self._process, self._lock_token, read_back=self._config.deletes
        )
        state.save(saving)
        self.saving, self._is_reported = saving, False

    def poll(self) -> None:
        """Log once whether the save has finished or failed on this rank."""
        if self.saving is None or self._is_reported:
            return
        failure = self.saving.poll()
        if failure is not None:
            _logger.warning("Rank %d cannot save iteration %d: %s", self._control.rank, self.saving.iteration, failure)
            self._is_reported = True
        elif self.saving.is_over:
            self._say_saved(self.saving.iteration)

    def finish(self) -> str | None:
        """Wait for the save on all ranks; its failure, if any."""
        assert self.saving is not None
        saving, self.saving = self.saving, None
        failure = first_failure(self._control.all_gather_object(saving.finish_own()))
        if failure is None:
            failure = run_on_rank0(self._control, saving.finish)
        if failure is None:
            self._say_saved(saving.iteration)
        else:
            saving.abandon()
        return failure

    def _say_saved(self, iteration: int) -> None:
        if not self._is_reported:
            self._log_rank0(f"saved checkpoint {iteration_directory(self._root, iteration)}")
            self._heartbeat.committed(iteration, self._step_ns)
        self._is_reported = True

    def close(self) -> None:
        """End the process. After a crash, a save whose files are written is committed."""
        if self.saving is not None and self.saving.finish_own() is None and self._control.rank == 0:
            self.saving.finish()
            self.poll()
        self._process.close()


def keep_tokenizer(context: RunContext) -> None:
    """Copy the tokenizer's files to ``--save`` and its copies; a failure is a warning."""
    config = context.config.checkpoint
    for place in [config.save, *config.redundant_save] if config.save is not None else []:
        try:
            keep_copy(path_of(place), context.config.tokenizer)
        except UserError as error:
            context.warn_rank0(f"The tokenizer is not copied beside the checkpoints: {error}")
