"""Carries out the decisions of the update guard: warn, stop, or return to a checkpoint from before a spike.

After a rollback the run trains on the same samples as before, up to ``--rollback-margin`` iterations before the spike.
It skips the samples from there until the iteration that noticed the spike. The manifest of every later checkpoint has
this range, so that later resumes skip the same samples.

    loaded          first_iteration - margin     first_iteration     noticed
      |  trained again  |            skipped                            |   new samples
"""

import dataclasses
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from megatron.checkpoint.directory import MANIFEST, iteration_directory, saved_iterations, set_aside
from megatron.checkpoint.files import RemotePath
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.schema import DataStage, Rollback
from megatron.core.control import run_on_rank0
from megatron.core.precision import LossScaler
from megatron.errors import CheckpointError, NotFiniteError, UnstableError
from megatron.features.spikes.flags import Action, Verdict
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints.saved_run import Progress, SavedRun, Start, find_saved_run
from megatron.training.context import RunContext
from megatron.training.loop.step import StepOutcome
from megatron.training.loop.trainer import IterationResult, Listener, Trainer
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


@dataclass
class Spikes(Listener):
    """Stops the run before an iteration is counted, and rolls back after it; the first of all listeners.

    All ranks reach the same verdict, so all of them raise.
    """

    _verdict: Verdict = field(default_factory=Verdict, init=False)
    # Sentences of the checks that looked at the iteration.
    _found: list[str] = field(default_factory=list, init=False)

    def after_step(self, trainer: Trainer, outcome: StepOutcome) -> None:
        iteration = trainer.state.progress.iteration + 1
        self._verdict = trainer.state.guard.conclude(iteration, not outcome.is_skipped, outcome.is_fault)
        self._found = []
        # A decision that follows from a fault of this rank alone is not examined: the other ranks do not take part.
        is_of_all = outcome.is_fault_of_all or not outcome.is_fault
        if self._verdict.action is not Action.CONTINUE and outcome.num_tokens and is_of_all:
            what = f"loss {outcome.loss} and gradient norm {outcome.grad_norm} of iteration {iteration}"
            self._found = examine(trainer, what)
        if self._verdict.action is Action.STOP:
            self._stop(trainer, iteration, outcome)

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if self._verdict.action is Action.ROLL_BACK:
            self._roll_back(trainer)
        if self._verdict.message is not None:
            trainer.context.warn_rank0(self._verdict.message)
        result.outcome.metrics.update(trainer.state.metrics())

    def _stop(self, trainer: Trainer, iteration: int, outcome: StepOutcome) -> NoReturn:
        """Raise the error at a loss or gradient that is not finite, or after too many skipped updates."""
        if self._verdict.message is None:
            fault = describe_fault(iteration, outcome, trainer.module.loss_scaler)
            raise NotFiniteError(" ".join([fault, *self._found]))
        assert self._verdict.cause is not None
        advice = (
            f"{self._verdict.message}: lower --lr, check the data, or go back to an earlier checkpoint with "
            "--ckpt-step and skip these samples with --iterations-to-skip."
        )
        raise UnstableError(" ".join([advice, *self._found]), self._verdict.cause)

    def _roll_back(self, trainer: Trainer) -> NoReturn:
        """Raise :class:`RollbackRequested` on every rank, or an error if there were too many."""
        verdict, state, context = self._verdict, trainer.state, trainer.context
        assert verdict.cause is not None and verdict.message is not None
        limit = context.config.operation.max_rollbacks
        if len(state.rollbacks) >= limit:
            raise UnstableError(
                f"{verdict.message}, after {len(state.rollbacks)} rollbacks (--max-rollbacks {limit}): lower --lr, "
                "check the data, or raise --max-rollbacks.",
                verdict.cause,
            )
        context.warn_rank0(" ".join([f"{verdict.message}: returning to an earlier checkpoint.", *self._found]))
        for listener in trainer.listeners:
            listener.before_rollback(trainer)
        raise RollbackRequested(
            cause=verdict.cause,
            message=verdict.message,
            first_iteration=verdict.first_iteration,
            progress=dataclasses.replace(state.progress),
            batches=trainer.batches,
            stage=state.data_stages[-1],
            earlier=state.rollbacks,
        )


def examine(trainer: Trainer, what: str) -> list[str]:
    """The sentences of the listeners on a suspicious iteration, which is not counted yet; a collective of all ranks.

    Raises :class:`~megatron.errors.SilentCorruptionError` if the hardware is the cause.
    """
    found = [listener.on_suspicion(trainer, what) for listener in trainer.listeners]
    return [sentence for sentence in found if sentence is not None]


def describe_fault(iteration: int, outcome: StepOutcome, scaler: LossScaler) -> str:
    """The message for an iteration whose loss or gradient is not finite."""
    skip = "--no-check-for-nan-in-loss-and-grad skips such iterations."
    if not outcome.num_tokens:
        return (
            f"Iteration {iteration} has no loss, because every token of its global batch is masked (--eod-mask-loss "
            f"masks the ends of documents): check the data, or use a larger --global-batch-size; {skip}"
        )
    advice = ": lower --lr or check the data"
    if math.isfinite(outcome.loss) and scaler.is_dynamic:
        advice = (
            f" although the loss scale is at --min-loss-scale {scaler.scale}: lower that or --lr, check the data, or "
            "use --bf16 instead of --fp16"
        )
    elif math.isfinite(outcome.loss) and scaler.scale != 1.0:
        advice = f" with --loss-scale {scaler.scale}: lower that or --lr, or check the data"
    return f"Iteration {iteration} has loss {outcome.loss} and gradient norm {outcome.grad_norm}{advice}; {skip}"


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
    rollback = skipped_after(request, saved.progress, context.config.operation.rollback_margin)
    run_on_rank0(context.control, lambda: set_later_aside(context, saved.iteration))
    context.log_rank0(
        f"rollback {len(request.earlier) + 1} ({rollback.cause}): from iteration {rollback.iteration} to the "
        f"checkpoint of iteration {saved.iteration}; iterations {rollback.first_iteration} to {rollback.iteration} "
        f"(samples {rollback.first_sample} to {rollback.end_sample - 1}) will be skipped"
    )
    return Return(saved, (*request.earlier, rollback))


def _find_checkpoint(context: RunContext, request: RollbackRequested) -> SavedRun:
    config, stage = context.config.checkpoint, request.stage
    assert config.save is not None
    # Checkpoints of the current data stage, verified one after the other until one is whole.
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


def skipped_after(request: RollbackRequested, loaded: Progress, margin: int) -> Rollback:
    """The record of the return to a checkpoint with the progress ``loaded``: the samples that the run skips."""
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
