"""Seconds of recorded launches, by the prices that are fitted to published runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from megatron.core.topology import RankGrid
from megatron.planner.launches import Group, Launch, ProductShape, axis_of
from megatron.planner.step_time import prices
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.workload import Cluster

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RINGS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}
"""Times that a ring sends (n - 1) / n of the tensor."""
TERM_OF_AXIS = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "etp": "expert parallelism",
}

Exposure = Literal["whole", "messages", "ring", "hidden"]
"""What computation leaves of a collective: all of it, the share of messages between products, of a ring around
attention, or nothing."""


@dataclass(frozen=True)
class Product:
    """Equal products of a step, for a roofline."""

    m: int
    n: int
    k: int
    dtype: str
    count: float
    """Number in a step of the slowest stage."""
    seconds: float
    """Seconds of all of them."""


@dataclass(frozen=True)
class LaunchPrices:
    """Prices of the launches of the first rank of a run."""

    cluster: Cluster
    constants: Constants
    grid: RankGrid
    seq_length: int
    is_cudnn: bool
    """Whether fused attention has the speed of cuDNN's kernel."""

    @cached_property
    def machines(self) -> prices.Machines:
        """The cluster as arrays of one element."""
        return prices.Machines([self.cluster])

    def by_term(self, launches: Iterable[Launch]) -> dict[str, float]:
        """Seconds by cause, named in :data:`TERMS`; without data parallelism and messages of the pipeline."""
        terms: dict[str, float] = {}
        for launch in launches:
            term, seconds = self._price(launch)
            if launch.is_recomputed:
                term = "recompute"
            terms[term] = terms.get(term, 0.0) + seconds
        return terms

    def _price(self, launch: Launch) -> tuple[str, float]:
        c = self.constants
        if launch.product is not None:
            return "products", self.product(launch)
        if launch.kind == "attention":
            length = launch.length or self.seq_length
            return "attention", _number(launch.flops / self.machines.attention_flops(c, self.is_cudnn, length))
        if launch.kind == "elementwise":
            return "between products", _number(prices.elementwise_seconds(self.machines, c, launch.num_bytes))
        if launch.group is not None:
            term = TERM_OF_AXIS.get(axis_of(launch.group.axes))
            if term is not None:
                return term, self.collective(launch) * self._exposed[exposure(launch.group, launch.during)]
        return "gaps", 0.0  # host copies and syncs: the gap of a layer stands for them

    def product(self, launch: Launch) -> float:
        """Seconds of a GEMM.

        A weight gradient counts with its inner dimension's operand first, as in the fit; the price of tiles
        is not symmetric.
        """
        shape = launch.product
        assert shape is not None
        if shape.dtype == torch.float32 and self.machines.is_gpu:
            flops = 2.0 * shape.rows * shape.columns * shape.depth * shape.count
            return _number(flops / (self.machines.bf16_flops * prices.FP32_SHARE))
        rows, columns = (shape.columns, shape.rows) if shape.is_accumulated else (shape.rows, shape.columns)
        sizes = rows, columns, shape.depth, launch.num_bytes / shape.count, shape.dtype in _FP8, shape.count
        return _number(prices.product_seconds(self.machines, self.constants, *sizes))

    def products(self, launches: Iterable[Launch], times: float) -> tuple[Product, ...]:
        """The GEMMs of launches that run ``times`` a step, equal ones together."""
        found: dict[ProductShape, list[float]] = {}
        for launch in launches:
            if launch.product is not None:
                found.setdefault(launch.product, []).append(self.product(launch))
        return tuple(
            Product(
                shape.rows, shape.columns, shape.depth, str(shape.dtype).removeprefix("torch."),
                len(seconds) * shape.count * times, sum(seconds) * times,
            )
            for shape, seconds in found.items()
        )  # fmt: skip

    @cached_property
    def _exposed(self) -> Mapping[Exposure, float]:
        """The share of a collective that computation does not hide."""
        messages = self.constants["exposed_tensor_parallel"]
        return {"whole": 1.0, "messages": messages, "ring": prices.EXPOSED_RING, "hidden": 0.0}

    def collective(self, launch: Launch) -> float:
        """Seconds of a collective, alone."""
        group, c, machines = launch.group, self.constants, self.machines
        assert group is not None
        if group.kind == "receive":
            return 0.0  # counted at its sender
        ranks = self._ranks(group)
        size, in_node = len(ranks), together(ranks, self.cluster.node_size)
        if group.kind in _RINGS:
            moved = _RINGS[group.kind] * (size - 1) / size * launch.num_bytes
            return _number(moved / prices.ring_rate(machines, c, in_node, in_node == size, self._between_pods(ranks)))
        if group.kind == "all_to_all" or (group.kind == "exchange" and axis_of(group.axes) in ("ep", "etp")):
            sent = launch.num_bytes * ((size - 1) / size if group.kind == "all_to_all" else 1.0)
            link, network = c["link"] * machines.link, c["network"] * machines.network
            return _number(prices.exchange_seconds(sent, size, in_node, link, network))
        # A message of the ring of context parallelism crosses nodes alone.
        rate = prices.ring_rate(machines, c, 1.0, in_node == size, self._between_pods(ranks))
        return _number(launch.num_bytes / rate)

    def _between_pods(self, ranks: Sequence[int]) -> float:
        """The share of the network's rate that the ranks have."""
        in_pod = together(ranks, self.cluster.pod_size or self.grid.world_size)
        return _number(prices.between_pods(self.machines, in_pod, in_pod < len(ranks)))

    def _ranks(self, group: Group) -> Sequence[int]:
        """The ranks of the group in the run that is priced, which may have other stages than the rehearsed one."""
        if group.axes == "cp" or group.axes.startswith("pp"):
            return group.ranks  # possibly of one level of the axis
        return self.grid.group(0, group.axes.split("x"))


def exposure(group: Group, during: str) -> Exposure:
    """What of a collective computation does not hide.

    The gather of a layer's input for its weight gradient hides behind the product of the input gradient, as in the
    software that the constants are fitted to; other overlapped collectives of tensor parallelism do not. Messages of
    --tp-comm-overlap and of the ring of context parallelism hide behind the products or attention between them.
    """
    axis = axis_of(group.axes)
    if axis == "tp":
        if group.kind == "exchange":
            return "messages"
        return "hidden" if group.kind == "all_gather" and (group.overlaps or during.startswith("weight")) else "whole"
    if axis == "cp" and (group.kind == "shift" or (group.kind == "all_gather" and group.overlaps)):
        return "ring"
    return "whole"


def together(ranks: Sequence[int], number: int) -> int:
    """Ranks in the node or pod of ``number`` ranks that has the first of them."""
    return sum(rank // number == ranks[0] // number for rank in ranks)


def _number(value: object) -> float:
    return float(np.asarray(value).reshape(-1)[0])
