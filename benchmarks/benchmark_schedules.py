#!/usr/bin/env python3
"""Pipeline schedules on two CPU cores, and their simulated bounds at the measured times of their passes.

    python benchmarks/benchmark_schedules.py [--repeats 9] [--json OUT]

Two stages train the model of benchmark_cpu.py, with eight layers so that every schedule divides them, and four
microbatches. The bound simulates the schedule with the mean time of every pass of every stage in the same step, without
messages; the share is the bound over the measured time.
"""

import json
import os
import platform
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them, here and in the ranks that this process starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from benchmarks.benchmark_cpu import CPU, MODEL, RANKS, Training, training
from benchmarks.lib.local_ranks import run_benchmark, run_ranks
from megatron.core.pipeline_parallel import ActionRecorder
from megatron.schedules.catalog import SCHEDULES
from megatron.schedules.schedule import Kind, Schedule
from megatron.schedules.simulator import Durations, Span, Timeline, simulate
from megatron.training.initialize import Process, prepare_cpu

EIGHT_LAYERS = replace(MODEL, num_layers=8)
MICRO_BATCH_SIZE, MICROBATCHES = 4, 4


@dataclass(frozen=True)
class BenchmarkConfig:
    """How long to measure."""

    repeats: int = 9
    """Turns of every schedule; the medians count."""
    json: str | None = None
    """File for the figures."""


def measured(one: Training, number: int) -> list[Span]:
    """The passes of this rank in one step, whose clock starts when both ranks are there."""
    dist.barrier()
    recorder = ActionRecorder(CPU)
    one.module.executor.recorder = recorder
    one.step(number)
    return list(recorder.spans())


def bound(schedule: Schedule, timeline: Timeline) -> float:
    """The simulated seconds of ``schedule`` with the mean time of every pass in ``timeline``."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        stage = schedule.result(span.stage, span.action).virtual_stage
        times[span.action.kind, stage].append(span.end - span.start)
    stages = range(schedule.placement.num_virtual_stages)
    # Where B and W are one pass, its time is B's.
    forward, backward, weight = (
        tuple(mean(times[kind, stage]) if times[kind, stage] else 0.0 for stage in stages) for kind in _KINDS
    )
    return simulate(schedule, Durations(forward, backward, weight)).makespan


_KINDS: tuple[Kind, ...] = ("F", "B", "W")


def run_rank(rank: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Train every schedule in turns; the seconds of the pipelines and their bounds."""
    prepare_cpu(Process(rank, rank, RANKS, RANKS, has_thread_count=True))
    layers = EIGHT_LAYERS.num_layers // RANKS
    contenders = {
        name: training(
            MICRO_BATCH_SIZE,
            rank,
            model=EIGHT_LAYERS,
            pp=RANKS,
            schedule=name,
            chunks=layers if name == "interleaved" else None,
        )
        for name in sorted(SCHEDULES)
    }
    timelines: dict[str, list[Timeline]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, one in contenders.items():
            spans = one.module.topology.control.all_gather_object(measured(one, repeat))
            if repeat > 0:  # the first turn warms up
                timelines[name].append(Timeline(RANKS, tuple(span for stage in spans for span in stage)))
        if rank == 0:
            print(f"\rturn {repeat} of {repeats}", end="", file=sys.stderr, flush=True)
    if rank == 0:
        print(file=sys.stderr)
    return {
        name: {
            "seconds": [timeline.makespan for timeline in timelines[name]],
            "bounds": [bound(one.module.executor.schedule(MICROBATCHES), timeline) for timeline in timelines[name]],
        }
        for name, one in contenders.items()
    }


def measure_all(config: BenchmarkConfig) -> None:
    """Start the ranks, and print the table."""
    rows = run_ranks(RANKS, run_rank, config.repeats)
    print("| schedule | ms | bound, ms | share (least to most) |\n| --- | --- | --- | --- |")
    for name, row in rows.items():
        shares = [limit / seconds for limit, seconds in zip(row["bounds"], row["seconds"])]
        times = (f"{1e3 * median(row[key]):.0f}" for key in ("seconds", "bounds"))
        print(f"| {name} | {' | '.join(times)} | {median(shares):.3f} ({min(shares):.3f}-{max(shares):.3f}) |")
    if config.json is not None:
        figures = {"machine": platform.machine(), "torch": torch.__version__, "rows": rows}
        Path(config.json).write_text(json.dumps(figures, indent=2) + "\n")


main = partial(run_benchmark, BenchmarkConfig, measure_all, __doc__)


if __name__ == "__main__":
    sys.exit(main())
