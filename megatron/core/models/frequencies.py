"""The rotary frequencies of a model."""

from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.ops.rope import rotary_frequencies, yarn_frequencies


def frequencies_of(config: TransformerConfig) -> Tensor:
    """Angles per position, ``[head_size / 2]`` in fp64."""
    if config.position_embedding_type == "yarn":
        assert config.yarn_rotary_scaling_factor is not None
        assert config.yarn_original_max_position_embeddings is not None
        return yarn_frequencies(
            config.kv_channels,
            config.rotary_base,
            scaling_factor=config.yarn_rotary_scaling_factor,
            original_length=config.yarn_original_max_position_embeddings,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
            round_to_int=config.yarn_correction_range_round_to_int,
        )
    return rotary_frequencies(
        config.kv_channels,
        config.rotary_base,
        scaling_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
        original_length=config.rope_scaling_original_length,
        low_freq_factor=config.rope_scaling_low_freq_factor,
        high_freq_factor=config.rope_scaling_high_freq_factor,
    )
