"""The order of layouts: ties, and which of them is the simplest."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron.planner.search.layout import Layout
from megatron.planner.search.result import PlannedLayout

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
    """How many things a layout does that the simplest one, sharded data parallelism, does not."""
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
