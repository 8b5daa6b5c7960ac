"""The flag for slow ranks, and which ranks are slow.

A rank that computes slowly makes all others wait, so every rank has the same time per iteration. The time in which a
rank does *not* wait for others tells them apart.
"""

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.errors import ConfigError

INTERVALS, SECONDS = 5, 60.0
"""A rank is judged over at least so many intervals, and at least so long: on a busy machine any rank is slow for a
while."""
SHARE = 0.9
"""A rank is slow if it was above the threshold in this share of them."""


@dataclass(frozen=True)
class StragglerFlags:
    """Slow ranks."""

    straggler_threshold: float = 1.2
    """Warn of a rank that was busy this many times as long as the median of the ranks with the same work, in 90 % of
    the log intervals of the last minute, and at least of the last 5; 0 disables this."""

    def check(self) -> None:
        if self.straggler_threshold != 0 and self.straggler_threshold <= 1:
            raise ConfigError(
                f"--straggler-threshold {self.straggler_threshold} would warn of every rank: use a number above 1, or "
                "0 to disable the warning."
            )


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
    """Remembers which ranks were slow in the last intervals. All ranks observe the same numbers and find the same
    stragglers."""

    threshold: float
    peers: Sequence[Sequence[int]]
    # Seconds of the last intervals, and the ranks above the threshold in each.
    _window: deque[tuple[float, list[int]]] = field(default_factory=deque)
    # Sum of the window's seconds.
    _seconds: float = 0.0
    _named: set[int] = field(default_factory=set)

    def peers_of(self, rank: int) -> Sequence[int]:
        return next(group for group in self.peers if rank in group)

    def observe(self, busy: Sequence[float], seconds: float) -> list[Straggler]:
        """The ranks that are slow now and were not after the interval before, from the busy seconds of all ranks in an
        interval of ``seconds``."""
        relative = ratios(busy, self.peers)
        self._window.append((seconds, [rank for rank, ratio in enumerate(relative) if ratio >= self.threshold]))
        self._seconds += seconds
        while len(self._window) > INTERVALS and self._seconds - self._window[0][0] >= SECONDS:
            self._seconds -= self._window.popleft()[0]
        if len(self._window) < INTERVALS or self._seconds < SECONDS:
            return []
        counts = Counter(rank for _, slow in self._window for rank in slow)
        # Named again only after all intervals were good: a rank at the threshold is named once.
        self._named.intersection_update(counts)
        slow = {rank for rank, count in counts.items() if count >= SHARE * len(self._window)}
        new = [rank for rank in sorted(slow - self._named) if relative[rank] >= self.threshold]
        self._named.update(new)
        return [Straggler(rank, relative[rank], len(self.peers_of(rank))) for rank in new]


def excess_section(own: Mapping[str, float], peers: Sequence[Mapping[str, float]]) -> str:
    """The section in which a rank's busy seconds exceed the median of its peers by most."""
    excess = {
        name: seconds - statistics.median_low(peer.get(name, 0.0) for peer in peers) for name, seconds in own.items()
    }
    return max(excess, key=excess.__getitem__)
