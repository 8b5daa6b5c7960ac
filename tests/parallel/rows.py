"""Rows of tests over layouts, and the tier in which each runs.

Rows are named, or are the product of some factors. By default a covering array of strength two runs: every pair of
values of two factors occurs in a row. Of products it has no rows of more than :data:`MOST_RANKS` ranks. ``--slow`` adds
the other named rows and arrays of strength three of the products; ``--whole-matrix`` runs all rows on both transports.

Half of the rows run on the late transport (:mod:`tests.late_transport`), which takes the branches that NCCL takes.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import chain
from typing import Any
from zlib import crc32

import pytest

from tests.covering import covering
from tests.parallel import tasks
from tests.parallel.layout_run import Layout, Task

Case = tuple[Task, Layout]
MOST_RANKS = 8
"""Sixteen ranks take two cores many seconds."""

TASK_NAMES = {value: name.lower() for name, value in vars(tasks).items() if isinstance(value, Task)}


def factors_of(cases: list[Case]) -> list[dict[str, Hashable]]:
    """The factors of each row: fields of its task and its layout, also nested ones, that differ between the rows where
    they have an effect. Fields that always change together are one factor."""
    rows = [dict(_leaves(task)) | dict(_leaves(layout)) | _in_effect(task, layout) for task, layout in cases]
    factors: dict[tuple[int, ...], str] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values: dict[Hashable, int] = {}
        numbers = tuple(values.setdefault(row.get(name), len(values)) for row in rows)
        if len(values) > 1:
            factors.setdefault(numbers, name)
    return [{name: row.get(name) for name in factors.values()} for row in rows]


def _leaves(value: Any, part_of: str = "") -> Iterator[tuple[str, Hashable]]:
    for one in fields(value):
        found, name = getattr(value, one.name), f"{part_of}{one.name}"
        yield from _leaves(found, f"{name}.") if is_dataclass(found) else [(name, found)]


def _in_effect(task: Task, layout: Layout) -> dict[str, Hashable]:
    """Values that are not those of the fields, because without other ranks a field means nothing, or something else."""
    of_pipeline = ("schedule", "chunks", "split", "overlap_p2p")
    values: dict[str, Hashable] = dict.fromkeys(of_pipeline if layout.pp == 1 else ())
    if layout.cp == 1:
        values["cp_comm_type"] = None
    if layout.dp == 1:
        # Weights are then sharded over context-parallel ranks, experts also over tensor-parallel ones.
        shards = layout.cp > 1 or task.model.num_experts is not None
        values["strategy"] = (layout.strategy, "without data parallelism") if shards else None
        if not shards:
            values |= dict.fromkeys(("bucket_size", "overlap_grad_reduce", "overlap_param_gather"))
    if layout.strategy != "optim_grads_params":
        values |= dict.fromkeys(("reshard_after_forward", "defer_grad_reduce"))
    return values


def covering_places(cases: list[Case], strength: int, most_ranks: int | None = None) -> set[int]:
    """Places of rows that show every ``strength`` factors together, as far as ``most_ranks`` can."""
    places = [place for place, case in enumerate(cases) if most_ranks is None or case[1].world_size <= most_ranks]
    factors = factors_of(cases)
    costs = [layout.world_size * task.model.num_layers * task.steps for task, layout in cases]
    chosen = covering([factors[place] for place in places], [costs[place] for place in places], strength)
    return {places[place] for place in chosen}


def rows_of(
    named: Iterable[Case], *products: Iterable[Case], strength: int = 2, most_ranks: int = MOST_RANKS
) -> list[Any]:
    """Parameters of a test, ordered so that the ranks seldom have to join anew.

    By default every two factors of the rows ``named`` and of each product are seen (with ``strength`` one: every value
    of a product's factors); with one more factor of a product they are slow.
    """
    candidates, others = list(named), []
    for cases in map(list, products):
        quick, slow = covering_places(cases, strength, most_ranks), covering_places(cases, strength + 1)
        candidates += [cases[place] for place in sorted(quick)]
        tiers = [[pytest.mark.slow] if place in slow else [pytest.mark.whole_matrix] for place in range(len(cases))]
        others += [(case, tiers[place]) for place, case in enumerate(cases) if place not in quick]
    default = covering_places(candidates, 2)
    rows = [(case, [] if place in default else [pytest.mark.slow]) for place, case in enumerate(candidates)] + others
    rows = [
        ((task, replace(layout, late=late)), tier if late == is_late(task, layout) else [pytest.mark.whole_matrix])
        for (task, layout), tier in rows
        for late in (False, True)
    ]
    rows.sort(key=lambda row: (row[0][1].world_size, row[0][1].late))
    return [pytest.param(*case, marks=marks) for case, marks in rows]


def is_late(task: Task, layout: Layout) -> bool:
    """Whether a row runs on the late transport outside the whole matrix: half of them do, always the same ones."""
    return bool(crc32(f"{identifier(task)}-{identifier(layout)}".encode()) % 2)


def identifier(value: object) -> str:
    """The name of a task; of a layout, what is not as in one process."""
    if isinstance(value, Task):
        return TASK_NAMES.get(value, "other")
    assert isinstance(value, Layout)
    return "-".join(_changes(value)) or "one-process"


def _changes(value: Any) -> list[str]:
    parts = []
    for one in fields(value):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        found = getattr(value, one.name)
        if is_dataclass(found):
            parts += _changes(found)
        elif found != default:
            parts.append(f"{one.name}{_word(found)}")
    return parts


def _word(value: object) -> str:
    if isinstance(value, tuple | list | frozenset):
        return "=" + "+".join(map(str, value))
    return "" if value is True else str(value) if isinstance(value, int) else f"={value}"
