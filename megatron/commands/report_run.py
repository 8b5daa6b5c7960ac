"""Report how a run trained and what became of its time: curves over tokens, effective time, failures, lost work, and
the save interval that fits its numbers.

Reads the records in the run directory (--run-dir of the training, by default its --save). Works while the run trains.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from megatron.commands.pages.run_charts import Curves, Report
from megatron.commands.report_run import report_page, report_text
from megatron.commands.tool import run_tool, write_file
from megatron.errors import DataError, ExitCode
from megatron.metrics.jsonl import History, Record, read_history
from megatron.operation.run_summary import read_run, summarize, to_json
from megatron.reports.svg import Point
from megatron.urls import refuse_urls

_NOT_A_NAME = {"checkpoints", "checkpoint", "ckpts", "ckpt"}


@dataclass(frozen=True)
class ReportConfig:
    """The run, and what to write."""

    run: Annotated[str, tyro.conf.Positional]
    """Run directory, with attempts.jsonl."""
    html: str | None = None
    """Write a page with the timeline of the run: one file without references to others."""
    json: str | None = None
    """Write the figures and the attempts as JSON."""
    metrics: str | None = None
    """The run's --metrics-jsonl file, for the curves (default: metrics.jsonl in the run directory, if it is there
    and has losses)."""
    name: str | None = None
    """Name of the run on the page (default: its --wandb-exp-name, else the name of the directory, or of the one above a
    directory that is called checkpoints)."""


def curves_of(history: History) -> Curves:
    """Losses over wall time."""

    def points(records: Sequence[Record], key: str) -> list[Point]:
        pairs = [(record.get("time"), record.get(key)) for record in records]
        return sorted(
            (float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)
        )

    return Curves(points(history.iterations, "lm_loss"), points(history.evaluations, "validation_loss"))


def history_of(config: ReportConfig, directory: Path) -> History | None:
    """The metrics of ``--metrics``, otherwise of the file with the usual name in the run directory, if it is there and
    has losses."""
    if config.metrics is not None:
        return read_history("--metrics", config.metrics)
    with suppress(DataError):
        return read_history("--metrics", str(directory / "metrics.jsonl"))
    return None


def name_of(directory: Path, history: History | None) -> str:
    """The name of a run that has none on the command line."""
    given = None if history is None else history.flag("logging", "wandb_exp_name", None)
    directory = directory.resolve()
    above = directory.parent.name if directory.name in _NOT_A_NAME else ""
    return str(given or above or directory.name)


def build_report(config: ReportConfig) -> Report:
    """Read the records; raises :class:`UserError`."""
    refuse_urls({"RUN": config.run, "--metrics": config.metrics}, "copy the files to a local directory")
    refuse_urls({"--html": config.html, "--json": config.json}, "name a local file")
    directory = Path(config.run)
    run = read_run(directory)
    if not run.attempts:
        raise DataError(
            f"{directory} has no record of an attempt (attempts.jsonl): name the directory that the training got as "
            "--run-dir, or as --save."
        )
    history = history_of(config, directory)
    curves = Curves() if history is None else curves_of(history)
    return Report(config.name or name_of(directory, history), run, summarize(run), curves, history)


def write_report(config: ReportConfig) -> None:
    report = build_report(config)
    if config.json is not None:
        attempts = [{**asdict(attempt), "hosts": len(attempt.hosts)} for attempt in report.run.attempts]
        figures = {**to_json(report.summary), "records": attempts}
        write_file("--json", config.json, json.dumps(figures, indent=1, allow_nan=False) + "\n")
    if config.html is not None:
        write_file("--html", config.html, report_page(report))
    print(report_text(report))


main = partial(run_tool, ReportConfig, write_report, __doc__, failed=ExitCode.ACTION_REQUIRED)
