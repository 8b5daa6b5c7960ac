"""The conditions that end a run, on which all ranks agree."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.config.training import TrainingConfig
from megatron.core.communication import Communicator
from megatron.training.loop.data_check import DataCheck
from megatron.training.signals import SignalWatch

NO_DATA = "a rank has no more data"
"""The reason to stop if a rank has no microbatch."""


@dataclass
class StopConditions:
    """The conditions that end a run."""

    train_iters: int
    config: TrainingConfig
    signals: SignalWatch
    world: Communicator
    device: torch.device
    started: float
    """Reading of the monotonic clock when the run began, in seconds."""
    first_iteration: int = 0
    """Iterations before this process; ``--exit-interval`` does not stop there."""
    data_check: DataCheck | None = None

    def reason(self, iteration: int, has_data: Callable[[], bool] = lambda: True) -> str | None:
        """The reason to stop after ``iteration`` iterations, or None; the same on every rank.

        ``has_data`` waits for the rank's next microbatch; it is called before the collective, in which the other ranks
        wait. Raises :class:`~megatron.errors.DataError` on every rank if one has found the corpus damaged.
        """
        if self.is_complete(iteration):
            return "the run is complete"
        interval = self.config.exit_interval
        if interval is not None and iteration > self.first_iteration and iteration % interval == 0:
            return f"--exit-interval {interval}"
        lacks_data = self.signals.received is None and not has_data()
        limit = self.config.exit_duration_in_mins
        is_late = limit is not None and time.monotonic() - self.started > limit * 60
        found_damage = self.data_check is not None and self.data_check.has_found_damage
        # Signals, clocks and data differ between ranks. The flags have a collective of their own: the reduction of the
        # loss does not span tensor-parallel ranks, and precedes evaluation, saves and the wait for data.
        mine = [self.signals.received is not None, is_late, found_damage, lacks_data]
        flags = torch.tensor(mine, dtype=torch.int32).to(self.device)
        got_signal, time_is_up, is_damaged, lacks_data = self.world.all_reduce(flags, "max").tolist()
        if is_damaged and self.data_check is not None:
            self.data_check.raise_on_all_ranks()
        if got_signal:
            return self.signal_reason() or "signal on another rank"
        if lacks_data:
            return NO_DATA
        if time_is_up:
            return f"--exit-duration-in-mins {limit}"
        return None

    def is_complete(self, iteration: int) -> bool:
        return iteration >= self.train_iters

    def signal_reason(self) -> str | None:
        """The signal that this rank has received, as a reason to stop."""
        return None if self.signals.received is None else f"signal {self.signals.received}"
