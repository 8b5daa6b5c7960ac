"""Checks: one line of JSON each, appended as soon as it is over, so that nothing is lost when a stage is killed."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.error_line import error_line

FILE = "checks.jsonl"
WHOLE_STAGE = "the stage"
"""The last check of a stage: whether its process has ended with exit code 0 within the time limit."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """The outcome of a check."""

    stage: str
    name: str
    ok: bool
    figures: Figures = field(default_factory=dict)
    error: str | None = None
    """First line."""
    seconds: float = 0.0


@dataclass(frozen=True)
class StageRun:
    """A stage, where it writes, and the device that it uses."""

    name: str
    out: Path
    device: torch.device
    is_tiny: bool
    """Rehearse with shapes that a CPU computes in seconds."""

    @contextmanager
    def check(self, name: str) -> Iterator[Figures]:
        """A check that fails if its block raises; the block adds its figures to the dictionary that it receives."""
        figures: Figures = {}
        started = time.monotonic()
        print(f"-- {name}", flush=True)
        error: str | None = None
        try:
            yield figures
        except Exception as raised:
            error = error_line(raised)
            print(f"   failed: {error}", flush=True)
        seconds = round(time.monotonic() - started, 3)
        append(self.out, Check(self.name, name, error is None, figures, error, seconds))


def append(out: Path, check: Check) -> None:
    """Append ``check`` to the file of the directory ``out``."""
    with (out / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(check)) + "\n")


def read_checks(out: Path) -> list[Check]:
    """The checks of the latest run of every stage, by stage in the order in which these first ran."""
    file = out / FILE
    if not file.exists():
        return []
    stages: dict[str, list[Check]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        check = Check(**json.loads(line))
        found = stages.setdefault(check.stage, [])
        if found and found[-1].name == WHOLE_STAGE:
            found.clear()
        found.append(check)
    return [check for found in stages.values() for check in found]


def require(condition: bool, sentence: str) -> None:
    """Raise :class:`RuntimeError` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise RuntimeError(sentence)
