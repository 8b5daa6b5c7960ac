"""Prices of single operations from the description of a cluster, and the constants that they have in common.

The closed form of other software (:mod:`megatron.planner.step_time.formulas`) and the prices of our own launches
(:mod:`megatron.planner.rehearsal.launch_prices`) both use these functions, so each formula exists once. They work on
scalars and arrays; times are seconds, sizes are bytes, rates are per second.

A constant says how much of a vendor's rate training reaches. One with a spread of 0 is stated and not fitted: with it
free, sources that are left out of the fit are predicted hardly better, or worse (docs/step_times.md).
``python -m benchmarks.published --write`` fits the others to published runs and writes :data:`RECORD`.

Sources: ring collectives move 2 (n - 1) / n bytes per byte for an all-reduce and (n - 1) / n for the others (Patarasuk
and Yuan 2009).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.planner.step_time.workload import Array, Cluster

Constants = Mapping[str, float]

RECORD = Path(__file__).with_name("fitted.json")
"""The constants, the errors of the fit, and what its runs have measured."""


@dataclass(frozen=True)
class Constant:
    """A positive constant with a log-normal prior, or a stated one."""

    start: float
    """Median of the prior."""
    spread: float
    """Standard deviation of its logarithm; 0 if the constant is stated."""
    meaning: str


CONSTANTS: Mapping[str, Constant] = {
    # Products.
    "product_ampere": Constant(0.874, 0.1, "share of the peak that a large product reaches on Ampere"),
    "product_hopper": Constant(0.744, 0.1, "the same on Hopper"),
    "product_blackwell": Constant(0.584, 0.15, "the same on Blackwell"),
    "product_fp8": Constant(1.0, 0.0, "the share of the FP8 peak relative to that of the bf16 peak"),
    "product_depth": Constant(128.0, 0.0, "inner length at which a product takes twice the time per FLOP"),
    "wave_quantization": Constant(1.0, 0.0, "share of the idle multiprocessors in the last wave of tiles that is lost"),
    "product_bytes": Constant(0.5, 0.0, "share of a product's memory traffic that its computation does not hide"),
    # Attention.
    "flash_ampere": Constant(0.327, 0.2, "share of the peak of fused attention, causal FLOPs, on Ampere"),
    "flash_hopper": Constant(0.184, 0.1, "the same on Hopper with FlashAttention 2 or Triton"),
    "cudnn_hopper": Constant(0.459, 0.2, "the same on Hopper with cuDNN"),
    "cudnn_blackwell": Constant(0.376, 0.2, "the same on Blackwell"),
    "attention_length": Constant(500.0, 0.0, "sequence length at which fused attention has half of its final rate"),
    "batched_product": Constant(0.33, 0.0, "share of the peak of the two products of unfused attention"),
    "softmax": Constant(1.0, 0.0, "factor on the memory accesses of the softmax"),
    # Between the products.
    "elementwise": Constant(1.6, 0.0, "factor on the estimated memory accesses of other software between products"),
    "own_elementwise": Constant(1.25, 0.0, "factor on the recorded memory accesses of this project between products"),
    "fp8_cast": Constant(1.6, 0.0, "factor on the estimated memory accesses of other software's casts to FP8"),
    "layer_gap": Constant(50e-6, 0.0, "seconds per layer and microbatch without work on the GPU"),
    "deepspeed_layer": Constant(4.3e-3, 1.0, "seconds per layer and microbatch of DeepSpeed's pipeline engine"),
    # Communication.
    "link": Constant(0.9, 0.0, "share of NVLink's rate that collectives reach"),
    "network": Constant(1.0, 0.0, "share of the network adapters' rate that collectives reach"),
    "exposed_tensor_parallel": Constant(0.49, 0.5, "share of overlapped tensor-parallel communication that is exposed"),
    "exposed_messages": Constant(1.0, 0.0, "share of the pipeline's messages that is exposed"),
    "exposed_interleaved_messages": Constant(1.0, 0.0, "the same with interleaving"),
    "hidden_data_parallel": Constant(1.0, 0.0, "share of a microbatch behind which gradients can be reduced"),
    "fsdp2_contention": Constant(0.2, 0.0, "share of hidden FSDP 2 traffic by which computation is slowed"),
    # The rest of a step.
    "optimizer": Constant(1.0, 0.0, "factor on 30 bytes of memory traffic per parameter"),
    "step": Constant(47e-3, 0.5, "seconds per step: host, loss, logging"),
    "growth": Constant(0.0046, 1.0, "growth of the time with each doubling of the nodes"),
}


def starts() -> dict[str, float]:
    """The medians of the priors."""
    return {name: constant.start for name, constant in CONSTANTS.items()}


def load_fitted() -> dict[str, float]:
    """The constants that the planner uses: fitted and stated ones."""
    return dict(load_record()["constants"])


@cache
def load_record() -> Mapping[str, Any]:
    """The content of :data:`RECORD`: ``constants``; ``errors``, 90th percentiles of the fit by name; ``measured``, the
    number of runs, the most GPUs of one, and the keys of the regimes of dense runs."""
    found: Mapping[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


_TILE_ROWS, _TILE_COLUMNS = 128, 256
_MOST_QUANTIZATION = 4.0
_LEAST_EXPOSED = 0.05  # share of the reduction of gradients that never overlaps: the last bucket
_BACKWARD_SHARE = 0.6  # of a microbatch: the backward pass, behind which gradients are reduced

BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass relative to the forward pass: five products instead of two."""
FP32_SHARE = 1 / 16
"""A product in fp32, without tensor cores, relative to the bf16 peak: 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100
(NVIDIA data sheets)."""
EXPOSED_RING = 0.2
"""Share of the ring of context parallelism that attention does not hide."""


_SHARED_NAMES = {
    ("flash", "blackwell"): "cudnn_blackwell",
    ("cudnn", "ampere"): "flash_ampere",
    ("cudnn", "cpu"): "flash_cpu",
}


def constant_name(operation: str, generation: str) -> str:
    """The constant of products or of an attention kernel on a generation of GPUs."""
    return _SHARED_NAMES.get((operation, generation), f"{operation}_{generation}")


class Machines:
    """The clusters of some runs; arrays ``[runs]``."""

    def __init__(self, clusters: Sequence[Cluster]) -> None:
        def numbers(name: str) -> Array:
            return np.array([float(getattr(cluster, name)) for cluster in clusters])

        self.bf16_flops, self.hbm = numbers("bf16_flops"), numbers("hbm_bytes_per_s")
        self.multiprocessors, self.node_size = numbers("multiprocessors"), numbers("node_size")
        self.link, self.network = numbers("link_bytes_per_s"), numbers("network_bytes_per_s")
        self.host_link, self.host_memory = numbers("host_link_bytes_per_s"), numbers("host_memory_bytes_per_s")
        self.pod_size = np.array([float(cluster.pod_size or np.inf) for cluster in clusters])
        self.oversubscription = numbers("oversubscription")
        names = [cluster.generation for cluster in clusters]
        self.is_gpu = all(name != "cpu" for name in names)
        self._generations = {name: np.array([other == name for other in names]) for name in dict.fromkeys(names)}

    def by_generation(self, constants: Constants, operation: str) -> Array:
        """The constant of an ``operation`` on the GPU of each run."""
        found = (
            np.where(mask, constants[constant_name(operation, name)], 0.0) for name, mask in self._generations.items()
        )
        return np.asarray(sum(found))

    def attention_flops(self, constants: Constants, is_cudnn: Any, seq_length: Any) -> Array:
        """Causal FLOP/s of fused attention in the forward pass."""
        cudnn, flash = (self.by_generation(constants, kernel) for kernel in ("cudnn", "flash"))
        share = np.where(is_cudnn, cudnn, flash) * seq_length / (seq_length + constants["attention_length"])
        return np.asarray(share * self.bf16_flops)


def product_traffic(
    rows: Any, columns: Any, depth: Any, is_fp8: Any, extra_bytes: Any = 0.0, element_bytes: Any = 2
) -> Any:
    """Bytes that a product reads and writes once; its output is not in FP8, and ``extra_bytes`` are on top."""
    # [rows, depth] and [depth, columns] are read, [rows, columns] is written
    element = np.where(is_fp8, 1, element_bytes)
    return (rows + columns) * depth * element + element_bytes * rows * columns + extra_bytes


def product_seconds(
    machines: Machines, c: Constants, rows: Any, columns: Any, depth: Any, traffic: Any, is_fp8: Any, count: Any = 1.0
) -> Array:
    """``count`` products ``[rows, depth] x [depth, columns]`` in one launch, each of which moves ``traffic`` bytes.

    Short inner lengths and a partial last wave of tiles lower the rate; a share of the traffic is not hidden.
    """
    rate = machines.bf16_flops * machines.by_generation(c, "product") * np.where(is_fp8, 2 * c["product_fp8"], 1.0)
    # The tiles of a launch run in waves of one tile for each multiprocessor; a CPU counts as one.
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
    # The slowest of the ring's links sets its rate.
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


def host_optimizer_seconds(machines: Machines, c: Constants, moved: Any, out: Any, back: Any, overlaps: Any) -> Array:
    """An update in host memory that reads and writes ``moved`` bytes there, of gradients of ``out`` bytes, which are
    copied to it, and of weights of ``back`` bytes, which are copied from it, one after the other or at once."""
    update = c["optimizer"] * moved / machines.host_memory
    out, back = out / machines.host_link, back / machines.host_link
    return np.where(overlaps, np.maximum(np.maximum(out, back), update), out + update + back)


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
