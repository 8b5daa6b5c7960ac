#!/usr/bin/env python3
"""Predicted against measured step times on CPU cores: layouts of 2 to 4 processes of the small model.

    python benchmarks/benchmark_planner_cpu.py [--turns 5] [--json OUT]

Two processes calibrate the machine as tools/calibrate_cluster.py does, before and after the layouts. The layouts take
turns; medians count. All train the model of benchmarks/benchmark_cpu.py (6,163,712 parameters, fp32, 16 sequences of
256 tokens a step) with one thread for each rank, built from flags as a run is. No constant of the prediction is fitted
to a layout. Two quiet cores are needed; it takes about three minutes.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them, here and in the ranks that this process starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.lib.local_ranks import run_benchmark
from benchmarks.lib.shared_cores import price_on_cores
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.core.control import ControlGroup
from megatron.core.topology import Topology
from megatron.planner.calibration.fit import Calibrated, calibrated
from megatron.planner.calibration.measure import Effort, Measured, Plan, Ranks, measure, merge
from megatron.planner.calibration.operations import build_step, planned_step
from megatron.planner.step_time.prices import load_fitted
from megatron.training.initialize import Process, prepare_cpu, rank_grid

BATCH, VOCABULARY = 16, 2048
MODEL = (
    "--num-layers 6 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 16 --kv-channels 16 "
    f"--vocab-size {VOCABULARY} --seq-length 256 --mock-data --global-batch-size {BATCH} --train-iters 1 --lr 1 "
    "--device cpu"
)
CORES = 2
PIPELINE = "--pipeline-model-parallel-size"
TENSOR = "--tensor-model-parallel-size"


@dataclass(frozen=True)
class Layout:
    """A row of the table."""

    name: str
    ranks: int
    flags: str
    micro_batch_size: int = 4

    @property
    def config(self) -> RunConfig:
        """The checked flags of the run."""
        config = parse_command_line(f"{MODEL} --micro-batch-size {self.micro_batch_size} {self.flags}".split())
        check_run(config, self.ranks)
        return config

    @property
    def num_microbatches(self) -> int:
        return BATCH // self.micro_batch_size // rank_grid(self.config.parallel, self.ranks).dp


LAYOUTS = (
    Layout("DP2", 2, ""),
    Layout("TP2", 2, f"{TENSOR} 2"),
    Layout("PP2 1F1B", 2, f"{PIPELINE} 2"),
    Layout("PP2 1F1B, 2 microbatches", 2, f"{PIPELINE} 2", 8),
    Layout("PP2 interleaved", 2, f"{PIPELINE} 2 --num-virtual-stages-per-pipeline-rank 3"),
    Layout("PP2 ZB-H1", 2, f"{PIPELINE} 2 --pipeline-schedule zb-h1"),
    Layout("PP3 1F1B", 3, f"{PIPELINE} 3"),
    Layout("DP4", 4, ""),
    Layout("TP2 DP2", 4, f"{TENSOR} 2"),
    Layout("PP2 DP2", 4, f"{PIPELINE} 2"),
)


@dataclass(frozen=True)
class BenchmarkConfig:
    """How long to measure."""

    turns: int = 5
    """Turns of every layout, and of every operation in each of both calibrations."""
    json: str | None = None
    """File for the figures."""


def calibration_plan(turns: int) -> Plan:
    """What both processes measure: the model's sizes, and its collectives' sizes."""
    return Plan(LAYOUTS[0].config, VOCABULARY, torch.device("cpu"), Effort(turns), batches=(4, 8))


def run_rank(rank: int, size: int, config: BenchmarkConfig, store: str, commands: Any) -> None:
    """A rank of a world of ``size``: does what each command says, and answers; sleeps in between."""
    prepare_cpu(Process(rank, rank, size, size, has_thread_count=True))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    layouts = [layout for layout in LAYOUTS if layout.ranks == size]
    steps = {layout.name: _build(layout, rank) for layout in layouts}
    commands.send("ready")
    while (command := commands.recv()) != "stop":
        commands.send(_calibrate(rank, config) if command == "calibrate" else _time(steps[command]))
    dist.destroy_process_group()


def _build(layout: Layout, rank: int) -> Callable[[], None]:
    topology = Topology(rank_grid(layout.config.parallel, layout.ranks), rank, torch.device("cpu"))
    step = build_step(layout.config, topology, VOCABULARY, layout.num_microbatches)
    step()  # warms up
    return step


def _calibrate(rank: int, config: BenchmarkConfig) -> Measured:
    control = ControlGroup(tuple(range(CORES)), rank)
    return measure(calibration_plan(config.turns), Ranks(rank, CORES, CORES, control), lambda what: None)


def _time(step: Callable[[], None]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


class World:
    """The processes of all layouts with equally many ranks. Each number of ranks has its own, because all ranks of
    ``torch.distributed`` must create equally many groups."""

    def __init__(self, size: int, config: BenchmarkConfig, directory: str) -> None:
        context = mp.get_context("spawn")
        self._commands, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, config, str(Path(directory, f"store{size}")), theirs)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._commands.append(ours)
            self._processes.append(process)

    def wait(self) -> Any:
        """The answer of the first rank, when all have answered. Raises :class:`EOFError` if a rank has ended."""
        answers = [commands.recv() for commands in self._commands]
        return answers[0]

    def call(self, command: str) -> Any:
        """Let all ranks do ``command``; the first one's answer."""
        for commands in self._commands:
            commands.send(command)
        return self.wait()

    def stop(self) -> None:
        for commands, process in zip(self._commands, self._processes):
            commands.send("stop")
            process.join()


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Calibrate, measure the layouts in turns, calibrate again; the figures."""
    with tempfile.TemporaryDirectory() as directory:
        worlds = {}
        for size in sorted({layout.ranks for layout in LAYOUTS}):
            _say(f"building the layouts of {size} ranks")
            worlds[size] = World(size, config, directory)
            worlds[size].wait()
        _say("calibrating")
        before = worlds[CORES].call("calibrate")
        seconds: dict[str, list[float]] = {layout.name: [] for layout in LAYOUTS}
        for turn in range(config.turns):
            _say(f"turn {turn + 1} of {config.turns}")
            for layout in LAYOUTS:
                seconds[layout.name].append(worlds[layout.ranks].call(layout.name))
        _say("calibrating again")
        after = worlds[CORES].call("calibrate")
        for world in worlds.values():
            world.stop()
    found = calibrated(calibration_plan(config.turns), merge(before, after), None, 1.0, Ranks(0, CORES, CORES))
    return report(found, seconds)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def report(found: Calibrated, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Predicted and measured seconds of each layout."""
    constants = {**load_fitted(), **found.cluster.constants}
    rows = {}
    for layout in LAYOUTS:
        machine = replace(found.cluster, node_size=max(layout.ranks, CORES))
        step = planned_step(layout.config, layout.ranks, VOCABULARY, layout.num_microbatches, machine)
        terms = price_on_cores(step, machine, constants, CORES)
        rows[layout.name] = {
            "predicted_s": sum(terms.values()),
            "measured_s": median(seconds[layout.name]),
            "terms": terms,
            "seconds_per_step": list(seconds[layout.name]),
        }
    return {
        "rows": rows,
        "constants": dict(found.cluster.constants),
        "rates": {name: getattr(found.cluster, name) for name in ("bf16_flops", "hbm_bytes_per_s", "link_bytes_per_s")},
        "calibration_errors": {kind: fitted.median_error for kind, fitted in found.errors.items()},
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def order_of_distinct(predicted: Sequence[float], measured: Sequence[float], apart: float = 0.1) -> tuple[int, int]:
    """Counts pairs whose measured times differ by ``apart``: those in the right order, and all of them."""
    pairs = [
        (first, second)
        for first, second in combinations(range(len(measured)), 2)
        if max(measured[first], measured[second]) >= (1 + apart) * min(measured[first], measured[second])
    ]
    right = [(predicted[i] < predicted[j]) == (measured[i] < measured[j]) for i, j in pairs]
    return sum(right), len(right)


def show(figures: Mapping[str, Any]) -> dict[str, float]:
    """Print the table; the figures below it."""
    rows = figures["rows"]
    print(f"\n{'':28}{'predicted s':>12}{'measured s':>12}{'error':>8}   largest terms")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["measured_s"]):
        largest = sorted(row["terms"].items(), key=lambda item: -item[1])[:4]
        causes = ", ".join(f"{cause} {share / row['predicted_s']:.0%}" for cause, share in largest)
        error = row["predicted_s"] / row["measured_s"] - 1
        print(f"{name:28}{row['predicted_s']:12.3f}{row['measured_s']:12.3f}{error:8.1%}   {causes}")
    predicted, measured = ([row[key] for row in rows.values()] for key in ("predicted_s", "measured_s"))
    errors = [abs(one / other - 1) for one, other in zip(predicted, measured)]
    right, pairs = order_of_distinct(predicted, measured)
    result = {
        "median_error": median(errors),
        "largest_error": max(errors),
        "spearman": rank_correlation(predicted, measured),
        "pairs_apart": pairs,
        "pairs_in_order": right,
    }
    print(
        f"median error {result['median_error']:.1%}, largest {result['largest_error']:.1%}; Spearman "
        f"{result['spearman']:.3f}; {right} of {pairs} pairs that are 10 % apart are in the right order"
    )
    return result


def measure_all(config: BenchmarkConfig) -> None:
    """Start the ranks, and report."""
    figures = run(config)
    result = show(figures)
    if config.json is not None:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "turns": config.turns}
        Path(config.json).write_text(json.dumps({**machine, **result, **figures}, indent=2) + "\n")


main = partial(run_benchmark, BenchmarkConfig, measure_all, __doc__)


if __name__ == "__main__":
    sys.exit(main())
