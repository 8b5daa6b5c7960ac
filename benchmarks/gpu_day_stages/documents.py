"""Time and memory of microbatches of documents, one after the other, by each attention kernel.

Every microbatch has documents of other lengths. If a kernel builds a plan for every new length, its first microbatches
are slow, and memory grows. Each kernel runs in a process of its own, with its own caches.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.benchmark_step import parse
from benchmarks.gpu_day_stages.checks import StageRun, require
from benchmarks.rank_slice import SliceConfig
from benchmarks.step_contenders import Samples, our_slice
from benchmarks.step_sweep import LENGTH, shrunk
from megatron.core.device import memory_outside_allocator

SLICE = f"--model llama3.1-8b --num-layers 2 {LENGTH} --bf16"
DOCUMENTS = "--documents 1000"
MICROBATCHES = {False: 50, True: 4}
"""By whether it is a rehearsal."""
LIMIT = 150.0
"""Seconds of a kernel: one that builds a plan per length may take minutes."""


@dataclass(frozen=True)
class Case:
    """A kernel with documents."""

    flags: str
    environment: dict[str, str] = field(default_factory=dict)


CASES = {
    "whole sequences": Case(""),
    "the kernel of a run": Case(DOCUMENTS),
    "flash": Case(f"{DOCUMENTS} --kernel attention=flash"),
    "cudnn": Case(f"{DOCUMENTS} --kernel attention=cudnn"),
    "cudnn, fewer plans": Case(f"{DOCUMENTS} --kernel attention=cudnn", {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}),
    "sdpa": Case(f"{DOCUMENTS} --kernel attention=sdpa"),
}
REHEARSED = ("the kernel of a run",)


def run(stage: StageRun) -> None:
    for name, case in CASES.items():
        if stage.is_tiny and name not in REHEARSED:
            continue
        with stage.check(name) as figures:
            figures |= measured_apart(case, stage)


def measured_apart(case: Case, stage: StageRun) -> dict[str, Any]:
    """The figures of a case, measured in another process."""
    flags = f"{SLICE} {case.flags}"
    command = [sys.executable, "-m", "benchmarks.gpu_day_stages.documents", "--device", stage.device.type]
    command += ["--tiny"] if stage.is_tiny else []
    command += ["--flags", shrunk(flags) if stage.is_tiny else flags]
    result = subprocess.run(
        command, env={**os.environ, **case.environment}, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    require(result.returncode == 0, f"exit code {result.returncode}: see the log")
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


def measure(config: SliceConfig, device: torch.device, count: int) -> dict[str, Any]:
    """Milliseconds of the host for every microbatch, forward and backward, and the memory after it."""
    contender = our_slice(config, Samples.random(config, device), device, with_optimizer=False)
    times, outside = [], []
    for _ in range(count):
        started = time.perf_counter()
        contender.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            outside.append(memory_outside_allocator(device))
        times.append((time.perf_counter() - started) * 1e3)
    kernels = {
        choice.operation: choice.implementation for choice in config.choose_kernels(config.topology(device)).choices
    }
    half = times[count // 2 :]
    return {
        "attention": kernels["attention"],
        "first_ms": times[0],
        "median_ms_of_second_half": median(half),
        "mean_ms_of_second_half": sum(half) / len(half),
        "total_s": sum(times) / 1e3,
        "outside_allocator_MiB": [num_bytes / 2**20 for num_bytes in outside[:: max(1, count // 10)]],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "ms": [round(value, 2) for value in times],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--flags", required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    config = parse(arguments.flags.split()).slice
    config.check()
    torch.manual_seed(1234)
    print(json.dumps(measure(config, torch.device(arguments.device), MICROBATCHES[arguments.tiny])))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
