"""The training loop. It fires events; metrics, evaluation, checkpoints and the rest listen."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.config.errors import DataError, RankError, UserError
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.topology import Topology
from megatron.data.loader import Microbatch
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.data import Data
from megatron.training.metrics import MetricsWriter
from megatron.training.state import RunState
from megatron.training.step import StepOutcome, train_step
from megatron.training.stop import StopConditions
from megatron.training.timers import Timers


@dataclass(frozen=True)
class IterationResult:
    """What listeners are told of an iteration."""

    outcome: StepOutcome
    learning_rate: float
    global_batch_size: int
    seconds: float


class Listener:
    """Reacts to events; every method is called on all ranks."""

    def on_iteration_start(self, trainer: "Trainer") -> None:
        """Before an iteration."""

    def on_iteration(self, trainer: "Trainer", result: IterationResult) -> None:
        """After an iteration; ``trainer.state.progress`` counts it."""

    def on_end(self, trainer: "Trainer", reason: str) -> None:
        """When the loop has trained and is over, for whatever ``reason``."""

    def close(self) -> None:
        """Let go of everything, however the run ended; no collective."""


@dataclass
class Trainer:
    """A run, ready to train."""

    topology: Topology
    state: RunState
    executor: PipelineExecutor
    data_parallel: DataParallel
    batches: BatchSchedule
    data: Data
    stop: StopConditions
    timers: Timers
    listeners: Sequence[Listener]
    writers: Sequence[MetricsWriter]
    """The writers of metrics, on the rank that has them."""
    seq_length: int
    check_for_nan: bool
    count_zeros: bool
    iterations_to_skip: frozenset[int] = frozenset()
    """Iterations whose samples are passed over; nobody hears of them."""
    before_update: Callable[[], None] | None = None
    """Called between the gradients and the update."""

    def run(self) -> str:
        """Train until a reason to stop, and return it; a run that is complete already does nothing."""
        while True:
            # The ranks' agreement waits for the device, so it belongs to the time of an iteration.
            started = time.perf_counter()
            reason = self.stop.reason(self.state.progress.iteration)
            if reason is not None:
                break
            if self.state.progress.iteration + 1 in self.iterations_to_skip:
                self.pass_over_one_iteration()
                continue
            for listener in self.listeners:
                listener.on_iteration_start(self)
            result = self.train_one_iteration(started)
            for listener in self.listeners:
                listener.on_iteration(self, result)
        if self.state.progress.iteration > self.stop.first_iteration:
            for listener in self.listeners:
                listener.on_end(self, reason)
        return reason

    def train_one_iteration(self, started: float) -> IterationResult:
        """One global batch, one update; ``started`` is the reading of the clock when it began."""
        progress = self.state.progress
        batch_size = self.batches.global_batch_size(progress.consumed_samples)
        learning_rate = self.state.schedule(progress.consumed_samples)
        weight_decay = self.state.weight_decay
        outcome = train_step(
            self.executor,
            self.data_parallel,
            self.state.optimizer,
            self._microbatches(),
            num_microbatches=self.batches.num_microbatches(progress.consumed_samples),
            expected_tokens=batch_size * self.seq_length,
            learning_rate=learning_rate,
            loss_scaler=self.state.loss_scaler,
            ranks=self.topology.loss_ranks,
            timers=self.timers,
            count_zeros=self.count_zeros,
            fp8=self.state.fp8,
            vocabulary_learning_rate=self.state.vocabulary_learning_rate(progress.consumed_samples),
            weight_decay=weight_decay(progress.consumed_samples) if weight_decay is not None else None,
            before_update=self.before_update,
        )
        if outcome.is_fault and self.check_for_nan:
            raise UserError(_fault(progress.iteration + 1, outcome, self.state.loss_scaler))
        self._count_iteration()
        return IterationResult(outcome, learning_rate, batch_size, time.perf_counter() - started)

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
                microbatch = next_microbatch(self.data.train, self.topology.rank)
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
    try:
        return next(microbatches)
    except DataError as error:
        raise RankError(f"rank {rank}: {error}") from error
