"""The training loop, which calls its listeners: metrics, evaluation, checkpoints and others."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeVar

from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.data.loader import Microbatch
from megatron.errors import DataError, NotFiniteError, RankError, UnstableError, UserError
from megatron.features.spikes.flags import Action, Verdict
from megatron.features.spikes.listener import RollbackRequested
from megatron.metrics.timers import Timers
from megatron.metrics.writer import MetricsWriter
from megatron.operation.heartbeat import Section
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints.state import RunState
from megatron.training.context import RunContext
from megatron.training.loop.data import Data
from megatron.training.loop.step import StepOutcome, train_step
from megatron.training.loop.stop import NO_DATA, StopConditions
from megatron.training.train_module import TrainModule

T = TypeVar("T")


class NoMicrobatchError(RankError):
    """This rank has no microbatch."""

    cause = "data"


@dataclass(frozen=True)
class IterationResult:
    """The result of an iteration, for listeners."""

    outcome: StepOutcome
    hyperparameters: Hyperparameters
    global_batch_size: int
    seconds: float


class Listener:
    """Receives the events of the loop; every method is called on all ranks."""

    def on_iteration_start(self, trainer: "Trainer") -> None:
        """Before an iteration."""

    def after_backward(self, trainer: "Trainer") -> None:
        """Between the last backward pass of an iteration and the end of the reduction of the gradients."""

    def before_update(self, trainer: "Trainer") -> None:
        """Between the gradients of an iteration and the update, unless the loss is not finite."""

    def on_iteration(self, trainer: "Trainer", result: IterationResult) -> None:
        """After an iteration; ``trainer.state.progress`` counts it."""

    def on_suspicion(self, trainer: "Trainer", what: str) -> str | None:
        """Before a decision about an iteration of which ``what`` is suspicious (such as "loss nan of iteration 7").

        Returns a sentence on what a check found out, the same on all ranks; raises if the hardware is the cause.
        """

    def on_skipped_iteration(self, trainer: "Trainer") -> None:
        """After an iteration whose samples were consumed without training; ``trainer.state.progress`` counts it."""

    def before_rollback(self, trainer: "Trainer") -> None:
        """Before this trainer is closed, and another one starts from an earlier checkpoint."""

    def after_rollback(self, trainer: "Trainer") -> None:
        """Before the first iteration after a rollback."""

    def on_skip_train(self, trainer: "Trainer") -> None:
        """Instead of all other events, with ``--skip-train``."""

    def on_end(self, trainer: "Trainer", reason: str) -> None:
        """After the last iteration of this process."""

    def on_nothing_to_train(self, trainer: "Trainer") -> None:
        """Instead of :meth:`on_end`, if this process trains no iteration."""

    def close(self) -> None:
        """Release resources, also after an error; not a collective."""


@dataclass
class Trainer:
    """A run that is ready to train."""

    context: RunContext
    state: RunState
    batches: BatchSchedule
    data: Data
    stop: StopConditions
    timers: Timers
    listeners: Sequence[Listener]
    writers: Sequence[MetricsWriter]
    """On rank 0; empty on other ranks."""
    started: float = field(default_factory=time.monotonic)
    """Reading of the monotonic clock when this process was ready to train, in seconds."""
    is_after_rollback: bool = False
    """Whether this trainer starts after a rollback."""
    _failure: NoMicrobatchError | None = field(default=None, init=False)
    """The reason why this rank has no microbatch."""

    @property
    def module(self) -> TrainModule:
        return self.state.module

    def evaluate_only(self) -> None:
        """Evaluate the loaded weights (``--skip-train``)."""
        for listener in self.listeners:
            listener.on_skip_train(self)

    def run(self) -> str:
        """Train until a reason to stop, and return it."""
        reason = self.begin()
        while reason is None:
            reason = self.advance()
        if self.state.progress.iteration > self.stop.first_iteration:
            for listener in self.listeners:
                listener.on_end(self, reason)
        else:
            for listener in self.listeners:
                listener.on_nothing_to_train(self)
        if reason == NO_DATA:
            self._raise_failure()
        return reason

    def begin(self) -> str | None:
        """Before the first iteration; returns the reason not to train it."""
        self.context.heartbeat.start_training(self.state.progress.iteration)
        self.context.heartbeat.enter(Section.STEP)
        if self.is_after_rollback:
            for listener in self.listeners:
                listener.after_rollback(self)
        return self.stop.agree(self.state.progress.iteration, self._has_data)

    def advance(self) -> str | None:
        """Train the next iteration, or leave its samples out; returns the reason to stop after it."""
        if not self._is_left_out():
            return self._train_iteration()
        self._skip_iteration()
        return self.stop.agree(self.state.progress.iteration, self._has_data)

    def _train_iteration(self) -> str | None:
        """Train one iteration and return the reason to stop after it, if there is one."""
        started = time.perf_counter()
        self.context.heartbeat.start_iteration(self.state.progress.iteration + 1)
        for listener in self.listeners:
            listener.on_iteration_start(self)
        batch_size = self.batches.global_batch_size(self.state.progress.consumed_samples)
        hyperparameters = self.state.hyperparameters()
        following = self.state.progress.iteration + 1
        try:
            outcome = train_step(
                self.module,
                self._microbatches(),
                hyperparameters,
                num_microbatches=self.batches.num_microbatches(self.state.progress.consumed_samples),
                expected_tokens=batch_size * self.context.config.seq_length,
                timers=self.timers,
                before_update=self._before_update,
                stop_flags=lambda: self._after_backward(following),
                accepts=partial(self.state.guard.accepts, following),
            )
        except NoMicrobatchError as error:
            if self.context.control.size > 1:
                raise  # the other ranks wait in a collective, so they cannot agree to save
            self._failure = error
            return self.stop.signal_reason() or NO_DATA
        verdict = self.state.guard.conclude(following, not outcome.is_skipped, outcome.is_fault)
        found = self._examine_before(verdict, following, outcome)
        if verdict.action is Action.STOP:
            raise self._stopped(following, outcome, verdict, found)
        self._count_iteration()
        if verdict.action is Action.ROLL_BACK:
            self._roll_back(verdict, found)
        if verdict.message is not None:
            self.context.warn_rank0(verdict.message)
        outcome.metrics.update(self.state.metrics())
        result = IterationResult(outcome, hyperparameters, batch_size, time.perf_counter() - started)
        for listener in self.listeners:
            listener.on_iteration(self, result)
        return self.stop.reason(following, outcome.stop_flags)

    def examine(self, what: str) -> list[str]:
        """What the listeners find out about a suspicious iteration, as sentences; a collective of all ranks.

        To be called before the iteration is counted. Raises :class:`~megatron.errors.SilentCorruptionError` if the
        hardware is the cause.
        """
        found = [listener.on_suspicion(self, what) for listener in self.listeners]
        return [sentence for sentence in found if sentence is not None]

    def _examine_before(self, verdict: Verdict, iteration: int, outcome: StepOutcome) -> list[str]:
        """What the listeners find out before the run stops or rolls back."""
        if verdict.action is Action.CONTINUE or not outcome.num_tokens:
            return []
        if outcome.is_fault and not outcome.is_fault_of_all:
            return []
        return self.examine(_what(iteration, outcome))

    def _stopped(self, iteration: int, outcome: StepOutcome, verdict: Verdict, found: Sequence[str]) -> UserError:
        """The error at a loss or gradient that is not finite, or after too many skipped updates."""
        if verdict.message is None:
            return NotFiniteError(" ".join([_fault(iteration, outcome, self.module.loss_scaler), *found]))
        assert verdict.cause is not None
        advice = (
            f"{verdict.message}: lower --lr, check the data, or go back to an earlier checkpoint with --ckpt-step and "
            "leave out these samples with --iterations-to-skip."
        )
        return UnstableError(" ".join([advice, *found]), verdict.cause)

    def _roll_back(self, verdict: Verdict, found: Sequence[str]) -> NoReturn:
        """Raise :class:`RollbackRequested` on every rank, or an error if there were too many."""
        assert verdict.cause is not None and verdict.message is not None
        limit = self.context.config.operation.max_rollbacks
        if len(self.state.rollbacks) >= limit:
            raise UnstableError(
                f"{verdict.message}, after {len(self.state.rollbacks)} rollbacks (--max-rollbacks "
                f"{limit}): lower --lr, check the data, or raise --max-rollbacks.",
                verdict.cause,
            )
        self.context.warn_rank0(" ".join([f"{verdict.message}: returning to an earlier checkpoint.", *found]))
        for listener in self.listeners:
            listener.before_rollback(self)
        raise RollbackRequested(
            cause=verdict.cause,
            message=verdict.message,
            first_iteration=verdict.first_iteration,
            progress=replace(self.state.progress),
            batches=self.batches,
            stage=self.state.data_stages[-1],
            earlier=self.state.rollbacks,
        )

    def _raise_failure(self) -> NoReturn:
        """Raise the first rank's failure on all ranks."""
        failures = self.context.control.all_gather_object(self._failure)
        first = next(failure for failure in failures if failure is not None)
        shared = DataError(str(first))
        shared.exit_code = first.exit_code
        raise shared

    def _has_data(self) -> bool:
        """Wait for the first microbatch of the next iteration; without it, all ranks can still agree to save."""
        try:
            if self.module.executor.readers:
                with self.timers("batch-generator", level=2):
                    fetch(self.data.train.fetch, self.context.topology.rank)
        except NoMicrobatchError as error:
            self._failure = error
        return self._failure is None

    def _after_backward(self, iteration: int) -> Sequence[bool]:
        """This rank's flags to stop after ``iteration``."""
        for listener in self.listeners:
            listener.after_backward(self)
        return self.stop.local_flags(iteration, self._has_data)

    def _before_update(self) -> None:
        for listener in self.listeners:
            listener.before_update(self)

    def _is_left_out(self) -> bool:
        """Whether ``--iterations-to-skip`` or a rollback leaves out the next iteration."""
        progress = self.state.progress
        if progress.iteration + 1 in self.context.config.training.iterations_to_skip:
            return True
        return self.state.leaves_out(self.batches.global_batch_size(progress.consumed_samples))

    def _skip_iteration(self) -> None:
        """Consume the samples of one global batch without training on them."""
        microbatches = self._microbatches()
        for _ in range(self.batches.num_microbatches(self.state.progress.consumed_samples)):
            next(microbatches)
        self._count_iteration()
        for listener in self.listeners:
            listener.on_skipped_iteration(self)

    def _count_iteration(self) -> None:
        self.state.progress.count_iteration(self.batches)
        self.context.heartbeat.finish_iteration(self.state.progress.iteration)

    def close(self) -> None:
        """Close listeners, loaders and writers; also after an error."""
        for listener in self.listeners:
            listener.close()
        self.data.close()
        for writer in self.writers:
            writer.close()

    def _microbatches(self) -> Iterator[Microbatch]:
        while True:
            with self.timers("batch-generator", level=2):
                microbatch = next_microbatch(self.data.train, self.context.topology.rank)
            self.context.heartbeat.count_microbatch()
            yield microbatch


def _what(iteration: int, outcome: StepOutcome) -> str:
    """What is suspicious about a fault."""
    return f"loss {outcome.loss} and gradient norm {outcome.grad_norm} of iteration {iteration}"


def _fault(iteration: int, outcome: StepOutcome, scaler: LossScaler) -> str:
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


def next_microbatch(microbatches: Iterator[Microbatch], rank: int) -> Microbatch:
    """The next microbatch; raises :class:`NoMicrobatchError`."""
    return fetch(lambda: next(microbatches), rank)


def fetch(action: Callable[[], T], rank: int) -> T:
    """Run ``action``, which reads data; raises :class:`NoMicrobatchError`."""
    try:
        return action()
    except DataError as error:
        raise NoMicrobatchError(f"rank {rank}: {error}", error.exit_code) from error
