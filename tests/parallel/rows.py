"""Rows of tests over layouts, and the tier in which each runs.

By default those rows of a product of factors run that show every two factors together (a covering array) on at most
:data:`MOST_RANKS` ranks; ``--slow`` adds the rows that show every three; ``--whole-matrix`` runs all of them, each on
both transports. A row that is named beside a product always runs, and says why it is there.

Half of the rows run on the late transport (:mod:`tests.late_transport`), which takes the branches that NCCL takes.
"""

from collections.abc import Hashable, Iterable
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any
from zlib import crc32

import pytest

from tests.parallel import tasks
from tests.parallel.covering import covering
from tests.parallel.layout_run import Layout, Task

Case = tuple[Task, Layout]
MOST_RANKS = 8
"""Sixteen ranks take two cores many seconds."""

TASK_NAMES = {value: name.lower() for name, value in vars(tasks).items() if isinstance(value, Task)}


def factors_of(cases: list[Case]) -> list[dict[str, Hashable]]:
    """What tells the rows of a product apart, by row."""
    rows = [{"task": task} | {one.name: getattr(layout, one.name) for one in fields(layout)} for task, layout in cases]
    varying = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
    return [{name: row[name] for name in varying} for row in rows]


def ranks_of(case: Case) -> int:
    """What a row costs."""
    return case[1].world_size


def covering_places(cases: list[Case], strength: int, most_ranks: int | None = None) -> set[int]:
    """Places of rows that show every ``strength`` factors together, as far as ``most_ranks`` can."""
    places = [place for place, case in enumerate(cases) if most_ranks is None or ranks_of(case) <= most_ranks]
    factors = factors_of(cases)
    chosen = covering([factors[place] for place in places], [ranks_of(cases[place]) for place in places], strength)
    return {places[place] for place in chosen}


def rows_of(
    named: Iterable[Case], *products: Iterable[Case], strength: int = 2, most_ranks: int = MOST_RANKS
) -> list[Any]:
    """Parameters of a test, ordered so that the ranks seldom have to join anew.

    By default the rows ``named`` run, and those of each product with every ``strength`` factors together; with one more
    factor they are slow.
    """
    rows: list[tuple[Case, list[Any]]] = [(case, []) for case in named]
    for cases in map(list, products):
        quick, slow = covering_places(cases, strength, most_ranks), covering_places(cases, strength + 1)
        for place, case in enumerate(cases):
            tier = [] if place in quick else [pytest.mark.slow] if place in slow else [pytest.mark.whole_matrix]
            rows.append((case, tier))
    rows = [
        ((task, replace(layout, late=late)), tier if late == is_late(task, layout) else [pytest.mark.whole_matrix])
        for (task, layout), tier in rows
        for late in (False, True)
    ]
    rows.sort(key=lambda row: (ranks_of(row[0]), row[0][1].late))
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
