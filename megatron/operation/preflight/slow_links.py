"""Which nodes and links are slow, from the speeds of pairs of nodes: pure functions.

A *vertex* is a node. A *round* is a list of disjoint pairs, which exchange data at the same time. Few nodes measure all
pairs; many nodes measure the distances 1, 2, 4, ..., so the number of rounds grows with the logarithm of the nodes:
every cable of a node and every link between groups of neighbouring nodes is in some pair.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""Two vertices, the smaller one first."""

ALL_PAIRS = 64
"""Nodes up to which all pairs are measured, in as many rounds."""


@dataclass(frozen=True)
class Suspect:
    """The smallest explanation of slow pairs."""

    vertices: tuple[int, ...]
    """One vertex: its own connection. Two: the link between them. See ``is_group`` for more."""
    is_group: bool = False
    """Whether the connection of these vertices to all others is slow, for example an uplink of their switch."""
    is_link: bool = False


def rounds_of(count: int) -> list[list[Pair]]:
    """The rounds for ``count`` vertices."""
    return _all_pairs(count) if count <= ALL_PAIRS else _doubling_distances(count)


def _all_pairs(count: int) -> list[list[Pair]]:
    """Every pair once (circle method: the last vertex stays, the others rotate)."""
    even = count + count % 2
    rounds = []
    for step in range(even - 1):
        order = [(step + offset) % (even - 1) for offset in range(even - 1)]
        pairs = [(order[0], even - 1), *((order[near], order[-near]) for near in range(1, even // 2))]
        rounds.append(sorted(_pair(*pair) for pair in pairs if max(pair) < count))
    return rounds


def _doubling_distances(count: int) -> list[list[Pair]]:
    rounds = []
    distance = 1
    while distance < count:
        for parity in (0, 1):
            starts = (start for start in range(count - distance) if start // distance % 2 == parity)
            if pairs := [(start, start + distance) for start in starts]:
                rounds.append(pairs)
        distance *= 2
    return rounds


def rounds_again(pairs: Collection[Pair], most: int) -> list[list[Pair]]:
    """At most ``most`` rounds with some of these ``pairs``, as many as fit."""
    rounds: list[list[Pair]] = [[] for _ in range(most)]
    busy: list[set[int]] = [set() for _ in range(most)]
    for pair in sorted(pairs):
        free = next((number for number in range(most) if not busy[number] & set(pair)), None)
        if free is not None:
            rounds[free].append(pair)
            busy[free].update(pair)
    return [pairs for pairs in rounds if pairs]


def usual_speed(speeds: Mapping[Pair, float]) -> float:
    """The speed of a healthy pair: the median over the vertices of the best speed of each.

    The median of all pairs would be that of slow ones if one of three nodes is slow.
    """
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for vertex in pair:
            best[vertex] = max(best.get(vertex, 0.0), speed)
    return statistics.median_high(best.values()) if best else 0.0


def slow_pairs(speeds: Mapping[Pair, float], ratio: float) -> list[Pair]:
    """Pairs below ``ratio`` times the usual speed."""
    limit = ratio * usual_speed(speeds)
    return sorted(pair for pair, speed in speeds.items() if speed < limit)


def explain(measured: Collection[Pair], slow: Collection[Pair]) -> list[Suspect]:
    """The suspects for the ``slow`` pairs among the ``measured`` ones.

    The fast pairs connect the vertices into groups. If one group has more than half of the vertices, the others are
    connected to it by slow pairs alone: each of them is a suspect. Slow pairs inside a group belong to the vertex that
    has most of them, or are slow links.
    """
    if not slow:
        return []
    vertices = sorted({vertex for pair in measured for vertex in pair})
    groups = _groups(vertices, [pair for pair in measured if pair not in set(slow)])
    largest = max(groups, key=len)
    suspects = []
    if 2 * len(largest) > len(vertices):
        suspects = [Suspect(group, is_group=len(group) > 1) for group in groups if group is not largest]
        slow = [pair for pair in slow if set(pair) <= set(largest)]
    return suspects + _inside(measured, slow)


def _groups(vertices: Sequence[int], pairs: Collection[Pair]) -> list[tuple[int, ...]]:
    """The connected components."""
    root = {vertex: vertex for vertex in vertices}

    def find(vertex: int) -> int:
        while root[vertex] != vertex:
            root[vertex] = root[root[vertex]]
            vertex = root[vertex]
        return vertex

    for one, other in pairs:
        root[find(one)] = find(other)
    groups: dict[int, list[int]] = {}
    for vertex in vertices:
        groups.setdefault(find(vertex), []).append(vertex)
    return [tuple(group) for group in groups.values()]


def _inside(measured: Collection[Pair], slow: Collection[Pair]) -> list[Suspect]:
    """Vertices with at least two slow pairs that are half of their pairs; the other slow pairs are links."""
    suspects, left = [], sorted(slow)
    while left:
        counts: dict[int, int] = {}
        for vertex in (vertex for pair in left for vertex in pair):
            counts[vertex] = counts.get(vertex, 0) + 1
        worst = max(counts, key=lambda vertex: counts[vertex])
        if counts[worst] < 2 or 2 * counts[worst] < sum(worst in pair for pair in measured):
            break
        suspects.append(Suspect((worst,)))
        left = [pair for pair in left if worst not in pair]
    return suspects + [Suspect(pair, is_link=True) for pair in left]


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
