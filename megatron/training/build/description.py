"""The lines that describe a run in its log before it starts."""

import sys
from collections import Counter
from collections.abc import Sequence

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.activations import ActivationConfig
from megatron.config.model import MoEConfig
from megatron.config.run import RunConfig
from megatron.core.device import device_name
from megatron.core.fp8 import Fp8Layers
from megatron.core.kernels.choice import Choice, table
from megatron.core.kernels.selection import Kernels
from megatron.core.models.parallelize import pipeline_schedule
from megatron.core.models.transformer import TransformerModel
from megatron.core.topology import RankGrid
from megatron.flags import changed_flags
from megatron.schedules.simulator import Durations, simulate
from megatron.training.build.plan import RunPlan
from megatron.training.checkpoints.state import RunState
from megatron.training.context import LogRank0, RunContext


def describe_run(
    context: RunContext, model: TransformerModel, kernels: Kernels, state: RunState, plan: RunPlan
) -> None:
    config, topology, batches, log_rank0 = context.config, context.topology, plan.batches, context.log_rank0
    grid = topology.grid
    num_microbatches = batches.num_microbatches(state.progress.consumed_samples)
    strategy = config.parallel.sharding_strategy
    types = dict.fromkeys(config.parallel.cp_comm_type)
    context_parallel = f"context {grid.cp} ({', '.join(types)}) x " if grid.cp > 1 else ""
    sequence = ", sequence parallel" if model.context.parallel.sequence_parallel else ""
    active = f"{model.config.num_active_parameters():,} for each token, " if model.has_experts else ""
    log_rank0(
        f"model: {model.config.num_parameters():,} parameters, {active}"
        f"{state.module.data_parallel.num_parameters:,} on this rank"
    )
    log_rank0(
        f"layout: {grid.world_size} ranks on {device_name(topology.device) or 'CPU'} = tensor {grid.tp}{sequence} x "
        f"{context_parallel}pipeline {grid.pp} x data {grid.dp} ({strategy}), {config.precision.name}"
    )
    if attention := describe_attention(model.config):
        log_rank0(f"attention: {attention}")
    if model.config.use_mup:
        log_rank0(f"muP: {describe_mup(model.config)}")
    if model.has_experts:
        log_rank0(f"experts: {describe_experts(model.config, config.moe, grid)}")
    if config.moe.moe_router_force_load_balancing:
        log_rank0("WARNING: --moe-router-force-load-balancing: for benchmarks only, no token is routed by its scores")
    if model.context.fp8 is not None:
        log_rank0(f"fp8: {describe_fp8(model.context.fp8, model.config.num_layers)}")
    if topology.rank == 0:
        describe_pipeline(config, model.config.num_layers, grid.pp, num_microbatches, log_rank0)
    if config.activations != ActivationConfig():
        log_rank0(f"activations: {describe_activations(config.activations)}")
    if model.context.parallel.has_overlap:
        engine = (
            "Transformer Engine's buffers; in the output layer " if config.model.transformer_impl != "local" else ""
        )
        log_rank0(f"tensor-parallel overlap: {engine}{model.context.parallel.overlap.name}")
    for flag in changed_flags(config.parallel, "sequence_parallel", "tp_comm_overlap") if grid.tp == 1 else ():
        log_rank0(f"{flag} has no effect with --tensor-model-parallel-size 1")
    if config.validation.skip_train:
        log_rank0("run: evaluation alone (--skip-train)")
    else:
        log_rank0(
            f"run: {plan.train_iters} iterations of {batches.final_batch_size} x {config.seq_length} tokens, "
            f"{num_microbatches} microbatches per rank"
        )
    log_rank0(describe_kernels(kernels.choices, config.logging.is_compact(sys.stdout), topology.device.type == "cpu"))
    memory = state.module.data_parallel.memory() | state.module.optimizer.memory()
    log_rank0(
        f"memory on this rank: {', '.join(f'{kind} {size / 2**20:,.1f} MiB' for kind, size in memory.items() if size)}"
    )


def describe_kernels(choices: Sequence[Choice], is_compact: bool, is_on_cpu: bool) -> str:
    """The table of the kernels; on a terminal only those that a flag asked for, and those that stand in for a better
    one, which on a CPU is no surprise."""
    if not is_compact:
        return "\n".join(["kernels:", *table(choices)])
    shown = [choice for choice in choices if choice.is_forced or (choice.is_stand_in and not is_on_cpu)]
    counts = Counter(choice.implementation for choice in choices if choice not in shown)
    rest = ", ".join(f"{name} for {count}" for name, count in counts.most_common())
    summary = f"kernels: {rest} operation{'s' * (sum(counts.values()) != 1)}" if rest else "kernels:"
    return "\n".join([summary, *table(shown)])


def describe_attention(model: TransformerConfig) -> str:
    """The differences of attention between layers, and from whole causal attention with rotary position embedding."""
    has_rope = model.rope_layers()
    with_rope, without = sum(has_rope), len(has_rope) - sum(has_rope)
    rope = [f"in chunks of {model.attention_chunk_size}"] if model.attention_chunk_size is not None else []
    rope += ["with normed queries and keys"] if model.qk_l2_norm else []
    windows = [window for window in model.windows() if window is not None]
    words = []
    if windows:
        words.append(f"{len(windows)} of {len(has_rope)} layers with a window of {windows[0] + 1} keys")
    if model.attn_logit_softcapping is not None:
        words.append(f"scores capped at {model.attn_logit_softcapping:g}")
    if without or rope:
        words.append(", ".join([f"{with_rope} of {len(has_rope)} layers with rotary position embedding", *rope]))
    if without:
        floor = model.attention_temperature_floor
        tuned = [f"with a temperature from position {floor - 1} on"] if model.attention_temperature_tuning else []
        words.append(", ".join([f"{without} without", *tuned]))
    return "; ".join(words)


def describe_mup(model: TransformerConfig) -> str:
    factors = {
        "embedding": model.embedding_multiplier,
        "logits": model.output_multiplier,
        "attention scores": model.attention_multiplier,
    }
    words = [f"{name} x {factor:g}" for name, factor in factors.items() if factor != 1.0]
    return ", ".join([f"{model.width_mult:g} times the width of the base model ({model.mup_base_hidden_size})", *words])


def describe_experts(model: TransformerConfig, moe: MoEConfig, grid: RankGrid) -> str:
    """The number of experts, the ranks that have them, and what balances their load."""
    layers = model.moe_layers()
    balanced_by = [
        f"{kind} {coeff:g}" for kind, coeff in zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff) if coeff
    ]
    if moe.moe_z_loss_coeff is not None:
        balanced_by.append(f"z-loss {moe.moe_z_loss_coeff:g}")
    if model.moe_router_enable_expert_bias:
        balanced_by.append(f"expert bias {moe.moe_router_bias_update_rate:g}")
    shared = ", a shared expert" if model.moe_shared_expert_intermediate_size else ""
    return (
        f"{model.moe_router_topk} of {model.num_experts} for each token{shared}, in {sum(layers)} of {len(layers)} "
        f"layers; ranks of a stage = expert tensor {grid.etp} x expert {grid.ep} x expert data {grid.edp}, "
        f"{moe.moe_token_dispatcher_type}; {', '.join(balanced_by) or 'no balancing loss'}"
    )


def describe_activations(activations: ActivationConfig) -> str:
    """What the forward pass saves, and where."""
    words, count = [], activations.recompute_num_layers
    if activations.granularity == "full" and activations.recompute_method == "uniform":
        words.append(f"only the input of every {count} layers is saved")
    elif activations.granularity == "full":
        words.append(f"only the inputs of the first {count} layers of a chunk are saved")
    elif activations.modules:
        words.append(f"{', '.join(sorted(activations.modules))} recomputed")
    if activations.distribute_saved_activations:
        words.append("sharded over the tensor-parallel ranks")
    if activations.cpu_offloading_num_layers:
        words.append(f"the first {activations.cpu_offloading_num_layers} layers of a chunk are offloaded to the host")
    if activations.loss_chunk_size is not None:
        words.append(f"logits and loss of {activations.loss_chunk_size} tokens at a time")
    return "; ".join(words)


def describe_fp8(fp8: Fp8Layers, num_layers: int) -> str:
    config = fp8.config
    layers = sum(fp8.includes(layer, num_layers) for layer in range(num_layers))
    scaling = "current (per-tensor) scaling"
    if config.fp8_recipe in ("blockwise", "mxfp8"):
        scaling = f"block scaling ({config.fp8_recipe})"
    if fp8.is_delayed:
        history = f"amax history of {config.fp8_amax_history_len}, {config.fp8_amax_compute_algo}"
        scaling = f"delayed scaling ({history}, margin {config.fp8_margin})"
    return (
        f"{config.fp8_format} with {scaling}: linear layers of {layers} of {num_layers} transformer layers, by "
        f"{fp8.gemm_name}; the rest in bf16"
    )


def describe_pipeline(
    config: RunConfig, num_layers: int, num_stages: int, num_microbatches: int, log_rank0: LogRank0
) -> None:
    if num_stages == 1:
        if config.pipeline.pipeline_schedule is not None:
            log_rank0("--pipeline-schedule has no effect with --pipeline-model-parallel-size 1")
        return
    schedule = pipeline_schedule(config, num_layers, num_stages)(num_microbatches)
    layers = [len(virtual_stage.layers) for virtual_stage in config.pipeline.virtual_stages(num_layers, num_stages)]
    times = tuple(map(float, layers))
    timeline = simulate(schedule, Durations(forward=times, backward=times, weight=times))
    log_rank0(
        f"pipeline: {schedule.name}, {num_stages} stages of {schedule.placement.num_chunks} chunks with "
        f"{'-'.join(map(str, layers))} layers; bubble {timeline.bubble_fraction:.1%} of the time (layers only, with "
        "F = B = W)"
    )
