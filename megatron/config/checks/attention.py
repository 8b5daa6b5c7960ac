"""Checks of the features of attention that only some layers have."""

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_flag


def check_attention(run: RunConfig, world_size: int) -> None:
    model = run.model
    tuned = changed_flags(model, "attention_temperature_floor", "attention_temperature_scale")
    require_flag("--attention-temperature-tuning", model.attention_temperature_tuning, tuned)
    if model.qk_l2_norm and model.qk_layernorm:
        raise ConfigError(
            "--qk-l2-norm contradicts --qk-layernorm, which normalises the same heads with a gain: remove one of them."
        )
    has_rope = model.resolve(1, run.parallel.tensor_model_parallel_size, run.data.seq_length or 1).rope_layers()
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
