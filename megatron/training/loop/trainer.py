"""The training loop, which calls its listeners: metrics, evaluation, checkpoints and others."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron.core.hyperparameters import Hyperparameters
from megatron.data.loader import Microbatch
from megatron.errors import DataError
from megatron.metrics.timers import Timers
from megatron.metrics.writer import MetricsWriter
from megatron.operation.heartbeat import Section
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints.state import RunState
from megatron.training.context import RunContext, TrainModule
from megatron.training.loop.data import Data, NoMicrobatchError, fetch, next_microbatch
from megatron.training.loop.step import NO_DATA, StepOutcome, StopConditions, train_step


@dataclass(frozen=True)
class IterationResult:
    """The result of an iteration, for listeners."""

    outcome: StepOutcome
    hyperparameters: Hyperparameters
    global_batch_size: int
    seconds: float


class Listener:
    """Receives the events of the loop; every method is called on all ranks."""

    # The events of an iteration, in this order:
    #
    #     on_iteration_start ─ forward, backward ─ after_backward ─ gradients reduced ─ before_update ─ update
    #     ─ after_step ─ the iteration is counted ─ on_iteration
    #
    # and of a run: after_rollback, iterations, then on_end or on_nothing_to_train, close. With --skip-train:
    # on_skip_train, close.

    def on_iteration_start(self, trainer: "Trainer") -> None:
        """Before an iteration."""

    def after_backward(self, trainer: "Trainer") -> None:
        """Between the last backward pass of an iteration and the end of the reduction of the gradients."""

    def before_update(self, trainer: "Trainer", gradient_factor: float) -> None:
        """Between the gradients of an iteration and the update, unless the loss is not finite.

        The gradients of ``trainer.module.optimizer.shards`` times ``gradient_factor``, which corrects the loss scale
        and the number of tokens, are those of the mean loss, before clipping.
        """

    def after_step(self, trainer: "Trainer", outcome: StepOutcome) -> None:
        """After the step of an iteration, before it is counted; after an error here no checkpoint has it."""

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
    """The writers on rank 0; none on other ranks."""
    started: float = field(default_factory=time.monotonic)
    """Reading of the monotonic clock when this process was ready to train, in seconds."""
    is_after_rollback: bool = False
    """Whether this trainer starts after a rollback."""
    # The reason why this rank has no microbatch.
    _failure: NoMicrobatchError | None = field(default=None, init=False)

    @property
    def module(self) -> TrainModule:
        return self.state.module

    def run(self) -> str:
        """Train until a reason to stop, and return it."""
        reason = self.begin()
        while reason is None:
            reason = self.advance()
        has_trained = self.state.progress.iteration > self.stop.first_iteration
        for listener in self.listeners:
            if has_trained:
                listener.on_end(self, reason)
            else:
                listener.on_nothing_to_train(self)
        if reason == NO_DATA:
            # The first failure, as an error of all ranks.
            failures = self.context.control.all_gather_object(self._failure)
            first = next(failure for failure in failures if failure is not None)
            shared = DataError(str(first))
            shared.exit_code = first.exit_code
            raise shared
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
        """Train the next iteration, or skip its samples; returns the reason to stop after it, if there is one."""
        if self._is_skipped():
            self._skip_iteration()
            return self.stop.agree(self.state.progress.iteration, self._has_data)
        started, following = time.perf_counter(), self.state.progress.iteration + 1
        self.context.heartbeat.start_iteration(following)
        for listener in self.listeners:
            listener.on_iteration_start(self)
        # Both follow from the samples consumed, so a resumed run has the same in any layout.
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
                stop_flags=partial(self._after_backward, following),
                accepts=partial(self.state.guard.accepts, following),
            )
        except NoMicrobatchError as error:
            if self.context.control.size > 1:
                raise  # the other ranks wait in a collective, so they cannot agree to save
            self._failure = error
            return self.stop.signal_reason() or NO_DATA
        # Until here an error leaves the iteration untrained: no checkpoint has it.
        for listener in self.listeners:
            listener.after_step(self, outcome)
        self._count_iteration()
        result = IterationResult(outcome, hyperparameters, batch_size, time.perf_counter() - started)
        for listener in self.listeners:
            listener.on_iteration(self, result)
        return self.stop.reason(following, outcome.stop_flags)

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
        for listener in self.listeners:
            listener.after_backward(self)
        return self.stop.local_flags(iteration, self._has_data)

    def _before_update(self, gradient_factor: float) -> None:
        for listener in self.listeners:
            listener.before_update(self, gradient_factor)

    def _is_skipped(self) -> bool:
        """Whether ``--iterations-to-skip`` or a rollback skips the samples of the next iteration."""
        progress = self.state.progress
        if progress.iteration + 1 in self.context.config.training.iterations_to_skip:
            return True
        return self.state.skips(self.batches.global_batch_size(progress.consumed_samples))

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
        self.state.loader_state = self.data.train.loader_state  # of samples that were trained
        self.context.heartbeat.finish_iteration(self.state.progress.iteration)

    def _microbatches(self) -> Iterator[Microbatch]:
        while True:
            with self.timers("batch-generator", level=2):
                microbatch = next_microbatch(self.data.train, self.context.topology.rank)
            self.context.heartbeat.count_microbatch()
            yield microbatch

    def close(self) -> None:
        """Close listeners, loaders and writers; also after an error."""
        for listener in self.listeners:
            listener.close()
        self.data.close()
        for writer in self.writers:
            writer.close()
