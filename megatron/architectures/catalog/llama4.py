"""The text models of Llama 4 Scout and Maverick (meta-llama/Llama-4-Scout-17B-16E and -Maverick-17B-128E): experts with
a shared expert, of which a token uses one; attention in chunks with rotary position embedding, and every fourth layer
attention of the whole sequence without. ``tiny-llama4`` is for tests and first runs."""

from typing import Any

from megatron.architectures.layer_pattern import describe_layers, describe_nope_layers
from megatron.architectures.spec import (
    ArchitectureSpec,
    Fields,
    HFTensor,
    MultimodalModel,
    WeightMapping,
    attention,
    flag,
    number,
    preset,
    size,
    swiglu,
)
from megatron.architectures.transformer_config import TransformerConfig

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _layer_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    mlp = _experts(config) if config.moe_layers()[number] else swiglu(config, config.ffn_hidden_size, "feed_forward")
    return (*attention(config, rotates_halves=False), *mlp)


def _experts(config: TransformerConfig) -> tuple[WeightMapping, ...]:
    """The router, the experts, each tensor stacked and transposed, and the shared expert."""
    experts, hidden, ffn = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
    assert experts is not None
    assert ffn is not None
    block = "feed_forward"
    gate_up = HFTensor(f"{block}.experts.gate_up_proj", experts * 2 * ffn, experts=experts)  # [E, h, 2f]
    down = HFTensor(f"{block}.experts.down_proj", experts * hidden, experts=experts)  # [E, f, h]
    return (
        WeightMapping("mlp.router.weight", (HFTensor(f"{block}.router.weight", experts),), hidden),
        WeightMapping("mlp.experts.linear_fc1.weight", (gate_up,), hidden),
        WeightMapping("mlp.experts.linear_fc2.weight", (down,), ffn),
        *swiglu(config, ffn, f"{block}.shared_expert", "mlp.shared_experts"),
    )


# --- config.json ---------------------------------------------------------------------------------------------


def _read_fields(fields: Fields) -> dict[str, Any]:
    has_rope, floor, tunes = _rope_layers(fields), number(fields, "floor_scale"), fields["attn_temperature_tuning"]
    if floor < 1 or floor != int(floor):
        raise ValueError(f"floor_scale is {fields['floor_scale']!r}, not a positive integer: convert another model")
    # Published files have the number 4, of which only the truth counts.
    tunes = tunes != 0 if isinstance(tunes, int) else flag(fields, "attn_temperature_tuning", True)
    return {
        "ffn_hidden_size": size(fields, "intermediate_size_mlp"),
        "num_experts": size(fields, "num_local_experts"),
        "moe_layer_freq": describe_layers(_moe_layers(fields)),
        "moe_ffn_hidden_size": size(fields, "intermediate_size"),
        "moe_shared_expert_intermediate_size": size(fields, "intermediate_size"),
        "moe_router_topk": size(fields, "num_experts_per_tok"),
        "qk_l2_norm": flag(fields, "use_qk_norm", True),
        "no_rope_freq": describe_nope_layers(not rope for rope in has_rope),
        "attention_chunk_size": _chunk_size(fields, has_rope),
        "attention_temperature_tuning": tunes,
        "attention_temperature_floor": int(floor),
        "attention_temperature_scale": number(fields, "attn_scale"),
    }


def _moe_layers(fields: Fields) -> list[bool]:
    layers = range(size(fields, "num_hidden_layers"))
    if fields.get("moe_layers") is None:
        step = size(fields, "interleave_moe_layer_step")
        chosen = list(layers[step - 1 :: step])
    else:
        chosen = _integers(fields, "moe_layers")
    is_moe = [layer in chosen for layer in layers]
    if not any(is_moe):
        raise ValueError("moe_layers and interleave_moe_layer_step leave no layer with experts: correct the file")
    return is_moe


def _rope_layers(fields: Fields) -> list[bool]:
    """Whether each layer has rotary position embedding, which is a 1 in ``no_rope_layers``."""
    layers = range(size(fields, "num_hidden_layers"))
    # Published files have an empty list, which means the default.
    if not fields.get("no_rope_layers"):
        interval = size(fields, "no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in layers]
    has_rope = _integers(fields, "no_rope_layers")
    if len(has_rope) < len(layers):
        raise ValueError(
            f"no_rope_layers has {len(has_rope)} elements for {len(layers)} layers: correct the file, 1 is a layer "
            "with rotary embedding"
        )
    return [has_rope[layer] != 0 for layer in layers]


def _chunk_size(fields: Fields, has_rope: list[bool]) -> int | None:
    """The size of the chunks of attention; None if no layer has chunks."""
    wanted = [_CHUNKED if rope else _FULL for rope in has_rope]
    kinds = fields.get("layer_types") or wanted
    if "attention_chunk_size" in fields and fields["attention_chunk_size"] is None:
        kinds = [_FULL] * len(wanted)  # an explicit null
    if kinds == wanted and _CHUNKED in wanted:
        return size(fields, "attention_chunk_size", 8192)
    if kinds == [_FULL] * len(wanted):
        return None
    raise ValueError(
        f"layer_types differs from no_rope_layers: the layers with rotary embedding, and no others, can have "
        f"{_CHUNKED!r}; convert another model"
    )


def _integers(fields: Fields, name: str) -> list[int]:
    value = fields[name]
    if not isinstance(value, list) or not all(isinstance(element, int) for element in value):
        raise ValueError(f"{name} is {value!r}, not a list of integers: correct the file")
    return value


def _config_fields(config: TransformerConfig) -> dict[str, Any]:
    rope = config.rope_layers()
    is_chunked = config.attention_chunk_size is not None
    return {
        "intermediate_size": config.moe_ffn_hidden_size,
        "intermediate_size_mlp": config.ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_layers": [layer for layer, is_moe in enumerate(config.moe_layers()) if is_moe],
        # The step of regular MoE layers, for programs that do not read moe_layers, which has priority.
        "interleave_moe_layer_step": config.moe_layers().index(True) + 1,
        "use_qk_norm": config.qk_l2_norm,
        "no_rope_layers": [int(has_rope) for has_rope in rope],
        # transformers needs a size even if no layer has chunks.
        "attention_chunk_size": config.attention_chunk_size if is_chunked else config.max_position_embeddings,
        "layer_types": [_CHUNKED if is_chunked and has_rope else _FULL for has_rope in rope],
        "attn_temperature_tuning": config.attention_temperature_tuning,
        "floor_scale": config.attention_temperature_floor,
        "attn_scale": config.attention_temperature_scale,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
        "attention_bias": False,
    }


# --- presets -------------------------------------------------------------------------------------------------


def _llama4(
    layers: int, hidden: int, ffn: int, heads: int, positions: int, expert: int, chunk: int, **more: Any
) -> dict[str, Any]:
    # Three layers with rotary position embedding and chunks, one without both.
    attention = {"no_rope_freq": "4", "attention_chunk_size": chunk, "attention_temperature_tuning": True}
    widths = {"moe_ffn_hidden_size": expert, "moe_shared_expert_intermediate_size": expert}
    router = {"moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True}
    more |= attention | widths | router
    return preset(layers, hidden, ffn, heads, max_position_embeddings=positions, **more)


def _published(positions: int, **more: Any) -> dict[str, Any]:
    return _llama4(48, 5120, 16384, 40, positions, 8192, 8192, groups=8, kv_channels=128, **more)


_TINY = {"num_experts": 8, "moe_layer_freq": "[0,1]*2", "qk_l2_norm": True, "make_vocab_size_divisible_by": 128}
_SCALED = {"use_rope_scaling": True, "rope_scaling_factor": 16.0, "rope_scaling_high_freq_factor": 1.0}
_PRESETS = {
    "tiny-llama4": _llama4(4, 128, 384, 8, 8192, 192, 64, groups=4, **_TINY),
    "llama4-scout": _published(10485760, num_experts=16, qk_l2_norm=True, **_SCALED),
    "llama4-maverick": _published(1048576, num_experts=128, moe_layer_freq="[0,1]*24"),
}

LLAMA4 = ArchitectureSpec(
    name="llama4_text",
    title="Llama4",
    layer_weights=_layer_weights,
    features={"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
    variable_features=frozenset(
        {
            "qk_l2_norm",
            "no_rope_freq",
            "attention_chunk_size",
            "attention_temperature_tuning",
            "attention_temperature_floor",
            "attention_temperature_scale",
            "moe_shared_expert_intermediate_size",
        }
    ),
    moe_layers=any,
    accepts=lambda config: (
        config.moe_router_topk == 1 and config.moe_shared_expert_intermediate_size == config.moe_ffn_hidden_size
    ),
    multimodal=MultimodalModel("llama4", "Llama4ForConditionalGeneration", ("vision_model.", "multi_modal_projector.")),
    presets=_PRESETS,
    vocab_sizes={name: 202048 for name in _PRESETS if name != "tiny-llama4"},
    config_fields=_config_fields,
    read_fields=_read_fields,
    field_defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    required_fields={
        "attention_bias": (False, "its linear layers have no bias"),
        "router_jitter_noise": (0.0, "the input of the router has no noise here"),
        "num_experts_per_tok": (1, "the weight of an expert multiplies its input, which needs one expert per token"),
    },
    layer_types=frozenset({_CHUNKED, _FULL}),
)
