"""The measurements of a calibration in their order, and the cluster that follows from them."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.precision import number_formats
from megatron.core.topology import single_process
from megatron.planner.calibration.fit import (
    Fitted,
    fit_attention,
    fit_link,
    fit_products,
    fit_step,
    without_overlap,
)
from megatron.planner.calibration.measure import Action, Effort, Ranks, Sample, take_turns
from megatron.planner.calibration.operations import (
    AttentionShape,
    CollectiveShape,
    ProductShape,
    attention_action,
    attention_shapes,
    build_step,
    collective_action,
    collective_shapes,
    copy_action,
    groups_of,
    planned_step,
    product_action,
    product_shapes,
    with_layers,
)
from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.workload import Attention

ATTENTION_CONSTANTS: Mapping[tuple[str, str], str] = {
    ("flash", "ampere"): "flash_ampere",
    ("flash", "hopper"): "flash_hopper",
    ("flash", "blackwell"): "cudnn_blackwell",
    ("flash", "cpu"): "flash_cpu",
    ("cudnn", "ampere"): "flash_ampere",
    ("cudnn", "hopper"): "cudnn_hopper",
    ("cudnn", "blackwell"): "cudnn_blackwell",
}
"""The constant of a kernel on a generation."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    config: RunConfig
    """Flags of the model; one rank's step must fit with three layers."""
    vocab_size: int
    device: torch.device
    effort: Effort
    batches: Sequence[int] = (1, 4)
    """Sequences of a microbatch."""
    depths: Sequence[int] = (1, 3)
    """Layers of the steps."""
    copy_bytes: int = 2**26
    message_bytes: Sequence[int] = (2**18, 2**20, 2**22, 2**23, 2**24)
    together: int = 1000
    """Operations that exist, and take turns, at the same time."""

    def for_gpus(self) -> "Plan":
        """The same with sizes that fill a GPU and its links, and one operation in memory."""
        sizes = tuple(2**power for power in (20, 22, 24, 26, 28))
        return replace(self, copy_bytes=2**30, message_bytes=sizes, together=1)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.precision.name == "bf16" else torch.float32

    @property
    def model(self) -> TransformerConfig:
        return self.config.model.resolve(self.vocab_size, 1, self.config.seq_length)


@dataclass(frozen=True)
class Measured:
    """The samples of all operations."""

    products: Mapping[ProductShape, Sample]
    attention: Mapping[AttentionShape, Sample]
    attention_kind: Attention
    copy: Sample
    collectives: Mapping[CollectiveShape, Sample]
    steps: Mapping[tuple[int, int, int], Sample]
    """By layers, sequences of a microbatch, and microbatches."""


@dataclass(frozen=True)
class Calibrated:
    """The cluster that the measurements describe."""

    cluster: Cluster
    errors: Mapping[str, Fitted] = field(default_factory=dict)
    """How well the formulas reproduce the measurements, by kind."""


def merge(one: Measured, other: Measured) -> Measured:
    """The means of two measurements, such as one before and one after the runs that they explain."""

    def mean(first: Mapping[Any, Sample], second: Mapping[Any, Sample]) -> dict[Any, Sample]:
        return {key: _mean(sample, second[key]) for key, sample in first.items()}

    return replace(
        one,
        products=mean(one.products, other.products),
        attention=mean(one.attention, other.attention),
        copy=_mean(one.copy, other.copy),
        collectives=mean(one.collectives, other.collectives),
        steps=mean(one.steps, other.steps),
    )


def _mean(one: Sample, other: Sample) -> Sample:
    return Sample((one.median + other.median) / 2, (one.spread + other.spread) / 2)


Progress = Callable[[str, int], None]
"""Called with what is measured, and how many operations that was."""


def measure(plan: Plan, ranks: Ranks, progress: Progress) -> Measured:
    """Measure everything; the same on every rank. Collective."""

    def turns(what: str, builders: Sequence[Callable[[], Action]]) -> list[Sample]:
        samples: list[Sample] = []
        for first in range(0, len(builders), plan.together):
            samples += take_turns(
                [build() for build in builders[first : first + plan.together]],
                plan.device,
                plan.effort,
                barrier=ranks.barrier,
                longest=ranks.longest,
                advance=lambda: progress(what, 1),
            )
            gc.collect()  # models have reference cycles
        return ranks.agree(samples)

    model, length, device = plan.model, plan.config.seq_length, plan.device
    products = product_shapes(model, length, plan.batches)
    attention = attention_shapes(model, length, max(plan.batches))
    kernel = choose_attention_kernel("auto", device, plan.dtype)
    steps = list(_steps(plan))
    of_products = turns("products", [partial(product_action, one, plan.dtype, device) for one in products])
    of_attention = turns("attention", [partial(attention_action, one, kernel, plan.dtype, device) for one in attention])
    return Measured(
        dict(zip(products, of_products)),
        dict(zip(attention, of_attention)),
        "cudnn" if "cudnn" in type(kernel).__name__.lower() else "flash",
        turns("copies", [partial(copy_action, plan.copy_bytes, device)])[0],
        _measure_collectives(plan, ranks, partial(turns, "collectives")),
        dict(zip(steps, turns("steps", [partial(_step_action, plan, *one) for one in steps]))),
    )


def number_of_operations(plan: Plan, ranks: Ranks) -> int:
    """How often :func:`measure` calls its progress."""
    groups = groups_of(ranks.world_size, ranks.local_size)
    products = product_shapes(plan.model, plan.config.seq_length, plan.batches)
    collectives = collective_shapes(groups, plan.message_bytes)
    actions = len(products) + 3 + 1 + len(collectives) + len(list(_steps(plan)))
    if plan.device.type == "cpu":
        actions += sum(shape.kind != "message" for shape in collectives) + len(groups)
    return plan.effort.turns * actions


def _steps(plan: Plan) -> Iterator[tuple[int, int, int]]:
    for depth in plan.depths:
        for batch in plan.batches:
            yield depth, batch, 1
    yield max(plan.depths), max(plan.batches), 2


def _step_action(plan: Plan, layers: int, batch: int, num_microbatches: int) -> Callable[[], None]:
    config = with_layers(plan.config, layers, batch)
    return build_step(config, single_process(plan.device), plan.vocab_size, num_microbatches)


def _measure_collectives(
    plan: Plan, ranks: Ranks, turns: Callable[[Sequence[Callable[[], Action]]], list[Sample]]
) -> dict[CollectiveShape, Sample]:
    samples: dict[CollectiveShape, Sample] = {}
    for groups in groups_of(ranks.world_size, ranks.local_size):
        members = groups.ranks_of(ranks.rank, ranks.local_size)
        group = Communicator(members, ranks.rank, f"calibration {groups.size}")
        shapes = collective_shapes([groups], plan.message_bytes)
        found = turns([partial(collective_action, shape, group, plan.device) for shape in shapes])
        for shape, sample in zip(shapes, found):
            # A message there and back are two.
            samples[shape] = replace(sample, median=sample.median / 2) if shape.kind == "message" else sample
        if plan.device.type == "cpu":
            rings = {shape: samples[shape] for shape in shapes if shape.kind != "message"}
            samples |= _after_a_product(plan, group, rings, turns)
    return samples


def _after_a_product(
    plan: Plan,
    group: Communicator,
    alone: Mapping[CollectiveShape, Sample],
    turns: Callable[[Sequence[Callable[[], Action]]], list[Sample]],
) -> dict[CollectiveShape, Sample]:
    """Ring collectives after a product, as in a step on CPUs: the ranks do not end the product at the same time, and it
    evicts the tensors from the caches. The schedule already has the waits for messages."""
    shapes = product_shapes(plan.model, plan.config.seq_length, plan.batches)
    largest = max(shapes, key=lambda one: one.rows * one.columns * one.depth)
    product = partial(product_action, largest, plan.dtype, plan.device)

    def after_product(shape: CollectiveShape) -> Action:
        first, second = product(), collective_action(shape, group, plan.device)
        return lambda: (first(), second())

    of_product, *found = turns([product, *(partial(after_product, shape) for shape in alone)])
    return {
        shape: replace(sample, median=max(sample.median - of_product.median, alone[shape].median))
        for shape, sample in zip(alone, found)
    }


def calibrated(plan: Plan, measured: Measured, base: Cluster | None, memory_gib: float, ranks: Ranks) -> Calibrated:
    """The cluster of the measurements: ``base`` with its constants replaced, or one of CPUs."""
    cluster = base or _cpu_cluster(plan, measured, memory_gib, ranks.local_size)
    element_bytes = number_formats(plan.config.precision, plan.config.optimizer).weight.itemsize
    fitted = load_fitted() | (without_overlap() if base is None else {})
    name = ATTENTION_CONSTANTS[measured.attention_kind, cluster.generation]
    found = {
        "products": fit_products(
            cluster, fitted, list(measured.products), list(measured.products.values()), element_bytes
        ),
        "attention": fit_attention(
            cluster, fitted, name, measured.attention_kind == "cudnn",
            list(measured.attention), list(measured.attention.values()),
        ),
    }  # fmt: skip
    constants = without_overlap() if base is None else {}
    for one in found.values():
        constants |= one.constants
    cluster, constants, of_links = _with_links(cluster, constants, measured, is_base=base is not None)
    found |= of_links
    steps = [
        planned_step(with_layers(plan.config, layers, batch), 1, plan.vocab_size, microbatches, cluster)
        for layers, batch, microbatches in measured.steps
    ]
    found["steps"] = fit_step(steps, cluster, {**fitted, **constants}, list(measured.steps.values()))
    constants |= found["steps"].constants
    return Calibrated(replace(cluster, constants=constants), found)


def _cpu_cluster(plan: Plan, measured: Measured, memory_gib: float, local_size: int) -> Cluster:
    """Peaks are the largest measured rates; links are replaced by :func:`_with_links` where there are any."""
    flops = max(2.0 * one.rows * one.columns * one.depth / sample.median for one, sample in measured.products.items())
    copy_rate = 2.0 * plan.copy_bytes / measured.copy.median
    return Cluster(
        name="cpu",
        generation="cpu",
        bf16_flops=flops,
        fp8_flops=0.0,
        hbm_bytes_per_s=copy_rate,
        multiprocessors=1,
        memory_gib=memory_gib,
        node_size=local_size,
        link_bytes_per_s=copy_rate,
        network_bytes_per_s=copy_rate,
    )


def _with_links(
    cluster: Cluster, constants: dict[str, float], measured: Measured, is_base: bool
) -> tuple[Cluster, dict[str, float], dict[str, Fitted]]:
    """The cluster with measured rates of its links, or with the shares of its rates that were measured."""
    found: dict[str, Fitted] = {}
    for spans_nodes, link in ((False, "link"), (True, "network")):
        shapes = [one for one in measured.collectives if one.spans_nodes == spans_nodes and one.kind != "message"]
        if not shapes:
            continue
        # On CPUs the latency is mostly the wait for the other ranks: it lowers the rate.
        rate, found[link] = fit_link(shapes, [measured.collectives[one] for one in shapes], with_latency=is_base)
        if is_base:
            constants[link] = rate / getattr(cluster, f"{link}_bytes_per_s")
        else:
            cluster = (
                replace(cluster, network_bytes_per_s=rate) if spans_nodes else replace(cluster, link_bytes_per_s=rate)
            )
            constants |= _exposed_messages(rate, measured, spans_nodes)
    return cluster, constants, found


def _exposed_messages(rate: float, measured: Measured, spans_nodes: bool) -> dict[str, float]:
    """Messages do not overlap on a CPU; their time is relative to the rate of rings."""
    shapes = [one for one in measured.collectives if one.spans_nodes == spans_nodes and one.kind == "message"]
    if not shapes:
        return {}
    of_messages, _ = fit_link(shapes, [measured.collectives[one] for one in shapes], with_latency=True)
    return {"exposed_messages": rate / of_messages, "exposed_interleaved_messages": rate / of_messages}
