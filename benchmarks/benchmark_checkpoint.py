#!/usr/bin/env python3
"""Speed of saving and loading checkpoints, against torch.save and torch.load of the same bytes on the same disk.

All contenders (``benchmarks/lib/checkpoint_contenders.py``) take turns within one run, in another order every time, so
that the ratios are valid on a noisy machine:

    python benchmarks/benchmark_checkpoint.py [--size-mb 500] [--repeats 7] [--ranks 2] [--directory DIR] [--json OUT]

The state is that of a Llama in bf16 under AdamW: weights, fp32 master weights and two moments; every rank holds its
rows of each tensor. A save ends when its bytes are on stable storage, unless its name says otherwise. A load ends when
they are in allocated tensors; ours looks for the latest checkpoint and compares its files with their digests first.
Files are in the page cache, unless the name says that they are cold, and torch.load cannot reuse freed memory, as in a
run that has just started. A save in the background ends when training can continue.
"""

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them, here and in the ranks that this process starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.lib.checkpoint_contenders import COMPARISONS, CONTENDERS, Bench, Contender
from megatron.commands.tool import run_tool
from megatron.core.topology import RankGrid, Topology
from megatron.flags import require_at_least
from megatron.training.initialize import Process, prepare_cpu
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to save and load, where, and how often."""

    size_mb: int = 500
    """Millions of bytes of all ranks together, about."""
    repeats: int = 7
    """Turns of every contender; the median counts."""
    ranks: Literal[1, 2] = 1
    """Processes that save and load together."""
    directory: Path = Path(".")
    """Directory for the files, which need five times the size and are removed at the end."""
    json: Path | None = None
    """File for the figures."""

    def check(self) -> None:
        require_at_least(1, {"--size-mb": self.size_mb, "--repeats": self.repeats})
        refuse_urls({"--directory": self.directory, "--json": self.json}, "name a local path")


class Turn(NamedTuple):
    """One turn of a contender."""

    seconds: float
    """From the start of all ranks to the end of the last."""
    cpu_seconds: float
    """Processor time of the first rank's threads, which varies less on a shared machine."""


def run_rank(rank: int, config: BenchmarkConfig, directory: Path) -> None:
    """Run the turns of every contender on this rank; rank 0 writes their times and the size of the state."""
    prepare_cpu(Process(rank, rank, config.ranks, config.ranks, has_thread_count=True))
    if config.ranks > 1:
        store = f"file://{directory / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=config.ranks)
    world = Topology(RankGrid(dp=config.ranks), rank, torch.device("cpu")).control
    bench = Bench(config.size_mb * 10**6, directory, world)
    turns = take_turns(config.repeats, bench)
    bench.background.close()
    if rank == 0:
        measured = {"bytes": bench.saved.num_bytes, "tensors": len(bench.saved.local), "turns": turns}
        (directory / "measured.json").write_text(json.dumps(measured))
    if config.ranks > 1:
        dist.destroy_process_group()


def take_turns(repeats: int, bench: Bench) -> dict[str, list[Turn]]:
    """The turns of every contender, after one that warms up."""
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in CONTENDERS}
    for repeat in range(repeats + 1):
        for contender in order_of(repeat):
            turns[contender.name].append(take_turn(contender, bench))
        if bench.world.rank == 0:
            print(f"\rturn {repeat} of {repeats}", end="", file=sys.stderr, flush=True)
    if bench.world.rank == 0:
        print(file=sys.stderr)
    return {name: taken[1:] for name, taken in turns.items()}


def order_of(repeat: int) -> list[Contender]:
    """The first turns are in the order of the list, because a load needs a save. Later turns are in random order,
    because a contender's caches and freed memory affect the next contender."""
    return random.Random(repeat).sample(CONTENDERS, len(CONTENDERS)) if repeat else list(CONTENDERS)


def take_turn(contender: Contender, bench: Bench) -> Turn:
    """One turn, on all ranks."""
    contender.before(bench)
    wait_for_all()
    start, cpu_start = time.perf_counter(), time.process_time()
    contender.run(bench)
    wait_for_all()
    turn = Turn(time.perf_counter() - start, time.process_time() - cpu_start)
    contender.after(bench)
    wait_for_all()
    return turn


def wait_for_all() -> None:
    """A barrier if there are several ranks."""
    if dist.is_initialized():
        dist.barrier()


def measure(config: BenchmarkConfig) -> dict[str, Any]:
    """The figures of :func:`run_rank`, in a temporary directory."""
    config.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=config.directory) as directory:
        if config.ranks == 1:
            run_rank(0, config, Path(directory))
        else:
            mp.spawn(run_rank, args=(config, Path(directory)), nprocs=config.ranks)  # type: ignore[attr-defined]
        measured: dict[str, Any] = json.loads((Path(directory) / "measured.json").read_text())
    return measured


def rows_of(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The median speed of each contender, and its times in every turn."""
    rows = {}
    for name, turns in measured["turns"].items():
        seconds, cpu_seconds = map(list, zip(*turns))
        speed = measured["bytes"] / median(seconds) / 1e6
        rows[name] = {"mb_per_s": speed, "seconds": seconds, "cpu_seconds": cpu_seconds}
    return rows


def comparisons_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ratio of every turn, their median, and whether it meets the aim."""
    found = []
    for comparison in COMPARISONS:
        mine, theirs = rows[comparison.name]["seconds"], rows[comparison.reference]["seconds"]
        ratios = [reference / own for own, reference in zip(mine, theirs)]
        ratio = median(ratios)
        is_met = None if comparison.aim is None else ratio >= comparison.aim
        found.append({**asdict(comparison), "ratio": ratio, "is_met": is_met, "ratios": ratios})
    return found


def print_tables(config: BenchmarkConfig, figures: Mapping[str, Any]) -> None:
    """Both tables, with the minimum and the maximum after each median."""
    size = f"{figures['bytes'] / 1e6:,.1f} MB in {figures['tensors']} tensors"
    print(f"{size}, {config.ranks} rank{'s'[: config.ranks - 1]}, {config.repeats} turns\n")
    print(f"{'':30}{'MB/s':>8}{'seconds':>9}{'least':>8}{'most':>8}{'CPU s':>8}")
    for name, row in figures["rows"].items():
        least, middle, most = min(row["seconds"]), median(row["seconds"]), max(row["seconds"])
        print(f"{name:30}{row['mb_per_s']:8.0f}{middle:9.3f}{least:8.3f}{most:8.3f}{median(row['cpu_seconds']):8.3f}")
    print(f"\n{'times as fast as':42}{'ratio':>8}{'least':>8}{'most':>8}  aim")
    for row in figures["comparisons"]:
        ratios = f"{row['ratio']:8.3f}{min(row['ratios']):8.3f}{max(row['ratios']):8.3f}"
        print(f"{row['name'] + ' / ' + row['reference']:42}{ratios}  {verdict(row)}")


def verdict(row: Mapping[str, Any]) -> str:
    """The aim of a comparison, and whether it is met."""
    if row["aim"] is None:
        return "(information)"
    meaning = f" ({row['meaning']})" if row["meaning"] else ""
    return f"at least {row['aim']:.2f}{meaning}: {'met' if row['is_met'] else 'MISSED'}"


def measure_all(config: BenchmarkConfig) -> None:
    """Measure, and report."""
    config.check()
    measured = measure(config)
    rows = rows_of(measured)
    figures = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "flags": asdict(config),
        "bytes": measured["bytes"],
        "tensors": measured["tensors"],
        "rows": rows,
        "comparisons": comparisons_of(rows),
    }
    print_tables(config, figures)
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")


main = partial(run_tool, BenchmarkConfig, measure_all, __doc__)

if __name__ == "__main__":
    sys.exit(main())
