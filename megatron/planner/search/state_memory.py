"""Weights, gradients and optimizer state of a rank, and what gathers and reductions allocate, by sharding strategy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.data_parallel.buffer import BufferLayout, plan_buffer


@dataclass(frozen=True)
class Weight:
    """A parameter of a rank."""

    rows: int
    width: int = 1
    is_expert: bool = False
    is_tied: bool = False
    """Whether the stages at both ends of the model hold it."""

    @property
    def size(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class Formats:
    """Bytes of an element."""

    weight: int
    gradient: int
    moments: int
    """All moments together."""
    master: int = 4

    @property
    def has_master_weights(self) -> bool:
        return self.weight != self.master


@dataclass(frozen=True)
class Sharding:
    """How the ranks with the same weights divide them."""

    dense: int
    """Ranks that divide a dense weight."""
    experts: int
    bucket_size: Callable[[bool, int], int | None]
    """Elements of a bucket of dense or (True) experts' weights, given the elements of the rank."""
    shards_gradients: bool
    overlaps: bool
    """Whether reductions overlap with the backward pass."""
    prefetches: bool
    """Whether the weights of the next unit are gathered ahead (fully sharded)."""
    reshards: bool = True
    """Whether gathered weights are freed after the forward pass (fully sharded)."""

    def of(self, is_expert: bool) -> int:
        return self.experts if is_expert else self.dense


@dataclass(frozen=True)
class UnitBuffers:
    """What a unit of a chunk has allocated beside its activations, in bytes."""

    start: int = 0
    """When it begins."""
    forward: int = 0
    backward: int = 0
    backward_end: int = 0
    """At the end of its backward pass, when its gradients are reduced and its activations are freed."""

    def plus(self, other: "UnitBuffers", itemsize: int) -> "UnitBuffers":
        """The sum with ``other`` in elements of ``itemsize`` bytes."""
        return UnitBuffers(
            self.start + other.start * itemsize,
            self.forward + other.forward * itemsize,
            self.backward + other.backward * itemsize,
            self.backward_end + other.backward_end * itemsize,
        )


@dataclass(frozen=True)
class StateMemory:
    """Bytes of a rank between the passes, and by unit what passes add. Units are in the order of the model."""

    lasting: int
    units: tuple[UnitBuffers, ...]
    split_backward: int = 0
    """Whole gradients that wait for the weight gradients, where these are a pass of their own."""


def buffered_state(units: Sequence[Sequence[Weight]], formats: Formats, sharding: Sharding) -> StateMemory:
    """Contiguous buffers: no sharding, of the optimizer (ZeRO-1), and of the gradients (ZeRO-2)."""
    lasting, everything = 0, 0
    num_elements = sum(weight.size for unit in units for weight in unit)
    passes = [UnitBuffers() for _ in units]
    for is_expert in (False, True):
        # The buffer is in the order of the backward pass.
        owners = [
            (number, weight)
            for number, unit in reversed(list(enumerate(units)))
            for weight in reversed(unit)
            if weight.is_expert == is_expert
        ]
        if not owners:
            continue
        shards = sharding.of(is_expert)
        alone = [place for place, (_, weight) in enumerate(owners) if weight.is_tied]
        sizes = [weight.size for _, weight in owners]
        layout = plan_buffer(sizes, shards, sharding.bucket_size(is_expert, num_elements), alone)
        splits = sharding.shards_gradients and shards > 1
        own = _own_elements(layout, shards)
        gradients = layout.size // shards if splits else layout.size
        state = formats.moments + (formats.master if formats.has_master_weights else 0)
        lasting += layout.size * formats.weight + gradients * formats.gradient + own * state
        if splits:
            places = [number for number, _ in owners]
            used = _whole_gradients(layout, places, len(units), shards, 2 if sharding.overlaps else 0)
            passes = [one.plus(more, formats.gradient) for one, more in zip(passes, used)]
            everything += layout.size * formats.gradient
    return StateMemory(lasting, tuple(passes), everything)


def _own_elements(layout: BufferLayout, shards: int) -> int:
    """Elements of the first rank, which has no padding unless it has all."""
    ends = [stop for _, stop in layout.parameters]
    total = 0
    for start, stop in layout.buckets:
        used = max(end for end in ends if start < end <= stop) - start
        total += min((stop - start) // shards, used)
    return total


def _whole_gradients(
    layout: BufferLayout, owners: Sequence[int], num_units: int, shards: int, in_flight: int
) -> list[UnitBuffers]:
    """By unit the most elements of whole gradients and of reductions under way. At most ``in_flight`` reductions of
    earlier buckets, perhaps of the microbatch before, are under way while a bucket is filled."""
    sizes = [stop - start for start, stop in layout.buckets]
    count = min(in_flight, len(sizes) - 1)
    pending = [sum(sizes[place - back - 1] // shards for back in range(count)) for place in range(len(sizes))]
    idle = sum(sizes[-min(in_flight, len(sizes)) :]) // shards if in_flight else 0
    found = [UnitBuffers(forward=idle, start=idle)] * num_units
    place = 0
    for owner, (first, _) in zip(owners, layout.parameters):
        while first >= layout.buckets[place][1]:
            place += 1
        most = max(found[owner].backward, sizes[place] + pending[place])
        found[owner] = UnitBuffers(start=idle, forward=idle, backward=most, backward_end=most)
    return found


def fully_sharded_state(
    units: Sequence[Sequence[Weight]], root: Sequence[Weight], formats: Formats, sharding: Sharding
) -> StateMemory:
    """Rows of every weight are sharded (FSDP2): a unit is gathered before it runs and reduced after it. ``root`` are
    weights of several units, which are gathered during all passes."""
    sizes = [_sharded_unit(unit, formats, sharding) for unit in units]
    common = _sharded_unit(root, formats, sharding)
    lasting = sum(one.lasting for one in (*sizes, common)) + common.gathered
    gathered = [one.gathered for one in sizes]
    pending = _reductions_before([one.part for one in sizes], 2 if sharding.overlaps else 0)
    idle = pending[-1] if pending else 0
    if not sharding.reshards:
        lasting, gathered = lasting + sum(gathered), [0] * len(units)
    ahead = sharding.prefetches
    buffers = tuple(
        UnitBuffers(
            start=2 * size + idle,  # gathered, and copied to the weights
            forward=size + idle + (after if ahead else 0),
            backward=size + reductions + (before if ahead else 0) + one.gradients + common.gradients,
            # The whole gradients, by weight and by rank.
            backward_end=size + reductions + (before if ahead else 0) + 2 * one.gradients + common.gradients,
        )
        for one, size, reductions, after, before in zip(
            sizes, gathered, pending, [*gathered[1:], 0], [0, *gathered[:-1]]
        )
    )
    return StateMemory(lasting, buffers, sum(one.gradients for one in sizes))


def _reductions_before(parts: Sequence[int], in_flight: int) -> list[int]:
    """By unit the sizes of the reductions of units whose backward pass was before, of which ``in_flight`` are under
    way; the last unit follows the first of the microbatch before."""
    count = min(in_flight, len(parts) - 1)
    return [sum(parts[(place + back + 1) % len(parts)] for back in range(count)) for place in range(len(parts))]


@dataclass(frozen=True)
class _ShardedUnit:
    lasting: int = 0
    gathered: int = 0
    gradients: int = 0
    """Whole."""
    part: int = 0
    """The rank's part of the gradients."""


def _sharded_unit(unit: Sequence[Weight], formats: Formats, sharding: Sharding) -> _ShardedUnit:
    lasting = gathered = gradients = part = 0
    for weight in unit:
        shards = sharding.of(weight.is_expert)
        padded = -(-weight.rows // shards) * weight.width
        lasting += min(padded, weight.size) * (formats.master + formats.moments) + padded * formats.gradient
        gathered += padded * shards * formats.weight
        gradients += padded * shards * formats.gradient
        part += padded * formats.gradient
    return _ShardedUnit(lasting, gathered, gradients, part)
