"""Qwen3 with experts (arXiv 2505.09388): attention of Qwen3, experts in all or in some layers."""

from collections.abc import Mapping
from typing import Any

from megatron.architectures.layer_pattern import describe_layers
from megatron.architectures.spec import (
    ArchitectureSpec,
    Fields,
    WeightMapping,
    attention,
    experts,
    preset,
    qk_norm,
    size,
    swiglu_mlp,
)
from megatron.architectures.transformer_config import TransformerConfig


def _layer_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    if config.moe_layers()[number]:
        mlp = experts(config, "mlp", gate="gate_proj", up="up_proj", down="down_proj")
    else:
        mlp = swiglu_mlp(config)
    return (*attention(config), *mlp, *qk_norm(config))


def _read_fields(fields: Fields) -> dict[str, Any]:
    # transformers 4 writes num_experts, transformers 5 num_local_experts.
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    return {
        "num_experts": size(fields, name, 128),
        "moe_layer_freq": _moe_layer_freq(fields),
        "moe_ffn_hidden_size": size(fields, "moe_intermediate_size"),
        "moe_router_topk": size(fields, "num_experts_per_tok"),
    }


def _moe_layer_freq(fields: Fields) -> str:
    step, dense = size(fields, "decoder_sparse_step"), fields["mlp_only_layers"]
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers is {dense!r}, not a list of layers: correct the file")
    # Counted from one, unlike in --moe-layer-freq: a step of 2 makes layers 1, 3, 5 … MoE layers.
    layers = range(size(fields, "num_hidden_layers"))
    is_moe = tuple((layer + 1) % step == 0 and layer not in dense for layer in layers)
    if not any(is_moe):
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts: correct the file")
    return describe_layers(is_moe)


def _config_fields(config: TransformerConfig) -> Mapping[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(config.moe_layers()) if not is_moe],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, expert: int) -> dict[str, Any]:
    return preset(
        layers,
        hidden,
        ffn,
        heads,
        groups=4,
        max_position_embeddings=40960,
        kv_channels=128,
        rotary_base=1000000.0,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        num_experts=128,
        moe_ffn_hidden_size=expert,
        moe_router_topk=8,
    )


_PRESETS = {
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 6144, 32, expert=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 12288, 64, expert=1536),
}

ARCHITECTURE = ArchitectureSpec(
    name="qwen3_moe",
    title="Qwen3Moe",
    layer_weights=_layer_weights,
    features={"qk_layernorm": True},
    moe_layers=any,
    presets=_PRESETS,
    vocab_sizes=dict.fromkeys(_PRESETS, 151936),
    config_fields=_config_fields,
    read_fields=_read_fields,
    field_defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    required_fields={
        "attention_bias": (False, "its linear layers have no bias"),
        "use_sliding_window": (False, "attention has no sliding window here"),
        "norm_topk_prob": (True, "the weights of the chosen experts sum to one here"),
    },
)
