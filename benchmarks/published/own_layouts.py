"""The prices of this code in the layouts of NVIDIA's published runs of Llama 3 8B on H100, against their times.

    python -m benchmarks.published.own_layouts

The software differs, so the error is that of a plan whose kernels are as fast as theirs.
"""

import csv
from collections.abc import Iterator, Mapping

import numpy as np

from benchmarks.published.table import TABLE
from megatron.config.command_line import parse_command_line
from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.workload import read_cluster
from megatron.training.initialize import rank_grid

_SOURCES = ("nemo-25xx", "dgxc-benchmarking")
_VOCABULARY = 128256


def published(precision: str) -> Iterator[tuple[PlannedStep, float]]:
    """The step of each run in this code, and its published seconds."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            is_8b = row["model"] == "Llama3-8B" and row["gpu"].startswith("H100") and row["source"] in _SOURCES
            if is_8b and row["precision"] == precision and row["step_time_s"]:
                yield _step(row), float(row["step_time_s"])


def _step(row: Mapping[str, str]) -> PlannedStep:
    tp, vp = int(row["tp"]), int(row["vp"] or 1)
    flags = (
        f"--model llama3-8b --mock-data --bf16 --seq-length {row['seq']} --micro-batch-size {row['mbs']} "
        f"--global-batch-size {row['gbs']} --train-iters 10 --lr 1e-3 --use-distributed-optimizer "
        f"--overlap-grad-reduce --overlap-param-gather --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {row['pp']} --context-parallel-size {row['cp']}"
    )
    flags += " --sequence-parallel --tp-comm-overlap" * (tp > 1)
    flags += f" --num-virtual-stages-per-pipeline-rank {vp}" * (vp > 1)
    flags += " --fp8-format hybrid --fp8-recipe delayed" * (row["precision"] == "fp8")
    config = parse_command_line(flags.split())
    grid = rank_grid(config.parallel, int(row["gpus"]))
    return PlannedStep(UnitsOfRun(UnitRecords(_VOCABULARY), config, grid), int(row["gbs"]))


def main() -> None:
    prices = StepPrices(read_cluster("h100"), load_fitted())
    for precision in ("bf16", "fp8"):
        steps, seconds = zip(*published(precision))
        errors = prices.price(steps).total / np.array(seconds) - 1
        middle, largest = np.median(errors), np.abs(errors).max()
        print(f"{precision}: {len(steps)} runs, median error {middle:+.1%}, largest {largest:.1%}")


if __name__ == "__main__":
    main()
