"""Steps of one rank of a recipe: their speed, the parts of an FP8 linear layer, documents, kernels, experts."""

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import benchmark_experts
from benchmarks.benchmark_step import BenchmarkConfig, measure, parse
from benchmarks.gpu_lines.line import Figures
from benchmarks.gpu_lines.line_run import LineRun
from benchmarks.lib.rank_slice import SliceConfig
from benchmarks.lib.step_contenders import Samples, our_slice
from benchmarks.lib.step_sweep import LENGTH, shrunk
from benchmarks.lib.step_timing import seconds_of
from megatron.core.communication import Communicator
from megatron.core.device import memory_outside_allocator
from megatron.core.fp8 import Fp8Scaling
from megatron.core.precision import Layout, QuantizedTensor

STEPS = "steps.jsonl"
"""All figures of benchmark_step.py, a line for each step."""
MARGIN = 8.0
"""Seconds before the line's end after which no turn begins: profiles and rates follow."""
TINY = "--warmup 1 --repeats 1 --peak-tflops 1"
"""Flags of a rehearsal, after the others."""


def run(run: LineRun, *flags: str) -> None:
    with run.result() as figures:
        words = f"{shrunk(' '.join(flags))} {TINY}".split() if run.is_tiny else flags
        config: BenchmarkConfig = parse([*words, "--device", run.device.type])
        config.check()
        measured = measure(config, run.deadline - MARGIN)
        with (run.out / STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"line": run.line.name} | measured) + "\n")
        figures |= summary(measured)


def summary(measured: dict[str, Any]) -> Figures:
    """The figures of a step that a table shows."""
    ours = measured["rows"]["megatron-llama"]
    names = ("mfu", "ms_per_layer", "tokens_per_s", "tflops", "spread", "stand_in_ms", "step_bytes", "held_bytes")
    others = {name: row["our_speed_relative_to_it"] for name, row in measured["rows"].items() if row is not ours}
    bounds = {f"speed / {name}": ratio for name, ratio in others.items()}
    kernels = {choice["operation"]: choice["implementation"] for choice in measured["kernels"]}
    return {name: ours[name] for name in names} | {
        **bounds,
        "step_ms": ours["ms"]["step"],
        "product_tflops": measured["product_tflops"],
        "kernel_ms": {group: seconds * 1e3 for group, seconds in ours["kernel_seconds"].items()},
        "kernels": kernels,
    }


def parts(run: LineRun, inputs: str, outputs: str, *flags: str) -> None:
    """The parts of an FP8 linear layer of these widths, each alone, by the kernels of a run with ``flags``."""
    widths = (64, 128, 32) if run.is_tiny else (int(inputs), int(outputs), 8192)
    with run.result() as figures:
        figures |= measure_parts(run, *widths, " ".join(flags))


def measure_parts(run: LineRun, inputs: int, outputs: int, tokens: int, flags: str) -> Figures:
    words = f"{flags} {LENGTH} --bf16 --fp8-format hybrid"
    slice_ = parse((shrunk(words) if run.is_tiny else words).split()).slice
    kernels = slice_.choose_kernels(slice_.topology(run.device)).fp8
    alone = Communicator((0,), 0)
    scaling = Fp8Scaling(slice_.precision, alone, run.device, kernels=kernels)
    gemm = scaling.gemm("linear", torch.bfloat16, alone, (), ())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=run.device)

    x, dy, weight = random(tokens, 1, inputs), random(tokens, 1, outputs), random(outputs, inputs)
    buffer = torch.zeros(outputs, inputs, device=run.device)

    def quantized() -> tuple[QuantizedTensor, QuantizedTensor]:
        return gemm.quantize("input", x, Layout.BOTH), gemm.quantize("output_gradient", dy, Layout.BOTH)

    # The first step has no scales yet.
    for _ in range(2):
        scaling.start_step()
        a, b = quantized()
        gemm.output(a, weight)
        scaling.finish_step()
    scaling.start_step()
    gemm.output(a, weight)
    product = gemm.weight_gradient(b, a)
    figures: Figures = {}
    # Bytes: read once in bf16, written once or twice in FP8. FLOPs: a multiplication and an addition.
    flops = 2.0 * tokens * inputs * outputs
    parts: dict[str, tuple[Callable[[], object], float, str]] = {
        "quantise rows": (partial(gemm.quantize, "input", x, Layout.ROWS), 3.0 * x.numel(), "GB/s"),
        "quantise both layouts": (partial(gemm.quantize, "input", x, Layout.BOTH), 4.0 * x.numel(), "GB/s"),
        "transpose": (partial(kernels.quantization.transpose, a.data.flatten(0, -2)), 2.0 * x.numel(), "GB/s"),
        "output": (partial(gemm.output, a, weight), flops, "TFLOP/s"),
        "input gradient": (partial(gemm.input_gradient, b, weight), flops, "TFLOP/s"),
        "weight gradient": (partial(product.write_to, buffer, False), flops, "TFLOP/s"),
        "weight gradient, added": (partial(product.write_to, buffer, True), flops, "TFLOP/s"),
    }
    for part, (action, work, unit) in parts.items():
        seconds = seconds_of(action, run.device)
        figures[f"{part}, ms"] = seconds * 1e3
        figures[f"{part}, {unit}"] = work / seconds / (1e9 if unit == "GB/s" else 1e12)
    return figures


SLICE = f"--model llama3.1-8b --num-layers 2 {LENGTH} --bf16"
DOCUMENTS = "--documents 1000"
MICROBATCHES = {False: 50, True: 4}
"""Microbatches on a GPU (False), and in a rehearsal (True)."""
DOCUMENTS_MARGIN = 5.0
"""Seconds before the line's end at which the figures so far are returned: a kernel that builds plans takes minutes."""


def documents(run: LineRun, *flags: str) -> None:
    """Time and memory of microbatches of documents, one after the other.

    Every microbatch has documents of other lengths. If a kernel builds a plan for every new length, its first
    microbatches are slow, and memory grows. Each kernel is a line, and so has caches of its own.
    """
    words = f"{SLICE} {' '.join(flags)}"
    with run.result() as figures:
        config = parse((shrunk(words) if run.is_tiny else words).split()).slice
        config.check()
        torch.manual_seed(1234)
        figures |= measure_documents(config, run.device, MICROBATCHES[run.is_tiny], run.deadline - DOCUMENTS_MARGIN)


def measure_documents(config: SliceConfig, device: torch.device, count: int, deadline: float) -> Figures:
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


VARIANTS = {
    "bf16": "--bf16",
    "documents": "--bf16 --documents 1000",
    "FP8 delayed": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "FP8 tensorwise": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
}


def kernel_choices(run: LineRun, *flags: str) -> None:
    """The kernels that a run of each kind would choose, and why."""
    for name, variant in VARIANTS.items():
        with run.result(name) as figures:
            words = f"{' '.join(flags)} {LENGTH} {variant}"
            config = parse((shrunk(words) if run.is_tiny else words).split()).slice
            config.check()
            chosen = config.choose_kernels(config.topology(run.device))
            figures |= {choice.operation: f"{choice.implementation}: {choice.reason}" for choice in chosen.choices}


TINY_EXPERTS = "E8 k2"


def experts(run: LineRun, *shapes: str) -> None:
    """The experts of a layer with every grouped GEMM, beside a dense MLP of equal FLOPs."""
    repeats, warmup = (1, 1) if run.is_tiny else (15, 4)
    options = benchmark_experts.Options(device=run.device.type, repeats=repeats, warmup=warmup)
    for name in shapes:
        with run.result(name) as figures:
            times = benchmark_experts.measure(
                benchmark_experts.SHAPES[TINY_EXPERTS if run.is_tiny else name],
                benchmark_experts.DTYPES["bf16"],
                options,
            )
            dense = times["dense MLP"]
            for contender, seconds in times.items():
                figures[f"{contender}, ms"] = 1e3 * median(seconds)
                figures[f"{contender}, speed"] = median(one / other for one, other in zip(dense, seconds, strict=True))
