"""The conditions that end a run, on which all ranks agree."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.config.training import TrainingConfig
from megatron.core.communication import Communicator
from megatron.operation.ranks import SignalWatch

NO_DATA = "a rank has no more data"
"""The reason to stop if a rank has no microbatch."""


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
