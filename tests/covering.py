"""Which rows of a table are enough to see every few factors together (a covering array)."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Any

import pytest

Factors = Mapping[str, Hashable]
Combination = tuple[tuple[str, Hashable], ...]


def combinations_of(factors: Factors, strength: int) -> set[Combination]:
    """Every ``strength`` of the factors, each with its value."""
    return set(combinations(sorted(factors.items(), key=lambda item: item[0]), strength))


def covering(rows: Sequence[Factors], costs: Sequence[float], strength: int = 3) -> list[int]:
    """Places of rows that together have every combination of ``strength`` factors that any row has.

    Greedy: always the row with the most that is new for its cost; at last without those that others make needless. What
    is new in a row only becomes less, so a row whose old value is not the best need not be counted again.
    """
    shown = [combinations_of(row, strength) for row in rows]
    missing = set[Combination]().union(*shown)
    waiting = [(-len(combinations) / cost, place) for place, (combinations, cost) in enumerate(zip(shown, costs))]
    heapify(waiting)
    chosen: list[int] = []
    while missing:
        _, place = heappop(waiting)
        worth = -len(shown[place] & missing) / costs[place]
        if waiting and (worth, place) > waiting[0]:
            heappush(waiting, (worth, place))
            continue
        chosen.append(place)
        missing -= shown[place]
    times = Counter(combination for place in chosen for combination in shown[place])
    for place in sorted(chosen, key=lambda place: costs[place], reverse=True):
        if all(times[combination] > 1 for combination in shown[place]):
            chosen.remove(place)
            times.subtract(shown[place])
    return sorted(chosen)


def each_factor_by_default(cases: Iterable[Any], factors_of: Callable[[Any], Factors]) -> list[Any]:
    """Parameters of a test: by default so many cases that every value of every factor is seen; the others are slow."""
    cases = list(cases)
    factors = [factors_of(case) for case in cases]
    names = sorted(set().union(*factors))
    rows = [{name: row.get(name) for name in names} for row in factors]
    chosen = covering(rows, [1.0] * len(rows), strength=1)
    slow = pytest.mark.slow(reason="other cases show the same flags")
    return [pytest.param(case, marks=[] if place in chosen else [slow]) for place, case in enumerate(cases)]


def flags_of(words: str) -> dict[str, Hashable]:
    """Flags with their values, as factors."""
    parts = [part.replace("=", " ", 1).partition(" ") for part in words.split("--")[1:]]
    return {flag: value.strip() for flag, _, value in parts}
