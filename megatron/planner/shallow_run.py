"""The shallowest run whose launches determine those of a run: one unit of layers of each kind, and at most two stages.

What is linear in layers, stages and microbatches need not be rehearsed in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.architectures.layer_pattern import describe_layers, describe_nope_layers
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.layer_kinds import LayerKind, layer_kinds
from megatron.planner.plan import Run
from megatron.schedules.stages import VirtualStage
from megatron.training.initialize import rank_grid

MICROBATCHES = 3
"""The first and the last microbatch also gather weights or reduce gradients, the one between is every other one."""


@dataclass(frozen=True)
class UnitKind:
    """Layers that run, or run again, as one unit."""

    layers: tuple[LayerKind, ...]
    is_recomputed: bool
    in_bf16: bool = False
    """Whether the layers are excluded from FP8."""
    cp_comm_type: str = ""
    """If layers differ in it."""


@dataclass(frozen=True)
class ShallowRun:
    """A shallow run: every stage has one unit of each of the ``kinds``, in order."""

    run: Run
    kinds: tuple[UnitKind, ...]
    virtual_stages: tuple[tuple[UnitKind, ...], ...]
    """The units of each virtual stage of the whole run."""

    @classmethod
    def of(cls, run: Run) -> "ShallowRun":
        """The shallow run of ``run``; raises :class:`ConfigError` for what cannot be rehearsed like this."""
        stages = virtual_stages(run)
        units = tuple(_units(run, stage) for stage in stages)
        kinds = tuple(sorted({unit for stage in units for unit in stage}, key=_order))
        if any(kind.in_bf16 for kind in kinds) and len({kind.is_recomputed for kind in kinds}) > 1:
            raise ConfigError(
                "--first-last-layers-bf16 with recompute of some layers alone has no priced rehearsal: recompute all "
                "layers or none."
            )
        return cls(_shallow(run, kinds), kinds, units)


def virtual_stages(run: Run) -> tuple[VirtualStage, ...]:
    """The virtual stages of ``run``, in the order of the layers."""
    return tuple(run.config.pipeline.virtual_stages(run.architecture.num_layers, run.grid.pp))


def _order(kind: UnitKind) -> tuple[bool, bool, int, tuple[LayerKind, ...], str]:
    """Recomputed layers and those in bf16 are the first of a chunk; a shorter unit is the last."""
    return not kind.is_recomputed, not kind.in_bf16, -len(kind.layers), kind.layers, kind.cp_comm_type


def _units(run: Run, stage: VirtualStage) -> tuple[UnitKind, ...]:
    config, kinds, count = run.config, layer_kinds(run.architecture), run.architecture.num_layers
    types = config.parallel.cp_comm_type

    def kind(layers: Sequence[int], is_recomputed: bool) -> UnitKind:
        return UnitKind(
            tuple(kinds[layer] for layer in layers),
            is_recomputed,
            any(_is_in_bf16(config, layer, count) for layer in layers),
            types[layers[0]] if len(set(types)) > 1 else "",
        )

    units = config.activations.units(len(stage.layers))
    return tuple(kind(stage.layers[unit.layers.start : unit.layers.stop], unit.is_recomputed) for unit in units)


def _is_in_bf16(config: RunConfig, layer: int, num_layers: int) -> bool:
    precision = config.precision
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return precision.first_last_layers_bf16 and not first <= layer < num_layers - last


def _shallow(run: Run, kinds: Sequence[UnitKind]) -> Run:
    config, stages = run.config, min(run.grid.pp, 2)
    layers = [layer for kind in kinds for layer in kind.layers] * stages
    nope_layers = describe_nope_layers(not layer.has_rope for layer in layers)
    model = replace(config.model, num_layers=len(layers), no_rope_freq=nope_layers)
    if model.num_experts:
        model = replace(model, moe_layer_freq=describe_layers(layer.is_moe for layer in layers))
    activations = replace(config.activations, cpu_offloading_num_layers=0)
    if activations.granularity == "full" and activations.recompute_method != "uniform":
        activations = replace(activations, recompute_num_layers=sum(kind.is_recomputed for kind in kinds))
    precision = config.precision
    if precision.first_last_layers_bf16:
        count = sum(kind.in_bf16 for kind in kinds)
        precision = replace(precision, num_layers_at_start_in_bf16=count, num_layers_at_end_in_bf16=0)
    parallel = replace(config.parallel, pipeline_model_parallel_size=stages)
    if len(set(parallel.cp_comm_type)) > 1:
        types = [kind.cp_comm_type for kind in kinds for _ in kind.layers] * stages
        parallel = replace(parallel, cp_comm_type=tuple(types))
    is_split = stages > 1 and run.schedule(1).splits_backward
    pipeline = type(config.pipeline)(
        pipeline_schedule="zb-h1" if is_split else None,
        overlap_p2p_communication=config.pipeline.overlap_p2p_communication,
    )
    changed = replace(
        config, model=model, activations=activations, precision=precision, parallel=parallel, pipeline=pipeline
    )
    size = run.grid.stage_size * stages
    return replace(run, config=changed, grid=rank_grid(parallel, size))
