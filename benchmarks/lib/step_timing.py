"""Times of contenders that take turns, and the rates of single operations on a device.

The rates are printed beside other figures, because clocks and power limits differ between cards of one name.
"""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.lib.results import error_line
from benchmarks.lib.step_contenders import Contender
from megatron.core.ops.fp8 import E4M3, E5M2, gemm_for
from megatron.core.ops.matmul import InPlaceWeightGradient, linear
from megatron.core.precision import QuantizedTensor


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


# --- rates of products ----------------------------------------------------------------------------------------------
def product_rates(device: torch.device, size: int | None = None) -> dict[str, float | str]:
    """TFLOP/s of ``[size, size]`` GEMMs by format and kind; the first line of the error where one does not run.

    The default size is 8,192 on a GPU and 256 on a CPU.
    """
    size = size or (8192 if device.type == "cuda" else 256)
    actions = _products(device, size)
    return {name: _rate(action, device, 2.0 * size**3) for name, action in actions.items()}


def _rate(action: Callable[[], object], device: torch.device, work: float) -> float | str:
    try:
        return work / seconds_of(action, device) / 1e12
    except Exception as error:
        return error_line(error)


def _products(device: torch.device, size: int) -> dict[str, Callable[[], object]]:
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    buffer = torch.zeros(size, size, device=device)
    one, multiply = torch.ones((), device=device), gemm_for(device)
    narrow, other, wide_range = (QuantizedTensor(m.to(f), one) for m, f in ((left, E4M3), (right, E4M3), (left, E5M2)))

    def fp8(a: QuantizedTensor, dtype: torch.dtype, fast: bool = False) -> Callable[[], Any]:
        return lambda: multiply(a, other, dtype, fast=fast)

    return {
        "bf16": lambda: linear(left, right),
        "bf16, added to fp32 gradients": lambda: InPlaceWeightGradient().write(buffer, left, right, True),
        "e4m3, fast accumulation": fp8(narrow, torch.bfloat16, fast=True),
        "e4m3": fp8(narrow, torch.bfloat16),
        "e5m2 x e4m3": fp8(wide_range, torch.bfloat16),
        "e5m2 x e4m3 to fp32": fp8(wide_range, torch.float32),
    }


def copy_rate(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes read and written per second when a tensor of ``num_bytes`` is copied on the device."""
    num_bytes = num_bytes or (2**30 if device.type == "cuda" else 2**24)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)
