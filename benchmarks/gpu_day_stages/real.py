"""pretrain_llama.py as a user starts it on one GPU: Llama 3.1 8B cut to 8 layers, with saves, evaluation and resume;
its memory beside the dry run's plan, and how long the GPU waits for the host."""

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
from benchmarks.gpu_day_stages.checks import Figures, StageRun, require
from megatron.core.device import memory_outside_allocator

# A vocabulary of 16,000 ids, so that two checkpoints fit on the disk: 26 GB each.
_MODEL = "--model llama3.1-8b --num-layers 8 --seq-length 8192 --vocab-size 16000"
_TINY_MODEL = "--model tiny --num-layers 2 --seq-length 32 --vocab-size 256 --peak-tflops 1"
_RUN = (
    "--mock-data --bf16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --log-interval 1 --num-workers 2 "
    "--eval-interval 10 --eval-iters 2"
)
ITERATIONS, SAVE_INTERVAL, RESUMED = 30, 15, 4


def run(stage: StageRun) -> None:
    directory = stage.out / "real_run"
    shutil.rmtree(directory, ignore_errors=True)
    flags = f"{_TINY_MODEL if stage.is_tiny else _MODEL} {_RUN} --device {stage.device.type}".split()
    plan: dict[str, Any] = {}
    with stage.check("dry run") as figures:
        plan = planned(flags, directory)
        figures |= {name: plan["memory_bytes"]["0"][name] for name in ("total", "allowance")}
        figures["steady_bytes"] = plan["steady_bytes"]["0"]
    try:
        with stage.check("train, evaluate, save in the background") as figures:
            train(flags, directory, figures)
            figures |= memory(plan, directory, stage.device)
        with stage.check("resume and profile") as figures:
            resume(flags, directory, figures)
    finally:
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)


def planned(flags: Sequence[str], directory: Path) -> dict[str, Any]:
    """The dry run's report."""
    directory.mkdir(parents=True, exist_ok=True)
    report = directory / "plan.json"
    length = ["--train-iters", str(ITERATIONS)]
    tiny_run.call([*flags, *length, "--dry-run", "--num-gpus", "1", "--dry-run-json", str(report)])
    plan: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return plan


def saving(directory: Path) -> list[str]:
    checkpoints = str(directory / "checkpoints")
    interval = ["--save-interval", str(SAVE_INTERVAL), "--async-save", "--save-retain-last", "1"]
    metrics = ["--metrics-jsonl", str(directory / "metrics.jsonl"), "--override-opt-param-scheduler"]
    return ["--save", checkpoints, "--load", checkpoints, *interval, *metrics]


def train(flags: Sequence[str], directory: Path, figures: Figures) -> None:
    """Train from scratch."""
    logging = ["--tensorboard-dir", str(directory / "tensorboard"), "--log-memory-to-tensorboard"]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    printed = tiny_run.call([*flags, *saving(directory), "--train-iters", str(ITERATIONS), *logging])
    records = training_records(directory)
    losses = [record["lm_loss"] for record in records]
    require(len(losses) == ITERATIONS, f"{len(losses)} of {ITERATIONS} iterations are logged")
    require(losses[-1] < losses[0], f"the loss has not fallen: {losses[0]:.3f}, {losses[-1]:.3f}")
    times = [record["iteration_time_ms"] for record in records]
    figures |= {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "iteration_ms": median(times[5:]),
        "slowest_iteration_ms": max(times[5:]),
        "mfu": median([record["mfu"] for record in records[5:]]),
        "saves": re.findall(r"saved checkpoint .*/(iter_\d+)", printed),
    }
    require(len(figures["saves"]) == 2, f"saved checkpoints: {figures['saves']}, expected two")


def training_records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "lm_loss" in record]


def memory(plan: dict[str, Any], directory: Path, device: torch.device) -> Figures:
    """Memory of the run beside the plan's; empty on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    planned = plan["memory_bytes"]["0"]
    planned_peak = planned["total"] - planned["allowance"]
    held = held_bytes(directory / "tensorboard")
    return {
        "peak_bytes": peak,
        "peak_relative_to_plan": peak / planned_peak,
        "held_bytes": held,
        "held_relative_to_plan": held / plan["steady_bytes"]["0"],
        "outside_allocator_bytes": memory_outside_allocator(device),
    }


def held_bytes(directory: Path) -> int:
    """Bytes allocated between iterations, the last that TensorBoard's file has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return int(events.Scalars("mem-allocated-bytes")[-1].value)


def resume(flags: Sequence[str], directory: Path, figures: Figures) -> None:
    """Resume for a few iterations under the profiler."""
    last = ITERATIONS + RESUMED
    window = ["--profile-step-start", str(last - 2), "--profile-step-end", str(last)]
    traces = ["--profile", "--use-pytorch-profiler", "--tensorboard-dir", str(directory / "profiled")]
    printed = tiny_run.call([*flags, *saving(directory), "--train-iters", str(last), *traces, *window])
    require(f"continuing after iteration {ITERATIONS}" in printed, "the run has not been resumed")
    figures["last_loss"] = training_records(directory)[-1]["lm_loss"]
    trace = next((directory / "profiled").rglob("*.trace.json"))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    figures |= device_time([event for event in events if event.get("cat") == "kernel"])


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
