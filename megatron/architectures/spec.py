"""The description of an architecture of the catalog, and helpers to write one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.architectures.transformer_config import TransformerConfig


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, stored as a range of rows (dim 0) of one of our tensors."""

    name: str
    """Its name at Hugging Face, in the layer."""
    rows: int
    is_rotary: bool = False
    """Whether its rows are heads in rotary order, which differs between the two (docs/architecture.md)."""


@dataclass(frozen=True)
class WeightMapping:
    """One of our tensors, and the Hugging Face tensors of which it is the stack along dim 0."""

    name: str
    sections: tuple[HFTensor, ...]
    columns: int | None = None
    """None: one dimension."""
    is_gain: bool = False
    """Whether it is the gain of a norm."""


LayerWeights = Callable[[TransformerConfig], tuple[WeightMapping, ...]]
"""The weights of a layer, by their names in the layer."""


@dataclass(frozen=True)
class ArchitectureSpec:
    """A family of models: its features, its presets, and its files at Hugging Face."""

    name: str
    """``model_type`` at Hugging Face."""
    title: str
    """For messages."""
    layer_weights: LayerWeights
    features: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`TransformerConfig` in which the family differs from the default."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flags that ``--model NAME`` stands for."""
    vocab_sizes: Mapping[str, int] = field(default_factory=dict)
    """Rows of the embedding of each preset."""
    config_fields: Callable[[TransformerConfig], Mapping[str, Any]] = lambda config: {}
    """Fields of ``config.json`` in addition to the common ones."""
    field_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for absent fields of ``config.json``, where they are not Llama's."""
    required_fields: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """Required values of fields of ``config.json`` (if present), and the reason."""

    @property
    def hugging_face_class(self) -> str:
        return f"{self.title}ForCausalLM"

    def describes(self, config: TransformerConfig) -> bool:
        """Whether ``config`` has the features of this family and no others."""
        default = {name: getattr(TransformerConfig, name) for name in FEATURES}
        return all(getattr(config, name) == value for name, value in (default | dict(self.features)).items())


FEATURES = ("qk_layernorm", "add_qkv_bias")
"""Fields of :class:`TransformerConfig` that distinguish families."""


def dense_layer(config: TransformerConfig) -> tuple[WeightMapping, ...]:
    """The weights that every layer with a SwiGLU MLP has."""
    hidden, ffn, key_value = config.hidden_size, config.ffn_hidden_size, config.key_value_size
    return (
        WeightMapping("input_layernorm.weight", (HFTensor("input_layernorm.weight", hidden),), is_gain=True),
        WeightMapping(
            "self_attention.linear_qkv.weight",
            (
                HFTensor("self_attn.q_proj.weight", config.query_size, is_rotary=True),
                HFTensor("self_attn.k_proj.weight", key_value, is_rotary=True),
                HFTensor("self_attn.v_proj.weight", key_value),
            ),
            hidden,
        ),
        WeightMapping(
            "self_attention.linear_proj.weight", (HFTensor("self_attn.o_proj.weight", hidden),), config.query_size
        ),
        WeightMapping("pre_mlp_layernorm.weight", (HFTensor("post_attention_layernorm.weight", hidden),), is_gain=True),
        WeightMapping(
            "mlp.linear_fc1.weight",
            (HFTensor("mlp.gate_proj.weight", ffn), HFTensor("mlp.up_proj.weight", ffn)),
            hidden,
        ),
        WeightMapping("mlp.linear_fc2.weight", (HFTensor("mlp.down_proj.weight", hidden),), ffn),
    )


def preset(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, max_position_embeddings: int, **more: Any
) -> dict[str, Any]:
    """The flags of a preset."""
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "max_position_embeddings": max_position_embeddings,
        "make_vocab_size_divisible_by": 1,
    }
    return sizes | more
