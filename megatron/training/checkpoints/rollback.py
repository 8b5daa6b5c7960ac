"""The return of a run to a checkpoint from before a spike, and what it leaves out afterwards.

The first pass after the return trains on the same samples as before, up to ``--rollback-margin`` iterations before the
spike. It consumes the samples from there until the iteration that noticed the spike without training on them. The
manifest of every later checkpoint has this range, so that later resumes leave out the same samples.
"""

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.directory import MANIFEST, iteration_directory, saved_iterations, set_aside
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.remote_path import RemotePath
from megatron.checkpoint.schema import DataStage, Rollback
from megatron.core.control import run_on_rank0
from megatron.errors import CheckpointError, UnstableError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints.saved_run import Progress, SavedRun, Start, find_saved_run
from megatron.training.context import RunContext
from megatron.urls import is_url

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class RollbackRequested(Exception):
    """Ends the training loop on every rank, to start again from an earlier checkpoint."""

    cause: str
    message: str
    """What happened, as the beginning of a sentence."""
    first_iteration: int
    """The first iteration of the spike."""
    progress: Progress
    """The progress after the iteration that noticed the spike."""
    batches: BatchSchedule
    stage: DataStage
    earlier: tuple[Rollback, ...]
    """Rollbacks of the run so far."""


@dataclass(frozen=True)
class Return:
    """The checkpoint from which the run continues, and all its rollbacks."""

    saved: SavedRun
    rollbacks: tuple[Rollback, ...]

    @property
    def start(self) -> Start:
        return Start(self.saved, is_resumed=True)


def go_back(context: RunContext, request: RollbackRequested) -> Return:
    """Choose and verify the checkpoint to return to, and set later ones aside; a collective.

    Raises :class:`UnstableError` on every rank if there is no checkpoint from before the spike.
    """
    saved = _find_checkpoint(context, request)
    rollback = left_out(request, saved.progress, context.config.operation.rollback_margin)
    run_on_rank0(context.control, lambda: set_later_aside(context, saved.iteration))
    context.log_rank0(
        f"rollback {len(request.earlier) + 1} ({rollback.cause}): from iteration {rollback.iteration} to the "
        f"checkpoint of iteration {saved.iteration}; iterations {rollback.first_iteration} to {rollback.iteration} "
        f"(samples {rollback.first_sample} to {rollback.end_sample - 1}) will be left out"
    )
    return Return(saved, (*request.earlier, rollback))


def _find_checkpoint(context: RunContext, request: RollbackRequested) -> SavedRun:
    config, stage = context.config.checkpoint, request.stage
    assert config.save is not None
    there = run_on_rank0(context.control, lambda: list_checkpoints(Path(str(config.save))))
    # The checkpoint at the beginning of a later data stage belongs to the stage before, and begins this one only with
    # its flag.
    begins_there = stage.first_iteration == 0 or context.config.data.new_data_stage == stage.name
    first = stage.first_iteration if begins_there else stage.first_iteration + 1
    margin = context.config.operation.rollback_margin
    for iteration in in_order_of_preference((one for one in there if one >= first), request.first_iteration, margin):
        try:
            chosen = dataclasses.replace(config, load=config.save, ckpt_step=iteration, checkpoint_fallback=True)
            saved = find_saved_run(chosen, context.control)
        except CheckpointError as error:
            context.warn_rank0(f"Not returning to iteration {iteration}: {error}")
            continue
        assert saved is not None
        return saved
    raise UnstableError(
        f"{request.message}, and --save {config.save} has no checkpoint from before it to return to: lower "
        "--save-interval, lower --lr, or check the data.",
        request.cause,
    )


def in_order_of_preference(iterations: Iterable[int], first_iteration: int, margin: int) -> list[int]:
    """The checkpoints from before a spike: the newest ones that are further than ``margin`` from it, then others, the
    farthest first."""
    before = sorted((iteration for iteration in iterations if iteration < first_iteration), reverse=True)
    far = [iteration for iteration in before if iteration < first_iteration - margin]
    return [*far, *reversed(before[: len(before) - len(far)])]


def left_out(request: RollbackRequested, loaded: Progress, margin: int) -> Rollback:
    """The rollback to a checkpoint with the progress ``loaded``."""
    first = max(loaded.iteration + 1, request.first_iteration - margin)
    return Rollback(
        cause=request.cause,
        iteration=request.progress.iteration,
        loaded_iteration=loaded.iteration,
        first_iteration=first,
        first_sample=request.batches.total_samples(first - 1 - loaded.iteration, loaded.consumed_samples),
        end_sample=request.progress.consumed_samples,
    )


def set_later_aside(context: RunContext, iteration: int) -> None:
    """Rename the checkpoints after ``iteration``, so that no later resume loads a state with the spike; on rank 0.

    The run may never save at the same iterations again, and then would find them among its own. What cannot be renamed
    is a warning.
    """
    config = context.config.checkpoint
    assert config.save is not None
    for place in (config.save, *config.redundant_save):
        try:
            root = RemotePath(place.rstrip("/")) if is_url(place) else Path(place)
            for later in [one for one in saved_iterations(root) if one > iteration]:
                if isinstance(root, RemotePath):
                    # Nothing is renamed at a URL; without a manifest it is no checkpoint.
                    iteration_directory(root, later).remove([MANIFEST])
                else:
                    set_aside(root, later)
        except (CheckpointError, OSError) as error:
            _logger.warning("Checkpoints of iterations after %d remain in %s: %s", iteration, place, error)
