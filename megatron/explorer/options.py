"""The options of the explorer that give a layout, with the names of flags."""

from typing import Any

from megatron.planner.search.layout import Job, Layout

_SAME = (
    *("micro_batch_size", "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"),
    *("pipeline_model_parallel_size", "account_for_embedding_in_pipeline_split", "expert_model_parallel_size"),
    *("account_for_loss_in_pipeline_split", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances"),
    "grad_reduce_in_bf16",
)


def options_of(job: Job, layout: Layout) -> dict[str, Any]:
    """The options of ``layout`` for the training of ``job``, for ``explorer.evaluate``."""
    settings, overlaps = layout.settings(job.architecture.num_experts is not None), layout.overlaps()
    return {
        "model": job.name,
        "cluster": job.cluster.name,
        "num_gpus": job.num_gpus,
        "seq_length": job.seq_length,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision,
        **{name: settings[name] for name in _SAME},
        "cp_comm_type": job.config.parallel.cp_comm_type[0],
        "tp_comm_overlap": layout.tp_comm_overlap,
        "pipeline_schedule": layout.schedule,
        "num_virtual_stages_per_pipeline_rank": layout.vp,
        "expert_tensor_parallel_size": layout.etp,
        "overlap_grad_reduce": overlaps["overlap_grad_reduce"],
        "overlap_param_gather": overlaps["overlap_param_gather"],
        "recompute_granularity": settings["recompute_granularity"] or "none",
        "recompute_modules": list(layout.modules),
        "recompute_num_layers": layout.recompute_layers or 1,
    }


def fragment_of(job: Job, layout: Layout) -> str:
    """The address of ``layout`` on the page; recompute is one control there."""
    options = options_of(job, layout)
    modules, granularity = options.pop("recompute_modules"), options.pop("recompute_granularity")
    options["recompute"] = "+".join(modules) if granularity == "selective" else granularity
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return "#" + "&".join(f"{name}={value}" for name, value in values.items())
