"""Mixtral (arXiv 2401.04088): Llama with experts instead of the MLP in every layer. ``tiny-moe`` is ``tiny`` with
experts, of which a token uses two that are half as wide as its MLP."""

from collections.abc import Mapping
from typing import Any

from megatron.architectures.spec import ArchitectureSpec, Fields, WeightMapping, attention, experts, preset, size
from megatron.architectures.transformer_config import TransformerConfig


def _layer_weights(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    # Mistral's names of the projections: w1 is gate, w3 is up, w2 is down.
    return (*attention(config), *experts(config, "block_sparse_moe", gate="w1", up="w3", down="w2"))


def _read_fields(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": size(fields, "num_local_experts"),
        "moe_ffn_hidden_size": size(fields, "intermediate_size"),
        "moe_router_topk": size(fields, "num_experts_per_tok"),
    }


def _config_fields(config: TransformerConfig) -> Mapping[str, Any]:
    return {
        "intermediate_size": config.moe_ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _mixtral(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, positions: int, **more: Any
) -> dict[str, Any]:
    experts = {"num_experts": 8, "moe_ffn_hidden_size": ffn, "moe_router_topk": 2}
    return preset(layers, hidden, ffn, heads, groups, positions, **experts, **more)


ARCHITECTURE = ArchitectureSpec(
    name="mixtral",
    title="Mixtral",
    layer_weights=_layer_weights,
    moe_layers=all,
    presets={
        "tiny-moe": _mixtral(4, 128, 192, 8, 4, 8192, make_vocab_size_divisible_by=128),
        "mixtral-8x7b": _mixtral(32, 4096, 14336, 32, 8, 32768, rotary_base=1000000.0),
        "mixtral-8x22b": _mixtral(56, 6144, 16384, 48, 8, 65536, rotary_base=1000000.0),
    },
    vocab_sizes={"mixtral-8x7b": 32000, "mixtral-8x22b": 32768},
    config_fields=_config_fields,
    read_fields=_read_fields,
    field_defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    required_fields={
        "sliding_window": (None, "attention has no sliding window here"),
        "router_jitter_noise": (0.0, "the input of the router has no noise here"),
    },
)
