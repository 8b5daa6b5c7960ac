"""When to stop, agreed among all ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.config.training import TrainingConfig
from megatron.core.communication import Communicator
from megatron.training.loop.data_check import DataCheck
from megatron.training.signals import SignalWatch

NO_DATA = "a rank has no more data"
"""The reason to stop when the wait for a microbatch has failed on some rank."""


@dataclass
class StopConditions:
    """Everything that ends a run."""

    train_iters: int
    config: TrainingConfig
    signals: SignalWatch
    world: Communicator
    device: torch.device
    started: float
    """Reading of the monotonic clock when the run began, in seconds."""
    first_iteration: int = 0
    """Iterations that the run had behind it when it was resumed; it does not stop before it has trained."""
    data_check: DataCheck | None = None
    """What may find the corpus damaged."""

    def reason(self, iteration: int, has_data: Callable[[], bool] = lambda: True) -> str | None:
        """Why to stop after ``iteration`` iterations, or None; the same on every rank.

        ``has_data`` waits for the rank's next microbatch, and returns whether it is there. Raises
        :class:`~megatron.errors.DataError` on every rank when one has found the corpus damaged.
        """
        if self.is_complete(iteration):
            return "the run is complete"
        interval = self.config.exit_interval
        if interval is not None and iteration > self.first_iteration and iteration % interval == 0:
            return f"--exit-interval {interval}"
        lacks_data = self.signals.received is None and not has_data()
        # Clocks, signals and what was found in the data differ between ranks, so the ranks agree on one answer.
        found_damage = self.data_check is not None and self.data_check.has_found_damage
        mine = [self.signals.received is not None, self._is_time_up(), found_damage, lacks_data]
        flags = torch.tensor(mine, dtype=torch.int32).to(self.device)
        got_signal, time_is_up, is_damaged, lacks_data = self.world.all_reduce(flags, "max").tolist()
        if is_damaged and self.data_check is not None:
            self.data_check.raise_on_all_ranks()
        if got_signal:
            return self.signal_reason() or "signal on another rank"
        if lacks_data:
            return NO_DATA
        if time_is_up:
            return f"--exit-duration-in-mins {self.config.exit_duration_in_mins}"
        return None

    def is_complete(self, iteration: int) -> bool:
        """Whether ``iteration`` iterations are the whole run."""
        return iteration >= self.train_iters

    def signal_reason(self) -> str | None:
        """The signal that this rank has received, as a reason to stop."""
        return None if self.signals.received is None else f"signal {self.signals.received}"

    def _is_time_up(self) -> bool:
        limit = self.config.exit_duration_in_mins
        return limit is not None and time.monotonic() - self.started > limit * 60
