"""The measurements of a calibration in their order.

Operations take turns on all ranks, so that a slow moment of the machine hits all of them.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.control import ControlGroup
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.topology import single_process
from megatron.planner.calibration import operations
from megatron.planner.calibration.operations import AttentionShape, CollectiveShape, ProductShape
from megatron.planner.step_time.workload import Attention

Action = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """The seconds of one operation in several turns."""

    median: float
    spread: float
    """Half the distance of the quartiles, relative to the median."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Sample":
        middle = median(seconds)
        if len(seconds) < 2:
            return cls(middle, 0.0)
        first, _, third = quantiles(seconds, n=4)
        return cls(middle, (third - first) / 2 / middle)


@dataclass(frozen=True)
class Ranks:
    """The processes that measure at the same time, as they would train at the same time."""

    rank: int = 0
    world_size: int = 1
    local_size: int = 1
    """Processes of a node."""
    control: ControlGroup | None = None
    """None for one process."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks. Collective."""
        return [value] if self.control is None else self.control.all_gather_object(value)


@dataclass(frozen=True)
class Effort:
    """The number and the length of the turns."""

    turns: int = 7
    warmup: int = 2
    least_seconds: float = 0.01
    """An operation is repeated within a turn until it takes this long."""


def seconds_of(action: Action, device: torch.device, repeats: int) -> float:
    """Seconds of one of ``repeats`` calls; on a GPU between two events, after all earlier work."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            action()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - began) / repeats


def take_turns(
    actions: Sequence[Action], device: torch.device, effort: Effort, ranks: Ranks, advance: Action
) -> list[Sample]:
    """Measure every action once in each turn; ``advance`` is called after each turn of an action."""
    repeats = []
    for action in actions:
        for _ in range(effort.warmup):
            action()
        ranks.gather(None)  # a barrier
        # All ranks repeat a collective equally often.
        slowest = max(ranks.gather(seconds_of(action, device, 1)))
        repeats.append(max(1, int(effort.least_seconds / slowest)))
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(effort.turns):
        for number, action in enumerate(actions):
            ranks.gather(None)
            seconds[number].append(seconds_of(action, device, repeats[number]))
            advance()
    return [Sample.of(one) for one in seconds]


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
        """This plan with sizes that fill a GPU and its links, and one operation in memory."""
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
    """Steps by number of layers, sequences of a microbatch, and microbatches."""


def merge(one: Measured, other: Measured) -> Measured:
    """The means of two measurements, such as one before and one after the runs that they explain."""

    def mean(first: Mapping[Any, Sample], second: Mapping[Any, Sample]) -> dict[Any, Sample]:
        found = {}
        for key, sample in first.items():
            spread = (sample.spread + second[key].spread) / 2
            found[key] = Sample((sample.median + second[key].median) / 2, spread)
        return found

    return replace(
        one,
        products=mean(one.products, other.products),
        attention=mean(one.attention, other.attention),
        copy=mean({"": one.copy}, {"": other.copy})[""],
        collectives=mean(one.collectives, other.collectives),
        steps=mean(one.steps, other.steps),
    )


Progress = Callable[[str], None]
"""Called with what is measured, once for each operation."""


def measure(plan: Plan, ranks: Ranks, progress: Progress) -> Measured:
    """Measure everything; the same on every rank. Collective."""

    def turns(what: str, builders: Sequence[Callable[[], Action]]) -> list[Sample]:
        samples: list[Sample] = []
        for first in range(0, len(builders), plan.together):
            actions = [build() for build in builders[first : first + plan.together]]
            samples += take_turns(actions, plan.device, plan.effort, ranks, lambda: progress(what))
            gc.collect()  # models have reference cycles
        # The median over the ranks.
        of_ranks = ranks.gather([one.median for one in samples])
        return [replace(one, median=median(values)) for one, values in zip(samples, zip(*of_ranks))]

    # Each kind takes its turns apart; `together` bounds how many of a kind are in memory at once.
    model, length, device = plan.model, plan.config.seq_length, plan.device
    products = operations.product_shapes(model, length, plan.batches)
    attention = operations.attention_shapes(model, length, max(plan.batches))
    kernel = choose_attention_kernel("auto", device, plan.dtype)
    steps = list(_steps(plan))
    of_products = turns("products", [partial(operations.product_action, one, plan.dtype, device) for one in products])
    of_attention = turns(
        "attention", [partial(operations.attention_action, one, kernel, plan.dtype, device) for one in attention]
    )
    return Measured(
        dict(zip(products, of_products)),
        dict(zip(attention, of_attention)),
        "cudnn" if "cudnn" in type(kernel).__name__.lower() else "flash",
        turns("copies", [partial(operations.copy_action, plan.copy_bytes, device)])[0],
        _measure_collectives(plan, ranks, partial(turns, "collectives")),
        dict(zip(steps, turns("steps", [partial(_step_action, plan, *one) for one in steps]))),
    )


def number_of_operations(plan: Plan, ranks: Ranks) -> int:
    """The number of times that :func:`measure` calls its progress."""
    groups = operations.groups_of(ranks.world_size, ranks.local_size)
    products = operations.product_shapes(plan.model, plan.config.seq_length, plan.batches)
    collectives = operations.collective_shapes(groups, plan.message_bytes)
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
    config = operations.with_layers(plan.config, layers, batch)
    return operations.build_step(config, single_process(plan.device), plan.vocab_size, num_microbatches)


def _measure_collectives(
    plan: Plan, ranks: Ranks, turns: Callable[[Sequence[Callable[[], Action]]], list[Sample]]
) -> dict[CollectiveShape, Sample]:
    samples: dict[CollectiveShape, Sample] = {}
    for groups in operations.groups_of(ranks.world_size, ranks.local_size):
        members = groups.ranks_of(ranks.rank, ranks.local_size)
        group = Communicator(members, ranks.rank, f"calibration {groups.size}")
        shapes = operations.collective_shapes([groups], plan.message_bytes)
        found = turns([partial(operations.collective_action, shape, group, plan.device) for shape in shapes])
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
    shapes = operations.product_shapes(plan.model, plan.config.seq_length, plan.batches)
    largest = max(shapes, key=lambda one: one.rows * one.columns * one.depth)
    product = partial(operations.product_action, largest, plan.dtype, plan.device)

    def after_product(shape: CollectiveShape) -> Action:
        first, second = product(), operations.collective_action(shape, group, plan.device)
        return lambda: (first(), second())

    # In the same turns: the product alone, then each ring after it.
    of_product, *found = turns([product, *(partial(after_product, shape) for shape in alone)])
    return {
        shape: replace(sample, median=max(sample.median - of_product.median, alone[shape].median))
        for shape, sample in zip(alone, found)
    }
