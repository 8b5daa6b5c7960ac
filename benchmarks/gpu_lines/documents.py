"""Time and memory of microbatches of documents, one after the other.

Every microbatch has documents of other lengths. If a kernel builds a plan for every new length, its first microbatches
are slow, and memory grows. Each kernel is a line, and so has caches of its own.
"""

import time
from statistics import median

import torch

from benchmarks.benchmark_step import parse
from benchmarks.gpu_lines.line import Figures
from benchmarks.gpu_lines.line_run import LineRun
from benchmarks.lib.rank_slice import SliceConfig
from benchmarks.lib.step_contenders import Samples, our_slice
from benchmarks.lib.step_sweep import LENGTH, shrunk
from megatron.core.device import memory_outside_allocator

SLICE = f"--model llama3.1-8b --num-layers 2 {LENGTH} --bf16"
DOCUMENTS = "--documents 1000"
MICROBATCHES = {False: 50, True: 4}
"""By whether it is a rehearsal."""
MARGIN = 5.0
"""Seconds before the line's end at which the figures so far are returned: a kernel that builds plans takes minutes."""


def run(run: LineRun, *flags: str) -> None:
    words = f"{SLICE} {' '.join(flags)}"
    with run.result() as figures:
        config = parse((shrunk(words) if run.is_tiny else words).split()).slice
        config.check()
        torch.manual_seed(1234)
        figures |= measure(config, run.device, MICROBATCHES[run.is_tiny], run.deadline - MARGIN)


def measure(config: SliceConfig, device: torch.device, count: int, deadline: float) -> Figures:
    """Milliseconds of the host for every microbatch, forward and backward, and the memory after it; fewer microbatches
    if the moment ``deadline`` of :func:`time.monotonic` comes before the last one."""
    kernels = config.choose_kernels(config.topology(device))
    contender = our_slice(config, Samples.random(config, device), device, False, kernels)
    times: list[float] = []
    outside: list[int] = []
    while len(times) < count and (not times or time.monotonic() < deadline):
        started = time.perf_counter()
        contender.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            outside.append(memory_outside_allocator(device))
        times.append((time.perf_counter() - started) * 1e3)
    half = times[len(times) // 2 :]
    return {
        "attention": next(choice.implementation for choice in kernels.choices if choice.operation == "attention"),
        "microbatches": len(times),
        "first_ms": times[0],
        "median_ms_of_second_half": median(half),
        "mean_ms_of_second_half": sum(half) / len(half),
        "outside_allocator_MiB": [num_bytes / 2**20 for num_bytes in outside[:: max(1, len(times) // 10)]],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "ms": [round(value, 2) for value in times],
    }
