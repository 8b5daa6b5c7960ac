"""The result of a search: ranked layouts, what a run of the best ones would cost, and both as JSON."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.flags import words_of
from megatron.planner.rehearsal.price import PassTimes
from megatron.planner.search.layout import Job, Layout


@dataclass(frozen=True, kw_only=True)
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
    """GPU memory of the tightest stage with the allowance: by the dry run if simulated, otherwise by its units."""
    tightest_stage: int
    is_simulated: bool = False
    """Whether the memory is that of the dry run."""
    memory_by_stage: tuple[Mapping[str, int], ...] = ()
    """Bytes by kind at the peak of every stage; empty unless simulated."""
    passes: PassTimes | None = None
    """The seconds of the passes of a simulated layout."""
    bubble_fraction: float
    tokens_per_s_per_gpu: float
    mfu: float
    """Share of the peak of the precision, counting causal model FLOPs."""
    limits: str
    """What limits it: the largest term besides products, in words."""
    advice: str
    """What would change the limit."""
    is_tie: bool = False
    """Whether the step time is within 2 % of the fastest."""


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
    """Price in the currency of ``price_per_gpu_hour``; None without one."""


@dataclass(frozen=True)
class SearchResult:
    job: Job
    layouts: tuple[PlannedLayout, ...]
    """Every layout that fits, ranked: the ties for first, the simplest first, then by step time."""
    num_enumerated: int
    seconds: float
    scaling: tuple[ScalePoint, ...]
    """Points by number of GPUs. The point of ``job.num_gpus`` has the layout ``layouts[0]``."""
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


TIE = 1.02
"""Layouts within this factor of the fastest are equal: differences between predictions are no more exact."""
_HEADROOM_CLASSES = 10
"""Equally simple ties are ordered by free memory in steps of this part of the GPU's."""


def rank(planned: Sequence[PlannedLayout], limit: int) -> tuple[PlannedLayout, ...]:
    """Ranked: those within 2 % of the fastest first, among them the simplest first; then by time.

    Simple is few dimensions, then few chunks, then free memory (in steps of a tenth of the GPU's ``limit`` bytes).
    Layouts that reduce gradients in bf16 follow those that do not, which have the numerics of one process.
    """
    changes_all = all(one.layout.reduces_in_bf16 for one in planned)
    compared = [one.step_time_s for one in planned if one.layout.reduces_in_bf16 == changes_all]
    slowest_tie = TIE * min(compared)
    marked = [
        replace(one, is_tie=one.layout.reduces_in_bf16 == changes_all and one.step_time_s <= slowest_tie)
        for one in planned
    ]

    def order(one: PlannedLayout) -> tuple[object, ...]:
        changes = one.layout.reduces_in_bf16
        if not one.is_tie:
            return changes, 1, one.step_time_s
        headroom = _HEADROOM_CLASSES * (limit - one.memory_bytes) // limit
        return changes, 0, num_dimensions(one.layout), one.layout.vp, -headroom, one.step_time_s

    return tuple(sorted(marked, key=order))


def num_dimensions(layout: Layout) -> int:
    """The number of things that a layout does and the simplest one, sharded data parallelism, does not."""
    return sum(
        (
            layout.tp > 1,
            layout.pp > 1,
            layout.cp > 1,
            layout.ep > 1,
            layout.vp > 1,
            layout.schedule.startswith("zb"),
            layout.sharding not in ("no_shard", "optim"),
            layout.replicas > 1,
            layout.recompute != "none",
            layout.counts_ends,
            layout.reduces_in_bf16,
        )
    )


def family(layout: Layout) -> Hashable:
    """What layouts have in common that differ in recompute, in the number of chunks, in the sharding of gradients and
    in their precision."""
    shards_weights = layout.sharding == "optim_grads_params"
    sizes = layout.tp, layout.pp, layout.cp, layout.dp, layout.ep, layout.etp, layout.replicas
    return *sizes, layout.schedule, layout.counts_ends, layout.micro_batch_size, shards_weights


def first_of_families(ranked: Iterable[PlannedLayout]) -> Iterator[PlannedLayout]:
    """The first layout of each family: the others are variants of it."""
    seen = set()
    for one in ranked:
        if family(one.layout) not in seen:
            seen.add(family(one.layout))
            yield one


def as_json(result: SearchResult) -> dict[str, Any]:
    """The result; docs/planner.md explains its fields."""
    job = result.job
    of_layout = "step_time_s", "tokens_per_s_per_gpu", "mfu", "limits", "advice", "is_tie", "tightest_stage"
    of_point = "num_gpus", "step_time_s", "tokens_per_s_per_gpu", "goodput", "save_interval_s", "days", "gpu_hours"
    return {
        "model": job.name,
        "cluster": job.cluster.name,
        "num_gpus": job.num_gpus,
        "seq_length": job.seq_length,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision,
        "tokens": job.operation.tokens,
        "num_enumerated": result.num_enumerated,
        "num_fitting": len(result.layouts),
        "seconds": result.seconds,
        "warnings": list(result.warnings),
        "layouts": [
            {
                "flags": one.flags,
                **{name: getattr(one, name) for name in of_layout},
                "interval_s": one.interval_s,
                "memory_gib": one.memory_bytes / 2**30,
                "is_rehearsed": one.is_simulated,
                "changes_numerics": one.layout.reduces_in_bf16,
                "bubble_fraction": one.bubble_fraction,
                "terms_s": one.terms,
                "memory_by_stage": one.memory_by_stage,
            }
            for one in result.layouts
        ],
        "scaling": [
            {**{name: getattr(point, name) for name in of_point}, "price": point.price, "flags": point.layout.flags()}
            for point in result.scaling
        ],
    }


def command(job: Job, one: PlannedLayout) -> list[str]:
    """The command line of a run with the layout, but for data, tokenizer, learning rate and length."""
    words = ["pretrain_llama.py", *job.line.words]
    for name, value in one.flags.items():
        field = name.replace("-", "_")
        if field not in job.given:
            words += words_of(field, tuple(value) if isinstance(value, list) else value)
    return words
