"""What formulas say of runs: the arithmetic of large-scale training, and the step times of a table of runs."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.commands.tool import run_tool
from megatron.flags import require_at_least, require_positive, values_of
from megatron.planner import arithmetic
from megatron.urls import refuse_urls

if TYPE_CHECKING:
    from megatron.planner.step_time.published import PublishedRun

ESTIMATE = """\
The arithmetic of large-scale training: compute, memory, communication. docs/arithmetic.md has formulas and sources.

python tools/estimate.py compute --parameters 405e9 --tokens 15e12 --gpus 16384 --tflops 400
python tools/estimate.py memory --parameters 175e9 --gradient-bytes 4
python tools/estimate.py communication --size-gb 16 --ranks 64 --gb-per-s 50
"""
PREDICT = """\
Predict the step times of a table of runs, with columns like those of benchmarks/published/runs.csv.

Columns of measured values may be empty; where a row has one, the error is printed, too. docs/step_times.md describes
the model and its errors.
"""
"""Texts of ``--help``."""


@dataclass(frozen=True)
class Compute:
    """FLOPs, time and GPU-hours of a training run."""

    parameters: float
    """Parameters of the model; of one with experts the active ones."""
    tokens: float
    """Tokens of the run."""
    gpus: int = 1
    tflops: float = 400.0
    """Average TFLOP/s of a GPU; over a whole run, interruptions included, it is lower than that of a step."""
    price_per_gpu_hour: float | None = None

    def check(self) -> None:
        require_positive(values_of(self, "parameters", "tokens", "tflops", "price_per_gpu_hour"))
        require_at_least(1, values_of(self, "gpus"))

    def lines(self) -> Iterator[tuple[str, str]]:
        flops = arithmetic.training_flops(self.parameters, self.tokens)
        seconds = arithmetic.training_seconds(flops, self.gpus, self.tflops * 1e12)
        hours = arithmetic.gpu_hours(flops, self.tflops * 1e12)
        yield "FLOPs (6 N D)", f"{flops:.4g}"
        yield "days", f"{seconds / arithmetic.DAY:,.1f}"
        yield "GPU-hours", f"{hours:,.0f}"
        if self.price_per_gpu_hour is not None:
            yield "price", f"{hours * self.price_per_gpu_hour:,.0f}"


@dataclass(frozen=True)
class Memory:
    """Bytes of weights, gradients and optimizer state."""

    parameters: float
    """Parameters of the model, or of a rank's part of it."""
    zero: arithmetic.Zero = 0
    """Stage of ZeRO."""
    ranks: int = 1
    """Data-parallel ranks."""
    gradient_bytes: float = 2.0
    """Bytes of a gradient: 4 in fp32."""

    def check(self) -> None:
        require_positive(values_of(self, "parameters", "gradient_bytes"))
        require_at_least(1, values_of(self, "ranks"))

    def lines(self) -> Iterator[tuple[str, str]]:
        per_parameter = arithmetic.state_bytes_per_parameter(self.zero, self.ranks, gradient=self.gradient_bytes)
        total = per_parameter * self.parameters
        yield "bytes per parameter and rank", f"{per_parameter:.4g}"
        yield "bytes per rank", f"{total / 1e12:,.4g} TB = {total / 2**40:,.4g} TiB"


@dataclass(frozen=True)
class Communication:
    """Time of a ring all-reduce."""

    size_gb: float
    """Bytes to reduce, in 1e9."""
    ranks: int
    gb_per_s: float
    """Rate of a rank's link in one direction, in 1e9 bytes."""

    def check(self) -> None:
        require_positive(values_of(self, "size_gb", "gb_per_s"))
        require_at_least(1, values_of(self, "ranks"))

    def lines(self) -> Iterator[tuple[str, str]]:
        seconds = arithmetic.all_reduce_seconds(self.size_gb, self.ranks, self.gb_per_s)
        yield "seconds", f"{seconds:.4g}"


def estimate(config: Compute | Memory | Communication) -> None:
    """Print the estimate."""
    config.check()
    for name, value in config.lines():
        print(f"{name:30}{value}")


COMMANDS = {"compute": Compute, "memory": Memory, "communication": Communication}
main = partial(run_tool, COMMANDS, estimate, ESTIMATE)


# --- a table of runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictRunsConfig:
    """The table, and where the result goes."""

    csv: str
    """Table of the runs."""
    json: str
    """File for {"rows": [{"step_time_s": seconds} or {"reason": text}, ...]}, one entry for each row, in order."""


def predict_rows(runs: "Sequence[PublishedRun]") -> list[dict[str, float | str]]:
    """The entry of each run."""
    from megatron.planner.step_time.prices import load_fitted
    from megatron.planner.step_time.published import predict

    priced = [one for one in runs if one.run is not None]
    seconds = iter(predict(priced, load_fitted()).tolist() if priced else [])
    return [{"reason": one.reason} if one.run is None else _entry(next(seconds)) for one in runs]


def _entry(seconds: float) -> dict[str, float | str]:
    if not 0 < seconds < math.inf:  # not for NaN
        return {"reason": "the sizes are outside of what the formulas describe"}
    return {"step_time_s": seconds}


def report(runs: "Sequence[PublishedRun]", rows: Sequence[dict[str, float | str]]) -> str:
    """A sentence on how many rows are predicted, and their errors where they are measured."""
    predicted = [row["step_time_s"] for row in rows if "step_time_s" in row]
    text = f"{len(predicted)} of {len(rows)} runs are predicted"
    errors = [
        abs(float(row["step_time_s"]) / one.seconds - 1)
        for one, row in zip(runs, rows)
        if "step_time_s" in row and one.seconds is not None
    ]
    if errors:
        import numpy as np

        median, p90 = np.percentile(errors, (50, 90))
        text += f"; median error {median:.1%} of {len(errors)} measured times, 90th percentile {p90:.1%}"
    return text


def predict_table(config: PredictRunsConfig) -> None:
    """Predict, and write the file."""
    refuse_urls({"--csv": config.csv, "--json": config.json}, "name a local file")
    from megatron.planner.step_time.published import read_published

    runs = read_published(Path(config.csv))
    rows = predict_rows(runs)
    Path(config.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(report(runs, rows))


main_predict = partial(run_tool, PredictRunsConfig, predict_table, PREDICT)
