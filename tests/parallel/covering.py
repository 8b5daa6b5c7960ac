"""Which rows of a product are enough to see every few factors together (a covering array)."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Factors = Mapping[str, Hashable]
Combination = tuple[tuple[str, Hashable], ...]


def combinations_of(factors: Factors, strength: int) -> set[Combination]:
    """Every ``strength`` of the factors, each with its value."""
    return set(combinations(sorted(factors.items(), key=lambda item: item[0]), strength))


def covering(rows: Sequence[Factors], costs: Sequence[float], strength: int = 3) -> list[int]:
    """Places of rows that together have every combination of ``strength`` factors that any row has.

    Greedy: always the row with the most that is new for its cost; at last without those that others make needless.
    """
    shown = [combinations_of(row, strength) for row in rows]
    missing = set[Combination]().union(*shown)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(shown[place] & missing) / costs[place])
        chosen.append(best)
        missing -= shown[best]
    for place in sorted(chosen, key=lambda place: costs[place], reverse=True):
        others = set[Combination]().union(*(shown[other] for other in chosen if other != place))
        if shown[place] <= others:
            chosen.remove(place)
    return sorted(chosen)
