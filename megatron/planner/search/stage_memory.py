"""Memory of the stages of a layout, from the records of its units: what the dry run would measure, in a fraction of its
time.

The sum of the state, of the activations of the live microbatches, and of the pass that runs, at the moments of the
schedule that can be the peak. A test compares it with the dry run, which stays the judge: this sum only selects
layouts.

Not counted: --cpu-offloading-num-layers, and working memory of --optimizer muon.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatron.config.dry_run import ALLOWANCE
from megatron.config.run import RunConfig
from megatron.core.parameter import ParameterInfo
from megatron.core.precision import number_formats
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.rehearsal.unit import UnitRecord
from megatron.planner.search import stage_memory as state_memory
from megatron.planner.search.layout import Layout
from megatron.planner.search.stage_memory import StateMemory, UnitBuffers, Weight
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

    def stage(self, layout: Layout, stage: int, num_microbatches: int) -> int:
        """Bytes that pipeline stage ``stage`` needs, with the allowance."""
        return _LayoutMemory(self, layout, self._units(layout), num_microbatches).stage(stage) + ALLOWANCE

    def tightest(self, layout: Layout, num_microbatches: int, units: UnitsOfRun | None = None) -> tuple[int, int]:
        """Bytes of the stage that needs the most, with the allowance, and its number. ``units`` are those of
        ``layout``."""
        memory = _LayoutMemory(self, layout, units or self._units(layout), num_microbatches)
        most, stage = max((memory.stage(stage), -stage) for stage in range(layout.pp))
        return most + ALLOWANCE, -stage

    def _units(self, layout: Layout) -> UnitsOfRun:
        config = layout.apply(self.config, self.given)
        return UnitsOfRun(self.records, config, rank_grid(config.parallel, layout.num_gpus))


class _LayoutMemory:
    def __init__(self, shared: StageMemory, layout: Layout, units: UnitsOfRun, num_microbatches: int) -> None:
        self.shared, self.layout, self.units, self.num_microbatches = shared, layout, units, num_microbatches
        self.config, self.division = units.config, units.division
        self._contents: dict[tuple[int, ...], _Content] = {}

    @cached_property
    def formats(self) -> state_memory.Formats:
        formats = number_formats(self.config.precision, self.config.optimizer)
        weight = formats.weight.itemsize
        return state_memory.Formats(
            weight, formats.gradient.itemsize, self.units.bytes_of_moments, formats.master.itemsize
        )

    def moments(self, stage: int) -> StageMoments:
        layout, chunks = self.layout, self.division.placement.num_chunks
        group = self.config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
        key = self.units.schedule, layout.pp, chunks, self.num_microbatches, stage
        if key not in self.shared.moments:
            self.shared.moments[key] = moments_of(
                self.units.schedule, layout.pp, self.num_microbatches, chunks, stage, group
            )
        return self.shared.moments[key]

    def stage(self, stage: int) -> int:
        """Bytes of the stage's peak without the allowance."""
        numbers = self.division.contents[stage]
        if numbers not in self._contents:
            self._contents[numbers] = self._content(numbers)
        content, moments = self._contents[numbers], self.moments(stage)
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
        sharding, stages = self.sharding, [self.division.stages[number] for number in numbers]
        ends = self.units.ends
        tables = {info.name for info in ends.embedding.parameters}
        is_tied = any(info.name in tables for info in ends.output.parameters)
        has_both = any(one.has_embedding for one in stages) and any(one.has_output_layer for one in stages)
        units: list[list[Weight]] = []
        for number in numbers:
            for record in self.units.of_stage(number):
                # A tied weight on a stage with both ends is one weight, that of the embedding.
                is_twice = record is ends.output and is_tied and has_both
                infos = [info for info in record.parameters if not (is_twice and info.is_vocabulary)]
                units.append([_weight(info, is_tied and not has_both) for info in infos])
        if not self.units.is_fully_sharded:
            return state_memory.buffered_state(units, self.formats, sharding)
        root: list[Weight] = []
        if is_tied and has_both:
            root, units[0], units[-1] = [*units[0], *units[-1]], [], []
        return state_memory.fully_sharded_state(units, root, self.formats, sharding)

    @cached_property
    def sharding(self) -> state_memory.Sharding:
        layout, parallel = self.layout, self.config.parallel
        dense, experts = self.units.shards if layout.sharding != "no_shard" else (1, 1)
        grid = self.units.grid
        copies = {False: grid.cp * grid.dp, True: grid.edp}
        return state_memory.Sharding(
            dense=dense,
            experts=experts,
            bucket_size=lambda is_expert, size: parallel.bucket_size(copies[is_expert], size),
            shards_gradients=layout.sharding == "optim_grads",
            overlaps=parallel.overlap_grad_reduce,
            prefetches=parallel.overlap_param_gather,
            frees_experts=layout.ep * layout.etp > 1,
            reshards=parallel.torch_fsdp2_reshard_after_forward,
        )


def _weight(info: ParameterInfo, is_tied: bool) -> Weight:
    rows, *others = info.local_shape
    return Weight(rows, prod(others), info.is_expert, is_tied and info.is_vocabulary)
