"""The units of runs by virtual stage. A unit that many runs have is recorded once for all of them."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import call
from typing import Any

import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.topology import RankGrid
from megatron.planner.rehearsal.unit import GPU, Ends, UnitRecord, UnitRehearsals
from megatron.planner.simulated_rank import with_local_layers
from megatron.planner.step_time.workload import Attention
from megatron.schedules.catalog import SCHEDULES, placement_of
from megatron.schedules.schedule import Placement
from megatron.schedules.stages import VirtualStage


@dataclass(frozen=True, order=True)
class LayerKind:
    is_moe: bool
    has_rope: bool = True
    """Whether the layer has rotary position embedding; only these layers have --qk-l2-norm and --attention-chunk-size,
    and only the others --attention-temperature-tuning."""
    has_window: bool = False
    """Whether attention has the window of --window-size."""


Map = Callable[[Callable[..., Any], Iterable[Any]], Iterator[Any]]
"""Applies a function to one sequence, in order, as ``map`` does."""


@dataclass(frozen=True)
class Unit:
    """Layers that run, or run again, as one unit."""

    layers: tuple[int, ...]
    """Numbers of the layers in the model."""
    is_recomputed: bool
    kind: Hashable
    """Equal for units with equal weights, operators and memory."""


@dataclass(frozen=True)
class Division:
    """The virtual stages of a pipeline with their units."""

    stages: tuple[VirtualStage, ...]
    units: tuple[tuple[Unit, ...], ...]
    """The units of each virtual stage, without the ends of the model."""
    placement: Placement
    kinds: tuple[Hashable, ...]
    """What each virtual stage consists of; equal for stages with equal units and ends."""
    like: tuple[int, ...]
    """The first virtual stage of the same kind as each virtual stage."""
    by_stage: tuple[tuple[int, ...], ...]
    """The virtual stages of each pipeline stage, by chunk."""

    @cached_property
    def different_units(self) -> tuple[Unit, ...]:
        """A unit of each kind."""
        return tuple({unit.kind: unit for units in self.units for unit in units}.values())

    @cached_property
    def contents(self) -> tuple[tuple[int, ...], ...]:
        """What :attr:`like` has for the chunks of each pipeline stage: stages with equal contents have equal units."""
        return tuple(tuple(self.like[number] for number in numbers) for numbers in self.by_stage)


def layer_kinds_of(architecture: TransformerConfig) -> list[LayerKind]:
    """The kind of every layer."""
    has_window = [window is not None for window in architecture.windows()]
    return list(map(LayerKind, architecture.moe_layers(), architecture.rope_layers(), has_window))


def divide(config: RunConfig, architecture: TransformerConfig, num_stages: int) -> Division:
    """The virtual stages of a run on ``num_stages`` pipeline stages."""
    pipeline, precision, types = config.pipeline, config.precision, config.parallel.cp_comm_type
    count, layer_kinds = architecture.num_layers, layer_kinds_of(architecture)
    # Layers differ by their number only under --first-last-layers-bf16 and with several types of context parallelism.
    in_fp8 = range(precision.num_layers_at_start_in_bf16, count - precision.num_layers_at_end_in_bf16)

    def kind(layer: int) -> Hashable:
        is_in_bf16 = precision.first_last_layers_bf16 and layer not in in_fp8
        return layer_kinds[layer], is_in_bf16, types[layer] if len(set(types)) > 1 else ""

    def units(stage: VirtualStage) -> Iterator[Unit]:
        for unit in config.activations.units(len(stage.layers)):
            layers = tuple(stage.layers[place] for place in unit.layers)
            yield Unit(layers, unit.is_recomputed, (unit.is_recomputed, *map(kind, layers)))

    stages = pipeline.virtual_stages(count, num_stages)
    schedule = pipeline.schedule(count, num_stages) if num_stages > 1 else "1f1b"
    placement = placement_of(schedule, num_stages, pipeline.num_chunks(count, num_stages))
    of_stages = tuple(tuple(units(stage)) for stage in stages)
    kinds = tuple(
        (tuple(unit.kind for unit in each), one.has_embedding, one.has_output_layer)
        for each, one in zip(of_stages, stages)
    )
    by_stage = tuple(
        tuple(placement.virtual_stage(stage, chunk) for chunk in range(placement.num_chunks))
        for stage in range(num_stages)
    )
    return Division(tuple(stages), of_stages, placement, kinds, tuple(map(kinds.index, kinds)), by_stage)


Rehearsal = Callable[[], UnitRecord | Ends]
"""Rehearses a unit, or the ends of the model."""


class UnitRecords:
    """Records of the units of runs that differ in their layout alone (:class:`~megatron.planner.search.layout.Layout`).

    ``attention`` is the kernel that the runs choose on ``device``, which this machine may not have.
    """

    def __init__(self, vocab_size: int, attention: Attention = "cudnn", device: torch.device = GPU) -> None:
        self.vocab_size, self._attention, self.device = vocab_size, attention, device
        self._records: dict[Hashable, UnitRecord | Ends] = {}
        self._divisions: dict[Hashable, Division] = {}

    def rehearse(self, runs: Iterable["UnitsOfRun"], map_in_parallel: Map = map) -> None:
        """Rehearse every unit of ``runs`` that has no record yet."""
        wanted: dict[Hashable, Rehearsal] = {}
        for run in runs:
            units = [((unit.kind, run.key), unit) for unit in run.division.different_units]
            # None stands for the ends of the model.
            for key, unit in ((run.ends_key, None), *units):
                if key not in self._records and key not in wanted:
                    wanted[key] = run.rehearsal(unit)
        self._records.update(zip(wanted, map_in_parallel(call, wanted.values())))

    def record(self, key: Hashable, prepare: Callable[[], Rehearsal]) -> UnitRecord | Ends:
        """The record of a ``key``, of the rehearsal that ``prepare`` returns if there is none."""
        if key not in self._records:
            self._records[key] = prepare()()
        return self._records[key]

    def division(self, config: RunConfig, num_stages: int) -> Division:
        """The virtual stages of ``config`` on ``num_stages`` pipeline stages."""
        key = num_stages, config.pipeline, config.activations
        if key not in self._divisions:
            architecture = config.model.resolve(self.vocab_size, 1, config.seq_length)
            self._divisions[key] = divide(config, architecture, num_stages)
        return self._divisions[key]

    def with_attention_kernel(self, config: RunConfig) -> RunConfig:
        """``config`` with the attention that it chooses on GPUs. Over packed sequences that is a kernel that takes all
        of them in one call, as FlashAttention does."""
        kernels = config.kernels
        is_half = config.precision.bf16 or config.precision.fp16
        if self.device.type == "cpu" or kernels.wanted("attention") is not None or not is_half:
            return config
        fused = "flash" if config.masks_attention or config.model.window_size is not None else "cudnn"
        kernel = {"cudnn": fused, "flash": "flash", "unfused": "reference"}[self._attention]
        return replace(config, kernels=replace(kernels, kernel=(*kernels.kernel, f"attention={kernel}")))


class UnitsOfRun:
    def __init__(self, records: UnitRecords, config: RunConfig, grid: RankGrid) -> None:
        self.records, self.config, self.grid = records, config, grid
        self._found: dict[Hashable, UnitRecord] = {}

    @cached_property
    def division(self) -> Division:
        return self.records.division(self.config, self.grid.pp)

    @cached_property
    def schedule(self) -> str:
        num_layers = sum(len(stage.layers) for stage in self.division.stages)
        return self.config.pipeline.schedule(num_layers, self.grid.pp) if self.grid.pp > 1 else "1f1b"

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients have passes of their own."""
        return SCHEDULES[self.schedule].splits_backward

    @property
    def shards(self) -> tuple[int, int]:
        """Ranks that divide a parameter outside of experts, and one of experts, if the strategy shards at all."""
        replicas = self.grid.dp_replicas
        of_experts = self.grid.edp if self.config.model.num_experts else 1
        return self.grid.cp * self.grid.dp // replicas, max(1, of_experts // replicas)

    @property
    def is_fully_sharded(self) -> bool:
        return self.config.parallel.sharding_strategy == "optim_grads_params" and max(self.shards) > 1

    @property
    def bytes_of_moments(self) -> int:
        """Bytes that the optimizer keeps for an element besides its main weight: moments, and an average of weights."""
        optimizer, is_fp64 = self.config.optimizer, self.config.precision.fp64
        average = 0 if optimizer.ema_decay is None else 8 if is_fp64 else 4
        if optimizer.optimizer == "sgd":
            return 4 + average
        if not optimizer.use_precision_aware_optimizer:
            return (16 if is_fp64 else 8) + average
        formats = optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype
        return average + sum({"fp32": 4, "bf16": 2}[name] for name in formats)

    @cached_property
    def ends(self) -> Ends:
        record = self.records.record(self.ends_key, partial(self.rehearsal, None))
        assert isinstance(record, Ends)
        return record

    @cached_property
    def ends_key(self) -> tuple[int | bool, ...]:
        """What the records of the ends depend on."""
        parallel, grid = self.config.parallel, self.grid
        of_tensor_parallel = grid.tp, parallel.sequence_parallel, parallel.tp_comm_overlap
        # With another order of the axes context-parallel ranks are further apart the larger the other sizes.
        is_usual = grid.cp == 1 or grid.order.startswith("tp-cp")
        of_context_parallel = (grid.cp,) if is_usual else (grid.cp, grid.pp, grid.dp)
        in_bf16 = self.config.precision.grad_reduce_in_bf16
        return *of_tensor_parallel, *of_context_parallel, self.config.micro_batch_size, in_bf16

    @cached_property
    def key(self) -> Hashable:
        """What the records of all units between the ends depend on besides their kind."""
        config, grid = self.config, self.grid
        # FSDP keeps no quantised weights.
        keeps_weights = config.precision.fp8_format is None or not self.is_fully_sharded
        *sizes, in_bf16 = self.ends_key
        in_bf16 = in_bf16 and not self._is_derived
        of_layers = config.activations.modules, grid.ep, grid.etp, self.splits_backward, keeps_weights
        return *sizes, in_bf16, *of_layers

    def unit(self, unit: Unit) -> UnitRecord:
        """The record of a unit between the ends."""
        if unit.kind not in self._found:
            record = self.records.record((unit.kind, self.key), partial(self.rehearsal, unit))
            assert isinstance(record, UnitRecord)
            self._found[unit.kind] = record.with_gradients_in_bf16() if self._is_derived else record
        return self._found[unit.kind]

    @property
    def _is_derived(self) -> bool:
        """Whether units between the ends are rehearsed with main gradients in fp32, which then become narrower: where
        products are added to both in place. In FP8 they are added after the product."""
        precision, wanted = self.config.precision, self.config.kernels.wanted("weight_gradient")
        is_separate = wanted is not None and wanted.implementation == "separate"
        return precision.bf16 and precision.grad_reduce_in_bf16 and precision.fp8_format is None and not is_separate

    def rehearsal(self, unit: Unit | None) -> Rehearsal:
        """The rehearsal of a unit; None for the ends."""
        config = self.config
        if unit is not None and self._is_derived:
            config = replace(config, precision=replace(config.precision, grad_reduce_in_bf16=False))
        records = self.records
        config = records.with_attention_kernel(with_local_layers(config))
        rehearsals = UnitRehearsals(config, self.grid, records.vocab_size, self.splits_backward, records.device)
        return rehearsals.ends if unit is None else partial(rehearsals.layers, unit.layers, unit.is_recomputed)

    def of_stage(self, number: int) -> list[UnitRecord]:
        """The records of all units of a virtual stage, in order."""
        stage, ends = self.division.stages[number], self.ends
        found = [ends.embedding] if stage.has_embedding else []
        found += map(self.unit, self.division.units[number])
        return found + ([ends.output] if stage.has_output_layer else [])
