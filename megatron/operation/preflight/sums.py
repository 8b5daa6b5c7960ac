"""An all-reduce of known values over all ranks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.features.preflight.check import Check, Node, Result, Site, Verdict
from megatron.operation.causes import Cause

_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
_REPETITIONS = 3
_SLOPES = 8
_CAUSE = Cause.SILENT_CORRUPTION


def addend(rank: int, size: int, device: torch.device) -> Tensor:
    """The addend of ``rank``, in fp32: integers whose sum is exact in any order for more than 100,000 ranks."""
    return _wave(size, device) * (rank % _SLOPES + 1)


def expected_sum(ranks: Sequence[int], size: int, device: torch.device) -> Tensor:
    """The sum of the addends of ``ranks``."""
    return _wave(size, device) * sum(rank % _SLOPES + 1 for rank in ranks)


def _wave(size: int, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) % 13 - 6).to(torch.float32)


def named_by_bits(is_right: Sequence[tuple[bool, bool]], world_size: int) -> int | None:
    """The rank whose addend is always wrong; None if no single rank explains the sums.

    For each bit of the rank numbers: whether the sum over the ranks without this bit is right, and over those with it.
    """
    rank = 0
    for bit, (without, having) in enumerate(is_right):
        if without == having:
            return None
        rank |= (not having) << bit
    return rank if rank < world_size else None


@dataclass(frozen=True)
class Sums(Check):
    """Names the ranks that receive a wrong sum or, if all do, the rank whose addend is wrong."""

    name = "all-reduce"
    seconds = 30.0
    is_collective = True
    remedy = "an all-reduce over all ranks does not end: check the network between the nodes"

    def measure(self, site: Site) -> Any:
        size, everyone = _ELEMENTS[site.device.type], range(site.world_size)
        seconds, wrong = [], 0
        for _ in range(_REPETITIONS):
            tensor = addend(site.rank, size, site.device)
            site.synchronize()
            started = time.perf_counter()
            site.network.all_reduce(tensor)
            site.synchronize()
            seconds.append(time.perf_counter() - started)
            wrong += int((tensor != expected_sum(everyone, size, site.device)).sum())
        by_bits = []
        if site.board.agree("all ranks have a wrong sum", wrong > 0, all, self.seconds):
            by_bits = self._by_bits(site, size)
        moved = 2 * (site.world_size - 1) / site.world_size * tensor.nbytes
        return {"wrong": wrong, "by_bits": by_bits, "bytes_per_s": moved / min(seconds)}

    def _by_bits(self, site: Site, size: int) -> list[list[bool]]:
        results = []
        for bit in range((site.world_size - 1).bit_length()):
            pair = []
            for value in (0, 1):
                part = [rank for rank in range(site.world_size) if rank >> bit & 1 == value]
                tensor = addend(site.rank, size, site.device) * (site.rank in part)
                site.network.all_reduce(tensor)
                pair.append(bool((tensor == expected_sum(part, size, site.device)).all()))
            results.append(pair)
        return results

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        wrong = [rank for rank, one in enumerate(measured) if one["wrong"]]
        remedy = "leave this node out: its memory, GPU or network adapter changes numbers"
        if len(wrong) < len(measured):
            results = []
            for rank in wrong:
                value = f"received a wrong sum ({measured[rank]['wrong']} elements)"
                results.append(self.result(Verdict.FAILURE, value, "0", remedy, rank, nodes, _CAUSE))
            speed = min(one["bytes_per_s"] for one in measured) / 1e9
            return results or self.ok(f"right, {speed:.3g} GB/s on the bus" if len(measured) > 1 else "one rank")
        guilty = named_by_bits([(without, having) for without, having in measured[0]["by_bits"]], len(measured))
        if guilty is not None or len(measured) == 1:
            return [self.result(Verdict.FAILURE, "adds a wrong addend", "0", remedy, guilty or 0, nodes, _CAUSE)]
        remedy = "check switches and adapters: every sum over the network is wrong, and no single rank is the cause"
        return [Result(self.name, Verdict.FAILURE, "all ranks received a wrong sum", "0", remedy)]
