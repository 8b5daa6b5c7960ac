"""When to stop, agreed among all ranks."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from megatron.config.training import TrainingConfig
from megatron.core.communication import Communicator

Handler = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def watch_signals(config: TrainingConfig) -> Iterator["SignalWatch"]:
    """Note SIGINT and ``--exit-signal`` instead of dying of them; the third signal acts as usual.

    Ctrl-C under torchrun may come twice: from the terminal and from torchrun.
    """
    watch = SignalWatch()
    names = ("SIGINT", config.exit_signal) if config.exit_signal_handler else ()
    numbers = [signal.Signals[name] for name in names]
    previous = {number: signal.signal(number, watch.note) for number in numbers}
    watch.previous = dict(previous)
    try:
        yield watch
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class SignalWatch:
    """Remembers the first signal."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._count = 0
        self.previous: dict[signal.Signals, Handler] = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handler: remember; after the second, give signals their usual effect again."""
        self.received = self.received or signal.Signals(number).name
        self._count += 1
        if self._count == 2:
            for watched, handler in self.previous.items():
                signal.signal(watched, handler)


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

    def reason(self, iteration: int) -> str | None:
        """Why to stop after ``iteration`` iterations, or None; the same on every rank."""
        if iteration >= self.train_iters:
            return "the run is complete"
        interval = self.config.exit_interval
        if interval is not None and iteration > self.first_iteration and iteration % interval == 0:
            return f"--exit-interval {interval}"
        # Clocks and signals differ between ranks, so the ranks agree on one answer.
        flags = torch.tensor([self.signals.received is not None, self._is_time_up()], dtype=torch.int32)
        got_signal, time_is_up = self.world.all_reduce(flags.to(self.device), "max").tolist()
        if got_signal:
            return f"signal {self.signals.received or 'on another rank'}"
        if time_is_up:
            return f"--exit-duration-in-mins {self.config.exit_duration_in_mins}"
        return None

    def _is_time_up(self) -> bool:
        limit = self.config.exit_duration_in_mins
        return limit is not None and time.monotonic() - self.started > limit * 60
