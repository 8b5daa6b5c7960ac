"""Qwen3, dense (arXiv 2505.09388): Llama with RMSNorm of queries and keys, and a head size of its own."""

from typing import Any

from megatron.architectures.spec import ArchitectureSpec, WeightMapping, dense_layer, preset, qk_norm
from megatron.architectures.transformer_config import TransformerConfig


def _layer_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    return (*dense_layer(config, number), *qk_norm(config))


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, untied: bool = True) -> dict[str, Any]:
    return preset(
        layers,
        hidden,
        ffn,
        heads,
        groups=8,
        max_position_embeddings=40960,
        kv_channels=128,
        rotary_base=1000000.0,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=untied,
    )


_PRESETS = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, untied=False),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, untied=False),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, untied=False),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
}

ARCHITECTURE = ArchitectureSpec(
    name="qwen3",
    title="Qwen3",
    layer_weights=_layer_weights,
    features={"qk_layernorm": True},
    presets=_PRESETS,
    vocab_sizes=dict.fromkeys(_PRESETS, 151936),
    config_fields=lambda config: {
        "attention_bias": False,
        "use_sliding_window": False,
        "max_window_layers": config.num_layers,
    },
    field_defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    required_fields={
        "attention_bias": (False, "its linear layers have no bias"),
        "use_sliding_window": (False, "attention has no sliding window here"),
    },
)
