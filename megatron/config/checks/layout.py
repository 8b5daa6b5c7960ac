"""Checks of the parallel layout, that of experts too, against the model and the number of processes."""

import math

from megatron.config.parallel import CONTEXT_PARALLEL_TYPES
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import values_of
from megatron.schedules.catalog import SCHEDULES


def check_tensor_parallel(run: RunConfig, world_size: int) -> None:
    size, model = run.parallel.tensor_model_parallel_size, run.architecture
    divided = values_of(model, "num_attention_heads", "num_query_groups")
    if not all(model.moe_layers()):
        divided |= values_of(model, "ffn_hidden_size")
    for flag, value in divided.items():
        if value % size:
            raise ConfigError(
                f"{flag} {value} is not divisible by --tensor-model-parallel-size {size}: lower "
                f"--tensor-model-parallel-size to a divisor of {value}, or change {flag}."
            )
    if run.parallel.sequence_parallel and run.data.seq_length is not None and run.data.seq_length % size:
        raise ConfigError(
            f"--sequence-parallel needs --seq-length {run.data.seq_length} to be divisible by "
            f"--tensor-model-parallel-size {size}: change one of them."
        )


def check_tensor_parallel_overlap(run: RunConfig, world_size: int) -> None:
    size = run.parallel.tensor_model_parallel_size
    if size > 1 and run.parallel.tp_comm_overlap and not run.parallel.sequence_parallel:
        raise ConfigError(
            f"--tp-comm-overlap with --tensor-model-parallel-size {size} needs --sequence-parallel: add it, or remove "
            "--tp-comm-overlap."
        )


def check_context_parallel(run: RunConfig, world_size: int) -> None:
    parallel, model = run.parallel, run.architecture
    size, tensor_size = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    types = " ".join(parallel.cp_comm_type)
    if len(parallel.cp_comm_type) not in (1, model.num_layers):
        raise ConfigError(
            f"--cp-comm-type {types} has {len(parallel.cp_comm_type)} types for {model.num_layers} layers: use one for "
            "all layers, or one per layer."
        )
    if size == 1:
        return
    length = run.data.seq_length
    # Each rank has two of 2 x size chunks, whose rows --sequence-parallel divides again.
    parts = math.lcm(2 * size, size * tensor_size) if parallel.sequence_parallel else 2 * size
    if length is not None and length % parts:
        by = " and --sequence-parallel" if parallel.sequence_parallel and tensor_size > 1 else ""
        raise ConfigError(
            f"--seq-length {length} is not divisible by {parts}, as --context-parallel-size {size}{by} requires: "
            "change one of them."
        )
    # An all-to-all exchanges a part of the sequence for a part of the heads.
    heads = model.num_query_groups // tensor_size
    for name in dict.fromkeys(parallel.cp_comm_type):
        spec = CONTEXT_PARALLEL_TYPES[name]
        sizes = spec.level_sizes(size, parallel.hierarchical_context_parallel_sizes)
        divided_by = f"--context-parallel-size {size}"
        if len(sizes) > 1:
            divided_by = f"the first of --hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
        if heads % spec.head_divisor(sizes):
            raise ConfigError(
                f"--cp-comm-type {name} needs the {heads} key-value heads of a rank to be divisible by {divided_by}: "
                "use p2p or allgather, or a smaller size."
            )


def check_pipeline(run: RunConfig, world_size: int) -> None:
    run.pipeline.check_stages(run.architecture.num_layers, run.parallel.pipeline_model_parallel_size)


def check_data_parallel(run: RunConfig, world_size: int) -> None:
    data_parallel = run.parallel.data_parallel_size(world_size)
    instances = run.parallel.num_distributed_optimizer_instances
    if run.parallel.sharding_strategy == "no_shard" and instances > 1:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} needs a sharded strategy: add "
            "--use-distributed-optimizer, or remove the flag."
        )
    if data_parallel % instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} does not divide the data-parallel size "
            f"{data_parallel}: use one of its divisors."
        )


def check_fully_sharded(run: RunConfig, world_size: int) -> None:
    parallel = run.parallel
    stages = parallel.pipeline_model_parallel_size
    # FSDP shards over the ranks with the same weights: one rank has nothing to shard.
    copies = run.parallel.data_parallel_size(world_size) * parallel.context_parallel_size
    if run.model.num_experts:
        expert_ranks = parallel.expert_tensor_size * parallel.expert_model_parallel_size
        copies = max(copies, world_size // stages // expert_ranks)
    shards = copies // parallel.num_distributed_optimizer_instances
    if parallel.sharding_strategy != "optim_grads_params" or stages == 1 or shards == 1:
        return
    model = run.architecture
    schedule = run.pipeline.schedule(model.num_layers, stages)
    if SCHEDULES[schedule].placement == "v" and not model.untie_embeddings_and_output_weights:
        raise ConfigError(
            f"--pipeline-schedule {schedule} places a tied embedding in two chunks of the first pipeline rank, which "
            "optim_grads_params does not support (docs/data_parallel.md): use another schedule, another "
            "--data-parallel-sharding-strategy, or --untie-embeddings-and-output-weights."
        )
    if SCHEDULES[schedule].placement == "v" and model.mtp_num_layers:
        raise ConfigError(
            f"--mtp-num-layers {model.mtp_num_layers} with --pipeline-schedule {schedule} uses the embedding in two "
            "chunks of the first pipeline rank, which optim_grads_params does not support (docs/data_parallel.md): use "
            "another schedule, or another --data-parallel-sharding-strategy."
        )


def check_expert_layout(run: RunConfig, world_size: int) -> None:
    parallel, model = run.parallel, run.architecture
    tensor_size, size = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    expert_tensor_size = parallel.expert_tensor_size
    if model.num_experts is None:
        return
    if model.num_experts % size:
        raise ConfigError(
            f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {size}: lower "
            "--expert-model-parallel-size to a divisor."
        )
    by_default = "" if parallel.expert_tensor_parallel_size else " (its default is --tensor-model-parallel-size)"
    assert model.moe_ffn_hidden_size is not None
    if model.moe_ffn_hidden_size % expert_tensor_size:
        raise ConfigError(
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} is not divisible by --expert-tensor-parallel-size "
            f"{expert_tensor_size}{by_default}: use 1 or another divisor."
        )
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % tensor_size:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by --tensor-model-parallel-size "
            f"{tensor_size}: change one of them."
        )
    if tensor_size > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"--num-experts with --tensor-model-parallel-size {tensor_size} needs --sequence-parallel, so that every "
            "rank routes other tokens: add it."
        )
    _check_stage(run, world_size, expert_tensor_size * size, by_default)
    load = run.dry_run.dry_run_expert_load
    if size == 1 and load != 1:
        raise ConfigError(
            f"--dry-run-expert-load {load:g} has no effect with --expert-model-parallel-size 1, where every rank has "
            "all experts: remove it."
        )
    largest = model.largest_expert_load(size)
    if load > max(largest, 1):
        raise ConfigError(
            f"--dry-run-expert-load {load:g} exceeds {largest:g}, the load of a rank whose experts every token chooses "
            f"with --expert-model-parallel-size {size}: lower it."
        )


def _check_stage(run: RunConfig, world_size: int, expert_ranks: int, by_default: str) -> None:
    """The ranks of a stage must be a multiple of the ``expert_ranks`` of one copy of the experts."""
    parallel = run.parallel
    # ranks of a stage = etp x ep x edp, where edp is the number of copies of the experts
    ranks = world_size // parallel.pipeline_model_parallel_size
    if ranks % expert_ranks:
        raise ConfigError(
            f"The {ranks} ranks of a pipeline stage are not a multiple of --expert-tensor-parallel-size "
            f"{parallel.expert_tensor_size}{by_default} x --expert-model-parallel-size "
            f"{parallel.expert_model_parallel_size} = {expert_ranks}: lower one of them, or start more processes."
        )
    instances, copies = parallel.num_distributed_optimizer_instances, ranks // expert_ranks
    if copies % instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} does not divide the {copies} copies of the experts "
            f"({ranks} ranks of a stage / {expert_ranks} ranks of a copy): use a divisor, or lower "
            "--expert-model-parallel-size."
        )


def check_activations(run: RunConfig, world_size: int) -> None:
    activations, parallel, model = run.activations, run.parallel, run.architecture
    size = parallel.tensor_model_parallel_size
    stages = run.pipeline.virtual_stages(model.num_layers, parallel.pipeline_model_parallel_size)
    layers = max(len(stage.layers) for stage in stages)
    for flag, count in values_of(activations, "recompute_num_layers", "cpu_offloading_num_layers").items():
        if count is not None and count > layers:
            raise ConfigError(f"{flag} {count} exceeds the {layers} layers of a pipeline chunk: lower it.")
    if not activations.distribute_saved_activations:
        return
    flag, sizes = "--distribute-saved-activations", f"--tensor-model-parallel-size {size}"
    if parallel.sequence_parallel:
        raise ConfigError(f"{flag} has no effect with --sequence-parallel, which already shards the inputs: remove it.")
    if size == 1:
        raise ConfigError(
            f"{flag} needs more than one tensor-parallel rank, not {sizes}: remove it, or raise the size."
        )
    if model.hidden_size % size:
        raise ConfigError(
            f"{flag} needs --hidden-size {model.hidden_size} to be divisible by {sizes}: change one, or remove {flag}."
        )
