"""Memory of the stages of a layout, from the records of its units: what the dry run would measure, in a fraction of its
time.

The sum of the state (weights, gradients, optimizer, and what gathers and reductions allocate, by sharding strategy), of
the activations of the live microbatches, and of the pass that runs, at the moments of the schedule that can be the
peak. A test compares it with the dry run, which stays the judge: this sum only selects layouts.

Not counted: --cpu-offloading-num-layers, and working memory of --optimizer muon.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatron.config.dry_run import ALLOWANCE
from megatron.config.run import RunConfig
from megatron.core.data_parallel.buffer import BufferLayout, plan_buffer
from megatron.core.precision import number_formats
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.rehearsal.unit import UnitRecord
from megatron.planner.search.layout import Layout
from megatron.schedules.catalog import SCHEDULES, placement_of
from megatron.schedules.schedule import Action, Kind, Placement, Shape
from megatron.training.initialize import rank_grid

KINDS: tuple[Kind, ...] = ("F", "B", "W")


@dataclass(frozen=True)
class StageMoments:
    """The different passes of a stage, each with what the stage holds beside it."""

    passes: NDArray[np.int64]
    """``[n]``: the number of the kind in :data:`KINDS`, times the chunks, plus the chunk."""
    held: NDArray[np.int64]
    """``[n, 2 chunks + 1]``: by chunk the other microbatches between forward and backward pass, by chunk those between
    backward pass and weight gradients, and whether the input of the next pass is being received.

    Under 1F1B the second of three stages has these moments of one chunk (``|`` a pass, ``F2`` of microbatch 2)::

        pass         | F0 | F1 | B0 | F2 | B1 | ...
        live beside  | 0  | 1  | 1  | 1  | 1  |
    """


def moments_of(
    schedule: str, stages: int, microbatches: int, chunks: int, stage: int, group_size: int | None = None
) -> StageMoments:
    """The moments of ``stage``, each once."""
    spec = SCHEDULES[schedule]
    size = stages if group_size is None else group_size
    count = microbatches
    if schedule != "gpipe":
        # With so many microbatches a schedule reaches its steady state; as many are beyond whole groups.
        groups, rest = divmod(microbatches, size)
        count = min(groups, max(4, 2 * stages // size + 2, rest + 1)) * size + rest
    actions = list(spec.actions(stage, Shape(stages, count, chunks, size)))
    rows = np.unique(_rows(actions, placement_of(schedule, stages, chunks), stage, spec.splits_backward), axis=0)
    return StageMoments(rows[:, 0], rows[:, 1:])


def _rows(actions: Sequence[Action], placement: Placement, stage: int, splits: bool) -> NDArray[np.int64]:
    """The pass of each action, and what is held beside it, ``[n, 2 chunks + 2]``."""
    chunks = placement.num_chunks
    kinds = np.array([KINDS.index(action.kind) for action in actions])
    numbers = kinds * chunks + np.array([action.chunk for action in actions])
    done = np.cumsum(np.eye(3 * chunks, dtype=np.int64)[numbers], axis=0)  # [n, 3 chunks]: with this action
    forward, backward, weight = done[:, :chunks], done[:, chunks : 2 * chunks], done[:, 2 * chunks :]
    own = np.eye(3 * chunks, dtype=np.int64)[numbers]
    # A backward pass has already taken its microbatch, a forward pass does not hold its own yet.
    live = forward - backward - own[:, :chunks]
    deferred = (backward - weight - own[:, chunks : 2 * chunks]) if splits else np.zeros_like(live)
    # A forward pass receives from the virtual stage before it, a backward pass from the one after it.
    received = np.zeros(3 * chunks, dtype=np.int64)
    for chunk in range(chunks):
        here = placement.virtual_stage(stage, chunk)
        for kind, source in enumerate((here - 1, here + 1)):
            if 0 <= source < placement.num_virtual_stages:
                received[kind * chunks + chunk] = placement.location(source)[0] != stage
    return np.column_stack((numbers, live, deferred, np.append(received[numbers[1:]], 0)))


# --- state -------------------------------------------------------------------------------------------------------


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
    on_device: float = 1.0
    """The share of the optimizer state that is not in host memory."""


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
        lasting += layout.size * formats.weight + gradients * formats.gradient + int(own * state * formats.on_device)
        if splits:
            places = [number for number, _ in owners]
            used = _whole_gradients(layout, places, len(units), shards, 2 if sharding.overlaps else 0)
            for number, more in enumerate(used):
                sums = zip(vars(passes[number]).values(), vars(more).values())
                passes[number] = UnitBuffers(*(one + formats.gradient * elements for one, elements in sums))
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
        state = formats.master + formats.moments * formats.on_device  # master weights are gathered from the device
        lasting += int(min(padded, weight.size) * state) + padded * formats.gradient
        gathered += padded * shards * formats.weight
        gradients += padded * shards * formats.gradient
        part += padded * formats.gradient
    return _ShardedUnit(lasting, gathered, gradients, part)


# --- the sum -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
    """Units of a chunk: what each keeps, and the peaks of the chunk's passes beyond the state and other activations."""

    kept: int
    forward: int
    backward: int
    deferred: int
    """Kept from the backward pass to the pass of the weight gradients."""
    weight_pass: int


@dataclass(frozen=True)
class _Content:
    """The memory of a stage with certain layers, in bytes."""

    lasting: int
    """What is allocated between the passes, without activations."""
    passes: NDArray[np.int64]
    """The peak of each pass (:class:`StageMoments`)."""
    held: NDArray[np.int64]
    """The size of each thing that is held beside a pass."""


class StageMemory:
    """Memory of the layouts of one run. What they share is computed once."""

    def __init__(self, config: RunConfig, records: UnitRecords, given: Collection[str] = ()) -> None:
        self.config, self.records, self.given = config, records, given
        self.moments: dict[Hashable, StageMoments] = {}
        self.states: dict[Hashable, StateMemory] = {}

    def by_stage(self, layout: Layout, num_microbatches: int, units: UnitsOfRun | None = None) -> list[int]:
        """Bytes that each pipeline stage needs, with the allowance. ``units`` are those of ``layout``."""
        if units is None:
            config = layout.apply(self.config, self.given)
            units = UnitsOfRun(self.records, config, rank_grid(config.parallel, layout.num_gpus))
        memory = _LayoutMemory(self, layout, units, num_microbatches)
        return [memory.stage(stage) + ALLOWANCE for stage in range(layout.pp)]


class _LayoutMemory:
    def __init__(self, shared: StageMemory, layout: Layout, units: UnitsOfRun, num_microbatches: int) -> None:
        self.shared, self.layout, self.units, self.num_microbatches = shared, layout, units, num_microbatches
        self.config, self.division = units.config, units.division
        self._contents: dict[tuple[int, ...], _Content] = {}

    def stage(self, stage: int) -> int:
        """Bytes of the stage's peak without the allowance."""
        numbers = self.division.contents[stage]
        if numbers not in self._contents:
            self._contents[numbers] = self._content(numbers)
        schedule, stages, chunks = self.units.schedule, self.layout.pp, self.division.placement.num_chunks
        key = schedule, stages, chunks, self.num_microbatches, stage
        if key not in self.shared.moments:
            group = self.config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
            self.shared.moments[key] = moments_of(schedule, stages, self.num_microbatches, chunks, stage, group)
        content, moments = self._contents[numbers], self.shared.moments[key]
        most = int((content.passes[moments.passes] + moments.held @ content.held).max())
        return content.lasting + most

    def _content(self, numbers: Sequence[int]) -> "_Content":
        """``numbers`` are the virtual stages of the stage."""
        state, shard = self.state(numbers), self.units.ends.shard
        chunks, buffers, lasting = [], iter(state.units), state.lasting + self.units.ends.position_tables
        for number in numbers:
            units = self.units.of_stage(number)
            receives = not self.division.stages[number].has_output_layer
            chunks.append(self.chunk(units, list(islice(buffers, len(units))), held=shard if receives else 0))
            lasting += sum(unit.memory.lasting for unit in units)
        lasting += state.split_backward if self.units.splits_backward else 0
        return _Content(
            lasting=lasting,
            passes=np.array([getattr(one, name) for name in ("forward", "backward", "weight_pass") for one in chunks]),
            held=np.array([*(one.kept for one in chunks), *(one.deferred for one in chunks), shard]),
        )

    def chunk(self, records: Sequence[UnitRecord], buffers: Sequence[UnitBuffers], held: int) -> _Chunk:
        """``held`` is the received gradient, which stays until the end of the backward pass."""
        splits, units = self.units.splits_backward, [record.memory for record in records]
        before = forward = backward = 0
        waiting = all_deferred = sum(unit.deferred for unit in units)
        for number, (unit, buffer) in enumerate(zip(units, buffers)):
            # With a pass for weight gradients all whole gradients are counted in the state.
            own = UnitBuffers() if splits else buffer
            forward = max(forward, before + max(unit.forward + buffer.forward, buffer.start))
            # Backward from the last unit on: this one runs while those in front of it keep `before`, and the weight
            # gradients of those behind it `waiting`.
            is_last = number == len(units) - 1
            waiting -= unit.deferred
            deferred = waiting + before
            early = unit.backward + (0 if is_last else held)
            late = unit.late_backward + held + own.late_backward if unit.late_backward else 0
            backward = max(
                backward,
                deferred + early + max(own.backward, 0 if unit.late_backward else own.late_backward),
                deferred + late,
                deferred + unit.experts_end + held + own.experts_end if own.experts_end else 0,
                deferred + unit.end + held + own.backward_end,
                deferred + unit.kept + held + buffer.start,
            )
            before += unit.kept
        # The pass of the weight gradients has two gathered inputs, [s/cp, b, h].
        gathers = self.config.parallel.sequence_parallel and self.layout.tp > 1
        gathered = 2 * self.layout.tp * self.units.ends.shard if gathers else 0
        return _Chunk(before, forward, backward, all_deferred, all_deferred + gathered)

    def state(self, numbers: Sequence[int]) -> StateMemory:
        layout = self.layout
        key = (
            tuple(self.division.kinds[number] for number in numbers),
            *(layout.tp, layout.cp, layout.dp, layout.ep, layout.etp, layout.sharding, layout.replicas),
            layout.reduces_in_bf16,
        )
        if key not in self.shared.states:
            self.shared.states[key] = self._state(numbers)
        return self.shared.states[key]

    def _state(self, numbers: Sequence[int]) -> StateMemory:
        formats = number_formats(self.config.precision, self.config.optimizer)
        weight, gradient, master = (one.itemsize for one in (formats.weight, formats.gradient, formats.master))
        on_device = 1.0 - self.config.optimizer.offloaded_fraction
        sizes = Formats(weight, gradient, self.units.bytes_of_moments, master, on_device)
        sharding, stages = self._sharding(), [self.division.stages[number] for number in numbers]
        ends = self.units.ends
        # The tables of a tied model, and the embedding of multi-token prediction.
        shared = {info.name for info in ends.embedding.parameters} & {info.name for info in ends.output.parameters}
        has_both = any(one.has_embedding for one in stages) and any(one.has_output_layer for one in stages)
        units: list[list[Weight]] = []
        for number in numbers:
            for record in self.units.of_stage(number):
                # A shared weight on a stage with both ends is one weight, that of the embedding.
                is_twice = record is ends.output and has_both
                units.append(
                    [
                        Weight(rows, prod(others), info.is_expert, not has_both and info.name in shared)
                        for info in record.parameters
                        if not (is_twice and info.name in shared)
                        for rows, *others in (info.local_shape,)
                    ]
                )
        if not self.units.is_fully_sharded:
            return buffered_state(units, sizes, sharding)
        root: list[Weight] = []
        if has_both and not self.config.model.untie_embeddings_and_output_weights:
            root, units[0], units[-1] = [*units[0], *units[-1]], [], []
        return fully_sharded_state(units, root, sizes, sharding)

    def _sharding(self) -> Sharding:
        layout, parallel = self.layout, self.config.parallel
        dense, experts = self.units.shards if layout.sharding != "no_shard" else (1, 1)
        grid = self.units.grid
        copies = {False: grid.cp * grid.dp, True: grid.edp}
        return Sharding(
            dense=dense,
            experts=experts,
            bucket_size=lambda is_expert, size: parallel.bucket_size(copies[is_expert], size),
            shards_gradients=layout.sharding == "optim_grads",
            overlaps=parallel.overlap_grad_reduce,
            prefetches=parallel.overlap_param_gather,
            frees_experts=layout.ep * layout.etp > 1,
            reshards=parallel.torch_fsdp2_reshard_after_forward,
        )
