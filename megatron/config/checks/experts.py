"""Checks of mixture of experts against the model, the layout, precision and recompute."""

from dataclasses import fields

from megatron.config.model import preset
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_flag
from megatron.update_rules.rule import update_rules


def check_experts(run: RunConfig, world_size: int) -> None:
    model = run.model
    if model.num_experts == 0 and model.model is not None and preset(model.model).num_experts:
        raise ConfigError(
            f"--num-experts 0 contradicts --model {model.model}, a model with experts: remove the former, or choose a "
            "dense model."
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
    tensor_size, length = run.parallel.tensor_model_parallel_size, run.data.seq_length or 1
    if not any(model.resolve(1, tensor_size, length).moe_layers()):
        raise ConfigError(
            f"--moe-layer-freq {model.moe_layer_freq} has no MoE layer for --num-experts {experts}: add a 1, or remove "
            "--num-experts."
        )
    if model.moe_apply_probs_on_input and topk > 1:
        raise ConfigError(
            f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {topk}: the chosen experts of a token have "
            "different weights, but one input; lower the latter, or remove the former."
        )
    _check_score_function(run)
    _check_groups(run)
    _check_balance(run)
    if run.moe.moe_shared_expert_overlap and model.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "--moe-shared-expert-overlap needs --moe-shared-expert-intermediate-size: add it, or remove the former."
        )


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
            "add it, or remove the former."
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
            f"{experts // groups} in a group for --moe-router-topk {topk}: raise the former, or lower the latter."
        )


def _check_balance(run: RunConfig) -> None:
    types, coefficients = run.moe.moe_router_load_balancing_type, run.moe.moe_aux_loss_coeff
    flag, named = "--moe-router-load-balancing-type", " ".join(types)
    given = " ".join(f"{coefficient:g}" for coefficient in coefficients)
    if not types or len(set(types)) < len(types) or ("none" in types and len(types) > 1):
        raise ConfigError(f"{flag} {named} must name each loss once, or none alone: change it.")
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


def check_expert_layout(run: RunConfig, world_size: int) -> None:
    parallel = run.parallel
    tensor_size, size = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    expert_tensor_size = parallel.expert_tensor_size
    model = run.model.resolve(1, tensor_size, run.data.seq_length or 1)
    if model.num_experts is None:
        return
    if model.num_experts % size:
        raise ConfigError(
            f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {size}: lower the "
            "latter to a divisor."
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
    if run.model.num_experts and not update_rules()[name].supports_experts:
        raise ConfigError(
            f"--optimizer {name} is not supported with --num-experts: it updates whole matrices, and the weights of "
            "experts are stacks of matrices; use adam."
        )


def check_recomputed_modules(run: RunConfig, world_size: int) -> None:
    """Modules of ``--recompute-modules`` that no layer has."""
    model = run.model.resolve(1, run.parallel.tensor_model_parallel_size, run.data.seq_length or 1)
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
