"""Ranks that are slower than others with the same work.

A rank that computes slowly makes all others wait, so every rank has the same time per iteration. The time in which a
rank does *not* wait for others tells them apart.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INTERVALS, NEEDED = 5, 3
"""A rank is slow if it was above the threshold in NEEDED of the last INTERVALS."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank."""

    rank: int
    ratio: float
    """Its busy time in the last interval, relative to the median of its peers."""
    num_peers: int
    """Ranks with the same work, with this one."""


def ratios(busy: Sequence[float], peers: Sequence[Sequence[int]]) -> list[float]:
    """The busy time of each rank relative to the median of its peers; 1 for a rank without others.

    ``peers`` are disjoint groups of ranks with the same work. The median of an even number is the lower one, so that
    one of two ranks can be slow.
    """
    result = [1.0] * len(busy)
    for group in peers:
        middle = statistics.median_low(busy[rank] for rank in group)
        if len(group) > 1 and middle > 0:
            for rank in group:
                result[rank] = busy[rank] / middle
    return result


@dataclass
class StragglerDetector:
    """Remembers the ratios of the last intervals. All ranks observe the same numbers and find the same stragglers."""

    threshold: float
    peers: Sequence[Sequence[int]]
    _history: dict[int, deque[bool]] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def largest_ratio(self, busy: Sequence[float]) -> float:
        """Of the busy seconds of all ranks to the median of their peers."""
        return max(ratios(busy, self.peers))

    def peers_of(self, rank: int) -> Sequence[int]:
        """The group of ``rank``."""
        return next(group for group in self.peers if rank in group)

    def observe(self, busy: Sequence[float]) -> list[Straggler]:
        """The ranks that are slow now and were not after the interval before, from the busy seconds of all ranks."""
        found = []
        relative = ratios(busy, self.peers)
        for group in self.peers:
            for rank in group:
                history = self._history.setdefault(rank, deque(maxlen=INTERVALS))
                history.append(relative[rank] >= self.threshold)
                is_slow = sum(history) >= NEEDED
                if is_slow and rank not in self._named:
                    self._named.add(rank)
                    found.append(Straggler(rank, relative[rank], len(group)))
                elif not any(history):
                    # Named again only after all intervals were good: a rank at the threshold is named once.
                    self._named.discard(rank)
        return found


def excess_section(own: Mapping[str, float], peers: Sequence[Mapping[str, float]]) -> str:
    """The section in which a rank's busy seconds exceed the median of its peers by most."""
    excess = {
        name: seconds - statistics.median_low(peer.get(name, 0.0) for peer in peers) for name, seconds in own.items()
    }
    return max(excess, key=excess.__getitem__)
