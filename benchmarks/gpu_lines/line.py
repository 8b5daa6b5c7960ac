"""A line of a session on a GPU: what runs in a process of its own, how long it may take, and what is expected of it;
and the results of lines, one line of JSON each."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.results import complete_records

RESULTS = "results.jsonl"
WHOLE = "the line"
"""The name of a line's last result: how its process has ended, and the state of the GPU before and after it."""
STARTED = "started"
"""The name of a line's first record, which drops the results of its earlier runs."""

PROCESS = "the process"
"""The name of the record with the largest memory of a line's process."""

BROKEN = 3
"""Exit code of a line's process after an error with which CUDA fails in this process from then on."""

Figures = dict[str, Any]


class Verdict(StrEnum):
    """How a line, or one of its results, has ended."""

    RIGHT = "right"
    SLOW = "slow"
    """The figure is below its expectation."""
    WRONG = "wrong"
    """Another result than the reference, or a figure that no card reaches."""
    OUT_OF_MEMORY = "out of memory"
    CRASHED = "crashed"
    HUNG = "hung"
    """Ended at its limit."""
    NOT_STARTED = "not started"
    """Too little time was left."""


SEVERITY = list(Verdict)
"""From the best to the worst."""


@dataclass(frozen=True)
class Expectation:
    """The range of a figure on an H100."""

    figure: str
    """Name of the figure in the result that has the line's name."""
    least: float
    most: float
    better: Literal["higher", "lower"] = "higher"
    relative_to: str = ""
    """The line whose figure of the same name divides this one."""

    @property
    def name(self) -> str:
        """The figure in words."""
        return f"{self.figure} / {self.relative_to}" if self.relative_to else self.figure

    @property
    def text(self) -> str:
        """The range in words."""
        return f"at most {self.most:g}" if self.better == "lower" else f"{self.least:g} to {self.most:g}"

    def verdict(self, value: float) -> Verdict:
        """Slow beyond the worse end; wrong far beyond the better one, where the measurement is to be suspected."""
        if self.better == "lower":
            return Verdict.RIGHT if value <= self.most else Verdict.SLOW
        if value > 1.15 * self.most:
            return Verdict.WRONG
        return Verdict.RIGHT if value >= self.least else Verdict.SLOW


@dataclass(frozen=True)
class Line:
    """What runs in a process of its own."""

    name: str
    function: str
    """``module.function`` of benchmarks.gpu_lines, called with a :class:`~benchmarks.gpu_lines.line_run.LineRun` and
    the words of ``flags``."""
    flags: str
    seconds: float
    """Expected; the line is not started if less than half of them are left."""
    limit: float
    """Seconds after which its process is ended."""
    expects: Expectation | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of its process."""
    resumes: bool = False
    """Whether another process continues after one that has ended early: the results so far are kept."""
    answers: str = ""
    """What the line is for, in a few words."""

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Line":
        """From what :func:`dataclasses.asdict` returns."""
        expects = fields["expects"]
        return Line(**(fields | {"expects": None if expects is None else Expectation(**expects)}))


@dataclass(frozen=True)
class Result:
    """What a line has found."""

    line: str
    name: str
    verdict: Verdict
    figures: Figures = field(default_factory=dict)
    error: str | None = None
    """First line of the error."""
    where: str | None = None
    """The innermost function of this repository in which it occurred."""
    seconds: float = 0.0


def append(out: Path, result: Result) -> None:
    """Append ``result`` to the file of the directory ``out``; it is on the disk when this returns."""
    with (out / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(out: Path) -> dict[str, list[Result]]:
    """The results of the latest run of every line, in the order in which lines first ran. Of a line that resumes, also
    what was right in earlier runs. A torn last line is left out."""
    lines: dict[str, dict[str, Result]] = {}
    for record in complete_records(out / RESULTS):
        result = Result(**(record | {"verdict": Verdict(record["verdict"])}))
        found = lines.setdefault(result.line, {})
        if result.name != STARTED:
            found.pop(result.name, None)
            found[result.name] = result
        else:
            resumes = result.figures["resumes"]
            right = {name: one for name, one in found.items() if one.verdict == Verdict.RIGHT and name != WHOLE}
            lines[result.line] = right if resumes else {}
    return {name: list(results.values()) for name, results in lines.items()}


def whole_of(results: Sequence[Result]) -> Result | None:
    """The last result of a line; None if its run has not ended."""
    return next((result for result in results if result.name == WHOLE), None)


def own_results(results: Sequence[Result]) -> list[Result]:
    """What the line's function has found: without the records of its process."""
    return [result for result in results if result.name not in (WHOLE, PROCESS)]


def figures_of(results: Mapping[str, Sequence[Result]], line: str, name: str | None = None) -> Figures | None:
    """The figures of a right result, by default of the one that has the line's name."""
    found = (one.figures for one in results.get(line, ()) if one.name == (name or line))
    return next((figures for figures in found if figures), None)
