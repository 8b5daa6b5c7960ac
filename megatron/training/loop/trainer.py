"""The training loop. It fires events; metrics, evaluation, checkpoints and the rest listen."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.data.loader import Microbatch
from megatron.errors import DataError, RankError, UserError
from megatron.metrics.timers import Timers
from megatron.metrics.writer import MetricsWriter
from megatron.training.checkpoints.state import RunState
from megatron.training.context import RunContext
from megatron.training.loop.batch_schedule import BatchSchedule
from megatron.training.loop.data import Data
from megatron.training.loop.step import StepOutcome, train_step
from megatron.training.loop.stop import NO_DATA, StopConditions
from megatron.training.train_module import TrainModule

T = TypeVar("T")


class NoMicrobatchError(RankError):
    """This rank has no microbatch, for the reason given."""


@dataclass(frozen=True)
class IterationResult:
    """What listeners are told of an iteration."""

    outcome: StepOutcome
    hyperparameters: Hyperparameters
    global_batch_size: int
    seconds: float


class Listener:
    """Reacts to events; every method is called on all ranks."""

    def on_iteration_start(self, trainer: "Trainer") -> None:
        """Before an iteration."""

    def before_update(self, trainer: "Trainer") -> None:
        """Between the gradients of an iteration and the update, unless the loss is not finite."""

    def on_iteration(self, trainer: "Trainer", result: IterationResult) -> None:
        """After an iteration; ``trainer.state.progress`` counts it."""

    def on_skip_train(self, trainer: "Trainer") -> None:
        """Instead of all other events, with ``--skip-train``."""

    def on_end(self, trainer: "Trainer", reason: str) -> None:
        """When the loop has trained and is over, for whatever ``reason``."""

    def close(self) -> None:
        """Let go of everything, however the run ended; no collective."""


@dataclass
class Trainer:
    """A run, ready to train."""

    context: RunContext
    state: RunState
    batches: BatchSchedule
    data: Data
    stop: StopConditions
    timers: Timers
    listeners: Sequence[Listener]
    writers: Sequence[MetricsWriter]
    """The writers of metrics, on the rank that has them."""
    started: float = field(default_factory=time.monotonic)
    """When this process was ready to train, by the monotonic clock."""
    _failure: NoMicrobatchError | None = field(default=None, init=False)
    """Why this rank has no microbatch."""

    @property
    def module(self) -> TrainModule:
        return self.state.module

    def evaluate_only(self) -> None:
        """Evaluate the loaded weights (``--skip-train``)."""
        for listener in self.listeners:
            listener.on_skip_train(self)

    def run(self) -> str:
        """Train until a reason to stop, and return it; a run that is complete already does nothing."""
        while True:
            # The ranks' agreement waits for the device, so it belongs to the time of an iteration.
            started = time.perf_counter()
            reason = self.stop.reason(self.state.progress.iteration, self._has_data)
            if reason is not None:
                break
            if self.state.progress.iteration + 1 in self.context.config.training.iterations_to_skip:
                self.pass_over_one_iteration()
                continue
            for listener in self.listeners:
                listener.on_iteration_start(self)
            batch_size = self.batches.global_batch_size(self.state.progress.consumed_samples)
            hyperparameters = self.state.hyperparameters()
            try:
                outcome = train_step(
                    self.module,
                    self._microbatches(),
                    hyperparameters,
                    num_microbatches=self.batches.num_microbatches(self.state.progress.consumed_samples),
                    expected_tokens=batch_size * self.context.config.seq_length,
                    timers=self.timers,
                    before_update=self._before_update,
                )
            except NoMicrobatchError as error:
                if self.context.topology.world.size > 1:
                    raise  # the other ranks wait in a collective, so they cannot agree to save
                self._failure = error
                reason = self.stop.signal_reason() or NO_DATA
                break
            self._check(outcome)
            self._count_iteration()
            result = IterationResult(outcome, hyperparameters, batch_size, time.perf_counter() - started)
            for listener in self.listeners:
                listener.on_iteration(self, result)
        if self.state.progress.iteration > self.stop.first_iteration:
            for listener in self.listeners:
                listener.on_end(self, reason)
        if reason == NO_DATA:
            self._raise_failure()
        return reason

    def _raise_failure(self) -> NoReturn:
        """Raise on all ranks why the first of them has no microbatch."""
        failures = self.context.topology.world.all_gather_object(self._failure)
        first = next(failure for failure in failures if failure is not None)
        shared = DataError(str(first))
        shared.exit_code = first.exit_code
        raise shared

    def _has_data(self) -> bool:
        """Wait for the first microbatch of the next iteration, before the ranks need each other.

        If it does not come, all ranks can still agree to save the last iteration.
        """
        try:
            if self.module.executor.readers:
                with self.timers("batch-generator", level=2):
                    fetch(self.data.train.fetch, self.context.topology.rank)
        except NoMicrobatchError as error:
            self._failure = error
        return self._failure is None

    def _check(self, outcome: StepOutcome) -> None:
        """Refuse a loss or gradient that is not finite (``--check-for-nan-in-loss-and-grad``)."""
        if outcome.is_fault and self.context.config.training.check_for_nan_in_loss_and_grad:
            raise UserError(_fault(self.state.progress.iteration + 1, outcome, self.module.loss_scaler))

    def _before_update(self) -> None:
        for listener in self.listeners:
            listener.before_update(self)

    def pass_over_one_iteration(self) -> None:
        """Consume the samples of one global batch without training on them."""
        microbatches = self._microbatches()
        for _ in range(self.batches.num_microbatches(self.state.progress.consumed_samples)):
            next(microbatches)
        self._count_iteration()

    def _count_iteration(self) -> None:
        progress = self.state.progress
        progress.skipped_samples += self.batches.skipped_samples(progress.consumed_samples)
        progress.consumed_samples += self.batches.global_batch_size(progress.consumed_samples)
        progress.iteration += 1

    def close(self) -> None:
        """Finish the listeners, the loaders and the writers; call it however the run ended."""
        for listener in self.listeners:
            listener.close()
        self.data.close()
        for writer in self.writers:
            writer.close()

    def _microbatches(self) -> Iterator[Microbatch]:
        """This rank's next microbatches, read when they are asked for."""
        while True:
            with self.timers("batch-generator", level=2):
                microbatch = next_microbatch(self.data.train, self.context.topology.rank)
            yield microbatch


def _fault(iteration: int, outcome: StepOutcome, scaler: LossScaler) -> str:
    """What is not in order with an iteration, and what to do."""
    skip = "--no-check-for-nan-in-loss-and-grad skips such iterations."
    if not outcome.num_tokens:
        return (
            f"Iteration {iteration} has no loss, because every token of its global batch is masked (--eod-mask-loss "
            f"masks the ends of documents): look at the data, or use a larger --global-batch-size; {skip}"
        )
    return (
        f"Iteration {iteration} has loss {outcome.loss} and gradient norm {outcome.grad_norm}"
        f"{_advice(outcome, scaler)}; {skip}"
    )


def _advice(outcome: StepOutcome, scaler: LossScaler) -> str:
    """What else is to be said of an iteration that is not finite, and what to do."""
    if math.isfinite(outcome.loss) and scaler.is_dynamic:
        return (
            f" although the loss scale is down at --min-loss-scale {scaler.scale}: lower that or --lr, look at the "
            "data, or use --bf16 instead of --fp16"
        )
    if math.isfinite(outcome.loss) and scaler.scale != 1.0:
        return f" with --loss-scale {scaler.scale}: lower that or --lr, or look at the data"
    return ": lower --lr or look at the data"


def next_microbatch(microbatches: Iterator[Microbatch], rank: int) -> Microbatch:
    """The next microbatch; a fault in the data is this rank's own."""
    return fetch(lambda: next(microbatches), rank)


def fetch(action: Callable[[], T], rank: int) -> T:
    """Run ``action``, which reads data."""
    try:
        return action()
    except DataError as error:
        raise NoMicrobatchError(f"rank {rank}: {error}", error.exit_code) from error
