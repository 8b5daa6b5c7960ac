"""Seconds of operations that take turns on all ranks, so that a slow moment of the machine hits all of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, Protocol

import torch

Action = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """The seconds of one operation in several turns."""

    median: float
    spread: float
    """Half the distance of the quartiles, relative to the median."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Sample":
        middle = median(seconds)
        if len(seconds) < 2:
            return cls(middle, 0.0)
        first, _, third = quantiles(seconds, n=4)
        return cls(middle, (third - first) / 2 / middle)


class Control(Protocol):
    """Objects of all ranks (:class:`megatron.core.control.ControlGroup`)."""

    def all_gather_object(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Ranks:
    """The processes that measure at the same time, as they would train at the same time."""

    rank: int = 0
    world_size: int = 1
    local_size: int = 1
    """Processes of a node."""
    control: Control | None = None
    """None for one process."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.control is not None:
            self.control.all_gather_object(None)

    def longest(self, seconds: float) -> float:
        """The largest value of a rank."""
        if self.control is None:
            return seconds
        return float(max(self.control.all_gather_object(seconds)))

    def agree(self, samples: list[Sample]) -> list[Sample]:
        """Of each sample the median over the ranks."""
        if self.control is None:
            return samples
        of_ranks = self.control.all_gather_object([one.median for one in samples])
        medians = [median(values) for values in zip(*of_ranks)]
        return [replace(one, median=value) for one, value in zip(samples, medians)]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    turns: int = 7
    warmup: int = 2
    least_seconds: float = 0.01
    """An operation is repeated within a turn until it takes this long."""


def seconds_of(action: Action, device: torch.device, repeats: int) -> float:
    """Seconds of one of ``repeats`` calls; on a GPU between two events, after all earlier work."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            action()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - began) / repeats


def take_turns(
    actions: Sequence[Action],
    device: torch.device,
    effort: Effort,
    *,
    barrier: Action = lambda: None,
    longest: Callable[[float], float] = lambda seconds: seconds,
    advance: Action = lambda: None,
) -> list[Sample]:
    """Measure every action once in each turn.

    ``barrier`` waits for all ranks. ``longest`` returns the largest of the ranks' values, so that all of them repeat a
    collective equally often. ``advance`` is called after each turn of an action.
    """
    repeats = []
    for action in actions:
        for _ in range(effort.warmup):
            action()
        barrier()
        repeats.append(max(1, int(effort.least_seconds / longest(seconds_of(action, device, 1)))))
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(effort.turns):
        for number, action in enumerate(actions):
            barrier()
            seconds[number].append(seconds_of(action, device, repeats[number]))
            advance()
    return [Sample.of(one) for one in seconds]
