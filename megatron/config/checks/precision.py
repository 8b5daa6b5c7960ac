"""Checks of number formats against the optimizer and the sizes of the model."""

from megatron.config.precision import FP8_UNITS
from megatron.config.run import RunConfig
from megatron.errors import ConfigError


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
