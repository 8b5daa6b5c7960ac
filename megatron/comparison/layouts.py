"""A run's flags scaled down: a small model with the same features, in the same layout or a smaller one of its kind."""

from dataclasses import replace
from math import lcm
from typing import Any

from megatron.comparison.experiment import MASKS
from megatron.config.checks import check_run
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.dry_run import DryRunConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_HEAD_SIZE, _VOCABULARY, _LENGTH = 8, 255, 32


def small_layout(config: RunConfig, world_size: int, most: int) -> tuple[RunConfig, int]:
    """The flags on at most ``most`` ranks: fewer replicas first, then context, pipeline and tensor parallelism of 2 and
    of 1; experts on the ranks that are left."""
    layout = config.parallel
    chunks = config.pipeline.num_virtual_stages_per_pipeline_rank
    if config.pipeline.num_layers_per_virtual_pipeline_stage is not None:
        per_rank = (config.model.num_layers or 1) // layout.pipeline_model_parallel_size
        chunks = per_rank // config.pipeline.num_layers_per_virtual_pipeline_stage
    replicas = layout.data_parallel_size(world_size)
    for fewer in (2, 1):
        if layout.model_parallel_size * replicas > most:
            replicas = min(replicas, fewer)
        for axis in ("context", "pipeline_model", "tensor_model"):
            if layout.model_parallel_size * replicas > most:
                changed: dict[str, Any] = {f"{axis}_parallel_size": fewer}
                layout = replace(layout, **changed) if getattr(layout, f"{axis}_parallel_size") > fewer else layout
    if layout != config.parallel:
        layout = replace(layout, expert_tensor_parallel_size=None)
    if layout.context_parallel_size < config.parallel.context_parallel_size:
        # Two levels need four ranks.
        kinds = tuple("p2p" if kind == "a2a+p2p" else kind for kind in layout.cp_comm_type)
        layout = replace(layout, cp_comm_type=kinds, hierarchical_context_parallel_sizes=())
    world_size = layout.model_parallel_size * replicas
    in_stage = world_size // layout.pipeline_model_parallel_size
    experts = layout.expert_model_parallel_size
    while in_stage % (experts * (layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size)):
        experts -= 1
    layout = replace(layout, expert_model_parallel_size=experts)
    pipeline = config.pipeline
    if chunks is not None and layout.pipeline_model_parallel_size > 1:
        pipeline = replace(
            pipeline,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=min(chunks, 2),
        )
    elif layout.pipeline_model_parallel_size == 1:
        pipeline = type(pipeline)()
    return replace(config, parallel=layout, pipeline=pipeline, dry_run=DryRunConfig()), world_size


def small_model(config: RunConfig, world_size: int) -> RunConfig:
    """The flags with a model that trains on a CPU in seconds: fewer and smaller heads, narrower, as many layers as
    stages and patterns of layers need; short mock samples, and two microbatches of every stage."""
    model, layout = config.model, config.parallel
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    heads, groups = model.num_attention_heads or 1, model.num_query_groups or model.num_attention_heads or 1
    share = tp * (1 if set(layout.cp_comm_type) <= {"p2p", "allgather"} else cp)
    small_groups = next((size for size in range(share, groups, share) if groups % size == 0), groups)
    small_heads = small_groups * min(2, heads // groups)
    width, length = small_heads * _HEAD_SIZE, _LENGTH * tp * cp
    experts: dict[str, Any] = {}
    if model.num_experts:
        count = 2 * lcm(2, layout.expert_model_parallel_size)
        experts = {"num_experts": min(model.num_experts, max(count, model.moe_router_topk))}
        experts |= {"moe_ffn_hidden_size": 2 * width}
        if model.moe_shared_expert_intermediate_size:
            experts["moe_shared_expert_intermediate_size"] = 2 * width
    small = replace(
        model,
        num_layers=_layers(config),
        hidden_size=width,
        ffn_hidden_size=2 * width,
        num_attention_heads=small_heads,
        num_query_groups=small_groups,
        kv_channels=_HEAD_SIZE,
        max_position_embeddings=None,
        **experts,
    )
    kept = {name: getattr(config.data, name) for name in MASKS}
    training = replace(
        config.training,
        micro_batch_size=min(config.training.micro_batch_size or 1, 2),
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        train_samples=None,
        train_iters=config.training.train_iters or 10,
    )
    microbatches = 2 * layout.pipeline_model_parallel_size
    batch = (training.micro_batch_size or 1) * layout.data_parallel_size(world_size) * microbatches
    return replace(
        config,
        model=small,
        data=DataConfig(mock_data=True, seq_length=length, num_workers=0, **kept),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=_VOCABULARY),
        training=replace(training, global_batch_size=batch),
    )


def _layers(config: RunConfig) -> int:
    """As few layers as stages, chunks and patterns need; all if a list says what each stage or layer is."""
    model, pipeline = config.model, config.pipeline
    layers = model.num_layers or 1
    uneven = (
        pipeline.pipeline_model_parallel_layout,
        pipeline.decoder_first_pipeline_num_layers,
        pipeline.decoder_last_pipeline_num_layers,
    )
    given = (model.moe_layer_freq, model.no_rope_freq, model.window_attn_skip_freq)
    patterns = [one for one in map(str, given) if one not in ("0", "None")]
    periods = [int(one) for one in patterns if one.isdigit()]
    if any(one is not None for one in uneven) or len(periods) < len(patterns):
        return layers
    stages = config.parallel.pipeline_model_parallel_size * (pipeline.num_virtual_stages_per_pipeline_rank or 1)
    return min(layers, max(lcm(stages, *periods), 2))


def one_process(config: RunConfig) -> RunConfig:
    """The flags without a layout, with the same samples in an iteration."""
    alone = replace(config, parallel=ParallelConfig(), pipeline=type(config.pipeline)())
    try:
        check_run(alone, 1)
    except ConfigError as error:
        raise ConfigError(f"The flags do not run in one process, without their layout: {error}") from None
    return alone
