"""Memory of a pipeline stage in closed form: what the dry run would measure, in a fraction of its time.

The sum of the state, of the activations of the live microbatches, and of the pass that runs, at the moments of the
schedule that can be the peak. A test compares it with the dry run, which stays the judge: this formula only selects
layouts.

Not counted: --cpu-offloading-num-layers, --loss-chunk-size, the scores of the reference attention kernel, layers in
bf16 beside --fp8-format, working memory of --optimizer muon, and kernels that --kernel forces.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.dry_run import ALLOWANCE
from megatron.config.run import RunConfig
from megatron.core.models.parallelize import chunks_of_stage
from megatron.core.precision import number_formats
from megatron.planner.layer_kinds import LayerKind, layer_kinds
from megatron.planner.search.layer_memory import UnitMemory
from megatron.planner.search.layout import Layout
from megatron.planner.search.schedule_moments import StageMoments, moments_of
from megatron.planner.search.state_memory import (
    Formats,
    Sharding,
    StateMemory,
    UnitBuffers,
    Weight,
    buffered_state,
    fully_sharded_state,
)
from megatron.planner.search.unit_memory import UnitRules
from megatron.schedules.registry import SCHEDULES, placement_of
from megatron.schedules.stages import VirtualStage


@dataclass(frozen=True)
class _Chunk:
    """Units of a chunk: what each keeps, and the peaks of the chunk's passes beyond the state and other activations."""

    kept: int
    forward: int
    backward: int
    deferred: int
    """From the backward pass to the pass of the weight gradients."""
    weight_pass: int


@dataclass(frozen=True)
class _Stages:
    chunks: list[list[VirtualStage]]
    """Of each stage."""
    like: list[int]
    """The first stage with the same weights and units as each stage."""


@dataclass(frozen=True)
class _Content:
    """The memory of a stage with certain layers, in bytes."""

    lasting: int
    """Between the passes, without activations."""
    passes: NDArray[np.int64]
    """Of each pass (:class:`StageMoments`)."""
    held: NDArray[np.int64]
    """Of each thing that is held beside a pass."""


class MemoryFormula:
    """The formula for the layouts of one run; it remembers what they share."""

    def __init__(self, config: RunConfig, architecture: TransformerConfig, given: Collection[str] = ()) -> None:
        self.config, self.architecture, self.given = config, architecture, given
        self.kinds = layer_kinds(architecture)
        self._stages: dict[Hashable, _Stages] = {}
        self._moments: dict[Hashable, StageMoments] = {}
        self._units: dict[Hashable, UnitMemory] = {}
        self._states: dict[Hashable, StateMemory] = {}

    def stage(self, layout: Layout, stage: int, num_microbatches: int) -> int:
        """Bytes that pipeline stage ``stage`` needs, with the allowance."""
        return _LayoutMemory(self, layout, num_microbatches).stage(stage) + ALLOWANCE

    def tightest(self, layout: Layout, num_microbatches: int) -> tuple[int, int]:
        """Bytes of the stage that needs the most, with the allowance, and its number."""
        memory = _LayoutMemory(self, layout, num_microbatches)
        most, stage = max((memory.stage(stage), -stage) for stage in range(layout.pp))
        return most + ALLOWANCE, -stage


def stage_memory(
    config: RunConfig,
    architecture: TransformerConfig,
    layout: Layout,
    stage: int,
    num_microbatches: int,
    given: Collection[str] = (),
) -> int:
    """Bytes that pipeline stage ``stage`` of ``config`` in ``layout`` needs, with the allowance."""
    return MemoryFormula(config, architecture, given).stage(layout, stage, num_microbatches)


def tightest_memory(
    config: RunConfig,
    architecture: TransformerConfig,
    layout: Layout,
    num_microbatches: int,
    given: Collection[str] = (),
) -> tuple[int, int]:
    """Bytes of the stage that needs the most, with the allowance, and its number. For many layouts of a run use one
    :class:`MemoryFormula`."""
    return MemoryFormula(config, architecture, given).tightest(layout, num_microbatches)


class _LayoutMemory:
    """The formula for one layout."""

    def __init__(self, formula: MemoryFormula, layout: Layout, num_microbatches: int) -> None:
        self.formula, self.layout, self.num_microbatches = formula, layout, num_microbatches
        self.config = layout.apply(formula.config, formula.given)
        self._contents: dict[int, _Content] = {}

    @cached_property
    def formats(self) -> Formats:
        formats = number_formats(self.config.precision, self.config.optimizer)
        weight = formats.weight.itemsize
        return Formats(weight, formats.gradient.itemsize, _bytes_of_moments(self.config), formats.master.itemsize)

    @cached_property
    def splits_backward(self) -> bool:
        return self.layout.pp > 1 and SCHEDULES[self.layout.schedule].splits_backward

    @cached_property
    def rules(self) -> UnitRules:
        model, tp = self.formula.architecture, self.layout.tp
        unit = self.config.model.make_vocab_size_divisible_by * tp
        model = replace(model, padded_vocab_size=-(-model.vocab_size // unit) * unit)
        return UnitRules(model, self.config, self.formats, self.splits_backward)

    @cached_property
    def stages(self) -> "_Stages":
        layout, layers = self.layout, self.formula.architecture.num_layers
        key = layout.pp, layout.vp, layout.schedule, layout.counts_ends
        if key not in self.formula._stages:
            chunks = list(self.config.pipeline.virtual_stages(layers, layout.pp))
            schedule = layout.schedule if layout.pp > 1 else "1f1b"
            placement = placement_of(schedule, layout.pp, self.config.pipeline.num_chunks(layers, layout.pp))
            of_stages = [chunks_of_stage(chunks, placement, stage) for stage in range(layout.pp)]
            first_of: dict[Hashable, int] = {}
            like = [first_of.setdefault(self.content(one), stage) for stage, one in enumerate(of_stages)]
            self.formula._stages[key] = _Stages(of_stages, like)
        return self.formula._stages[key]

    def moments(self, stage: int) -> StageMoments:
        layout = self.layout
        schedule = layout.schedule if layout.pp > 1 else "1f1b"
        group = self.config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
        key = schedule, layout.pp, layout.vp, self.num_microbatches, stage
        if key not in self.formula._moments:
            chunks = len(self.stages.chunks[stage])
            self.formula._moments[key] = moments_of(schedule, layout.pp, self.num_microbatches, chunks, stage, group)
        return self.formula._moments[key]

    def stage(self, stage: int) -> int:
        """Bytes of the stage's peak without the allowance."""
        like = self.stages.like[stage]
        if like not in self._contents:
            self._contents[like] = self._content(self.stages.chunks[like])
        content, moments = self._contents[like], self.moments(stage)
        most = int((content.passes[moments.passes] + moments.held @ content.held).max())
        return content.lasting + most

    def _content(self, virtual_stages: Sequence[VirtualStage]) -> "_Content":
        state = self.state(virtual_stages)
        chunks, first = [], 0
        for virtual_stage in virtual_stages:
            units = self.units(virtual_stage)
            buffers = state.units[first : first + len(units)]
            first += len(units)
            receives = not virtual_stage.has_output_layer
            chunks.append(self.chunk(units, buffers, held=self.rules.shard if receives else 0))
        lasting = state.lasting + self.rules.position_tables
        lasting += self.rules.fp8_copies(sum(len(one.layers) for one in virtual_stages))
        lasting += state.split_backward if self.splits_backward else 0
        return _Content(
            lasting=lasting,
            passes=np.array([getattr(one, name) for name in ("forward", "backward", "weight_pass") for one in chunks]),
            held=np.array([*(one.kept for one in chunks), *(one.deferred for one in chunks), self.rules.shard]),
        )

    def content(self, virtual_stages: Sequence[VirtualStage]) -> Hashable:
        """What determines the weights and units of a stage."""
        kinds = self.formula.kinds
        return tuple(
            (tuple(kinds[layer] for layer in one.layers), one.has_embedding, one.has_output_layer)
            for one in virtual_stages
        )

    def chunk(self, units: Sequence[UnitMemory], buffers: Sequence[UnitBuffers], held: int) -> _Chunk:
        """``held`` is the received gradient, which stays until the end of the backward pass."""
        splits, shard = self.splits_backward, self.rules.shard
        before = forward = backward = 0
        for number, (unit, buffer) in enumerate(zip(units, buffers)):
            # With a pass for weight gradients all whole gradients are counted in the state.
            own = UnitBuffers() if splits else buffer
            forward = max(forward, before + max(unit.forward + buffer.forward, buffer.start))
            is_last = number == len(units) - 1
            deferred = sum(one.deferred for one in units[number + 1 :]) + before
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
        waiting = sum(unit.deferred for unit in units)
        gathered = 2 * self.rules._whole if self.rules._whole > shard else 0
        return _Chunk(before, forward, backward, waiting, waiting + gathered)

    def units(self, virtual_stage: VirtualStage) -> list[UnitMemory]:
        found = [self._unit("embedding")] if virtual_stage.has_embedding else []
        for unit in self.config.activations.units(len(virtual_stage.layers)):
            kinds = tuple(self.formula.kinds[virtual_stage.layers[place]] for place in unit.layers)
            found.append(self._unit(kinds, unit.is_recomputed))
        return found + ([self._unit("output")] if virtual_stage.has_output_layer else [])

    def _unit(self, kind: str | tuple[LayerKind, ...], is_recomputed: bool = False) -> UnitMemory:
        layout = self.layout
        key = (
            kind,
            is_recomputed,
            *(layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch_size, layout.modules),
            *(layout.reduces_in_bf16, self.splits_backward),
        )
        found = self.formula._units.get(key)
        if found is None:
            if isinstance(kind, str):
                found = self.rules.embedding() if kind == "embedding" else self.rules.output()
            else:
                found = self.rules.layers(kind, is_recomputed)
            self.formula._units[key] = found
        return found

    def state(self, virtual_stages: Sequence[VirtualStage]) -> StateMemory:
        layout = self.layout
        full = (layout.recompute, layout.recompute_layers) if not layout.modules else None
        key = (
            self.content(virtual_stages),
            full,
            *(layout.tp, layout.cp, layout.dp, layout.ep, layout.etp, layout.sharding, layout.replicas),
            layout.reduces_in_bf16,
        )
        if key not in self.formula._states:
            self.formula._states[key] = self._state(virtual_stages)
        return self.formula._states[key]

    def _state(self, virtual_stages: Sequence[VirtualStage]) -> StateMemory:
        sharding = self.sharding
        is_tied = not self.formula.architecture.untie_embeddings_and_output_weights
        has_both = any(one.has_embedding for one in virtual_stages) and any(
            one.has_output_layer for one in virtual_stages
        )
        is_full = self.layout.sharding == "optim_grads_params" and max(sharding.dense, sharding.experts) > 1
        units = [
            unit
            for one in virtual_stages
            for unit in self._weights(one, is_tied and not has_both, not (is_tied and has_both))
        ]
        if not is_full:
            return buffered_state(units, self.formats, sharding)
        root: list[Weight] = []
        if is_tied and has_both:
            root, units[0], units[-1] = [*units[0], *units[-1]], [], []
        return fully_sharded_state(units, root, self.formats, sharding)

    def _weights(self, one: VirtualStage, is_tied: bool, has_output_weight: bool) -> list[list[Weight]]:
        kinds, rules = self.formula.kinds, self.rules
        found = [rules.embedding_weights(is_tied)] if one.has_embedding else []
        for unit in self.config.activations.units(len(one.layers)):
            is_moe = [kinds[one.layers[place]].is_moe for place in unit.layers]
            found.append([weight for layer in is_moe for weight in rules.layer_weights(layer)])
        if one.has_output_layer:
            found.append(rules.output_weights(is_tied, has_output_weight))
        return found

    @cached_property
    def sharding(self) -> Sharding:
        layout, parallel = self.layout, self.config.parallel
        copies = layout.cp * layout.dp
        of_experts = layout.tp * copies // (layout.ep * layout.etp) if self.formula.architecture.num_experts else 1
        is_sharded = layout.sharding != "no_shard"
        return Sharding(
            dense=copies // layout.replicas if is_sharded else 1,
            experts=of_experts // layout.replicas if is_sharded else 1,
            bucket_size=lambda is_expert, size: parallel.bucket_size(of_experts if is_expert else copies, size),
            shards_gradients=layout.sharding == "optim_grads",
            overlaps=parallel.overlap_grad_reduce,
            prefetches=parallel.overlap_param_gather,
            frees_experts=layout.ep * layout.etp > 1,
            reshards=parallel.torch_fsdp2_reshard_after_forward,
        )


def _bytes_of_moments(config: RunConfig) -> int:
    """Of an element, all moments together, and the moving average of the weights."""
    optimizer = config.optimizer
    average = 0 if optimizer.ema_decay is None else 8 if config.precision.fp64 else 4
    if optimizer.optimizer == "sgd":
        return 4 + average
    if not optimizer.use_precision_aware_optimizer:
        return (8 if not config.precision.fp64 else 16) + average
    return average + sum({"fp32": 4, "bf16": 2}[name] for name in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
