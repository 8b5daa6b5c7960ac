"""Everything that is done to a model on a rank, in one list: :func:`parallelize`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.activations import ActivationConfig
from megatron.config.model import MoEConfig
from megatron.config.run import RunConfig
from megatron.core.activations import HostCopies, LayerGroup, Recomputed, offload, recompute_modules
from megatron.core.auxiliary_losses import AuxiliaryLosses
from megatron.core.context_parallel import ContextParallel
from megatron.core.data_parallel.buffered import shards_weights, wrap_data_parallel
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.device import device_name
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.kernels.selection import Kernels
from megatron.core.models.layer import BuildContext, BuildLayer, LayerProvider, LocalProvider
from megatron.core.models.multi_token_prediction import PredictionDepth, mtp_metric
from megatron.core.models.transformer import TransformerModel
from megatron.core.moe.dispatch import DISPATCHERS, token_dispatcher
from megatron.core.moe.layer import ExpertParallel, ExpertShard
from megatron.core.moe.routing import BalanceRule, ExpertBalance, RoutingRule
from megatron.core.ops.documents import Documents
from megatron.core.ops.fp8 import FP8_CAPABILITY
from megatron.core.parameter import info_of, initialize_parameters
from megatron.core.pipeline_parallel import ActivationFormat, PipelineExecutor, ReadDocuments
from megatron.core.precision import number_formats
from megatron.core.tensor_parallel.collectives import TensorParallel, choose_overlap
from megatron.core.topology import Topology
from megatron.errors import ConfigError
from megatron.schedules.catalog import build_schedule, placement_of
from megatron.schedules.schedule import Placement, Schedule
from megatron.schedules.stages import VirtualStage


@dataclass(frozen=True)
class ParallelModel:
    """The model of a rank, its executor and its data parallelism."""

    model: TransformerModel
    executor: PipelineExecutor
    data_parallel: DataParallel
    """Owns the weights, which are not initialised yet."""


@dataclass(frozen=True)
class OwnLayers:
    """Layers that a program builds in place of :class:`TransformerLayer`."""

    build_layer: BuildLayer
    auxiliary_losses: Sequence[str] = ()
    """The names of the losses that they add."""


def parallelize(
    config: RunConfig, topology: Topology, vocab_size: int, kernels: Kernels, own: OwnLayers | None = None
) -> ParallelModel:
    """Build this rank's part of the model and apply all that the flags request, in this order. Collective.

    1. The layers of this rank's chunks, with FP8 and tensor, context and expert parallelism: :func:`build_context`.
    2. Recompute, CPU offload, and the loss for some tokens at a time: :func:`apply_activation_flags`.
    3. Frozen parameters.
    4. The pipeline's executor.
    5. Data parallelism: gradient buffers, ZeRO or FSDP.
    """
    model = build_parallel_model(config, topology, vocab_size, kernels, own)
    freeze(model, config.training.freeze_parameters, topology)
    documents, data = None, config.data
    if data.marks_documents:
        documents = partial(
            Documents,
            masks_attention=data.masks_documents,
            resets_positions=data.reset_position_ids,
            device=topology.device,
        )
    executor = build_executor(
        model,
        topology,
        pipeline_schedule(config, model.config.num_layers, topology.grid.pp),
        config.seq_length,
        config.micro_batch_size,
        config.pipeline.overlap_p2p_communication,
        documents,
        config.training.z_loss_multiplier,
        config.training.mtp_loss_scaling_factor,
    )
    # Buffers and FSDP replace the memory of the weights, so they come last.
    formats = number_formats(config.precision, config.optimizer)
    data_parallel = wrap_data_parallel(model, formats, topology, config.parallel, model.context.fp8)
    return ParallelModel(model, executor, data_parallel)


def build_parallel_model(
    config: RunConfig, topology: Topology, vocab_size: int, kernels: Kernels, own: OwnLayers | None = None
) -> TransformerModel:
    """This rank's chunks of the model with recompute and offload; weights are not initialised."""
    pipeline, stages = config.pipeline, topology.grid.pp
    architecture = config.model.resolve(vocab_size, topology.tensor_parallel.size, config.seq_length)
    context = build_context(config, architecture, topology, kernels)
    if own is not None:
        losses = AuxiliaryLosses(own.auxiliary_losses)
        context = replace(context, build_layer=own.build_layer, auxiliary_losses=losses)
    layers = architecture.num_layers
    placement = placement_of(pipeline.schedule(layers, stages), stages, pipeline.num_chunks(layers, stages))
    virtual_stages = pipeline.virtual_stages(layers, stages)
    chunks = chunks_of_stage(virtual_stages, placement, topology.pipeline_parallel.rank)
    model = TransformerModel(architecture, context, chunks)
    apply_activation_flags(model, config.activations)
    return model


def build_context(
    config: RunConfig, architecture: TransformerConfig, topology: Topology, kernels: Kernels
) -> BuildContext:
    """The kernels, ranks and dtypes that the layers of a run are built with. Collective: it creates process groups."""
    parallel, ranks = config.parallel, topology.tensor_parallel
    # Tensor parallelism, and the overlap of its collectives with GEMMs.
    has_sequence_parallel, overlap = ranks.size > 1 and parallel.sequence_parallel, None
    if has_sequence_parallel and parallel.tp_comm_overlap:
        if topology.simulated_overlap is not None:
            overlap = topology.simulated_overlap(ranks)
        else:
            overlap = choose_overlap(ranks, topology.control, topology.device)
    tensor_parallel = TensorParallel(ranks, has_sequence_parallel, overlap)
    # Linear layers and the norms before them: our own, or Transformer Engine's.
    provider: LayerProvider = LocalProvider()
    if kernels.engine is not None:
        from megatron.core.backends.transformer_engine import TransformerEngineProvider

        wanted = config.kernels.wanted("weight_gradient")
        is_fused = wanted is None or wanted.implementation == "in_place"
        provider = TransformerEngineProvider(kernels.engine, tensor_parallel.has_overlap, is_fused)
    # FSDP allocates the weights, so that whole weights are never in memory. FSDP2 does not support this with fake
    # tensors (dry run).
    is_fsdp = shards_weights(parallel, topology, bool(config.model.num_experts))
    levels = topology.context_parallel_levels(parallel.hierarchical_context_parallel_sizes)
    return BuildContext(
        tensor_parallel,
        number_formats(config.precision, config.optimizer).weight,
        topology.device,
        kernels.attention,
        kernels=kernels.layers,
        weight_gradient=kernels.weight_gradient,
        context_parallel=ContextParallel(topology.context_parallel, parallel.cp_comm_type, levels),
        # FSDP frees the weights of a layer after use; quantised copies of all weights would take the memory it saves.
        fp8=build_fp8(config, topology, kernels, keeps_weights=not is_fsdp),
        provider=provider,
        weights_device=torch.device("meta") if is_fsdp and topology.has_memory else None,
        experts=build_experts(architecture, config.moe, topology, config.dry_run.dry_run_expert_load),
    )


def build_model(
    architecture: TransformerConfig,
    context: BuildContext,
    seed: int,
    virtual_stages: Sequence[VirtualStage] | None = None,
    activations: ActivationConfig | None = None,
) -> TransformerModel:
    """An initialised model without flags; its weights are the same in every layout."""
    model = TransformerModel(architecture, context, virtual_stages)
    if activations is not None:
        apply_activation_flags(model, activations)
    initialize_parameters(model.parameters(), seed)
    return model


# Steps


def build_experts(
    architecture: TransformerConfig, moe: MoEConfig, topology: Topology, expert_load: float = 1.0
) -> ExpertParallel | None:
    """The objects that MoE layers share; None for a dense model. Collective: it creates process groups.

    ``expert_load`` is the assumed load of this rank's experts in a dry run.
    """
    if architecture.num_experts is None:
        return None
    # Stages without experts create the groups, too.
    dispatcher_type, sequence_ranks = moe.moe_token_dispatcher_type, ("tp", "cp")
    topology.open(*DISPATCHERS[dispatcher_type].groups, sequence_ranks)
    place, grid = topology.coordinates, topology.grid
    shard = ExpertShard(place["ep"], grid.ep, place["etp"], grid.etp)
    routing = RoutingRule.of(architecture)
    balance = ExpertBalance(
        routing,
        BalanceRule.of(moe, architecture),
        [layer for layer, is_moe in enumerate(architecture.moe_layers()) if is_moe],
        topology.communicator(*sequence_ranks),
        topology.world,
        topology.device,
    )
    dispatcher = token_dispatcher(
        dispatcher_type, routing.num_experts, topology, architecture.moe_apply_probs_on_input, expert_load
    )
    return ExpertParallel(
        routing, shard, dispatcher, balance, moe.moe_router_force_load_balancing, moe.moe_shared_expert_overlap
    )


def build_fp8(config: RunConfig, topology: Topology, kernels: Kernels, keeps_weights: bool) -> Fp8Layers | None:
    """The state of all FP8 linear layers; None without ``--fp8-format``."""
    if config.precision.fp8_format is None:
        return None
    if kernels.engine is not None:
        from megatron.core.backends.transformer_engine import TransformerEngineFp8, why_unsupported

        reason = why_unsupported(kernels.engine, config.precision)
        if reason is not None:
            raise ConfigError(
                f"--fp8-recipe {config.precision.fp8_recipe} is not supported on {device_name(topology.device)} "
                f"({reason}): use another recipe, or remove --fp8-format."
            )
        return TransformerEngineFp8(kernels.engine, config.precision, topology.stage_ranks)
    on_gpu = topology.has_memory and topology.device.type != "cpu"
    if on_gpu and torch.cuda.get_device_capability(topology.device) < FP8_CAPABILITY:
        raise ConfigError(
            f"--fp8-format {config.precision.fp8_format} needs a GPU with FP8 units (Ada, Hopper or newer), which "
            f"{device_name(topology.device)} does not have: remove it."
        )
    return Fp8Scaling(config.precision, topology.stage_ranks, topology.device, keeps_weights, kernels.fp8)


def chunks_of_stage(virtual_stages: Sequence[VirtualStage], placement: Placement, stage: int) -> list[VirtualStage]:
    """The virtual stages of the chunks of ``stage``."""
    return [virtual_stages[placement.virtual_stage(stage, chunk)] for chunk in range(placement.num_chunks)]


def apply_activation_flags(model: TransformerModel, activations: ActivationConfig) -> None:
    """Recompute, CPU offload, and the loss for some tokens at a time."""
    parallel, copies = model.context.parallel, None
    shards = parallel.communicator if activations.distribute_saved_activations else None
    if activations.cpu_offloading_num_layers:
        copies = HostCopies.of(model.context.device)
    for chunk in model.transformer_chunks:
        # Selective recompute wraps modules inside each layer, full recompute whole layers, of which several may be one
        # unit that saves its input alone.
        for layer in chunk.layers:
            recompute_modules(layer, activations.modules)
        units = list(activations.units(len(chunk.layers)))
        layers: list[torch.nn.Module] = [
            Recomputed(LayerGroup(chunk.layers[unit.layers.start : unit.layers.stop]), shards)
            if unit.is_recomputed
            else chunk.layers[unit.layers.start]
            for unit in units
        ]
        if copies is not None:
            # The first layers of each chunk. The saved input of a recomputed unit counts as its first layer.
            count = sum(unit.is_offloaded for unit in units)
            after = layers[count] if count < len(layers) else chunk.output_layer
            layers[:count] = offload(layers[:count], after, copies)
        chunk.layers = torch.nn.ModuleList(layers)
    apply_to_output_layer(model, activations)


def apply_to_output_layer(model: TransformerModel, activations: ActivationConfig) -> None:
    """The loss for some tokens at a time, and recompute in the layers of multi-token prediction."""
    if model.output_layer is not None:
        model.output_layer.loss_chunk_size = activations.loss_chunk_size
    shards = model.context.parallel.communicator if activations.distribute_saved_activations else None
    for depth in [] if model.future is None else model.future.depths:
        assert isinstance(depth, PredictionDepth)
        recompute_modules(depth.layer, activations.modules)
        if activations.granularity == "full":
            depth.layer = Recomputed(depth.layer, shards)


def freeze(model: TransformerModel, patterns: Sequence[str], topology: Topology) -> None:
    """Freeze the parameters whose global name fits one of ``patterns`` (those of a shell): they have no gradient, no
    optimizer state and no part in the norm. Collective; raises :class:`ConfigError` on all ranks if a pattern fits no
    parameter of the model, or if nothing is left to train."""
    if not patterns:
        return
    used: set[str] = set()
    for parameter in model.parameters():
        fitting = {pattern for pattern in patterns if fnmatchcase(info_of(parameter).name, pattern)}
        parameter.requires_grad_(parameter.requires_grad and not fitting)
        used |= fitting
    if not topology.has_memory:
        return  # one simulated rank has not the names of other ranks' layers
    found = topology.control.all_gather_object((used, any(one.requires_grad for one in model.parameters())))
    unused = set(patterns).difference(*(patterns_of_rank for patterns_of_rank, _ in found))
    if unused:
        raise ConfigError(
            f"--freeze-parameters {' '.join(sorted(unused))} fits no parameter of the model: names are those of "
            "checkpoints, such as layers.0.mlp.linear_fc1.weight (tools/inspect_checkpoint.py lists them)."
        )
    if not any(is_trained for _, is_trained in found):
        raise ConfigError("--freeze-parameters leaves no parameter to train: use fewer patterns.")


def pipeline_schedule(config: RunConfig, num_layers: int, num_stages: int) -> Callable[[int], Schedule]:
    """A function from the number of microbatches to the schedule."""
    return partial(
        build_schedule,
        config.pipeline.schedule(num_layers, num_stages),
        num_stages,
        num_chunks=config.pipeline.num_chunks(num_layers, num_stages),
        microbatch_group_size=config.pipeline.microbatch_group_size_per_virtual_pipeline_stage,
    )


def build_executor(
    model: TransformerModel,
    topology: Topology,
    schedule: Callable[[int], Schedule],
    seq_length: int,
    micro_batch_size: int,
    overlap: bool = True,
    documents: ReadDocuments | None = None,
    z_loss_multiplier: float | None = None,
    mtp_loss_scaling_factor: float = 0.1,
) -> PipelineExecutor:
    """The executor of this rank's chunks. Collective over the pipeline: it creates process groups."""
    auxiliary_losses, depths = model.context.auxiliary_losses, model.config.mtp_num_layers
    if model.output_layer is not None:
        model.output_layer.has_z_loss = z_loss_multiplier is not None
    if z_loss_multiplier is not None:
        auxiliary_losses.names.append("lm_z_loss")
    if depths:
        auxiliary_losses.names += map(mtp_metric, range(depths))
        topology.open(("cp", "dp"))
    if model.future is not None:
        model.future.scaling_factor, model.future.ranks = mtp_loss_scaling_factor, topology.communicator("cp", "dp")
    return PipelineExecutor(
        model.transformer_chunks,
        None if model.output_layer is None else model.output_layer.token_losses,
        topology.pipeline_parallel.rank,
        schedule,
        topology.pipeline_channel,
        activation_format(model, seq_length, micro_batch_size),
        model.context.weight_gradients,
        overlap,
        documents,
        chunks_loss=model.output_layer is not None and model.output_layer.loss_chunk_size is not None,
        z_loss_multiplier=z_loss_multiplier,
        auxiliary_losses=auxiliary_losses,
        future=model.future,
    )


def activation_format(model: TransformerModel, seq_length: int, micro_batch_size: int) -> ActivationFormat:
    """The activations that stages send: ``[s/(cp tp), b, h]`` under sequence parallelism, else ``[s/cp, b, h]``."""
    context = model.context
    length = seq_length // context.context_parallel.split.size // context.parallel.sequence_parts
    return ActivationFormat((length, micro_batch_size, model.config.hidden_size), context.dtype, context.device)
