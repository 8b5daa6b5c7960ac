"""Variants of YaRN in configs of transformers."""

from dataclasses import replace
from typing import Any

from megatron.architectures.transformer_config import TransformerConfig
from tests.model.reference import architecture


def with_yarn(factor: float, original: int, **more: Any) -> TransformerConfig:
    """A model whose heads have eight pairs."""
    config = architecture(scaling=False, tied=False, tp=1)
    return replace(
        config,
        kv_channels=16,
        rope_scaling_original_length=8192,
        max_position_embeddings=int(factor * original),
        position_embedding_type="yarn",
        yarn_rotary_scaling_factor=factor,
        yarn_original_max_position_embeddings=original,
        **{f"yarn_{name}": value for name, value in more.items()},
    )


VARIANTS = {
    "defaults": with_yarn(4.0, 512),
    "not rounded": with_yarn(4.0, 512, correction_range_round_to_int=False),
    "other betas": with_yarn(16.0, 4096, beta_fast=8.0, beta_slow=2.0),
    "equal betas": with_yarn(2.0, 512, beta_fast=4.0, beta_slow=4.0, correction_range_round_to_int=False),
    "mscale": with_yarn(40.0, 256, mscale=0.707, mscale_all_dim=1.3),
    "attention factor": with_yarn(4.0, 512, attention_factor=1.5),
    "factor 1": with_yarn(1.0, 512),
    "short": with_yarn(4.0, 16),
}
