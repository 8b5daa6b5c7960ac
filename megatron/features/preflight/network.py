"""Checks of the network between the nodes: clocks, sums of known values, the speed of links and what they carry.

A *vertex* is a node. A *round* is a list of disjoint pairs, which exchange data at the same time. Few nodes measure all
pairs; many nodes measure the distances 1, 2, 4, ..., so the number of rounds grows with the logarithm of the nodes:
every cable of a node and every link between groups of neighbouring nodes is in some pair.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.features.preflight.check import Check, Node, Result, Site, Verdict, found, host_of
from megatron.operation.causes import Cause

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
    """The clocks of the nodes, as in NTP: one rank of each node asks rank 0 for the time through the store."""

    name = "clocks"
    seconds = 20.0
    remedy = "the store of the job does not answer: check the network between this node and the first one"

    now: Callable[[], float] = time.time

    def measure(self, site: Site) -> Any:
        board, trips = site.board, []
        if site.rank == 0:
            for rank in (node.ranks[0] for node in site.nodes[1:]):
                for trip in range(ROUND_TRIPS):
                    board.get(board.key(self.name, "asked", rank, trip), time.monotonic() + self.seconds)
                    board.set(board.key(self.name, "answered", rank, trip), self.now())
            return [0.0, 0.0]
        if not site.leads_node:
            return None
        for trip in range(ROUND_TRIPS):
            asked, started = self.now(), time.monotonic()
            board.set(board.key(self.name, "asked", site.rank, trip), "")
            answered = board.get(board.key(self.name, "answered", site.rank, trip), time.monotonic() + self.seconds)
            # The clock is not read again: it may be set in between.
            trips.append((asked, answered, asked + time.monotonic() - started))
        return list(offset_of(trips))

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        offsets = dict(found(measured))
        # Relative to the middle one: the clock of rank 0's node may be the wrong one.
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


_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
_SUM_REPETITIONS = 3
_SLOPES = 8


def expected_sum(ranks: Sequence[int], size: int, device: torch.device) -> Tensor:
    """The sum of the addends of ``ranks``, in fp32: integers, exact in any order for more than 100,000 ranks."""
    wave = (torch.arange(size, device=device) % 13 - 6).to(torch.float32)
    return wave * sum(rank % _SLOPES + 1 for rank in ranks)


def addend(rank: int, size: int, device: torch.device) -> Tensor:
    return expected_sum([rank], size, device)


def named_by_bits(is_right: Sequence[Sequence[bool]], world_size: int) -> int | None:
    """The rank whose addend is always wrong; None if no single rank explains the sums.

    For each bit of the rank numbers: whether the sum over the ranks without this bit is right, and over those with it.
    """
    rank = 0
    for bit, (without, having) in enumerate(is_right):
        if without == having:
            return None
        rank |= (not having) << bit
    return rank if rank < world_size else None


class Sums(Check):
    """An all-reduce of known values. Names the ranks that receive a wrong sum or, if all do, the rank whose addend is
    wrong."""

    name = "all-reduce"
    seconds = 30.0
    is_collective = True
    remedy = "an all-reduce over all ranks does not end: check the network between the nodes"

    def measure(self, site: Site) -> Any:
        size, everyone = _ELEMENTS[site.device.type], range(site.world_size)
        seconds, wrong = [], 0
        for _ in range(_SUM_REPETITIONS):
            tensor = addend(site.rank, size, site.device)
            site.synchronize()
            started = time.perf_counter()
            site.network.all_reduce(tensor)
            site.synchronize()
            seconds.append(time.perf_counter() - started)
            wrong += int((tensor != expected_sum(everyone, size, site.device)).sum())
        by_bits = []
        if site.board.agree("all ranks have a wrong sum", wrong > 0, all, self.seconds):
            # Sums over half of the ranks: those without and those with each bit in their number.
            for bit in range((site.world_size - 1).bit_length()):
                pair = []
                for value in (0, 1):
                    part = [rank for rank in everyone if rank >> bit & 1 == value]
                    tensor = addend(site.rank, size, site.device) * (site.rank in part)
                    site.network.all_reduce(tensor)
                    pair.append(bool((tensor == expected_sum(part, size, site.device)).all()))
                by_bits.append(pair)
        moved = 2 * (site.world_size - 1) / site.world_size * tensor.nbytes
        return {"wrong": wrong, "by_bits": by_bits, "bytes_per_s": moved / min(seconds)}

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        wrong = [rank for rank, one in enumerate(measured) if one["wrong"]]
        remedy = "leave this node out: its memory, GPU or network adapter changes numbers"
        if len(wrong) < len(measured):
            results = []
            for rank in wrong:
                value = f"received a wrong sum ({measured[rank]['wrong']} elements)"
                results.append(self.result(Verdict.FAILURE, value, "0", remedy, rank, nodes, Cause.SILENT_CORRUPTION))
            speed = min(one["bytes_per_s"] for one in measured) / 1e9
            return results or self.ok(f"right, {speed:.3g} GB/s on the bus" if len(measured) > 1 else "one rank")
        guilty = named_by_bits(measured[0]["by_bits"], len(measured))
        if guilty is not None or len(measured) == 1:
            return [
                self.result(
                    Verdict.FAILURE, "adds a wrong addend", "0", remedy, guilty or 0, nodes, Cause.SILENT_CORRUPTION
                )
            ]
        remedy = "check switches and adapters: every sum over the network is wrong, and no single rank is the cause"
        return [Result(self.name, Verdict.FAILURE, "all ranks received a wrong sum", "0", remedy)]


Pair = tuple[int, int]
"""Two vertices, the smaller one first."""

ALL_PAIRS = 64
"""Nodes up to which all pairs are measured, in as many rounds."""


@dataclass(frozen=True)
class Suspect:
    """The smallest explanation of slow pairs."""

    vertices: tuple[int, ...]
    """One or more: their connection to all others is slow, for example an uplink of their switch."""
    is_link: bool = False
    """Whether it is the link between two vertices."""


def rounds_of(count: int) -> list[list[Pair]]:
    """The rounds for ``count`` vertices: every pair once, or, of many vertices, the distances 1, 2, 4, ..."""
    rounds: list[list[Pair]] = []
    if count <= ALL_PAIRS:
        # Circle method: the last vertex stays, the others rotate. An odd number has one more, which pauses.
        even = count + count % 2
        for step in range(even - 1):
            order = [(step + offset) % (even - 1) for offset in range(even - 1)]
            pairs = [(order[0], even - 1), *((order[near], order[-near]) for near in range(1, even // 2))]
            rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count))
        return rounds
    distance = 1
    while distance < count:
        for parity in (0, 1):
            starts = (start for start in range(count - distance) if start // distance % 2 == parity)
            if pairs := [(start, start + distance) for start in starts]:
                rounds.append(pairs)
        distance *= 2
    return rounds


def rounds_again(pairs: Collection[Pair], most: int) -> list[list[Pair]]:
    """Rounds with as many of these ``pairs`` as fit into ``most`` rounds."""
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
        suspects = [Suspect(group) for group in groups if group is not largest]
        slow = [pair for pair in slow if set(pair) <= set(largest)]
    return suspects + _inside(measured, slow)


def _groups(vertices: Sequence[int], pairs: Collection[Pair]) -> list[tuple[int, ...]]:
    """The connected components."""
    group_of = {vertex: {vertex} for vertex in vertices}
    for one, other in pairs:
        small, large = sorted((group_of[one], group_of[other]), key=len)
        if small is not large:
            large |= small
            group_of.update(dict.fromkeys(small, large))
    groups = {id(group): group for group in group_of.values()}
    return [tuple(sorted(group)) for group in groups.values()]


def _inside(measured: Collection[Pair], slow: Collection[Pair]) -> list[Suspect]:
    """Vertices with at least two slow pairs that are half of their pairs; the other slow pairs are links."""
    suspects, left = [], sorted(slow)
    while left:
        ((worst, count),) = Counter(vertex for pair in left for vertex in pair).most_common(1)
        if count < 2 or 2 * count < sum(worst in pair for pair in measured):
            break
        suspects.append(Suspect((worst,)))
        left = [pair for pair in left if worst not in pair]
    return suspects + [Suspect(pair, is_link=True) for pair in left]


# Ratios to the usual speed of a pair: warning, failure. Sockets of a loaded machine vary much more than adapters of
# GPUs.
_RATIOS = {"cpu": (0.2, 0.1), "cuda": (0.7, 0.35)}
_BYTES = {"cpu": 2**19, "cuda": 2**25}
# On a CPU many short exchanges: the fastest one was not interrupted by other processes.
_REPETITIONS = {"cpu": 20, "cuda": 3}
# Times that slow pairs are measured again, so that a moment's load is no slow link; rounds of each time; and the factor
# by which each time has more repetitions.
_AGAIN, _ROUNDS_AGAIN, _MORE = 3, 6, 2
# A pair is not repeated after so long, because it is slow for certain.
_PAIR_SECONDS = 1.0
# A word that one flipped bit does not make of 0.
_END = 7129.0
# Speed of a pair that received other bytes than were sent.
_WRONG = 0.0


def vertices_of(nodes: Sequence[Node], device: str) -> list[tuple[int, ...]]:
    """The ranks of each vertex: nodes, or the ranks of a single node with GPUs (their links are worth a measurement,
    the memory of a single machine without GPUs is not)."""
    if len(nodes) > 1:
        return [node.ranks for node in nodes]
    return [(rank,) for rank in nodes[0].ranks] if device == "cuda" else []


class Links(Check):
    """The ranks of two nodes exchange data in pairs, all at the same time: a rank with the one of the same place."""

    name = "links"
    seconds = 40.0
    is_collective = True
    remedy = "an exchange between two ranks does not end: check the network between the nodes"

    def measure(self, site: Site) -> Any:
        vertices = vertices_of(site.nodes, site.device.type)
        speeds: dict[str, float] = {}
        measured = {"device": site.device.type, "speeds": speeds}
        if len(vertices) < 2:
            return measured
        rounds = rounds_of(len(vertices))
        for attempt in range(_AGAIN + 1):
            for pairs in rounds:
                self._measure_round(site, vertices, pairs, speeds, _MORE**attempt)
            if attempt == _AGAIN:
                break
            slow = site.board.agree(f"slow links {attempt}", measured, _slow, self.seconds)
            vertex_of = {rank: vertex for vertex, ranks in enumerate(vertices) for rank in ranks}
            rounds = rounds_again({(vertex_of[one], vertex_of[other]) for one, other in slow}, _ROUNDS_AGAIN)
            if not rounds:
                break
        return measured

    def _measure_round(
        self, site: Site, vertices: Sequence[Sequence[int]], pairs: Sequence[Pair], speeds: dict[str, float], times: int
    ) -> None:
        """Measure this rank's pair, if it has one; ``speeds`` keeps the best speed by rank."""
        peer = peer_of(site.rank, vertices, pairs)
        if peer is None:
            return
        size = _BYTES[site.device.type] // 4
        sent = _message(site.rank, peer, size, site.device)
        expected = _message(peer, site.rank, size, site.device)
        best, is_right = speeds.get(str(peer), 0.0), speeds.get(str(peer)) != _WRONG
        deadline = time.perf_counter() + _PAIR_SECONDS
        # Each repetition: a word, which says whether this rank ends, and then the data unless one of the two ends.
        #
        #     rank a   word ->  data ->  word -> ... end        the time of the data alone counts
        #     rank b   <- word  <- data  <- word     break
        for repetition in range(times * _REPETITIONS[site.device.type]):
            received = torch.zeros_like(sent)
            # The time must not include waiting for the other rank, which may come from a slow pair. Both end together.
            is_late = repetition > 0 and time.perf_counter() > deadline
            own_word = torch.tensor([_END if is_late else 0.0], device=site.device)
            other_word = torch.zeros_like(own_word)
            site.network.exchange(own_word, other_word, peer)
            if is_late or other_word.item() > _END / 2:
                break
            started = time.perf_counter()
            site.network.exchange(sent, received, peer)
            site.synchronize()
            best = max(best, sent.nbytes / (time.perf_counter() - started))
            # The other rank does not know, and goes on.
            is_right = is_right and torch.equal(received, expected)
        speeds[str(peer)] = best if is_right else _WRONG

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        speeds = speeds_of(measured)
        if not speeds:
            return self.ok("one node")
        warning_ratio, failure_ratio = _RATIOS[measured[0]["device"]]
        usual = usual_speed(speeds)
        wrong = [pair for pair, speed in speeds.items() if speed == _WRONG]
        right = {pair: speed for pair, speed in speeds.items() if speed != _WRONG}
        results = []
        for rail in _rails(nodes, speeds):
            for suspect in explain(rail, set(rail) & set(wrong)):
                results.append(self._of(suspect, Verdict.FAILURE, "changes what it carries", "", nodes))
            measured_right = set(rail) & right.keys()
            slow = measured_right & set(slow_pairs(right, warning_ratio))
            for suspect in explain(measured_right, slow):
                ratio = min(right[pair] for pair in slow if set(pair) & set(suspect.vertices)) / usual
                verdict = Verdict.FAILURE if ratio < failure_ratio else Verdict.WARNING
                value = f"{ratio * usual / 1e9:.3g} GB/s, {ratio:.2f} x the usual speed"
                results.append(self._of(suspect, verdict, value, f"{warning_ratio} x", nodes))
        if results:
            return results
        slowest = min(speeds.values())
        return self.ok(
            f"{len(speeds)} pairs, {usual / 1e9:.3g} GB/s each way, slowest {slowest / usual:.2f} x the usual",
            f"{warning_ratio} x",
        )

    def _of(self, suspect: Suspect, verdict: Verdict, value: str, limit: str, nodes: Sequence[Node]) -> Result:
        first, *others = suspect.vertices
        names = ", ".join(f"rank {rank} ({host_of(rank, nodes)})" for rank in others)
        remedy = "check the network adapter, cable and switch port of this node, or leave it out"
        if suspect.is_link:
            value = f"link to {names}: {value}"
            remedy = "check the path between these two nodes: ports, routes, switches"
        elif others:
            value = f"connection of this rank and {names} to the others: {value}"
            remedy = "check what only these nodes use: their switch and its uplinks"
        # Of two ends, or of a switch, the node is not at fault.
        cause = None if others else Cause.STRAGGLER if limit else Cause.SILENT_CORRUPTION
        return self.result(verdict, value, limit, remedy, first, nodes, cause)


def speeds_of(measured: Sequence[dict[str, Any]]) -> dict[Pair, float]:
    """Speed by pair of ranks; the lower one of the two measurements."""
    speeds: dict[Pair, float] = {}
    for rank, one in enumerate(measured):
        for peer, speed in one["speeds"].items():
            pair = min(rank, int(peer)), max(rank, int(peer))
            speeds[pair] = min(speed, speeds.get(pair, speed))
    return speeds


def _slow(measured: Sequence[dict[str, Any]]) -> list[Pair]:
    """The slow pairs, without those that are wrong anyway."""
    speeds = speeds_of(measured)
    return [pair for pair in slow_pairs(speeds, _RATIOS[measured[0]["device"]][0]) if speeds[pair] != _WRONG]


def _rails(nodes: Sequence[Node], pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs by the place of their ranks on the node; on one node all pairs are together."""
    if len(nodes) == 1:
        return [list(pairs)]
    place_of = {rank: place for node in nodes for place, rank in enumerate(node.ranks)}
    rails: dict[int, list[Pair]] = {}
    for pair in pairs:
        rails.setdefault(place_of[pair[0]], []).append(pair)
    return list(rails.values())


def peer_of(rank: int, vertices: Sequence[Sequence[int]], pairs: Sequence[Pair]) -> int | None:
    """The rank with which ``rank`` exchanges data in a round."""
    own = next((vertex for vertex, ranks in enumerate(vertices) if rank in ranks), None)
    pair = next((pair for pair in pairs if own in pair), None)
    if own is None or pair is None:
        return None
    place, other = vertices[own].index(rank), vertices[pair[0] + pair[1] - own]
    return other[place] if place < len(other) else None


def _message(source: int, target: int, size: int, device: torch.device) -> Tensor:
    """Numbers that only this message has, in fp32."""
    return (torch.arange(size, device=device) % 8191 + 31 * source + 17 * target).to(torch.float32)
