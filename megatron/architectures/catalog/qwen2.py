"""Qwen2 and Qwen2.5, dense (arXiv 2412.15115): Llama with a bias in the query, key and value projections."""

from megatron.architectures.spec import ArchitectureSpec, HFTensor, WeightMapping, dense_layer
from megatron.architectures.transformer_config import TransformerConfig


def _layer_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    bias = WeightMapping(
        "self_attention.linear_qkv.bias",
        (
            HFTensor("self_attn.q_proj.bias", config.query_size, is_rotary=True),
            HFTensor("self_attn.k_proj.bias", config.key_value_size, is_rotary=True),
            HFTensor("self_attn.v_proj.bias", config.key_value_size),
        ),
    )
    return (*dense_layer(config, number), bias)


ARCHITECTURE = ArchitectureSpec(
    name="qwen2",
    title="Qwen2",
    layer_weights=_layer_weights,
    features={"add_qkv_bias": True},
    config_fields=lambda config: {"use_sliding_window": False, "max_window_layers": config.num_layers},
    field_defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    required_fields={"use_sliding_window": (False, "attention has no sliding window here")},
)
