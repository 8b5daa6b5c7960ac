"""The speed of the links between nodes, and whether they change what they carry."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.features.preflight.check import Check, Node, Result, Site, Verdict, host_of
from megatron.features.preflight.network import (
    Pair,
    Suspect,
    explain,
    rounds_again,
    rounds_of,
    slow_pairs,
    usual_speed,
)
from megatron.operation.causes import Cause

_RATIOS = {"cpu": (0.2, 0.1), "cuda": (0.7, 0.35)}
"""Of the usual speed of a pair: warning, failure. Sockets of a loaded machine vary much more than adapters of GPUs."""
_BYTES = {"cpu": 2**19, "cuda": 2**25}
_REPETITIONS = {"cpu": 20, "cuda": 3}
"""On a CPU many short exchanges: the fastest one was not interrupted by other processes."""
_AGAIN, _ROUNDS_AGAIN, _MORE = 3, 6, 2
"""Times that slow pairs are measured again, so that a moment's load is no slow link; rounds of each time; and the
factor by which each time has more repetitions."""
_PAIR_SECONDS = 1.0
"""After which a pair is not repeated, because it is slow for certain."""
_END = 7129.0
"""A word that one flipped bit does not make of 0."""
_WRONG = 0.0
"""Speed of a pair that received other bytes than were sent."""


def vertices_of(nodes: Sequence[Node], device: str) -> list[tuple[int, ...]]:
    """The ranks of each vertex: nodes, or the ranks of a single node with GPUs (their links are worth a measurement,
    the memory of a single machine without GPUs is not)."""
    if len(nodes) > 1:
        return [node.ranks for node in nodes]
    return [(rank,) for rank in nodes[0].ranks] if device == "cuda" else []


@dataclass(frozen=True)
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
        self,
        site: Site,
        vertices: Sequence[Sequence[int]],
        pairs: Sequence[Pair],
        speeds: dict[str, float],
        times: int,
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
