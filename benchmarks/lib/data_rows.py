"""Rows of the table that benchmarks/benchmark_data.py prints."""

from typing import NamedTuple

HEADER = f"{'':64} {'ours':>10} {'other':>10} {'ratio':>6} {'of CPU':>6} {'peak MB':>15}"


class Row(NamedTuple):
    """One measurement, where there is something to compare with beside that of another design."""

    name: str
    unit: str
    ours: float
    other: float | None = None
    ours_peak_mb: float | None = None
    other_peak_mb: float | None = None
    cpu_ratio: float | None = None
    """How many times less processor time ours takes, which other processes of the machine hardly change."""

    @property
    def ratio(self) -> float | None:
        """How many times more ours does in a second; rows with an ``other`` are speeds."""
        return None if self.other is None else self.ours / self.other

    def line(self) -> str:
        """The row below :data:`HEADER`."""
        peaks = " / ".join(f"{peak:.0f}" for peak in (self.ours_peak_mb, self.other_peak_mb) if peak is not None)
        ratios = " ".join(f"{'' if ratio is None else f'{ratio:.2f}':>6}" for ratio in (self.ratio, self.cpu_ratio))
        name = f"{self.name} ({self.unit})"
        return f"{name:64} {_number(self.ours)} {_number(self.other)} {ratios} {peaks:>15}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return " " * 10
    return f"{value:10,.0f}" if value >= 100 else f"{value:10.3f}"
