"""One training iteration, and one evaluation batch: the microbatches through the pipeline, then the update; and the
conditions that end a run, on which all ranks agree with the loss of the iteration.

The loss is the mean over all unmasked tokens of the global batch, in every layout: ranks and microbatches add
up losses and token counts, never means. The reported loss is the cross entropy; auxiliary losses are other metrics.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.config.training import TrainingConfig
from megatron.core.communication import Communicator
from megatron.core.hyperparameters import Hyperparameters
from megatron.data.evaluation_data import CountedBytes, TokenBytes
from megatron.data.loader import Microbatch
from megatron.metrics.timers import Timers
from megatron.operation.signals import SignalWatch
from megatron.training.context import TrainModule

NO_DATA = "a rank has no more data"
"""The reason to stop if a rank has no microbatch."""

# Microbatches of an evaluation between two visits of its section.
_PORTION = 64


@dataclass(frozen=True)
class TokenLoss:
    """Sum of the losses of unmasked tokens, and their number."""

    total: float
    num_tokens: float
    num_bytes: float = 0.0
    """UTF-8 bytes of their text; 0 if they are not known."""

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        """The sums over the tokens of both; 0 bytes if those of one are not known."""
        num_bytes = self.num_bytes + other.num_bytes if self.num_bytes and other.num_bytes else 0.0
        return TokenLoss(self.total + other.total, self.num_tokens + other.num_tokens, num_bytes)

    @property
    def mean(self) -> float:
        """Loss per token; NaN without tokens."""
        return self.total / self.num_tokens if self.num_tokens else float("nan")


@dataclass(frozen=True)
class StepOutcome:
    """The result of an iteration."""

    loss: float
    grad_norm: float
    is_skipped: bool
    """Whether no update was made: the loss or a gradient was not finite, or ``accepts`` rejected it."""
    is_fault: bool
    """Whether the loss was not finite, or gradients overflowed although the loss scale cannot be lowered."""
    num_tokens: float
    """Unmasked tokens in the global batch."""
    is_fault_of_all: bool
    """Whether a fault is certainly one of all ranks: the loss is a sum over all, but replicas with whole gradients
    compute the norm on their own, and one of them may have wrong bits."""
    stop_flags: Sequence[float] = ()
    """The number of ranks with each stop flag."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Values for the metrics record, by name; listeners may add some."""


def evaluate(
    module: TrainModule,
    microbatches: Iterator[Microbatch],
    num_microbatches: int,
    timers: Timers,
    token_bytes: TokenBytes | None = None,
) -> TokenLoss:
    """Loss over ``num_microbatches`` on every data-parallel rank, without gradients."""
    # Every rank that has the output layer reads the labels of the losses that it computes.
    table = None if module.executor.token_losses is None else token_bytes
    counted = CountedBytes(_timed(microbatches, timers), table)
    sums = torch.zeros(3, dtype=torch.float64, device=module.topology.device)
    for first in range(0, num_microbatches, _PORTION):
        # A portion at a time: the launcher's time limit is for one, and a whole text may take hours.
        with timers("evaluation"):
            sums[:2] += module.executor.evaluate(counted, min(_PORTION, num_microbatches - first))
    sums[2] = counted.num_bytes
    with timers("evaluation"):
        return TokenLoss(*module.start_sum(sums).wait().tolist())


def _timed(microbatches: Iterator[Microbatch], timers: Timers) -> Iterator[Microbatch]:
    """Waiting for data has a limit of its own."""
    while True:
        with timers("evaluation-data", level=2):
            microbatch = next(microbatches, None)
        if microbatch is None:
            return
        yield microbatch


def train_step(
    module: TrainModule,
    microbatches: Iterator[Microbatch],
    hyperparameters: Hyperparameters,
    *,
    num_microbatches: int,
    expected_tokens: int,
    timers: Timers,
    before_update: Callable[[float], None] = lambda gradient_factor: None,
    stop_flags: Callable[[], Sequence[bool]] = tuple,
    accepts: Callable[[float, float], bool] = lambda loss, grad_norm: True,
) -> StepOutcome:
    """One iteration, without an update if the loss or a gradient is not finite.

    ``expected_tokens`` is the number of tokens in the global batch, by which the loss is divided until the number of
    unmasked tokens is known. ``before_update`` is called between the gradients and the update, with the factor by which
    the gradients are those of the mean loss. ``stop_flags`` returns this rank's flags, which are counted together with
    the loss. ``accepts`` receives a finite loss and gradient norm, and returns whether to apply the update, the same on
    every rank.
    """
    scale, fp8, experts = module.loss_scaler.scale, module.fp8, module.experts
    if fp8 is not None:
        fp8.start_step()
    if experts is not None:
        experts.start_step()
    module.data_parallel.start_grad_accumulation(num_microbatches)
    with timers("forward-backward"):
        # [loss, tokens] of this rank's microbatches
        sums = module.executor.train(microbatches, num_microbatches, scale / expected_tokens)
    flags = stop_flags()
    with timers("grads-reduce"):
        # The reduction of the loss overlaps with the reduction of the gradients, and precedes the all-gathers of the
        # updated weights. The stop flags add no collective and no wait for the device.
        auxiliary = module.executor.auxiliary_losses
        # [sums + flags + auxiliary], over all ranks
        pending_sum = module.start_sum(sums, flags, auxiliary.sums(sums.device))
        pending_balance = None if experts is None else experts.start_sum()
        module.data_parallel.finish_grad_sync()
        values = pending_sum.wait().tolist()
        loss, counts = TokenLoss(*values[:2]), values[2 : 2 + len(flags)]
        auxiliary_metrics = auxiliary.metrics(values[2 + len(flags) :])
        # Before the update, because reading these values waits for the device.
        balance = {} if experts is None or pending_balance is None else experts.finish_sum(pending_balance.wait())
    if fp8 is not None:
        # Also in a skipped step: its finite amax values set the scales of the next step.
        fp8.finish_step()
    if not math.isfinite(loss.mean):
        module.data_parallel.finish_skipped_step()
        # The loss scale does not change: the loss does not depend on it.
        return StepOutcome(
            loss.mean,
            math.nan,
            is_skipped=True,
            is_fault=True,
            num_tokens=loss.num_tokens,
            is_fault_of_all=True,
            stop_flags=counts,
        )
    # Gradients are of the loss times the loss scale over the expected tokens; the factor corrects both.
    gradient_factor = expected_tokens / loss.num_tokens / scale
    before_update(gradient_factor)
    with timers("optimizer"):
        result = module.optimizer.step(
            hyperparameters,
            gradient_factor,
            lambda grad_norm: accepts(loss.mean, grad_norm),
        )
    if not result.is_applied:
        module.data_parallel.finish_skipped_step()
    is_fault = not module.loss_scaler.update(overflowed=not math.isfinite(result.grad_norm))
    if experts is not None and result.is_applied:
        experts.update_biases()
    return StepOutcome(
        loss.mean,
        result.grad_norm,
        is_skipped=not result.is_applied,
        is_fault=is_fault,
        num_tokens=loss.num_tokens,
        is_fault_of_all=is_fault and module.optimizer.has_one_norm,
        stop_flags=counts,
        metrics={**result.metrics, **balance, **auxiliary_metrics},
    )


# --- the end of a run ----------------------------------------------------------------------------------------


class RankAlarm(ABC):
    """A test that each rank makes alone, whose failure ends the run on all ranks together."""

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """Whether this rank's test has failed."""

    @abstractmethod
    def raise_on_all_ranks(self) -> None:
        """Raise the error on every rank if the test of one has failed; a collective."""


@dataclass
class StopConditions:
    """The conditions that end a run.

    Each step counts the flags of all ranks together with its loss, so agreeing costs no collective and no wait for the
    device. A signal during an evaluation or a save therefore ends the run after the next iteration.
    """

    train_iters: int
    config: TrainingConfig
    signals: SignalWatch
    world: Communicator
    device: torch.device
    started: float
    """Reading of the monotonic clock when the run began, in seconds."""
    first_iteration: int = 0
    """Iterations before this process; ``--exit-interval`` does not stop there."""
    alarms: Sequence[RankAlarm] = ()
    """The first of those that have failed raises its error."""

    def local_flags(self, iteration: int, has_data: Callable[[], bool] = lambda: True) -> Sequence[bool]:
        """This rank's reasons not to start another iteration after ``iteration``, to be counted over all ranks.

        Signals, clocks and data differ between ranks. ``has_data`` waits for the rank's next microbatch, before any
        rank waits in the collective.
        """
        if self._known_reason(iteration) is not None:
            return [False] * (3 + len(self.alarms))
        lacks_data = self.signals.received is None and not has_data()
        limit = self.config.exit_duration_in_mins
        is_late = limit is not None and time.monotonic() - self.started > limit * 60
        return [self.signals.received is not None, is_late, lacks_data, *(alarm.has_failed for alarm in self.alarms)]

    def reason(self, iteration: int, counts: Sequence[float]) -> str | None:
        """The reason to stop after ``iteration`` iterations, or None; the same on every rank.

        ``counts`` are the numbers of ranks with each of :meth:`local_flags`. Raises the error of an alarm that has
        failed on any rank, on every rank.
        """
        known = self._known_reason(iteration)
        if known is not None:
            return known
        got_signal, time_is_up, lacks_data, *have_failed = (count > 0 for count in counts)
        for alarm, has_failed in zip(self.alarms, have_failed, strict=True):
            if has_failed:
                alarm.raise_on_all_ranks()
        if got_signal:
            return self.signal_reason() or "signal on another rank"
        if lacks_data:
            return NO_DATA
        if time_is_up:
            return f"--exit-duration-in-mins {self.config.exit_duration_in_mins}"
        return None

    def agree(self, iteration: int, has_data: Callable[[], bool] = lambda: True) -> str | None:
        """:meth:`reason`, by a separate collective: for use where no step counts the flags together with its loss."""
        flags = torch.tensor(self.local_flags(iteration, has_data), dtype=torch.float64).to(self.device)
        return self.reason(iteration, self.world.all_reduce(flags).tolist())

    def _known_reason(self, iteration: int) -> str | None:
        """The reason that follows from the flags of the run alone."""
        if self.is_complete(iteration):
            return "the run is complete"
        interval = self.config.exit_interval
        if interval is not None and iteration > self.first_iteration and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None

    def is_complete(self, iteration: int) -> bool:
        return iteration >= self.train_iters

    def signal_reason(self) -> str | None:
        """The signal that this rank has received, as a reason to stop."""
        return None if self.signals.received is None else f"signal {self.signals.received}"
