"""Qwen2 and Qwen2.5, dense (arXiv 2412.15115): Llama with a bias in the query, key and value projections.

Qwen3 (arXiv 2505.09388): no bias, but RMSNorm of queries and keys and a head size of its own; dense, or with experts in
all or in some layers.
"""

from typing import Any

from megatron.architectures.layer_pattern import describe_layers, describe_window_layers
from megatron.architectures.spec import (
    ArchitectureSpec,
    Fields,
    HFTensor,
    WeightMapping,
    attention,
    dense_layer,
    experts,
    flag,
    number,
    preset,
    qk_norm,
    size,
    swiglu,
)
from megatron.architectures.transformer_config import TransformerConfig

_VOCABULARY = 151936
_NO_WINDOW = {"use_sliding_window": (False, "attention has no sliding window here")}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOWS = frozenset({"window_size", "window_attn_skip_freq"})
_NO_BIAS = {"attention_bias": (False, "its linear layers have no bias")}


def _read_windows(fields: Fields) -> dict[str, Any]:
    """The window of transformers counts a query's own key."""
    layers, first = range(size(fields, "num_hidden_layers")), int(number(fields, "max_window_layers", 28))
    uses_window = flag(fields, "use_sliding_window", False)
    kinds = fields.get("layer_types") or [_SLIDING if uses_window and layer >= first else _FULL for layer in layers]
    if _SLIDING not in kinds:
        return {}
    if not uses_window:
        raise ValueError(f"layer_types has {_SLIDING!r} without use_sliding_window: correct the file")
    pattern = describe_window_layers(kind == _SLIDING for kind in kinds)
    return {"window_size": f"{size(fields, 'sliding_window', 4096) - 1},0", "window_attn_skip_freq": pattern}


def _window_fields(config: TransformerConfig) -> dict[str, Any]:
    windows = config.windows()
    found = [window + 1 for window in windows if window is not None]
    first = next((layer for layer, window in enumerate(windows) if window is not None), config.num_layers)
    fields: dict[str, Any] = {"use_sliding_window": bool(found), "max_window_layers": first}
    if found:
        kinds = [_FULL if window is None else _SLIDING for window in windows]
        fields |= {"sliding_window": found[0], "layer_types": kinds}
    return fields


def _qwen2_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    bias = WeightMapping(
        "self_attention.linear_qkv.bias",
        (
            HFTensor("self_attn.q_proj.bias", config.query_size, is_rotary=True),
            HFTensor("self_attn.k_proj.bias", config.key_value_size, is_rotary=True),
            HFTensor("self_attn.v_proj.bias", config.key_value_size),
        ),
    )
    return (*dense_layer(config, number), bias)


QWEN2 = ArchitectureSpec(
    name="qwen2",
    title="Qwen2",
    layer_weights=_qwen2_weights,
    features={"add_qkv_bias": True},
    variable_features=_WINDOWS,
    config_fields=_window_fields,
    read_fields=_read_windows,
    field_defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    layer_types=frozenset({_SLIDING, _FULL}),
)


def _qwen3_preset(layers: int, hidden: int, ffn: int, heads: int, groups: int = 8, **more: Any) -> dict[str, Any]:
    shared = {"kv_channels": 128, "rotary_base": 1000000.0, "norm_epsilon": 1e-6, "qk_layernorm": True}
    return preset(layers, hidden, ffn, heads, groups, 40960, **shared, **more)


_QWEN3_PRESETS = {
    "qwen3-0.6b": _qwen3_preset(28, 1024, 3072, 16, untie_embeddings_and_output_weights=False),
    "qwen3-1.7b": _qwen3_preset(28, 2048, 6144, 16, untie_embeddings_and_output_weights=False),
    "qwen3-4b": _qwen3_preset(36, 2560, 9728, 32, untie_embeddings_and_output_weights=False),
    "qwen3-8b": _qwen3_preset(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3_preset(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3_preset(64, 5120, 25600, 64),
}

QWEN3 = ArchitectureSpec(
    name="qwen3",
    title="Qwen3",
    layer_weights=lambda config, number: (*dense_layer(config, number), *qk_norm(config)),
    features={"qk_layernorm": True},
    presets=_QWEN3_PRESETS,
    vocab_sizes=dict.fromkeys(_QWEN3_PRESETS, _VOCABULARY),
    variable_features=_WINDOWS,
    config_fields=lambda config: {"attention_bias": False, **_window_fields(config)},
    read_fields=_read_windows,
    field_defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    required_fields=_NO_BIAS,
    layer_types=frozenset({_SLIDING, _FULL}),
)

# --- with experts --------------------------------------------------------------------------------------------


def _moe_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    if config.moe_layers()[number]:
        mlp = experts(config, "mlp", gate="gate_proj", up="up_proj", down="down_proj")
    else:
        mlp = swiglu(config, config.ffn_hidden_size)
    return (*attention(config), *mlp, *qk_norm(config))


def _read_moe_fields(fields: Fields) -> dict[str, Any]:
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


def _moe_preset(layers: int, hidden: int, ffn: int, heads: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "moe_ffn_hidden_size": expert, "moe_router_topk": 8}
    return _qwen3_preset(layers, hidden, ffn, heads, groups=4, **experts)


_MOE_PRESETS = {
    "qwen3-30b-a3b": _moe_preset(48, 2048, 6144, 32, expert=768),
    "qwen3-235b-a22b": _moe_preset(94, 4096, 12288, 64, expert=1536),
}

QWEN3_MOE = ArchitectureSpec(
    name="qwen3_moe",
    title="Qwen3Moe",
    layer_weights=_moe_weights,
    features={"qk_layernorm": True},
    moe_layers=any,
    presets=_MOE_PRESETS,
    vocab_sizes=dict.fromkeys(_MOE_PRESETS, _VOCABULARY),
    config_fields=lambda config: {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(config.moe_layers()) if not is_moe],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    read_fields=_read_moe_fields,
    field_defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    required_fields=_NO_BIAS
    | _NO_WINDOW
    | {"norm_topk_prob": (True, "the weights of the chosen experts sum to one here")},
)
