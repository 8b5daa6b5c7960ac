"""Prices of single operations: products, attention, memory traffic, rings of ranks, and what stays exposed of them.

The closed form of other software (:mod:`megatron.planner.step_time.formulas`) and the prices of our own launches
(:mod:`megatron.planner.rehearsal.launch_prices`) both use these functions, so each formula exists once. They work on scalars and
arrays; times are seconds, sizes are bytes, rates are per second.

Sources: a ring all-gather or reduce-scatter moves (n - 1) / n bytes per byte, an all-reduce twice as many (Patarasuk
and Yuan 2009).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.workload import Array

_TILE_ROWS, _TILE_COLUMNS = 128, 256
_MOST_QUANTIZATION = 4.0
_LEAST_EXPOSED = 0.05  # share of the reduction of gradients that never overlaps: the last bucket
_BACKWARD_SHARE = 0.6  # of a microbatch: the backward pass, behind which gradients are reduced

BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass relative to the forward pass: five products instead of two."""
EXPOSED_RING = 0.2
"""Share of the ring of context parallelism that attention does not hide."""


class Machines:
    """The clusters of some runs; arrays ``[runs]``."""

    def __init__(self, clusters: Sequence[Cluster]) -> None:
        def numbers(name: str) -> Array:
            return np.array([float(getattr(cluster, name)) for cluster in clusters])

        self.bf16_flops, self.hbm = numbers("bf16_flops"), numbers("hbm_bytes_per_s")
        self.multiprocessors, self.node_size = numbers("multiprocessors"), numbers("node_size")
        self.link, self.network = numbers("link_bytes_per_s"), numbers("network_bytes_per_s")
        self.pod_size = np.array([float(cluster.pod_size or np.inf) for cluster in clusters])
        self.oversubscription = numbers("oversubscription")
        names = [cluster.generation for cluster in clusters]
        self.is_gpu = all(name != "cpu" for name in names)
        self._generations = {name: np.array([other == name for other in names]) for name in dict.fromkeys(names)}

    def by_generation(self, constants: Constants, operation: str, names: dict[str, str] | None = None) -> Array:
        """The constant of an ``operation``, ``operation_generation`` unless ``names`` has another for a generation."""
        names = names or {}
        return np.asarray(
            sum(
                np.where(mask, constants[names.get(name, f"{operation}_{name}")], 0.0)
                for name, mask in self._generations.items()
            )
        )

    def product_flops(self, constants: Constants) -> Array:
        """bf16 FLOP/s that a large product reaches."""
        return self.bf16_flops * self.by_generation(constants, "product")

    def attention_flops(self, constants: Constants, is_cudnn: Any, seq_length: Any) -> Array:
        """Causal FLOP/s of fused attention in the forward pass."""
        flash = self.by_generation(constants, "flash", {"blackwell": "cudnn_blackwell"})
        cudnn = self.by_generation(constants, "cudnn", {"ampere": "flash_ampere", "cpu": "flash_cpu"})
        share = np.where(is_cudnn, cudnn, flash) * seq_length / (seq_length + constants["attention_length"])
        return np.asarray(share * self.bf16_flops)


def product_traffic(
    rows: Any, columns: Any, depth: Any, is_fp8: Any, extra_bytes: Any = 0.0, element_bytes: Any = 2
) -> Any:
    """Bytes that a product reads and writes once; its output is not in FP8, and ``extra_bytes`` are on top."""
    element = np.where(is_fp8, 1, element_bytes)
    return (rows + columns) * depth * element + element_bytes * rows * columns + extra_bytes


def product_seconds(
    machines: Machines, c: Constants, rows: Any, columns: Any, depth: Any, traffic: Any, is_fp8: Any, count: Any = 1.0
) -> Array:
    """``count`` products ``[rows, depth] x [depth, columns]`` in one launch, each of which moves ``traffic`` bytes.

    Short inner lengths and a partial last wave of tiles lower the rate; a share of the traffic is not hidden.
    """
    rate = machines.product_flops(c) * np.where(is_fp8, 2 * c["product_fp8"], 1.0)
    waves = count * np.ceil(rows / _TILE_ROWS) * np.ceil(columns / _TILE_COLUMNS) / machines.multiprocessors
    quantization = 1 + c["wave_quantization"] * (np.ceil(waves) / waves - 1)
    computation = 2 * rows * columns * depth / rate * (1 + c["product_depth"] / depth)
    one = computation * np.minimum(quantization, _MOST_QUANTIZATION) + c["product_bytes"] * traffic / machines.hbm
    return np.asarray(count * one)


def pod_share(machines: Machines, ranks: Any, distance: Any) -> Array:
    """The share of the adapters' rate that rings of ``ranks``, ``distance`` apart, reach if all GPUs send at once.

    A ring leaves a pod from one of its ranks there, so the links between pods carry that share of the traffic, at
    1 / ``oversubscription`` of the rate. The rings of Llama 3 405B are not slowed down by 1:7.
    """
    in_pod = np.maximum(1.0, np.minimum(machines.pod_size / distance, ranks))
    return between_pods(machines, in_pod, ranks * distance > machines.pod_size)


def between_pods(machines: Machines, in_pod: Any, leaves: Any) -> Array:
    """The share of a ring with ``in_pod`` ranks in a pod, which ``leaves`` it or not."""
    return np.where(leaves, np.minimum(1.0, in_pod / machines.oversubscription), 1.0)


def ring_rate(machines: Machines, c: Constants, in_node: Any, is_in_node: Any, share: Any = 1.0) -> Array:
    """Bytes per second of a ring with ``in_node`` ranks in each of its nodes, or all of them in one: ranks of a node
    share its network adapters, and no ring is faster than the link inside of a node. ``share`` of the adapters' rate
    is left between pods."""
    link = c["link"] * machines.link
    across = np.minimum(link, c["network"] * machines.network * in_node * share)
    return np.where(is_in_node, link, across)


def exchange_seconds(sent: Any, size: Any, in_node: Any, link: Any, network: Any) -> Any:
    """An all-to-all in which a rank sends ``sent`` bytes to the other ``size - 1`` ranks, ``in_node - 1`` of them in
    its node: those for other nodes pass its network adapter, the rest the fast link at the same time."""
    others = np.maximum(size - 1, 1.0)
    return np.maximum(sent * (in_node - 1) / others / link, sent * (size - in_node) / others / network)


def elementwise_seconds(machines: Machines, c: Constants, num_bytes: Any) -> Array:
    """Operations of our layers between the products, casts to FP8 among them, that read and write ``num_bytes``.

    The bytes are recorded exactly, so that no factor of rough counts fits. Until a GPU has measured these kernels they
    are taken to reach 80 % of the memory's rate, in bf16 and FP8 alike.
    """
    return np.asarray(c["own_elementwise"] * num_bytes / machines.hbm)


def optimizer_seconds(machines: Machines, c: Constants, num_bytes: Any) -> Array:
    """An update that reads and writes ``num_bytes`` of gradients, weights and optimizer state."""
    return np.asarray(c["optimizer"] * num_bytes / machines.hbm)


def message_rate(machines: Machines, c: Constants, is_in_node: Any, share: Any = 1.0) -> Array:
    """Bytes per second between two ranks; ``share`` of the adapters' rate is left between pods."""
    return np.where(is_in_node, c["link"] * machines.link, c["network"] * machines.network * share)


def reduction_window(slowest: Any, microbatches: Any, stages: Any, is_interleaved: Any) -> Any:
    """Seconds behind which gradients can be reduced: the backward pass of a microbatch, with interleaving of several;
    ``slowest`` is a microbatch on the slowest stage."""
    return np.where(is_interleaved, np.minimum(stages, microbatches), 1.0) * _BACKWARD_SHARE * slowest


def exposed_reduction(c: Constants, once: Any, window: Any, overlaps: Any) -> Array:
    """What is not hidden of ``once``, the reduction of gradients and the gather of weights of a step."""
    hidden = np.where(overlaps, c["hidden_data_parallel"] * window, 0.0)
    return np.maximum(once - hidden, _LEAST_EXPOSED * once)


def exposed_sharding(c: Constants, each: Any, slowest: Any, contention: Any) -> Array:
    """What a microbatch of ``slowest`` seconds shows of the gathers and reductions of fully sharded weights, ``each``
    seconds: what is longer than it, and the computation that hidden traffic slows down."""
    exposed = np.maximum(each - c["hidden_data_parallel"] * slowest, 0.0)
    return np.asarray(exposed + contention * np.minimum(each, slowest))


def growth(c: Constants, gpus: Any) -> Any:
    """The factor of large runs."""
    return 1 + c["growth"] * np.log2(np.maximum(1.0, gpus / 8))
