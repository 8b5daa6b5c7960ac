#!/usr/bin/env python3
"""Collectives of two ranks on one host: gloo's sockets beside shared memory, alone and behind a matrix product.

    python benchmarks/benchmark_collectives.py [--repeats 40] [--json OUT]

Both take turns within one run, with one thread per rank. Behind a product the ranks do not arrive together, as in a
training step; the time then includes the wait for the other rank.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them, here and in the ranks that this process starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch

from benchmarks.lib.local_ranks import run_benchmark, run_ranks
from megatron.core.communication import Communicator

RANKS = 2
SIZES = {"64 kB": 64_000, "1 MB": 10**6, "4 MB": 4 * 10**6, "25 MB": 25 * 10**6}


@dataclass(frozen=True)
class BenchmarkConfig:
    """How long to measure."""

    repeats: int = 40
    """Turns of every row; the medians count."""
    json: str | None = None
    """File for the figures."""


def operations(ranks: Communicator, size: int) -> dict[str, Callable[[], object]]:
    """The collectives on ``size`` bytes of fp32."""
    tensor = torch.randn(size // 4)
    gathered = torch.empty(RANKS * tensor.numel())
    scattered = torch.empty(tensor.numel() // RANKS)
    return {
        "all-reduce": partial(ranks.all_reduce, tensor),
        "all-gather": partial(ranks.all_gather, tensor[: tensor.numel() // RANKS], gathered[: tensor.numel()]),
        "reduce-scatter": partial(ranks.reduce_scatter, tensor, scattered),
    }


def run_rank(rank: int, repeats: int) -> list[dict[str, Any]]:
    """Take part in every row; the milliseconds of each turn."""
    groups = {
        "gloo": Communicator(range(RANKS), rank, "gloo", shares_memory=False),
        "shared memory": Communicator(range(RANKS), rank, "shared memory", exclusive=True),
    }
    rows: dict[tuple[str, str, str], Callable[[], object]] = {
        (size, name, group): operation
        for size, count in SIZES.items()
        for group, ranks in groups.items()
        for name, operation in operations(ranks, count).items()
    }
    inputs, weight = torch.randn(1024, 256), torch.randn(768, 256)
    times: list[dict[str, Any]] = [
        {"bytes": size, "operation": name, "transport": group, "before": before, "milliseconds": []}
        for size, name, group in rows
        for before in ("nothing", "product")
    ]
    for repeat in range(repeats + 1):
        for row in times:
            if row["before"] == "product":
                inputs @ weight.t()
            start = time.perf_counter()
            rows[row["bytes"], row["operation"], row["transport"]]()
            if repeat > 0:  # the first turn warms up
                row["milliseconds"].append(1e3 * (time.perf_counter() - start))
    return times


def measure_all(config: BenchmarkConfig) -> None:
    """Start the ranks, and print medians with the 10 % and 90 % quantiles."""
    rows = run_ranks(RANKS, run_rank, config.repeats)
    print("| bytes | operation | after | transport | ms (10 % to 90 %) |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        low, *_, high = quantiles(row["milliseconds"], n=10)
        interval = f"{median(row['milliseconds']):.2f} ({low:.2f}-{high:.2f})"
        print(f"| {row['bytes']} | {row['operation']} | {row['before']} | {row['transport']} | {interval} |")
    if config.json is not None:
        figures = {"torch": torch.__version__, "cores": os.cpu_count(), "rows": rows}
        Path(config.json).write_text(json.dumps(figures, indent=2) + "\n")


main = partial(run_benchmark, BenchmarkConfig, measure_all, __doc__)


if __name__ == "__main__":
    sys.exit(main())
