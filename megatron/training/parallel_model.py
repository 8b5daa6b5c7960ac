"""What computes on a rank: kernels, its part of the model, data parallelism and the pipeline, as the flags say."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from megatron.config.errors import ConfigError, RankError
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.context_parallel.attention import ContextParallel
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.data_parallel.wrap import shards_weights, wrap_data_parallel
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.kernels.choice import Choice
from megatron.core.kernels.selection import Kernels, Setting, choose_kernels
from megatron.core.model.layer import BuildContext, LocalParts
from megatron.core.model.llama import LlamaModel
from megatron.core.model.pipeline import build_executor, stage_chunks
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.documents import Documents
from megatron.core.ops.fp8 import supports_fp8
from megatron.core.pipeline_parallel.executor import PipelineExecutor, ReadDocuments
from megatron.core.pipeline_parallel.schedule import Schedule
from megatron.core.pipeline_parallel.schedules import build_schedule, placement_of
from megatron.core.precision import number_formats
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.overlap import choose_overlap
from megatron.core.topology import Topology
from megatron.core.transformer_engine.fp8 import TransformerEngineFp8, why_unsupported
from megatron.core.transformer_engine.layers import TransformerEngineParts
from megatron.core.transformer_engine.overlap import shared_buffers
from megatron.core.transformer_engine.package import TransformerEngine, UnavailableError
from megatron.training.data import Vocabulary
from megatron.training.listeners import (
    device_name,
)


def build_kernels(config: RunConfig, topology: Topology, vocabulary: Vocabulary) -> Kernels:
    """What computes each operation on this rank."""
    size = topology.tensor_parallel.size
    model = config.model.resolve(vocabulary.size, size, config.seq_length)
    formats = number_formats(config.precision, config.optimizer)
    setting = Setting(
        topology.device,
        formats.weight,
        formats.gradient,
        AttentionShape(model.num_attention_heads // size, model.num_query_groups // size, model.kv_channels),
        needs_log_sum_exp=needs_log_sum_exp(config, topology),
        attention_backend=config.model.attention_backend,
        engine=find_transformer_engine(config, topology),
    )
    return choose_kernels(config.kernels, setting)


def check_kernels_agree(choices: Sequence[Choice], world: Communicator) -> None:
    """Refuse ranks that differ, by packages, compilers or GPUs: what tensor-parallel ranks each compute, and must
    compute alike, would drift apart."""
    for rank, others in enumerate(world.all_gather_object(choices)):
        for mine, other in zip(choices, others, strict=True):
            if mine.implementation != other.implementation:
                raise ConfigError(
                    f"The {mine.operation} kernel differs among ranks: on rank {world.rank} {mine.implementation} "
                    f"({mine.reason}), on rank {rank} {other.implementation} ({other.reason}): install the same on all "
                    f"hosts, or choose one by --kernel {mine.operation}={mine.implementation}."
                )


def needs_log_sum_exp(config: RunConfig, topology: Topology) -> bool:
    """Whether attention must tell it: where partial results are merged; and where activations go to the host, since the
    one kernel that does not tell keeps a graph of its own, which cannot."""
    return topology.context_parallel.size > 1 or config.activations.cpu_offloading_num_layers > 0


def build_parallel_model(config: RunConfig, topology: Topology, vocabulary: Vocabulary, kernels: Kernels) -> LlamaModel:
    """This rank's part of the model, without initial weights."""
    parallel = build_tensor_parallel(config, topology)
    overlaps = parallel.overlap is not None
    architecture = config.model.resolve(vocabulary.size, parallel.size, config.seq_length)
    dtype = number_formats(config.precision, config.optimizer).weight
    context_parallel = ContextParallel(topology.context_parallel, config.parallel.cp_comm_type)
    # Left to FSDP2, so that whole weights never lie in memory; it cannot do that with tensors that have none at all.
    leaves_memory = topology.has_memory and shards_weights(config.parallel, topology)
    weights_device = torch.device("meta") if leaves_memory else None
    context = BuildContext(
        parallel,
        dtype,
        topology.device,
        kernels.attention,
        kernels=kernels.layers,
        weight_gradient=kernels.weight_gradient,
        context_parallel=context_parallel,
        weights_device=weights_device,
        activations=config.activations,
        parts=LocalParts() if kernels.engine is None else TransformerEngineParts(kernels.engine, overlaps=overlaps),
        fp8=build_fp8(config, topology, kernels),
    )
    layers, stages = architecture.num_layers, topology.grid.pp
    virtual_stages = config.pipeline.virtual_stages(layers, stages)
    schedule, chunks = config.pipeline.schedule(layers, stages), config.pipeline.num_chunks(layers, stages)
    placement = placement_of(schedule, stages, chunks)
    mine = stage_chunks(virtual_stages, placement, topology.pipeline_parallel.rank)
    return LlamaModel(architecture, context, mine)


def build_tensor_parallel(config: RunConfig, topology: Topology) -> TensorParallel:
    """How layers are shared; one rank alone splits and overlaps nothing."""
    ranks = topology.tensor_parallel
    if ranks.size == 1 or not config.parallel.sequence_parallel:
        return TensorParallel(ranks)
    overlap = choose_overlap(ranks, topology.device) if config.parallel.tp_comm_overlap else None
    return TensorParallel(ranks, sequence_parallel=True, overlap=overlap)


def share_buffers(config: RunConfig, topology: Topology, engine: TransformerEngine | None, at_end: ExitStack) -> None:
    """What layers of Transformer Engine overlap with, if they shall, until ``at_end``; by all ranks together."""
    ranks = topology.tensor_parallel
    if engine is None or ranks.size == 1 or not config.parallel.tp_comm_overlap:
        return
    rows = config.micro_batch_size * config.seq_length // topology.grid.cp
    hidden_size = config.model.resolve(1, ranks.size, config.seq_length).hidden_size
    try:
        at_end.enter_context(shared_buffers(engine, config.precision, ranks, rows, hidden_size))
    except UnavailableError as error:
        raise RankError(
            f"--tp-comm-overlap with --transformer-impl transformer_engine needs that package, which on rank "
            f"{topology.rank} {error}: change that, use --transformer-impl local, or remove --tp-comm-overlap."
        ) from error


def find_transformer_engine(config: RunConfig, topology: Topology) -> TransformerEngine | None:
    """Transformer Engine, if ``--transformer-impl`` asks for it."""
    if config.model.transformer_impl == "local":
        return None
    try:
        return TransformerEngine.find(topology.device)
    except UnavailableError as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine needs that package, which {error}: install requirements-cuda.txt "
            "on a machine with a GPU, or use --transformer-impl local."
        ) from error


def build_fp8(config: RunConfig, topology: Topology, kernels: Kernels) -> Fp8Layers | None:
    """What FP8 linear layers share, if ``--fp8-format`` asks for them."""
    if config.precision.fp8_format is None:
        return None
    if kernels.engine is not None:
        reason = why_unsupported(kernels.engine, config.precision)
        if reason is not None:
            raise ConfigError(
                f"--fp8-recipe {config.precision.fp8_recipe} does not run on {device_name(topology.device)} "
                f"({reason}): use another recipe, or remove --fp8-format."
            )
        return TransformerEngineFp8(kernels.engine, config.precision, topology.stage_ranks)
    if not supports_fp8(topology.device):
        raise ConfigError(
            f"--fp8-format {config.precision.fp8_format} needs a GPU with FP8 units (Ada, Hopper or newer), which "
            f"{device_name(topology.device)} is not: remove it."
        )
    # Beside weights that are gathered and freed layer by layer, quantised copies of all would be kept in vain.
    keeps_weights = not shards_weights(config.parallel, topology)
    return Fp8Scaling(config.precision, topology.stage_ranks, topology.device, keeps_weights, kernels.fp8_product)


def build_data_parallel(config: RunConfig, topology: Topology, model: LlamaModel) -> DataParallel:
    """The model under its data-parallel strategy, with its initial weights."""
    data_parallel = wrap_model(config, topology, model)
    data_parallel.initialize(config.training.seed)
    return data_parallel


def wrap_model(config: RunConfig, topology: Topology, model: LlamaModel) -> DataParallel:
    """The model under its data-parallel strategy, its weights without values."""
    return wrap_data_parallel(model, number_formats(config.precision, config.optimizer), topology, config.parallel)


def pipeline_schedule(config: RunConfig, num_layers: int, num_stages: int) -> Callable[[int], Schedule]:
    """Makes the schedule of a number of microbatches."""
    return partial(
        build_schedule,
        config.pipeline.schedule(num_layers, num_stages),
        num_stages,
        num_chunks=config.pipeline.num_chunks(num_layers, num_stages),
        microbatch_group_size=config.pipeline.microbatch_group_size_per_virtual_pipeline_stage,
    )


def build_pipeline(config: RunConfig, topology: Topology, model: LlamaModel) -> PipelineExecutor:
    """What runs this rank's part of the model; with one stage, too."""
    return build_executor(
        model,
        topology,
        pipeline_schedule(config, model.config.num_layers, topology.grid.pp),
        config.seq_length,
        config.micro_batch_size,
        config.pipeline.overlap_p2p_communication,
        read_documents(config),
    )


def read_documents(config: RunConfig) -> ReadDocuments | None:
    """How to read where documents begin; None where that does not matter."""
    if not config.data.marks_documents:
        return None
    return partial(
        Documents, masks_attention=config.data.masks_documents, resets_positions=config.data.reset_position_ids
    )
