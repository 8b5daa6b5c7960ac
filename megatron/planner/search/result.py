"""The result of a search: ranked layouts, and what a run of the best ones would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.planner.rehearsal.price import PassTimes
    from megatron.planner.search.layout import Job, Layout


def layout_name(layout: Layout) -> str:
    """Sizes above 1, such as ``TP4 PP4 VP5 CP2 DP2``."""
    sizes = {"TP": layout.tp, "PP": layout.pp, "VP": layout.vp, "CP": layout.cp, "EP": layout.ep, "DP": layout.dp}
    if layout.ep > 1 and layout.etp != layout.tp:
        sizes["ETP"] = layout.etp
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 GPU"


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, with its time and its memory."""

    layout: Layout
    flags: Mapping[str, object]
    """Flags of ``pretrain_llama.py`` by name, without the dashes; True for a switch."""
    step_time_s: float
    interval_s: tuple[float, float]
    """Bounds of the step time, from the model's own error or, without measurements, +-30 %."""
    terms: Mapping[str, float]
    """Seconds by cause; they add up to ``step_time_s``."""
    memory_bytes: int
    """GPU memory of the tightest stage with the allowance: of the dry run if rehearsed, otherwise by its units."""
    tightest_stage: int
    is_rehearsed: bool
    """Whether the memory is that of the dry run."""
    memory_by_stage: tuple[Mapping[str, int], ...]
    """Bytes by kind at the peak of every stage; empty unless rehearsed."""
    passes: PassTimes | None
    """Of a rehearsed layout."""
    bubble_fraction: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Share of the peak of the precision, counting causal model FLOPs."""
    limits: str
    """What limits it: the largest term besides products, in words."""
    advice: str
    """What would change that."""
    is_tie: bool
    """Whether the step time is within 2 % of the fastest."""

    @property
    def name(self) -> str:
        """Of the layout."""
        return layout_name(self.layout)


@dataclass(frozen=True)
class ScalePoint:
    """The best layout on a number of GPUs, and a run of it over the tokens of the job."""

    num_gpus: int
    layout: Layout
    step_time_s: float
    tokens_per_s_per_gpu: float
    goodput: float
    """Share of the wall time in steps that need not be repeated."""
    save_interval_s: float
    """Time between saves that leaves most of the wall time for training."""
    days: float
    """Wall time."""
    gpu_hours: float
    price: float | None
    """In the currency of ``price_per_gpu_hour``; None without a price."""

    @property
    def name(self) -> str:
        """Of the layout."""
        return layout_name(self.layout)


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    job: Job
    layouts: tuple[PlannedLayout, ...]
    """Every layout that fits, ranked: the ties for first, the simplest first, then by step time."""
    num_enumerated: int
    num_fitting: int
    seconds: float
    scaling: tuple[ScalePoint, ...]
    """By number of GPUs. The point of ``job.num_gpus`` has the layout ``layouts[0]``."""
    warnings: tuple[str, ...]
    """Sentences, such as a regime without measurements."""

    @property
    def best(self) -> PlannedLayout:
        return self.layouts[0]

    @property
    def ties(self) -> tuple[PlannedLayout, ...]:
        """The layouts within 2 % of the fastest."""
        return tuple(planned for planned in self.layouts if planned.is_tie)

    @property
    def cost(self) -> ScalePoint:
        """The run of the best layout on the job's GPUs."""
        return next(point for point in self.scaling if point.num_gpus == self.job.num_gpus)
