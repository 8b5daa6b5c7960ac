"""A product of known bits on every rank, and its speed beside the other ranks."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.features.known_product.listener import expected_product, operands
from megatron.features.preflight.check import Check, Node, Result, Site, Verdict
from megatron.operation.causes import Cause

WARNING_RATIO, FAILURE_RATIO = 1.2, 1.4
"""Time of a rank over the median of the job. Healthy processors of one kind differ by less than 10 %. While training,
stragglers are reported from 1.2, too."""
_SIZES = {"cpu": 256, "cuda": 8192}
"""On a CPU a product takes less than a time slice of the scheduler, so that some repetitions are not interrupted."""
_FEWEST = 50
_AGAIN = 3
"""Times that all ranks measure again if one is slow."""


@dataclass(frozen=True)
class Product(Check):
    """All ranks compute at the same time, as they do in training."""

    name = "product"
    seconds = 20.0
    remedy = "the processor does not answer, or is very slow: leave this node out"

    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    duration: float = 1.5
    """Seconds for which a rank repeats the product: of hundreds of repetitions some are undisturbed."""

    def measure(self, site: Site) -> Any:
        measured = self._repeat(site)
        for attempt in range(_AGAIN):
            if not site.board.agree(f"slow products {attempt}", measured, _has_slow, self.seconds):
                break
            # All ranks again: a moment's load is no slow rank.
            again = self._repeat(site)
            wrong, seconds = measured["wrong"] + again["wrong"], min(measured["seconds"], again["seconds"])
            measured = {**measured, "wrong": wrong, "seconds": seconds}
        return measured

    def _repeat(self, site: Site) -> dict[str, Any]:
        size = _SIZES[site.device.type]
        dtype = torch.bfloat16 if site.device.type == "cuda" else torch.float32
        left, right = operands(size, dtype, site.device)
        expected = expected_product(size, dtype, site.device)
        wrong, times = 0, list[float]()
        deadline = time.perf_counter() + self.duration
        while len(times) < _FEWEST or time.perf_counter() < deadline:
            site.synchronize()
            started = time.perf_counter()
            product = self.multiply(left, right)
            site.synchronize()
            times.append(time.perf_counter() - started)
            wrong += int((product != expected).sum())
        # Other processes interrupt a core, so the fastest repetition counts there. A GPU belongs to its process, and is
        # slower when it is warm.
        seconds = min(times) if site.device.type == "cpu" else statistics.median(times[len(times) // 2 :])
        return {"device": site.place.device, "wrong": wrong, "seconds": seconds, "flop": 2 * size**3}

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        ratios = ratios_of(measured)
        results = []
        for (rank, one), ratio in zip(enumerate(measured), ratios):
            if one["wrong"]:
                value = f"{one['wrong']} wrong elements in a product of known bits"
                remedy = "leave this node out: its processor or memory computes wrongly"
                results.append(self.result(Verdict.FAILURE, value, "0", remedy, rank, nodes, Cause.SILENT_CORRUPTION))
            elif ratio > WARNING_RATIO:
                verdict = Verdict.FAILURE if ratio > FAILURE_RATIO else Verdict.WARNING
                value = f"{ratio:.2f} x the median time of the {one['device']} ranks"
                remedy = "look for other processes, heat and power limits on this node, or leave it out"
                limit = f"{WARNING_RATIO} x"
                results.append(self.result(verdict, value, limit, remedy, rank, nodes, Cause.STRAGGLER))
        if results:
            return results
        tera = min(one["flop"] / one["seconds"] for one in measured) / 1e12
        return self.ok(f"right, slowest rank {max(ratios):.2f} x the median, {tera:.3g} TFLOP/s", f"{WARNING_RATIO} x")


def ratios_of(measured: Sequence[dict[str, Any]]) -> list[float]:
    """The time of each rank over the median of the ranks with the same device."""
    times: dict[str, list[float]] = {}
    for one in measured:
        times.setdefault(one["device"], []).append(one["seconds"])
    # The lower median: of two ranks the slower one is slow.
    medians = {device: statistics.median_low(seconds) for device, seconds in times.items()}
    return [one["seconds"] / medians[one["device"]] for one in measured]


def _has_slow(measured: Sequence[dict[str, Any]]) -> bool:
    return max(ratios_of(measured)) > WARNING_RATIO
