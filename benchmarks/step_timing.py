"""Times of contenders that take turns."""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.lib.step_contenders import Contender


class Clock:
    """Records moments in the work of a device; on a GPU the host does not wait for them."""

    def __init__(self, device: torch.device, cpu_time: bool = False) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._now = time.process_time if cpu_time else time.perf_counter
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record this moment: on a GPU the one at which the launched work is done."""
        if not self._on_gpu:
            self._marks.append(self._now())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds between the marks so far, which are dropped."""
        marks, self._marks = self._marks, []
        if not self._on_gpu:
            return [end - start for start, end in pairwise(marks)]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


Times = dict[str, list[float]]
"""Seconds of every turn, by phase."""


def take_turns(
    contenders: Sequence[Contender],
    warmup: int,
    repeats: int,
    clock: Clock,
    shows_turns: bool = True,
    deadline: float = float("inf"),
) -> dict[str, Times]:
    """Times of every contender by name: one step of each contender in every turn. No turn begins after the moment
    ``deadline`` of :func:`time.monotonic`, if one has been timed."""
    times: dict[str, Times] = {one.name: {phase: [] for phase in one.phases} for one in contenders}
    for turn in range(warmup + repeats):
        if turn > warmup and time.monotonic() > deadline:
            break
        for contender in contenders:
            clock.mark()
            for action in contender.actions:
                action.run()
                clock.mark()
            spans = clock.seconds()
            if turn < warmup:
                continue
            for phase, seconds in times[contender.name].items():
                parts = zip(contender.actions, spans, strict=True)
                seconds.append(sum(span for action, span in parts if action.phase == phase))
        if shows_turns:
            print(f"\rturn {turn + 1} of {warmup + repeats}", end="", file=sys.stderr, flush=True)
    if shows_turns:
        print(file=sys.stderr)
    return times


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int = 10, warmup: int = 3) -> float:
    """Median seconds of ``action``."""
    clock = Clock(device)
    for _ in range(warmup):
        action()
    clock.mark()
    for _ in range(repeats):
        action()
        clock.mark()
    return median(clock.seconds())


def spread(values: Sequence[float]) -> float:
    """Half the distance of the quartiles, relative to the median."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4)
    return (third - first) / 2 / median(values)
