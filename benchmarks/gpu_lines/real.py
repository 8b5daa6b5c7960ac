"""pretrain_llama.py as a user starts it on one GPU: layers of Llama 3.1 8B, with evaluation and a profile, or with
saves and a resume; its memory beside the dry run's plan, and how long the GPU waits for the host."""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import tiny_run
from benchmarks.gpu_lines.line import Figures
from benchmarks.gpu_lines.line_run import LineRun, require
from megatron.core.device import memory_outside_allocator

_TINY_MODEL = "--model tiny --num-layers 2 --seq-length 32 --vocab-size 256 --peak-tflops 1"
RUN = (
    "--mock-data --bf16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --log-interval 1 --num-workers 2 "
    "--eval-interval 10 --eval-iters 2"
)
WARMUP = 5
"""First iterations that are not timed."""
ITERATIONS, SAVE_INTERVAL, RESUMED = 30, 15, 4
"""Iterations of the run that saves, between two saves, and of the resumed run."""


def profiled(run: LineRun, *model: str) -> None:
    """20 iterations, the last under the profiler; no checkpoint."""
    directory, flags = _start(run, model)
    length = ["--train-iters", "20", "--metrics-jsonl", str(directory / "metrics.jsonl")]
    with run.result() as figures:
        traces = ["--profile", "--use-pytorch-profiler", "--profile-step-start", "16", "--profile-step-end", "18"]
        train([*flags, *length, *traces], directory, run.device, figures)
        figures |= device_time(kernels_of_trace(directory))
    compare_with_plan(run, [*flags, *length], directory)


def saved(run: LineRun, *model: str) -> None:
    """30 iterations with two saves in the background, and a resume of 4."""
    directory, flags = _start(run, model)
    checkpoints = directory / "checkpoints"
    flags += ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", str(SAVE_INTERVAL)]
    flags += ["--async-save", "--save-retain-last", "1", "--metrics-jsonl", str(directory / "metrics.jsonl")]
    flags.append("--override-opt-param-scheduler")
    length = ["--train-iters", str(ITERATIONS)]
    try:
        with run.result() as figures:
            printed = train([*flags, *length], directory, run.device, figures)
            figures["saves"] = re.findall(r"saved checkpoint .*/(iter_\d+)", printed)
            require(len(figures["saves"]) == 2, f"saved checkpoints: {figures['saves']}, expected two")
        with run.result("resume") as figures:
            printed = tiny_run.call([*flags, "--train-iters", str(ITERATIONS + RESUMED)])
            require(f"continuing after iteration {ITERATIONS}" in printed, "the run has not been resumed")
            figures["last_loss"] = training_records(directory)[-1]["lm_loss"]
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)
    compare_with_plan(run, [*flags, *length], directory)


def _start(run: LineRun, model: Sequence[str]) -> tuple[Path, list[str]]:
    """The run's empty directory, and its flags."""
    directory = run.out / f"{run.line.name.replace('/', '-')}_run"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    words = _TINY_MODEL.split() if run.is_tiny else model
    logging = ["--tensorboard-dir", str(directory / "tensorboard"), "--log-memory-to-tensorboard"]
    return directory, [*words, *RUN.split(), "--device", run.device.type, *logging]


def train(flags: Sequence[str], directory: Path, device: torch.device, figures: Figures) -> str:
    """Train from scratch; what the run has printed."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    printed = tiny_run.call(flags)
    records = training_records(directory)
    losses = [record["lm_loss"] for record in records]
    wanted = int(flags[flags.index("--train-iters") + 1])
    require(len(losses) == wanted, f"{len(losses)} of {wanted} iterations are logged")
    require(losses[-1] < losses[0], f"the loss has not fallen: {losses[0]:.3f}, {losses[-1]:.3f}")
    times = [record["iteration_time_ms"] for record in records]
    figures |= {
        "mfu": median([record["mfu"] for record in records[WARMUP:]]),
        "iteration_ms": median(times[WARMUP:]),
        "slowest_iteration_ms": max(times[WARMUP:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    if device.type == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        figures["held_bytes"] = held_bytes(directory / "tensorboard")
        figures["outside_allocator_bytes"] = memory_outside_allocator(device)
    return printed


def training_records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "lm_loss" in record]


def held_bytes(directory: Path) -> int:
    """Bytes allocated between iterations, the last that TensorBoard's file has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return int(events.Scalars("mem-allocated-bytes")[-1].value)


def compare_with_plan(run: LineRun, flags: Sequence[str], directory: Path) -> None:
    """The dry run's memory, after the run's own: the plan costs seconds, and is worth less than the figures."""
    with run.result("dry run") as figures:
        report = directory / "plan.json"
        tiny_run.call([*flags, "--dry-run", "--num-gpus", "1", "--dry-run-json", str(report)])
        plan = json.loads(report.read_text(encoding="utf-8"))
        planned = plan["memory_bytes"]["0"]
        figures["peak_bytes"] = planned["total"] - planned["allowance"]
        figures["held_bytes"], figures["allowance_bytes"] = plan["steady_bytes"]["0"], planned["allowance"]


def kernels_of_trace(directory: Path) -> list[dict[str, Any]]:
    """The kernels in the trace of torch's profiler."""
    trace = next((directory / "tensorboard").rglob("*.trace.json"))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


def device_time(kernels: Iterable[dict[str, Any]]) -> Figures:
    """How much of the time from the first to the last kernel of a trace the GPU ran kernels; empty without kernels."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    if not spans:
        return {}
    merged = [spans[0]]
    for start, end in spans[1:]:
        if start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    whole = merged[-1][1] - merged[0][0]
    gaps = [after[0] - before[1] for before, after in pairwise(merged)]
    return {
        "kernels": len(spans),
        "busy_share": sum(end - start for start, end in merged) / whole,
        "longest_gap_ms": max(gaps, default=0.0) / 1e3,
        "gaps_ms": sum(gaps) / 1e3,
    }
