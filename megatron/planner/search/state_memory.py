"""Weights, gradients and optimizer state of a rank, and what gathers and reductions allocate, by sharding strategy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Sharding:
    """The division of weights among the ranks that share them."""

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

    frees_experts: bool = False
    """Whether the last weight gradient of experts is computed after their weights are freed, while tokens are sent back
    (fully sharded)."""

    def of(self, is_expert: bool) -> int:
        return self.experts if is_expert else self.dense


@dataclass(frozen=True)
class UnitBuffers:
    """What a unit of a chunk has allocated beside its activations, in bytes."""

    start: int = 0
    """Bytes at its beginning."""
    forward: int = 0
    backward: int = 0
    experts_end: int = 0
    """Bytes when the gradients of its experts are reduced."""
    late_backward: int = 0
    """Bytes in the backward pass after the gradient of its output is freed."""
    backward_end: int = 0
    """Bytes at the end of its backward pass, when gradients are reduced and activations are freed."""

    def plus(self, other: "UnitBuffers", itemsize: int) -> "UnitBuffers":
        """The sum with ``other`` in elements of ``itemsize`` bytes."""
        return UnitBuffers(*(one + itemsize * more for one, more in zip(vars(self).values(), vars(other).values())))


@dataclass(frozen=True)
class StateMemory:
    """Bytes of a rank between the passes, and by unit what passes add. Units are in the order of the model."""

    lasting: int
    units: tuple[UnitBuffers, ...]
    split_backward: int = 0
    """Whole gradients that wait for the weight gradients, where these are a pass of their own."""


def buffered_state(units: Sequence[Sequence[Weight]], formats: Formats, sharding: Sharding) -> StateMemory:
    """Contiguous buffers: no sharding, of the optimizer (ZeRO-1), and of the gradients (ZeRO-2)."""
    # A buffer of dense weights and one of experts, in the order of the backward pass; the shards divide each bucket:
    #   | bucket 0: last layer ... pad | bucket 1: ... pad | ... embedding pad |
    lasting, everything = 0, 0
    num_elements = sum(weight.size for unit in units for weight in unit)
    passes = [UnitBuffers() for _ in units]
    for is_expert in (False, True):
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
        # ZeRO-2 keeps a shard of the gradients between passes; whole ones are allocated bucket by bucket.
        splits = sharding.shards_gradients and shards > 1
        own = _own_elements(layout, shards)
        gradients = layout.size // shards if splits else layout.size
        # Weights in the dtype of the main weights are the main weights.
        state = formats.moments + (formats.master if formats.weight != formats.master else 0)
        lasting += layout.size * formats.weight + gradients * formats.gradient + own * state
        if splits:
            places = [number for number, _ in owners]
            used = _whole_gradients(layout, places, len(units), shards, 2 if sharding.overlaps else 0)
            passes = [one.plus(more, formats.gradient) for one, more in zip(passes, used)]
            everything += layout.size * formats.gradient
    return StateMemory(lasting, tuple(passes), everything)


def _own_elements(layout: BufferLayout, shards: int) -> int:
    """Elements of the first rank, which has no padding unless it has all."""
    used = dict.fromkeys(layout.buckets, 0)
    buckets = iter(layout.buckets)
    bucket = next(buckets)
    for first, stop in layout.parameters:
        while first >= bucket[1]:
            bucket = next(buckets)
        used[bucket] = stop - bucket[0]
    return sum(min((stop - start) // shards, content) for (start, stop), content in used.items())


def _whole_gradients(
    layout: BufferLayout, owners: Sequence[int], num_units: int, shards: int, in_flight: int
) -> list[UnitBuffers]:
    """The most elements of whole gradients and of reductions under way, by unit. At most ``in_flight`` reductions of
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
        found[owner] = UnitBuffers(idle, idle, most, 0, most, most)
    return found


def fully_sharded_state(
    units: Sequence[Sequence[Weight]], root: Sequence[Weight], formats: Formats, sharding: Sharding
) -> StateMemory:
    """Rows of every weight are sharded (FSDP2): a unit is gathered before it runs and reduced after it. ``root`` are
    weights of several units, which are gathered during all passes."""
    dense = [_sharded_unit([one for one in unit if not one.is_expert], formats, sharding) for unit in units]
    experts = [_sharded_unit([one for one in unit if one.is_expert], formats, sharding) for unit in units]
    common = _sharded_unit(root, formats, sharding)
    # Shards of weights, gradients and moments last; weights of several units stay gathered in all passes.
    lasting = sum(one.lasting for one in (*dense, *experts, common)) + common.gathered
    if not sharding.reshards:
        lasting += sum(one.gathered for one in (*dense, *experts))
        dense, experts = ([replace(one, gathered=0) for one in part] for part in (dense, experts))
    # The experts of a unit are reduced before its dense weights.
    parts = {
        (place, is_expert): part.part
        for place, both in enumerate(zip(dense, experts))
        for is_expert, part in enumerate(both)
        if part.part
    }
    under_way = dict(zip(parts, _reductions_before(list(parts.values()), 2 if sharding.overlaps else 0)))
    idle = next(reversed(under_way.values()), 0)
    kept_weights = not sharding.frees_experts
    buffers = []
    for place, (one, inner) in enumerate(zip(dense, experts)):
        # The weights of the next unit are gathered ahead: of the one after it forward, of the one before it backward.
        after = dense[place + 1].gathered if sharding.prefetches and place + 1 < len(units) else 0
        before = dense[place - 1].gathered if sharding.prefetches and place > 0 else 0
        resident = one.gathered + before + common.gradients
        late = resident + under_way.get((place, 0), 0) + one.gradients
        early = resident + under_way.get((place, 1), 0) + inner.gradients if inner.gradients else late
        buffers.append(
            UnitBuffers(
                start=2 * one.gathered + idle,  # gathered, and copied to the weights
                forward=one.gathered + inner.gathered + after + idle,
                backward=early + inner.gathered,
                # Whole gradients, by weight and by rank.
                experts_end=early + inner.gradients + kept_weights * inner.gathered if inner.gradients else 0,
                late_backward=late,
                backward_end=late + one.gradients,
            )
        )
    return StateMemory(lasting, tuple(buffers), sum(one.gradients for one in (*dense, *experts)))


@dataclass(frozen=True)
class _ShardedUnit:
    lasting: int = 0
    gathered: int = 0
    gradients: int = 0
    """Whole gradients."""
    part: int = 0
    """The rank's part of the gradients."""


def _reductions_before(parts: Sequence[int], in_flight: int) -> list[int]:
    """The sizes of the reductions of units whose backward pass was before, by unit, of which ``in_flight`` are under
    way; the last unit follows the first of the microbatch before."""
    count = min(in_flight, len(parts) - 1)
    return [sum(parts[(place + back + 1) % len(parts)] for back in range(count)) for place in range(len(parts))]


def _sharded_unit(unit: Sequence[Weight], formats: Formats, sharding: Sharding) -> _ShardedUnit:
    lasting = gathered = gradients = part = 0
    for weight in unit:
        shards = sharding.of(weight.is_expert)
        padded = -(-weight.rows // shards) * weight.width  # elements of a rank; rows are padded to whole shards
        lasting += min(padded, weight.size) * (formats.master + formats.moments) + padded * formats.gradient
        gathered += padded * shards * formats.weight
        gradients += padded * shards * formats.gradient
        part += padded * formats.gradient
    return _ShardedUnit(lasting, gathered, gradients, part)
