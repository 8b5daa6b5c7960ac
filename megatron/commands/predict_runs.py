"""Predict the step times of a table of runs with the columns of benchmarks/published/runs.csv.

Columns of measured values may be empty; where a row has one, the error is printed, too. docs/step_times.md describes
the model and its errors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.commands.tool import run_tool, write_json
from megatron.urls import refuse_urls

if TYPE_CHECKING:
    from megatron.planner.step_time.published import PublishedRun


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
    write_json(config.json, {"rows": rows})
    print(report(runs, rows))


main = partial(run_tool, PredictRunsConfig, predict_table, __doc__)
