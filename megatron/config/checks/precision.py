"""Checks of number formats and of forced kernels against the optimizer, the layout and the sizes of the model."""

from megatron.config.compute import FP8_UNITS
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import require_flag
from megatron.schedules.catalog import SCHEDULES


def check_formats(run: RunConfig, world_size: int) -> None:
    if run.precision.fp64 and run.optimizer.use_precision_aware_optimizer:
        raise ConfigError("--fp64 and --use-precision-aware-optimizer exclude each other: remove one of them.")


def check_fp8(run: RunConfig, world_size: int) -> None:
    if run.precision.fp8_format is None:
        return
    unit = FP8_UNITS[run.precision.fp8_recipe]
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
    for formula, value in on_each_rank.items():
        if value % unit:
            raise ConfigError(
                f"--fp8-format needs sizes that are multiples of {unit}, but {formula} is {value}: change one of them, "
                "or remove --fp8-format."
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
        if precision.fp8_recipe in ("blockwise", "mxfp8"):
            hardware = "Hopper" if precision.fp8_recipe == "blockwise" else "Blackwell"
            raise ConfigError(
                f"--fp8-recipe {precision.fp8_recipe} is not supported by --transformer-impl local, only by "
                f"Transformer Engine on {hardware}: use delayed or tensorwise, or {flag}."
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
