"""The tables of benchmarks/gpu_day.py: all checks, and the goals beside the figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu_day_stages.checks import Check, Figures

TABLE = "table.txt"


@dataclass(frozen=True)
class Goal:
    """A figure that a check must reach."""

    name: str
    stage: str
    check: str
    least: float
    figure: Callable[[Sequence[Check], Figures], float | None]
    """The figure, from all checks and the figures of ``check``."""

    def found(self, checks: Sequence[Check]) -> float | None:
        """The figure; None if it was not measured."""
        figures = figures_of(checks, self.stage, self.check)
        return None if figures is None else self.figure(checks, figures)


def figures_of(checks: Sequence[Check], stage: str, name: str) -> Figures | None:
    """The figures of a check that has passed."""
    return next((check.figures for check in checks if (check.stage, check.name) == (stage, name) and check.ok), None)


def _mfu(checks: Sequence[Check], figures: Figures) -> float | None:
    value: float | None = figures["mfu"]
    return value


def _relative_to(other: str) -> Callable[[Sequence[Check], Figures], float | None]:
    """Speed relative to another row of the stage ``fp8``."""

    def ratio(checks: Sequence[Check], figures: Figures) -> float | None:
        reference = figures_of(checks, "fp8", other)
        return None if reference is None else figures["tokens_per_s"] / reference["tokens_per_s"]

    return ratio


def _speed_with_documents(checks: Sequence[Check], figures: Figures) -> float | None:
    relative: float = figures["our_speed_relative_to"]["without documents"]
    return relative


_MANY = ", 4 microbatches"
GOALS = (
    Goal("8B, bf16: share of the peak", "bench", "8B", 0.60, _mfu),
    Goal("70B TP4, bf16: share of the peak", "bench", "70B TP4", 0.64, _mfu),
    Goal("405B TP8, bf16: share of the peak", "bench", "405B TP8", 0.67, _mfu),
    *(
        Goal(
            f"{name}, FP8 delayed: speed relative to bf16",
            "fp8",
            f"{name}, delayed{_MANY}",
            least,
            _relative_to(f"{name}, bf16{_MANY}"),
        )
        for name, least in (("8B", 1.28), ("70B TP4", 1.40), ("405B TP8", 1.45))
    ),
    Goal("8B, documents: speed relative to whole sequences", "bench", "8B, documents", 0.95, _speed_with_documents),
)
"""Goals of this code on a Hopper GPU, whose dense peak in bf16 is 989 TFLOP/s."""


def goal_rows(checks: Sequence[Check]) -> Iterator[tuple[str, ...]]:
    """Goals beside figures."""
    yield "goal", "at least", "measured", ""
    for goal in GOALS:
        found = goal.found(checks)
        verdict = "not measured" if found is None else "reached" if found >= goal.least else "missed"
        yield goal.name, f"{goal.least:.2f}", "" if found is None else f"{found:.3f}", verdict


def check_rows(checks: Sequence[Check]) -> Iterator[tuple[str, ...]]:
    """All checks with their first figures."""
    yield "stage", "check", "", "seconds", "figures, or the error"
    for check in checks:
        text = brief(check.figures) if check.ok else str(check.error)
        yield check.stage, check.name, "ok" if check.ok else "FAILED", f"{check.seconds:.1f}", text


def aligned(rows: Iterator[tuple[str, ...]]) -> str:
    """A table in plain text, so that a machine without rich can print it; the first row is the header."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def brief(figures: Figures, most: int = 6) -> str:
    """The first plain figures of a check."""
    plain = [(name, value) for name, value in figures.items() if isinstance(value, str | int | float)]
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in plain[:most]
    )


def as_text(checks: Sequence[Check]) -> str:
    """Both tables, and how many checks have failed."""
    failed = sum(not check.ok for check in checks)
    counts = f"{len(checks)} checks, {failed} failed"
    return f"{aligned(check_rows(checks))}\n\n{aligned(goal_rows(checks))}\n\n{counts}\n"
