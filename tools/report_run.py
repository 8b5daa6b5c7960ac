#!/usr/bin/env python3
"""Report what became of a run's time: effective time, failures, lost work, and the save interval that fits its numbers.

Reads the records in the run directory (--run-dir of the training, by default its --save). Works while the run trains.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.errors import ConfigError, DataError, UserError
from megatron.operation.run_summary import read_run, summarize, to_json
from megatron.reports.svg import Point
from megatron.urls import refuse_urls
from tools.support.run_charts import Curves, Report
from tools.support.run_report import report_page, report_text


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
    """The run's --metrics-jsonl file, for the losses in the timeline."""
    name: str | None = None
    """Name of the run on the page (default: the name of the directory)."""


def read_curves(path: str) -> Curves:
    """Losses over wall time in a metrics file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"--metrics {path} cannot be read ({error.strerror}): check the path.") from error
    training: list[Point] = []
    validation: list[Point] = []
    for line in lines:
        record = _record(line)
        for key, points in (("lm_loss", training), ("validation_loss", validation)):
            if isinstance(record.get(key), int | float) and isinstance(record.get("time"), int | float):
                points.append((float(record["time"]), float(record[key])))
    if lines and not training and not validation:
        raise DataError(f"--metrics {path} has no losses: name the file that --metrics-jsonl of the run wrote.")
    return Curves(sorted(training), sorted(validation))


def _record(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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
    curves = Curves() if config.metrics is None else read_curves(config.metrics)
    return Report(config.name or directory.resolve().name, run, summarize(run), curves)


def write(flag: str, path: str, content: str) -> None:
    """Write a file as a whole; raises :class:`ConfigError` if it cannot be written."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ConfigError(f"{flag} {path} cannot be written ({error.strerror}): choose another path.") from error


def main() -> int:
    """Report; the exit code."""
    try:
        config = tyro.cli(ReportConfig, description=__doc__)
        report = build_report(config)
        if config.json is not None:
            attempts = [{**asdict(attempt), "hosts": len(attempt.hosts)} for attempt in report.run.attempts]
            figures = {**to_json(report.summary), "records": attempts}
            write("--json", config.json, json.dumps(figures, indent=1, allow_nan=False) + "\n")
        if config.html is not None:
            write("--html", config.html, report_page(report))
        print(report_text(report))
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
