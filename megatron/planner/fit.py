"""Fit the constants of the step-time model to published runs, and print its errors.

    python -m megatron.planner.fit               # the errors
    python -m megatron.planner.fit --markdown    # the same as the tables of docs/planner.md
    python -m megatron.planner.fit --write       # fitted.json: the constants, and the rows used

Rows are held back by a digest of what describes them, not by hand. A source is left out by a fit to all others.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.planner.step_time.fit import FITTED, errors, fit, fitted_names
from megatron.planner.step_time.published import TABLE, PublishedRun, fitted_and_held_back, read_published, sources
from megatron.planner.step_time.validation import (
    SIZES,
    Errors,
    constants_without,
    corrected_errors,
    left_out,
    repeats,
    same_job,
    same_software,
    size_of,
    sweeps,
    without_doubtful,
)
from megatron.planner.step_time.workload import Array

Constants = dict[str, float]
_NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table to print."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As in a page."""
        rule = ("---", *("---:" for _ in self.columns[1:]))
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.columns, rule, *self.rows))

    def text(self) -> str:
        """With aligned columns."""
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
    def of(cls, runs: Sequence[PublishedRun]) -> "Evaluation":
        known, held_back = fitted_and_held_back(runs)
        return cls(known, held_back, fit(known), constants_without(known))

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

    def _of_all(self) -> Table:
        chosen = {
            "fitted": self.known,
            "held back": self.held_back,
            "fitted, without doubtful rows": without_doubtful(self.known),
            "held back, without doubtful rows": without_doubtful(self.held_back),
        }
        rows = [(name, *_cells(runs, self.constants), _mean(runs, self.constants)) for name, runs in chosen.items()]
        return Table(("rows", "number", "median", "90th percentile", "mean"), tuple(rows))

    def _by_source(self) -> Table:
        rows = []
        for source in sources(self.known):
            known, held_back = ([one for one in runs if one.source == source] for runs in (self.known, self.held_back))
            other = left_out(self.known, source)
            without = self.without[source]
            rows.append(
                (
                    source,
                    *_cells(known, self.constants),
                    *_cells(held_back, self.constants),
                    *_cells(other, without),
                    *_cells(without_doubtful(other), without)[1:],
                )
            )
        columns = ("source", *_columns("fitted"), *_columns("held back"), *_columns("left out"))
        return Table((*columns, "left out, without doubtful rows: median", "90th"), tuple(rows))

    def _by_size(self) -> Table:
        rows = []
        for size in SIZES:
            low, high = size
            parts = ([one for one in runs if size_of(one) == size] for runs in (self.known, self.held_back))
            cells = [cell for runs in parts for cell in _cells(runs, self.constants)]
            rows.append((f"{low:,} to {high:,}" if high else f"{low:,} and more", *cells))
        return Table(("GPUs", *_columns("fitted"), *_columns("held back")), tuple(rows))

    def _after_one_run(self) -> Table:
        by_key = self._corrected(self.without)
        rows = []
        for source in sources(self.known):
            cells = [cell for found in by_key for cell in _cells_of(_errors_of(found.get(source)))]
            rows.append((source, *cells))
        same = self._corrected(dict.fromkeys(sources(self.known), self.constants))
        for name, of_keys in (("all", by_key), ("all, of sources in the fit", same)):
            everything = [np.concatenate(list(found.values())) for found in of_keys]
            rows.append((name, *(cell for values in everything for cell in _cells_of(_errors_of(values)))))
        return Table(("source", *_columns("same software"), *_columns("same software and model")), tuple(rows))

    def _corrected(self, constants: Mapping[str, Constants]) -> list[dict[str, Array]]:
        """Errors by source after one run of the same software, and of the same software and model."""
        return [corrected_errors(self.known, constants, key) for key in (same_software, same_job)]

    def _of_repeats(self) -> Table:
        found = repeats(self.known)
        rows = []
        for kind in ("same release", "another release", "another source"):
            values = np.array([one.difference for one in found if one.kind == kind])
            rows.append((kind, *_cells_of(_errors_of(values))))
        return Table(("the same layout, measured twice", "pairs", "median difference", "90th"), tuple(rows))

    def known_errors(self) -> dict[str, float]:
        """90th percentiles on which the planner's intervals rest."""
        others = {source: without_doubtful(left_out(self.known, source)) for source in sources(self.known)}
        left = [Errors.of(errors(runs, self.without[source])).p90 for source, runs in others.items() if runs]
        software, job = (Errors.of(np.concatenate(list(found.values()))).p90 for found in self._corrected(self.without))
        return {"left_out": max(left), "same_software": software, "same_software_and_model": job}

    def _of_sweeps(self) -> Table:
        same = dict.fromkeys(sources(self.known), self.constants)
        rows = []
        for name, constants in (("all sources", same), ("all sources but the sweep's own", self.without)):
            found = sweeps(self.known, constants)
            regrets = np.array([one.regret for one in found])
            good = sum(one.is_good for one in found) / len(found)
            worst = _percent(regrets.max())
            rows.append((name, str(len(found)), f"{100 * good:.0f} %", _percent(regrets.mean()), worst))
        return Table(("constants fitted to", "sweeps", "within 2 %", "mean regret", "largest"), tuple(rows))


def _columns(name: str) -> tuple[str, str, str]:
    return (f"{name}: rows", "median", "90th")


def _cells(runs: Sequence[PublishedRun], constants: Constants) -> tuple[str, ...]:
    return _cells_of(Errors.of(errors(runs, constants)) if runs else None)


def _cells_of(found: Errors | None) -> tuple[str, ...]:
    return (_NONE,) * 3 if found is None else (str(found.rows), _percent(found.median), _percent(found.p90))


def _mean(runs: Sequence[PublishedRun], constants: Constants) -> str:
    return f"{100 * Errors.of(errors(runs, constants)).mean:+.1f} %"


def _errors_of(values: Array | None) -> Errors | None:
    return None if values is None else Errors.of(values)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def record(evaluation: Evaluation) -> str:
    """The content of ``fitted.json``: the constants, which of them are fitted, errors, rows and table."""
    content = {
        "constants": evaluation.constants,
        "fitted": fitted_names(),
        "errors": {name: round(value, 6) for name, value in evaluation.known_errors().items()},
        "table_sha256": hashlib.sha256(TABLE.read_bytes()).hexdigest(),
        "rows": [one.number for one in evaluation.known],
    }
    return json.dumps(content, indent=1) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Fit, and print the errors; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.planner.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write the constants and the rows used to {FITTED.name}")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/planner.md")
    options = parser.parse_args(arguments)
    evaluation = Evaluation.of(read_published())
    tables = evaluation.tables()
    print("\n\n".join(table.markdown() if options.markdown else table.text() for table in tables))
    if options.write:
        FITTED.write_text(record(evaluation), encoding="utf-8")
        print(f"wrote {FITTED}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
