"""The closed form's description of a run of this project."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.topology import RankGrid
from megatron.errors import ConfigError
from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.workload import Attention, OwnSoftware, Run, Software

_ATTENTION: dict[str, Attention] = {"flash": "flash", "sdpa": "flash", "cpu": "flash", "reference": "unfused"}
_RECOMPUTABLE = frozenset(("core_attn", "layernorm", "mlp_act", "mlp"))


def attention_kind(config: RunConfig, cluster: Cluster) -> Attention:
    """Attention kernels of a run: on GPUs cuDNN, or a kernel of its speed, from Hopper on."""
    wanted, backend = config.kernels.wanted("attention"), config.model.attention_backend
    if wanted is not None:
        return _ATTENTION.get(wanted.implementation, "cudnn")
    if backend in ("unfused", "local"):
        return "unfused"
    return "cudnn" if cluster.generation in ("hopper", "blackwell") and backend != "flash" else "flash"


def step_to_price(
    architecture: TransformerConfig, config: RunConfig, grid: RankGrid, global_batch_size: int, cluster: Cluster
) -> Run:
    """The step of a run on ``cluster``, for :class:`~megatron.planner.step_time.formulas.StepTimeModel`.

    The constants are fitted to other people's software; our kernels are unmeasured on GPUs. Raises
    :class:`ConfigError` for what the formulas do not describe.
    """
    is_fp8 = config.precision.fp8_format is not None
    element = {"fp32": 4, "fp64": 8}.get(config.precision.name, 2)
    own = _own_software(architecture, config, grid, cluster)
    overlap = config.parallel.overlap_grad_reduce and grid.dp * grid.cp > 1
    software = Software(
        attention=attention_kind(config, cluster),
        elementwise="megatron-llama",
        sharding="none" if own.sharding_strategy == "no_shard" else "optimizer",
        main_grad_bytes=2 * own.gradient_bytes - element,
        overlaps_tensor_parallel=config.parallel.tp_comm_overlap and config.parallel.sequence_parallel,
        overlaps_data_parallel=overlap,
        keeps_weights_gathered=not config.parallel.torch_fsdp2_reshard_after_forward,
        element_bytes=element,
    )
    is_moe, rope_layers = architecture.moe_layers(), sum(architecture.rope_layers())
    experts: dict[str, Any] = _experts(architecture, config, grid, sum(is_moe)) if any(is_moe) else {}
    return Run(
        layers=architecture.num_layers,
        hidden=architecture.hidden_size,
        heads=architecture.num_attention_heads,
        kv_heads=architecture.num_query_groups,
        head_size=architecture.kv_channels,
        ffn=architecture.ffn_hidden_size,
        is_gated=True,
        vocab=architecture.padded_vocab_size,
        seq_length=config.seq_length,
        chunked_layers=rope_layers if architecture.attention_chunk_size is not None else 0,
        chunk_length=architecture.attention_length(True, config.seq_length),
        gpus=grid.world_size,
        tp=grid.tp,
        pp=grid.pp,
        vp=config.pipeline.num_chunks(architecture.num_layers, grid.pp),
        cp=grid.cp,
        dp=grid.dp,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=global_batch_size,
        is_fp8=is_fp8,
        sequence_parallel=config.parallel.sequence_parallel and grid.tp > 1,
        software=software,
        cluster=cluster,
        own=own,
        **experts,
    )


def _experts(
    architecture: TransformerConfig, config: RunConfig, grid: RankGrid, moe_layers: int
) -> dict[str, int | str]:
    """The fields of experts."""
    dispatcher = "allgather" if config.moe.moe_token_dispatcher_type == "allgather" else "alltoall"
    return {
        "num_experts": architecture.num_experts or 0,
        "moe_topk": architecture.moe_router_topk,
        "moe_ffn": architecture.moe_ffn_hidden_size or 0,
        "shared_ffn": architecture.moe_shared_expert_intermediate_size or 0,
        "moe_layers": moe_layers,
        "ep": grid.ep,
        "etp": grid.etp,
        "dispatcher": dispatcher,
    }


def _own_software(architecture: TransformerConfig, config: RunConfig, grid: RankGrid, cluster: Cluster) -> OwnSoftware:
    parallel, pipeline, precision = config.parallel, config.pipeline, config.precision
    first, inner, last = _layers(architecture, config, grid)
    sizes = dict(_dimensions(grid))
    exchange, heads = parallel.cp_comm_type[0], 1
    if len(set(parallel.cp_comm_type)) > 1 and grid.cp > 1:
        raise ConfigError(
            "--cp-comm-type with a type per layer has no closed form: give one type for all layers, or price the run "
            "by its rehearsal."
        )
    if exchange == "a2a+p2p" and grid.cp > 1:
        heads = parallel.hierarchical_context_parallel_sizes[0]
    return OwnSoftware(
        first_layers=first,
        inner_layers=inner,
        last_layers=last,
        **_recompute(config, max(first, inner, last)),
        pipeline_schedule=pipeline.schedule(architecture.num_layers, grid.pp),
        cp_exchange=exchange,
        cp_heads=heads,
        sharding_strategy=parallel.sharding_strategy,
        replicas=grid.dp_replicas if parallel.sharding_strategy != "no_shard" else 1,
        gradient_bytes=2 if precision.grad_reduce_in_bf16 else max(4, {"fp64": 8}.get(precision.name, 4)),
        defers_reduction=parallel.defer_grad_reduce,
        overlaps_gathers=parallel.overlap_param_gather,
        fp8_recipe=precision.fp8_recipe if precision.fp8_format is not None else "",
        chunks_loss=config.activations.loss_chunk_size is not None,
        has_qkv_bias=architecture.add_qkv_bias,
        has_qk_norm=architecture.qk_layernorm,
        rope_layers=sum(architecture.rope_layers()),
        has_qk_l2_norm=architecture.qk_l2_norm,
        weighs_input=architecture.moe_apply_probs_on_input,
        tunes_temperature=architecture.attention_temperature_tuning,
        **_places(grid, sizes, cluster, parallel.sharding_strategy),
    )


def _recompute(config: RunConfig, layers: int) -> dict[str, Any]:
    """The fields of recompute."""
    activations = config.activations
    if activations.granularity == "full":
        number = activations.recompute_num_layers
        assert number is not None
        if activations.recompute_method == "uniform":
            return {"recomputed_layers": layers, "recomputed_unit": number}
        return {"recomputed_layers": number}
    unknown = sorted(activations.modules - _RECOMPUTABLE)
    if unknown:
        raise ConfigError(
            f"--recompute-modules {' '.join(unknown)} has no closed form: price the run by its rehearsal, or leave "
            "it out."
        )
    return {
        "recomputes_attention": "core_attn" in activations.modules,
        "recomputes_norms": "layernorm" in activations.modules,
        "recomputes_activation": "mlp_act" in activations.modules,
        "recomputes_mlp": "mlp" in activations.modules,
    }


def _layers(architecture: TransformerConfig, config: RunConfig, grid: RankGrid) -> tuple[int, int, int]:
    """Layers of the first virtual stage, of the longest inner one, and of the last."""
    stages = config.pipeline.virtual_stages(architecture.num_layers, grid.pp)
    counts = [len(stage.layers) for stage in stages]
    return counts[0], max(counts[1:-1], default=0), counts[-1] if len(counts) > 1 else 0


def _dimensions(grid: RankGrid) -> list[tuple[str, int]]:
    """(axis, size) of the dense ranks from neighbours to distant ones."""
    found = []
    for axis in grid.order.split("-"):
        if axis == "dp":
            found += [("dp_shard", grid.dp // grid.dp_replicas), ("dp_replicate", grid.dp_replicas)]
        elif axis != "ep":
            found.append((axis, getattr(grid, axis)))
    return found


def _places(grid: RankGrid, sizes: Mapping[str, int], cluster: Cluster, strategy: str) -> dict[str, Any]:
    """How many ranks of each group are in a node and in a pod."""
    dense = list(sizes.items())
    shards = ("cp", "dp_shard", "dp_replicate") if strategy == "no_shard" else ("cp", "dp_shard")
    folded = _folded(grid, 1 if strategy == "no_shard" else grid.dp_replicas)
    pod = cluster.pod_size or grid.world_size
    found: dict[str, Any] = {
        "tp_in_node": _inside(dense, ("tp",), cluster.node_size),
        "cp_in_node": _inside(dense, ("cp",), cluster.node_size),
        "sends_in_node": _inside(dense, ("pp",), cluster.node_size) == grid.pp,
        "stages_in_pod": _inside(dense, ("pp",), pod),
    }
    for place, size in (("node", cluster.node_size), ("pod", pod)):
        found[f"shards_in_{place}"] = _inside(dense, shards, size)
        found[f"replicas_in_{place}"] = _inside(dense, ("dp_replicate",), size)
        found[f"expert_shards_in_{place}"] = _inside(folded, ("edp",), size)
    return found


def _folded(grid: RankGrid, replicas: int) -> list[tuple[str, int]]:
    """The same for experts, whose ranks are folded over those of a stage. If stages are neighbours, the ranks of a
    stage are not: what is left of the axes inside of a stage counts from there on."""
    order = grid.order.split("-")
    near = prod(getattr(grid, axis) for axis in order[: order.index("pp")] if axis != "ep")
    found, stride = [], 1
    for axis, size in (("etp", grid.etp), ("ep", grid.ep), ("edp", max(1, grid.edp // replicas))):
        inside = max(1, min(size, near // stride))
        found += [(axis, inside)]
        stride *= inside
        if inside < size:
            found += [("pp", grid.pp), (axis, size // inside)]
            near, stride = grid.world_size, stride * (size // inside)
    return found


def _inside(dimensions: Sequence[tuple[str, int]], axes: Sequence[str], number: int) -> int:
    """Ranks of a group along ``axes`` among the first ``number`` ranks."""
    count, stride = 1, 1
    for axis, size in dimensions:
        if axis in axes:
            count *= min(size, max(1, number // stride))
        stride *= size
    return count
