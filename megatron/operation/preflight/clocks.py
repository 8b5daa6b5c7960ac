"""The clocks of the nodes, compared through the store as in NTP."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.features.preflight.check import Check, Node, Result, Site, Verdict, found

LIMIT_SECONDS = 1.0
"""Torch's rendezvous drops a node whose clock is 15 s behind; below a second, logs of nodes can be compared."""
ROUND_TRIPS = 5


def offset_of(trips: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Offset of the own clock from the other clock, and the largest error of this number, in seconds.

    Each trip is (own clock when asking, other clock when answering, own clock when the answer arrived). The other clock
    answered between the two readings of the own clock, so the error is at most half of the trip, however loaded the
    machines are.
    """
    asked, answered, arrived = min(trips, key=lambda trip: trip[2] - trip[0])
    return (asked + arrived) / 2 - answered, (arrived - asked) / 2


@dataclass(frozen=True)
class Clocks(Check):
    """One rank of each node asks rank 0 for the time."""

    name = "clocks"
    seconds = 20.0
    remedy = "the store of the job does not answer: check the network between this node and the first one"

    now: Callable[[], float] = time.time

    def measure(self, site: Site) -> Any:
        if site.rank == 0:
            for node in site.nodes[1:]:
                self._answer(site, node.ranks[0])
            return [0.0, 0.0]
        return self._ask(site) if site.leads_node else None

    def _answer(self, site: Site, rank: int) -> None:
        for trip in range(ROUND_TRIPS):
            site.board.get(site.board.key(self.name, "asked", rank, trip), time.monotonic() + self.seconds)
            site.board.set(site.board.key(self.name, "answered", rank, trip), self.now())

    def _ask(self, site: Site) -> list[float]:
        trips = []
        for trip in range(ROUND_TRIPS):
            asked, started = self.now(), time.monotonic()
            site.board.set(site.board.key(self.name, "asked", site.rank, trip), "")
            key = site.board.key(self.name, "answered", site.rank, trip)
            answered = site.board.get(key, time.monotonic() + self.seconds)
            # Not read again: the clock may be set in between.
            trips.append((asked, answered, asked + time.monotonic() - started))
        return list(offset_of(trips))

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        offsets = dict(found(measured))
        # The clock of rank 0's node may be the wrong one. Of two clocks nobody knows which is right.
        middle = sorted(offsets, key=lambda rank: offsets[rank][0])[(len(offsets) - 1) // 2]
        results, largest = [], 0.0
        for rank, (offset, error) in offsets.items():
            skew = offset - offsets[middle][0]
            error = 0.0 if rank == middle else error + offsets[middle][1]
            largest = max(largest, abs(skew))
            if abs(skew) - error > LIMIT_SECONDS:
                value = f"clock {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
                remedy = "let NTP or chrony set the clock of this node (with two nodes: of both)"
                results.append(self.result(Verdict.FAILURE, value, f"{LIMIT_SECONDS:g} s", remedy, rank, nodes))
            elif error > LIMIT_SECONDS:
                value = f"clock only known to {error:.1f} s"
                remedy = "the store answers slowly: check the network, and the load of the first node"
                results.append(self.result(Verdict.WARNING, value, f"{LIMIT_SECONDS:g} s", remedy, rank, nodes))
        if results or len(offsets) == 1:
            return results or self.ok("one node")
        return self.ok(f"{1000 * largest:.0f} ms apart", f"{LIMIT_SECONDS:g} s")
