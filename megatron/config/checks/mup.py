"""Checks of the maximal update parametrization against the model and the optimizer."""

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags
from megatron.update_rules.rule import build_rule


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
