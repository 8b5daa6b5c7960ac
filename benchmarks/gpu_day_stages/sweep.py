"""The sweeps of benchmark_step.py: the stages ``bench`` (bf16) and ``fp8``."""

import gc
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.benchmark_step import BenchmarkConfig, measure, parse
from benchmarks.gpu_day_stages.checks import Figures, StageRun
from benchmarks.step_sweep import LENGTH, SLICES, Row, SweepName, rows, shrunk
from benchmarks.step_timing import seconds_of
from megatron.core.communication import Communicator
from megatron.core.fp8 import Fp8Scaling
from megatron.core.ops.quantized import Layout, QuantizedTensor

TURNS = {False: ("--warmup", "3", "--repeats", "10"), True: ("--warmup", "1", "--repeats", "1", "--peak-tflops", "1")}
"""By whether it is a rehearsal."""
REHEARSED = 4
"""Rows of a rehearsal; tests build the others."""


def run_bf16(stage: StageRun) -> None:
    run_sweep(stage, "bf16")


def run_fp8(stage: StageRun) -> None:
    # Widths of the first layer of the MLP.
    for name, (inputs, outputs) in {"8B": (4096, 28672), "405B TP8": (16384, 13312)}.items():
        inputs, outputs, tokens = (64, 128, 32) if stage.is_tiny else (inputs, outputs, 8192)
        measure_parts(stage, name, SLICES[name], inputs, outputs, tokens)
    run_sweep(stage, "fp8")


def run_sweep(stage: StageRun, sweep: SweepName) -> None:
    """A check for each row; all figures go to ``<sweep>.jsonl``."""
    for row in rows(sweep, stage.is_tiny)[: REHEARSED if stage.is_tiny else None]:
        with stage.check(row.name) as figures:
            measured = measure_row(row, stage)
            with (stage.out / f"{sweep}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": row.name} | measured) + "\n")
            figures |= summary(measured)
        gc.collect()
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_row(row: Row, stage: StageRun) -> dict[str, Any]:
    """The figures of benchmark_step.py."""
    config: BenchmarkConfig = parse([*row.flags, *TURNS[stage.is_tiny], "--device", stage.device.type])
    config.check()
    return measure(config)


def summary(measured: dict[str, Any]) -> Figures:
    """The figures of a row that a table shows."""
    ours = measured["rows"]["megatron-llama"]
    names = ("tokens_per_s", "tflops", "mfu", "spread", "stand_in_ms", "step_bytes", "held_bytes")
    others = {name: row["our_speed_relative_to_it"] for name, row in measured["rows"].items() if row is not ours}
    kernels = {choice["operation"]: choice["implementation"] for choice in measured["kernels"]}
    return {name: ours[name] for name in names} | {
        "step_ms": ours["ms"]["step"],
        "kernel_ms": {group: seconds * 1e3 for group, seconds in ours["kernel_seconds"].items()},
        "our_speed_relative_to": others,
        "kernels": kernels,
    }


def measure_parts(stage: StageRun, name: str, flags: str, inputs: int, outputs: int, tokens: int) -> None:
    """The parts of an FP8 linear layer, each alone, by the kernels of a run with ``flags``."""
    with stage.check(f"{name}, parts of an FP8 linear layer") as figures:
        words = f"{flags} {LENGTH} --bf16 --fp8-format hybrid"
        slice_ = parse((shrunk(words) if stage.is_tiny else words).split()).slice
        kernels = slice_.choose_kernels(slice_.topology(stage.device)).fp8
        alone = Communicator((0,), 0)
        scaling = Fp8Scaling(slice_.precision, alone, stage.device, kernels=kernels)
        gemm = scaling.gemm("linear", torch.bfloat16, alone, ())

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=stage.device)

        x, dy, weight = random(tokens, 1, inputs), random(tokens, 1, outputs), random(outputs, inputs)
        buffer = torch.zeros(outputs, inputs, device=stage.device)

        def quantized() -> tuple[QuantizedTensor, QuantizedTensor]:
            return gemm.quantize_input(x, Layout.BOTH), gemm.quantize_gradient(dy, Layout.BOTH)

        # The first step has no scales yet.
        for _ in range(2):
            scaling.start_step()
            a, b = quantized()
            gemm.output(a, weight)
            scaling.finish_step()
        scaling.start_step()
        gemm.output(a, weight)
        product = gemm.weight_gradient(b, a)
        # Bytes: read once in bf16, written once or twice in FP8. FLOPs: a multiplication and an addition.
        flops = 2.0 * tokens * inputs * outputs
        parts: dict[str, tuple[Callable[[], object], float, str]] = {
            "quantise rows": (partial(gemm.quantize_input, x, Layout.ROWS), 3.0 * x.numel(), "GB/s"),
            "quantise both layouts": (partial(gemm.quantize_input, x, Layout.BOTH), 4.0 * x.numel(), "GB/s"),
            "transpose": (partial(kernels.quantization.transpose, a.data.flatten(0, -2)), 2.0 * x.numel(), "GB/s"),
            "output": (partial(gemm.output, a, weight), flops, "TFLOP/s"),
            "input gradient": (partial(gemm.input_gradient, b, weight), flops, "TFLOP/s"),
            "weight gradient": (partial(product.write_to, buffer, False), flops, "TFLOP/s"),
            "weight gradient, added": (partial(product.write_to, buffer, True), flops, "TFLOP/s"),
        }
        for part, (action, work, unit) in parts.items():
            seconds = seconds_of(action, stage.device)
            figures[f"{part}, ms"] = seconds * 1e3
            figures[f"{part}, {unit}"] = work / seconds / (1e9 if unit == "GB/s" else 1e12)
