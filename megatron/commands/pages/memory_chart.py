"""The memory of the stages for a page: by kind, against the memory of a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.planner.memory import KINDS
from megatron.reports.charts import Bar, Limit, Part, stacked_bars
from megatron.reports.page import figure, legend
from megatron.reports.svg import gib, nice_ticks

ALLOWANCE_NAME = "allowance"
COLOURS: Mapping[str, str] = {
    "weights": "blue",
    "gradients": "sky",
    "master weights": "violet",
    "moments": "lilac",
    "activations": "teal",
    "logits and loss": "mint",
    "communication buffers": "orange",
    "working memory": "sand",
    ALLOWANCE_NAME: "grey",
}


@dataclass(frozen=True)
class MemoryOfStage:
    """A stage, or neighbouring stages with equal memory."""

    name: str
    detail: str
    by_kind: Mapping[str, int]
    """Bytes, with the allowance."""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def equal_neighbours(by_stage: Sequence[tuple[int, Mapping[str, int]]]) -> list[MemoryOfStage]:
    """One row for neighbouring stages with equal memory, from ``(stage, bytes by kind)``."""
    rows = []
    for by_kind, group in groupby(by_stage, key=lambda stage: dict(stage[1])):
        stages = [stage for stage, _ in group]
        name = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
        rows.append(MemoryOfStage(name, "", by_kind))
    return rows


def memory_figure(rows: Sequence[MemoryOfStage], limit: int) -> str:
    """Stacked bars with the GPU's ``limit`` in bytes as a line; the tightest stage is strong."""
    most = max(row.total for row in rows)
    end = max(most, limit) * 1.04
    bars = [_bar(row, limit, row.total == most) for row in rows]
    ticks = [(tick * 2**30, f"{tick:g} GiB") for tick in nice_ticks(0.0, end / 2**30, 6)]
    chart = stacked_bars(bars, ticks, end, Limit(limit, f"GPU: {gib(limit)} GiB"))
    shown = [kind for kind in (*KINDS, ALLOWANCE_NAME) if any(row.by_kind.get(kind) for row in rows)]
    return figure(chart, legend([(COLOURS[kind], kind) for kind in shown]))


def _bar(row: MemoryOfStage, limit: int, is_tightest: bool) -> Bar:
    parts = [
        Part(kind, COLOURS[kind], size, f"{row.name}: {kind}\n{gib(size)} GiB, {size / row.total:.0%}", gib(size))
        for kind in (*KINDS, ALLOWANCE_NAME)
        if (size := row.by_kind.get(kind, 0)) > 0
    ]
    return Bar(row.name, row.detail, f"{gib(row.total)} GiB ({row.total / limit:.0%})", parts, is_tightest)
