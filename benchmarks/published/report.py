"""Fit the constants of the step-time model to published runs, and print its errors.

    python -m benchmarks.published               # the errors
    python -m benchmarks.published --markdown    # the same as the tables of docs/step_times.md
    python -m benchmarks.published --write       # the record that the planner reads

Rows are held back by a digest of what describes them, not by hand. A source is left out by a fit to all others.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published import fit as fitting
from benchmarks.published.fit import Errors, errors
from benchmarks.published.table import (
    TABLE,
    fitted_and_held_back,
    run_of,
    same_job,
    same_software,
    sources,
    split_by_twins,
    without_doubtful,
)
from megatron.planner.search.accuracy import regimes
from megatron.planner.step_time.prices import RECORD, Constants
from megatron.planner.step_time.published import PublishedRun, predict
from megatron.planner.step_time.workload import Array

SIZES = ((1, 8), (9, 64), (65, 512), (513, 4096))
"""Ranges of GPUs."""
_NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table to print."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rule = ("---", *("---:" for _ in self.columns[1:]))
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.columns, rule, *self.rows))

    def text(self) -> str:
        """The table with aligned columns."""
        table = (self.columns, *self.rows)
        widths = [max(len(row[column]) for row in table) for column in range(len(self.columns))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths))
            )
            for row in table
        )


@dataclass(frozen=True)
class Evaluation:
    """A fit, and all that its tables need."""

    known: Sequence[PublishedRun]
    """The rows that are fitted."""
    held_back: Sequence[PublishedRun]
    constants: Constants
    without: Mapping[str, Constants]
    """Constants of a fit without a source."""

    @classmethod
    def of_table(cls) -> "Evaluation":
        known, held_back = fitted_and_held_back()
        return cls(known, held_back, fitting.fit(known), fitting.constants_without(known))

    def tables(self) -> list[Table]:
        """All tables, in the order of the page."""
        return [
            self._of_all(),
            self._by_source(),
            self._by_size(),
            self._after_one_run(),
            self._of_repeats(),
            self._of_sweeps(),
        ]

    def errors_left_out(self, source: str, with_doubtful: bool = True) -> Array | None:
        """Errors of the rows of a source with the constants without it; None if no other source has their GPUs."""
        rows = fitting.left_out(self.known, source)
        rows = rows if with_doubtful else without_doubtful(rows)
        return errors(rows, self.without[source]) if rows else None

    def known_errors(self) -> dict[str, float]:
        """90th percentiles on which the planner's intervals rest."""
        left = [self.errors_left_out(source, with_doubtful=False) for source in sources(self.known)]
        software, job = (np.concatenate(list(found.values())) for found in self._corrected(self.without))
        return {
            "left_out": max(Errors.of(values).p90 for values in left if values is not None),
            "same_software": Errors.of(software).p90,
            "same_software_and_model": Errors.of(job).p90,
        }

    def _of_all(self) -> Table:
        twins, others = split_by_twins(self.held_back, self.known)
        found = {
            "fitted": errors(self.known, self.constants),
            "fitted, without doubtful rows": errors(without_doubtful(self.known), self.constants),
            "held back": errors(self.held_back, self.constants),
            "held back, without a twin": errors(others, self.constants),
            "held back, with a twin": errors(twins, self.constants),
            "the same, by copying the twin": fitting.errors_of_copies(twins, self.known),
        }
        rows = [(name, *_cells(values), f"{100 * values.mean():+.1f} %") for name, values in found.items()]
        return Table(("rows", "number", "median", "90th percentile", "mean"), tuple(rows))

    def _by_source(self) -> Table:
        rows, left = [], []
        for source in sources(self.known):
            known, held_back = ([one for one in runs if one.source == source] for runs in (self.known, self.held_back))
            others = split_by_twins(held_back, self.known)[1]
            every, usual = (self.errors_left_out(source, with_doubtful) for with_doubtful in (True, False))
            left += [] if every is None else [Errors.of(every)]
            cells = (self._cells(known), self._cells(others), _cells(every), _cells(usual)[1:])
            rows.append((source, *(cell for part in cells for cell in part)))
        means = [_percent(float(np.mean(values))) for values in zip(*((one.median, one.p90) for one in left))]
        rows.append(("mean of the sources", *(_NONE,) * 7, *means, *(_NONE,) * 2))
        columns = ("source", *_columns("fitted"), *_columns("held back, without a twin"), *_columns("left out"))
        return Table((*columns, "left out, without doubtful rows: median", "90th"), tuple(rows))

    def _by_size(self) -> Table:
        rows = []
        for low, high in SIZES:
            parts = ([one for one in runs if low <= run_of(one).gpus <= high] for runs in (self.known, self.held_back))
            rows.append((f"{low:,} to {high:,}", *(cell for runs in parts for cell in self._cells(runs))))
        return Table(("GPUs", *_columns("fitted"), *_columns("held back")), tuple(rows))

    def _after_one_run(self) -> Table:
        # With the constants of the other sources, as for software that the fit does not know.
        by_key = self._corrected(self.without)
        rows = []
        for source in sources(self.known):
            rows.append((source, *(cell for found in by_key for cell in _cells(found.get(source)))))
        same = self._corrected(dict.fromkeys(sources(self.known), self.constants))
        for name, of_keys in (("all", by_key), ("all, of sources in the fit", same)):
            everything = [np.concatenate(list(found.values())) for found in of_keys]
            rows.append((name, *(cell for values in everything for cell in _cells(values))))
        return Table(("source", *_columns("same software"), *_columns("same software and model")), tuple(rows))

    def _corrected(self, constants: Mapping[str, Constants]) -> list[dict[str, Array]]:
        """Errors by source after one run of the same software, and of the same software and model."""
        return [fitting.corrected_errors(self.known, constants, key) for key in (same_software, same_job)]

    def _of_repeats(self) -> Table:
        found = fitting.repeats(self.known)
        rows = []
        for kind in ("same release", "another release", "another source"):
            values = np.array([one.difference for one in found if one.kind == kind])
            rows.append((kind, *_cells(values)))
        return Table(("the same layout, measured twice", "pairs", "median difference", "90th"), tuple(rows))

    def _of_sweeps(self) -> Table:
        judged: dict[str, Callable[[Sequence[PublishedRun]], Array]] = {
            "constants of all sources": lambda runs: predict(runs, self.constants),
            "constants of all sources but the sweep's own": lambda runs: predict(runs, self.without[runs[0].source]),
            "chance": lambda runs: np.ones(len(runs)),
        }
        rows = []
        for name, predicted in judged.items():
            found = fitting.sweeps(self.known, predicted)
            regrets = np.array([one.regret for one in found])
            good = sum(one.is_good for one in found) / len(found)
            rows.append(
                (name, str(len(found)), f"{100 * good:.0f} %", _percent(regrets.mean()), _percent(regrets.max()))
            )
        return Table(("chosen by", "sweeps", "within 2 %", "mean regret", "largest"), tuple(rows))

    def _cells(self, runs: Sequence[PublishedRun]) -> tuple[str, ...]:
        return _cells(errors(runs, self.constants) if runs else None)


def _columns(name: str) -> tuple[str, str, str]:
    return (f"{name}: rows", "median", "90th")


def _cells(values: Array | None) -> tuple[str, ...]:
    if values is None or not len(values):
        return (_NONE,) * 3
    found = Errors.of(values)
    return (str(found.rows), _percent(found.median), _percent(found.p90))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def record(evaluation: Evaluation) -> str:
    """The content of the planner's record: the constants, which of them are fitted, errors, and what is measured."""
    # Held-back rows have been measured, too, though they are not fitted.
    runs = [run_of(one) for one in (*evaluation.known, *evaluation.held_back)]
    keys = {
        key
        for run in runs
        if not run.num_experts
        for key in regimes(
            run.cluster, run.is_fp8, run.software.sharding, run.schedule, run.gpus, run.cp, has_experts=False
        )
    }
    content = {
        "constants": evaluation.constants,
        "fitted": fitting.fitted_names(),
        "errors": {name: round(value, 6) for name, value in evaluation.known_errors().items()},
        "measured": {
            "runs": len(runs),
            "most_gpus": max(run.gpus for run in runs),
            "regimes": sorted(key for key in keys if key != ("gpus",)),
        },
        "table_sha256": hashlib.sha256(TABLE.read_bytes()).hexdigest(),
    }
    return json.dumps(content, indent=1) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Fit, and print the errors; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write constants and errors to {RECORD.name}")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/step_times.md")
    options = parser.parse_args(arguments)
    evaluation = Evaluation.of_table()
    print("\n\n".join(table.markdown() if options.markdown else table.text() for table in evaluation.tables()))
    if options.write:
        RECORD.write_text(record(evaluation), encoding="utf-8")
        print(f"wrote {RECORD}", file=sys.stderr)
    return 0
