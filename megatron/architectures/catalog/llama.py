"""Llama 2 (arXiv 2307.09288) and Llama 3 (The Llama 3 Herd of Models, arXiv 2407.21783, table 3), and the published
configurations of Llama 3.2 and 3.3. ``tiny`` is for tests and first runs."""

from typing import Any

from megatron.architectures.spec import ArchitectureSpec, dense_layer, preset


def _llama2(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> dict[str, Any]:
    return preset(layers, hidden, ffn, heads, groups, 4096, rotary_base=10000.0)


def _llama3(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return preset(layers, hidden, ffn, heads, 8, 8192)


def _scaled(layers: int, hidden: int, ffn: int, heads: int, factor: float = 8.0, **more: Any) -> dict[str, Any]:
    return preset(layers, hidden, ffn, heads, 8, 131072, use_rope_scaling=True, rope_scaling_factor=factor, **more)


_PRESETS = {
    "tiny": preset(4, 128, 384, 8, 4, 8192, make_vocab_size_divisible_by=128),
    "llama2-7b": _llama2(32, 4096, 11008, 32, 32),
    "llama2-13b": _llama2(40, 5120, 13824, 40, 40),
    "llama2-70b": _llama2(80, 8192, 28672, 64, 8),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3-70b": _llama3(80, 8192, 28672, 64),
    "llama3.1-8b": _scaled(32, 4096, 14336, 32),
    "llama3.1-70b": _scaled(80, 8192, 28672, 64),
    "llama3.1-405b": _scaled(126, 16384, 53248, 128),
    "llama3.2-1b": _scaled(16, 2048, 8192, 32, factor=32.0, untie_embeddings_and_output_weights=False),
    "llama3.2-3b": _scaled(28, 3072, 8192, 24, factor=32.0, untie_embeddings_and_output_weights=False),
    "llama3.3-70b": _scaled(80, 8192, 28672, 64),
}


LLAMA = ArchitectureSpec(
    name="llama",
    title="Llama",
    layer_weights=dense_layer,
    presets=_PRESETS,
    vocab_sizes={name: 32000 if name.startswith("llama2") else 128256 for name in _PRESETS if name != "tiny"},
    config_fields=lambda config: {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    required_fields={"attention_bias": (False, "its linear layers have no bias")},
)
