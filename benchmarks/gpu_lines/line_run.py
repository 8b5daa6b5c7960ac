"""What the function of a line receives: its directory, its device, and a place for each of its results."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

import torch

from benchmarks.gpu_lines.line import BROKEN, Figures, Line, Result, Verdict, append
from benchmarks.lib.results import error_line
from megatron.core.device import device_is_broken

REPOSITORY = Path(__file__).resolve().parents[2]


class Wrong(Exception):
    """A result differs from its reference."""


class BrokenProcess(SystemExit):
    """The process cannot use its GPU any more; what is left of the line is lost."""


@dataclass(frozen=True)
class LineRun:
    """A line, where it writes, and the device that it uses."""

    line: Line
    out: Path
    device: torch.device
    is_tiny: bool = False
    """Rehearse with shapes that a CPU computes in seconds."""
    deadline: float = float("inf")
    """Moment of :func:`time.monotonic` at which the process is ended."""

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def result(self, name: str | None = None) -> Iterator[Figures]:
        """A result, by default the one that has the line's name. The block adds its figures to the dictionary that it
        receives. An error of the block is the result's; the line goes on, unless the GPU cannot be used any more."""
        figures: Figures = {}
        name, started = name or self.line.name, time.monotonic()
        print(f"-- {name}", flush=True)
        verdict, error, where = Verdict.RIGHT, None, None
        try:
            yield figures
        except Exception as raised:
            verdict, error, where = verdict_of(raised), error_line(raised), place_of(raised.__traceback__)
            print(f"   {verdict}: {error} ({where})", flush=True)
        is_broken = verdict != Verdict.RIGHT and device_is_broken()
        if is_broken:
            error = f"{error}; the process cannot use its GPU any more"
        seconds = round(time.monotonic() - started, 3)
        append(self.out, Result(self.line.name, name, verdict, figures, error, where, seconds))
        if is_broken:
            raise BrokenProcess(BROKEN)


def verdict_of(error: BaseException) -> Verdict:
    """The verdict on a result whose block has raised ``error``."""
    if isinstance(error, Wrong | AssertionError):
        return Verdict.WRONG
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower():
        return Verdict.OUT_OF_MEMORY
    return Verdict.CRASHED


def place_of(traceback: TracebackType | None) -> str | None:
    """The innermost function of the repository in a traceback: ``megatron/core/ops/norm.py:12 forward``."""
    place = None
    for frame, number in walk_tb(traceback):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(REPOSITORY) and ".venv" not in file.parts:
            place = f"{file.relative_to(REPOSITORY)}:{number} {frame.f_code.co_name}"
    return place


def require(condition: bool, sentence: str) -> None:
    """Raise :class:`Wrong` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise Wrong(sentence)
