"""Checks of the model and of how it computes: attention, the maximal update parametrization, mixture of experts, number
formats, forced kernels."""

from dataclasses import fields

from megatron.config.model import preset
from megatron.config.precision import FP8_BLOCK, FP8_UNITS
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_flag
from megatron.schedules.catalog import SCHEDULES
from megatron.update_rules.rule import build_rule, update_rules


def check_attention(run: RunConfig, world_size: int) -> None:
    model = run.model
    tuned = changed_flags(model, "attention_temperature_floor", "attention_temperature_scale")
    require_flag("--attention-temperature-tuning", model.attention_temperature_tuning, tuned)
    exchanges = " ".join(run.parallel.cp_comm_type) if run.parallel.context_parallel_size > 1 else ""
    if model.softmax_type != "vanilla" and "a2a" in exchanges:
        raise ConfigError(
            f"--softmax-type {model.softmax_type} does not support --cp-comm-type {exchanges}, which exchanges heads: "
            "use p2p or allgather."
        )
    if model.qk_l2_norm and model.qk_layernorm:
        raise ConfigError(
            "--qk-l2-norm contradicts --qk-layernorm, which normalises the same heads with a gain: remove one of them."
        )
    has_rope = run.architecture.rope_layers()
    for flag in changed_flags(model, "qk_l2_norm", "attention_chunk_size"):
        if not any(has_rope):
            raise ConfigError(
                f"{flag} has no effect with --no-rope-freq {model.no_rope_freq}, where no layer has rotary position "
                "embedding: remove one of them."
            )
    if model.attention_temperature_tuning and all(has_rope):
        raise ConfigError(
            "--attention-temperature-tuning has no effect without layers that have no rotary position embedding: add "
            "--no-rope-freq, or remove it."
        )


def check_mup(run: RunConfig, world_size: int) -> None:
    model, optimizer = run.model, run.optimizer
    if not model.use_mup:
        return
    if model.mup_output_mult == 1.0 and model.mup_base_hidden_size not in (None, model.hidden_size):
        raise ConfigError(
            "--mup-output-mult 1 means 1 / width multiplier in Megatron-LM: remove it, which has the same effect."
        )
    # The scale of attention is a factor of the rotation, and conversion to Hugging Face needs weights to multiply.
    for flag in changed_flags(model, "qk_l2_norm", "no_rope_freq"):
        raise ConfigError(f"--use-mup does not support {flag}: remove one of them.")
    obstacle = build_rule(optimizer).mup_obstacle()
    if obstacle is not None:
        raise ConfigError(f"--use-mup does not support --optimizer {optimizer.optimizer} here: {obstacle}")
    if optimizer.optimizer == "sgd" and model.qk_layernorm:
        raise ConfigError(
            "--use-mup with --optimizer sgd does not support --qk-layernorm, whose gains are shared by all heads: use "
            "adam, or remove one of them."
        )


def check_multi_token_prediction(run: RunConfig, world_size: int) -> None:
    depths, length = run.model.mtp_num_layers, run.seq_length
    require_flag("--mtp-num-layers", depths > 0, changed_flags(run.training, "mtp_loss_scaling_factor"))
    if depths >= length:
        raise ConfigError(f"--mtp-num-layers {depths} is not below --seq-length {length}: lower it.")


def check_experts(run: RunConfig, world_size: int) -> None:
    model = run.model
    if model.num_experts == 0 and model.model is not None and preset(model.model).num_experts:
        raise ConfigError(
            f"--num-experts 0 contradicts --model {model.model}, a model with experts: remove --num-experts, or choose "
            "a dense model."
        )
    if not model.num_experts:
        dependent = [field.name for field in fields(model) if field.name.startswith("moe_")]
        given = changed_flags(model, *dependent) + changed_flags(run.moe, *(field.name for field in fields(run.moe)))
        # --expert-tensor-parallel-size, which divides nothing then, is among the flags without effect.
        parallel = changed_flags(run.parallel, "expert_model_parallel_size")
        load = changed_flags(run.dry_run, "dry_run_expert_load")
        require_flag("--num-experts", False, given + parallel + load)
        return
    experts, topk = model.num_experts, model.moe_router_topk
    if topk > experts:
        raise ConfigError(f"--moe-router-topk {topk} exceeds --num-experts {experts}: lower it.")
    if not any(run.architecture.moe_layers()):
        raise ConfigError(
            f"--moe-layer-freq {model.moe_layer_freq} has no MoE layer for --num-experts {experts}: add a 1, or remove "
            "--num-experts."
        )
    if model.moe_apply_probs_on_input and topk > 1:
        raise ConfigError(
            f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {topk}: the chosen experts of a token have "
            "different weights, but one input; lower --moe-router-topk, or remove --moe-apply-probs-on-input."
        )
    _check_score_function(run)
    _check_groups(run)
    _check_balance(run)
    has_shared = model.moe_shared_expert_intermediate_size is not None
    overlap = changed_flags(run.moe, "moe_shared_expert_overlap")
    require_flag("--moe-shared-expert-intermediate-size", has_shared, overlap)


def _check_score_function(run: RunConfig) -> None:
    model = run.model
    is_softmax, topk = model.moe_router_score_function == "softmax", model.moe_router_topk
    if is_softmax and topk == 1 and not model.moe_router_pre_softmax:
        raise ConfigError(
            "--moe-router-topk 1 with a softmax over the chosen expert alone makes every weight 1, so that the router "
            "has no gradient: add --moe-router-pre-softmax, or use --moe-router-score-function sigmoid."
        )
    if model.moe_router_pre_softmax and not is_softmax:
        raise ConfigError(
            "--moe-router-pre-softmax contradicts --moe-router-score-function sigmoid, which has no softmax: remove "
            "one of them."
        )
    if model.moe_router_enable_expert_bias and is_softmax:
        raise ConfigError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, whose scores do not sum to 1: "
            "add it, or remove --moe-router-enable-expert-bias."
        )
    rate = changed_flags(run.moe, "moe_router_bias_update_rate")
    require_flag("--moe-router-enable-expert-bias", model.moe_router_enable_expert_bias, rate)


def _check_groups(run: RunConfig) -> None:
    model = run.model
    experts, topk = model.num_experts or 0, model.moe_router_topk
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None or chosen is None:
        require_flag("--moe-router-num-groups", groups is not None, changed_flags(model, "moe_router_group_topk"))
        require_flag("--moe-router-group-topk", chosen is not None, changed_flags(model, "moe_router_num_groups"))
        return
    if experts % groups:
        raise ConfigError(
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}: change one of them."
        )
    if not chosen <= min(groups, topk):
        raise ConfigError(
            f"--moe-router-group-topk {chosen} must exceed neither --moe-router-num-groups {groups} nor "
            f"--moe-router-topk {topk}: lower it."
        )
    if chosen * (experts // groups) < topk:
        raise ConfigError(
            f"--moe-router-group-topk {chosen} leaves {chosen * (experts // groups)} experts of "
            f"{experts // groups} in a group for --moe-router-topk {topk}: raise --moe-router-group-topk, or lower "
            "--moe-router-topk."
        )


def _check_balance(run: RunConfig) -> None:
    types, coefficients = run.moe.moe_router_load_balancing_type, run.moe.moe_aux_loss_coeff
    flag, named = "--moe-router-load-balancing-type", " ".join(types)
    given = " ".join(f"{coefficient:g}" for coefficient in coefficients)
    if not types or len(set(types)) < len(types) or ("none" in types and len(types) > 1):
        raise ConfigError(f"{flag} {named} must name each loss once, or none alone: change it.")
    # By default the loss is named and has the coefficient 0: that is no mistake.
    is_default = not changed_flags(run.moe, "moe_router_load_balancing_type", "moe_aux_loss_coeff")
    if types == ("none",) and any(coefficients):
        raise ConfigError(
            f"--moe-aux-loss-coeff {given} has no effect with {flag} none: remove it, or use seq_aux_loss."
        )
    if types != ("none",) and not is_default and not all(coefficients):
        raise ConfigError(
            f"{flag} {named} has no effect with --moe-aux-loss-coeff {given}: give a positive coefficient, such as "
            "1e-2, or use none."
        )
    if len(coefficients) != len(types):
        raise ConfigError(
            f"--moe-aux-loss-coeff {given} has {len(coefficients)} coefficients for the {len(types)} of {flag} "
            f"{named}: give as many."
        )


def check_expert_precision(run: RunConfig, world_size: int) -> None:
    if not run.model.num_experts:
        return
    if run.precision.fp8_format is not None:
        raise ConfigError(
            f"--fp8-format {run.precision.fp8_format} is not supported with --num-experts, whose experts compute in "
            "bf16: remove it."
        )
    dtype = run.moe.moe_router_dtype
    if dtype is not None and (dtype == "fp64") != run.precision.fp64:
        remedy = "add --fp64, or use fp32" if dtype == "fp64" else "use fp64, or remove it"
        raise ConfigError(
            f"--moe-router-dtype {dtype} is not what the router computes in, which is fp32, and fp64 under --fp64: "
            f"{remedy}."
        )


def check_expert_optimizer(run: RunConfig, world_size: int) -> None:
    name = run.optimizer.optimizer
    if run.model.num_experts and not update_rules()[name].is_elementwise:
        raise ConfigError(
            f"--optimizer {name} is not supported with --num-experts: it updates whole matrices, and the weights of "
            "experts are stacks of matrices; use adam."
        )


def check_recomputed_modules(run: RunConfig, world_size: int) -> None:
    """Modules of ``--recompute-modules`` that no layer has."""
    model = run.architecture
    is_moe = model.moe_layers()
    exists = {
        "mlp": not all(is_moe),
        "mlp_act": not all(is_moe),
        "moe": any(is_moe),
        "moe_act": any(is_moe),
        "shared_experts": model.moe_shared_expert_intermediate_size is not None,
    }
    for module in run.activations.recompute_modules or ():
        if not exists.get(module, True):
            there = ", ".join(["core_attn", "layernorm", *(name for name, is_there in exists.items() if is_there)])
            raise ConfigError(f"--recompute-modules {module} is in no layer of the model: use one or more of {there}.")


def check_formats(run: RunConfig, world_size: int) -> None:
    if run.precision.fp64 and run.optimizer.use_precision_aware_optimizer:
        raise ConfigError("--fp64 and --use-precision-aware-optimizer exclude each other: remove one of them.")


def check_fp8(run: RunConfig, world_size: int) -> None:
    if run.precision.fp8_format is None:
        return
    has_blocks = run.precision.fp8_recipe == "blockwise" and run.model.transformer_impl == "local"
    unit = FP8_BLOCK if has_blocks else FP8_UNITS[run.precision.fp8_recipe]
    size, context_size = run.parallel.tensor_model_parallel_size, run.parallel.context_parallel_size
    length, samples = run.data.seq_length or unit, run.training.micro_batch_size or unit
    model = run.model.resolve(1, size, length)
    # Rows and columns of the matrices of a rank.
    on_each_rank = {
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size / --tensor-model-parallel-size": model.ffn_hidden_size // size,
        "--num-attention-heads x --kv-channels / --tensor-model-parallel-size": model.query_size // size,
        "(--num-attention-heads + 2 x --num-query-groups) x --kv-channels / --tensor-model-parallel-size": (
            (model.query_size + 2 * model.key_value_size) // size
        ),
        "--micro-batch-size x --seq-length / --context-parallel-size": samples * length // context_size,
    }
    if has_blocks:
        # A block is on one rank, and has one of query, key and value, so that it is the same in every layout.
        width = model.key_value_size // size
        on_each_rank["--num-query-groups x --kv-channels / --tensor-model-parallel-size"] = width
        if run.parallel.sequence_parallel:
            rows = "--micro-batch-size x --seq-length / --context-parallel-size"
            on_each_rank[f"{rows} / --tensor-model-parallel-size"] = on_each_rank[rows] // size
    flag, remedy = "--fp8-format", "remove --fp8-format"
    if has_blocks:
        flag, remedy = "--fp8-recipe blockwise", "use another recipe"
    for formula, value in on_each_rank.items():
        if value % unit:
            raise ConfigError(
                f"{flag} needs sizes that are multiples of {unit}, but {formula} is {value}: change one of them, or "
                f"{remedy}."
            )
    if run.precision.fp8_param_gather:
        _check_fp8_param_gather(run)
    start, end = run.precision.num_layers_at_start_in_bf16, run.precision.num_layers_at_end_in_bf16
    if run.precision.first_last_layers_bf16 and start + end >= model.num_layers:
        raise ConfigError(
            f"--first-last-layers-bf16 keeps {start} + {end} of {model.num_layers} layers in bf16 and leaves none for "
            "--fp8-format: lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or remove --fp8-format."
        )


def _check_fp8_param_gather(run: RunConfig) -> None:
    if run.training.freeze_parameters:
        raise ConfigError(
            "--fp8-param-gather and --freeze-parameters exclude each other: weights that are gathered in FP8 exist in "
            "full precision in the optimizer alone, which frozen weights do not have: remove one of them."
        )
    strategy = run.parallel.sharding_strategy
    if strategy not in ("optim", "optim_grads"):
        raise ConfigError(
            f"--fp8-param-gather is not supported with --data-parallel-sharding-strategy {strategy}, where no "
            "quantised shards are gathered: use --use-distributed-optimizer or optim_grads, or remove it."
        )
    if run.model.transformer_impl != "local":
        raise ConfigError(
            f"--fp8-param-gather is not supported by --transformer-impl {run.model.transformer_impl}, which quantises "
            "bf16 weights itself: remove it, or use --transformer-impl local."
        )


def check_transformer_engine(run: RunConfig, world_size: int) -> None:
    precision, activations, flag = run.precision, run.activations, "--transformer-impl transformer_engine"
    if run.model.transformer_impl == "local":
        if precision.fp8_recipe == "mxfp8":
            raise ConfigError(
                "--fp8-recipe mxfp8 is not supported by --transformer-impl local, only by Transformer Engine on "
                f"Blackwell: use delayed, tensorwise or blockwise, or {flag}."
            )
        if precision.fp8_recipe == "blockwise" and precision.fp8_format == "hybrid":
            raise ConfigError(
                "--fp8-format hybrid with --fp8-recipe blockwise is not supported by --transformer-impl local, because "
                f"torch's block-scaled GEMM multiplies e4m3 alone: use --fp8-format e4m3, or {flag}."
            )
        return
    if precision.fp64:
        raise ConfigError(f"--fp64 is not supported by {flag}: use --transformer-impl local.")
    if run.pipeline.pipeline_schedule is not None and SCHEDULES[run.pipeline.pipeline_schedule].splits_backward:
        raise ConfigError(
            f"--pipeline-schedule {run.pipeline.pipeline_schedule} needs separate weight gradients, which {flag} does "
            "not support: use 1f1b or interleaved, or --transformer-impl local."
        )
    if activations.cpu_offloading_num_layers:
        raise ConfigError(
            f"--cpu-offloading-num-layers is not supported by {flag}, whose saved tensors include weights: remove it, "
            "or use --transformer-impl local."
        )
    if "layernorm" in activations.modules:
        raise ConfigError(
            f"--recompute-modules layernorm is not supported by {flag}, where the norm and the projection are one "
            "module: remove layernorm, or use --transformer-impl local."
        )
    # Limits of FP8 in Transformer Engine.
    if precision.fp8_format is None:
        return
    if precision.fp8_recipe == "delayed" and activations.granularity is not None:
        raise ConfigError(
            f"--recompute-granularity {activations.granularity} is not supported by {flag} with --fp8-recipe delayed, "
            "which would record the amax of both runs: use another recipe, remove the recompute flags, or use "
            "--transformer-impl local."
        )
    if run.parallel.sharding_strategy == "optim_grads_params":
        raise ConfigError(
            f"--fp8-format with {flag} keeps FP8 copies of unsharded weights, which --data-parallel-sharding-strategy "
            "optim_grads_params does not support: use optim_grads, or --transformer-impl local."
        )


def check_transformer_engine_overlap(run: RunConfig, world_size: int) -> None:
    """Limits of Transformer Engine's overlap that it does not check itself."""
    parallel, precision = run.parallel, run.precision
    size = parallel.tensor_model_parallel_size
    if size == 1 or not parallel.tp_comm_overlap or run.model.transformer_impl == "local":
        return
    overlap = "--tp-comm-overlap with --transformer-impl transformer_engine"
    remedy = "use --transformer-impl local, or remove --tp-comm-overlap"
    if not precision.bf16:
        raise ConfigError(f"{overlap} reduces only in bf16: add --bf16, {remedy}.")
    if size not in (2, 4, 8):
        raise ConfigError(
            f"{overlap} supports 2, 4 or 8 ranks, not --tensor-model-parallel-size {size}: use one of these, {remedy}."
        )
    if not parallel.rank_order.startswith("tp-"):
        raise ConfigError(
            f"{overlap} needs neighbouring tensor-parallel ranks, not --rank-order {parallel.rank_order}: begin it "
            f"with tp, {remedy}."
        )
    if precision.fp8_format is not None and precision.fp8_recipe == "blockwise":
        raise ConfigError(f"{overlap} does not support --fp8-recipe blockwise: use another recipe, {remedy}.")


def check_transformer_engine_buffers(run: RunConfig, world_size: int) -> None:
    parallel, size = run.parallel, run.parallel.tensor_model_parallel_size
    if size == 1 or not parallel.tp_comm_overlap or run.model.transformer_impl == "local":
        return
    length = run.data.seq_length or 128 * size
    # Transformer Engine sends a quarter of the hidden size at a time, in vectors of eight numbers.
    sizes = {"--hidden-size": (run.model.resolve(1, size, length).hidden_size, 32)}
    if run.precision.fp8_format is not None and run.precision.fp8_recipe == "mxfp8":
        rows = (run.training.micro_batch_size or 1) * length // parallel.context_parallel_size // size
        name = "--micro-batch-size x --seq-length / --context-parallel-size / --tensor-model-parallel-size"
        sizes[name] = (rows, 128)
    for name, (value, unit) in sizes.items():
        if value % unit:
            raise ConfigError(
                f"--tp-comm-overlap with --transformer-impl transformer_engine needs multiples of {unit}, but {name} "
                f"is {value}: change one of them, use --transformer-impl local, or remove --tp-comm-overlap."
            )


def check_kernels(run: RunConfig, world_size: int) -> None:
    attention, adam = run.kernels.wanted("attention"), run.kernels.wanted("adam")
    backend = run.model.attention_backend
    if attention is not None and backend != "auto":
        raise ConfigError(f"{attention.flag} and --attention-backend {backend} exclude each other: remove one of them.")
    product = run.kernels.wanted("weight_gradient")
    if run.model.transformer_impl != "local" and product is not None and product.implementation == "apex":
        raise ConfigError(
            f"{product.flag} is not supported by --transformer-impl transformer_engine, which has its own kernels for "
            "weight gradients: use --kernel weight_gradient=in_place or separate, or --transformer-impl local."
        )
    for operation in ("fp8_quantization", "fp8_weight_gradient"):
        kernel = run.kernels.wanted(operation)
        if kernel is None:
            continue
        require_flag("--fp8-format", run.precision.fp8_format is not None, [kernel.flag])
        if run.model.transformer_impl != "local":
            raise ConfigError(
                f"{kernel.flag} is not supported by --transformer-impl transformer_engine, which has its own FP8 "
                "kernels: remove it, or use --transformer-impl local."
            )
    if adam is None or adam.implementation == "torch":
        return
    uses_adam = run.optimizer.optimizer in ("adam", "muon")
    others = {
        f"--optimizer {run.optimizer.optimizer}": not uses_adam,
        "--use-precision-aware-optimizer": run.optimizer.use_precision_aware_optimizer,
        "--grad-reduce-in-bf16": run.precision.grad_reduce_in_bf16,
    }
    for flag, is_given in others.items():
        if is_given:
            raise ConfigError(f"{adam.flag} is not supported with {flag}: remove one of them.")
