"""The description of an architecture of the catalog, helpers to write one, and checked values of ``config.json``."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.architectures.features import ArchitectureFeatures
from megatron.architectures.transformer_config import TransformerConfig

# The content of config.json.
Fields = Mapping[str, Any]


def size(fields: Fields, name: str, default: int | None = None) -> int:
    """A positive integer."""
    value = _present(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a positive number: correct the file")
    return value


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """A finite number that is not negative."""
    value = _present(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, not a number: correct the file")
    return float(value)


def flag(fields: Fields, name: str, default: bool) -> bool:
    """A boolean."""
    value = _present(fields, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not a boolean: correct the file")
    return value


def _present(fields: Fields, name: str, default: float | bool | None) -> Any:
    value = default if fields.get(name) is None else fields[name]
    if value is None:
        raise ValueError(f"{name} is missing: correct the file")
    return value


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, stored as a range of rows (dim 0) of one of our tensors."""

    name: str
    """Its name at Hugging Face, in the layer."""
    rows: int
    is_rotary: bool = False
    """Whether its rows are heads in rotary order, which differs between the two (docs/decisions_core.md)."""
    experts: int | None = None
    """Number of experts whose weights the tensor stacks, transposed: ``[experts, columns, rows / experts]``."""


@dataclass(frozen=True)
class WeightMapping:
    """One of our tensors, and the Hugging Face tensors of which it is the stack along dim 0."""

    name: str
    sections: tuple[HFTensor, ...]
    columns: int | None = None
    """None: one dimension."""
    is_gain: bool = False
    """Whether it is the gain of a norm."""


@dataclass(frozen=True)
class MultimodalModel:
    """A multimodal model at Hugging Face that contains a text model of a family."""

    name: str
    """``model_type`` at Hugging Face."""
    hugging_face_class: str
    other_prefixes: tuple[str, ...]
    """Prefixes of the names of the tensors beside the text model."""
    text_prefix: str = "language_model."
    """Prefix of the names of the text model's tensors."""
    text_fields: str = "text_config"
    """Field of ``config.json`` with the text model's fields."""


@dataclass(frozen=True)
class ArchitectureSpec:
    """A family of models: its features, its presets, and its files at Hugging Face."""

    name: str
    """``model_type`` at Hugging Face."""
    title: str
    """For messages."""
    layer_weights: Callable[[TransformerConfig, int], tuple[WeightMapping, ...]]
    """The weights of the layer with this number, by their names in the layer."""
    features: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`TransformerConfig` in which the family differs from the default."""
    variable_features: frozenset[str] = frozenset()
    """Fields among ``FEATURES`` in which models of the family differ from one another."""
    moe_layers: Callable[[tuple[bool, ...]], bool] = lambda is_moe: not any(is_moe)
    """Whether a model of the family can have these MoE layers; ``is_moe`` has an element for each layer."""
    accepts: Callable[[TransformerConfig], bool] = lambda config: True
    """Whether a model of the family can have the other fields of the configuration."""
    multimodal: MultimodalModel | None = None
    """The multimodal model that contains a text model of the family."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flags that ``--model NAME`` stands for."""
    vocab_sizes: Mapping[str, int] = field(default_factory=dict)
    """Rows of the embedding of each preset."""
    config_fields: Callable[[TransformerConfig], Fields] = lambda config: {}
    """Fields of ``config.json`` that differ from the common ones."""
    read_fields: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}
    """Fields of :class:`TransformerConfig` from fields of ``config.json`` that only this family has. Raises
    ``ValueError``."""
    field_defaults: Fields = field(default_factory=dict)
    """Defaults of transformers for absent fields of ``config.json``, where they are not Llama's."""
    required_fields: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """Required values of fields of ``config.json`` (absent is correct without a default), and the reason."""
    layer_types: frozenset[str] = frozenset({"full_attention"})
    """Values in ``layer_types`` of ``config.json`` that are read."""

    @property
    def hugging_face_class(self) -> str:
        return f"{self.title}ForCausalLM"

    def describes(self, config: TransformerConfig) -> bool:
        """Whether ``config`` has the features of this family and no others."""
        # Features that do not vary must have the default, or the value of the family.
        fixed = [name for name in FEATURES if name not in self.variable_features]
        features = {name: getattr(TransformerConfig, name) for name in fixed} | dict(self.features)
        has_features = all(getattr(config, name) == value for name, value in features.items())
        return has_features and self.moe_layers(config.moe_layers()) and self.accepts(config)


_COMMON = """
    position_embedding_type rotary_base use_rope_scaling norm_epsilon untie_embeddings_and_output_weights
    init_method_std apply_layernorm_1p num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk
    mtp_num_layers use_mup
"""
# Features that distinguish families, besides MoE layers: all but those that every family may have.
FEATURES = [
    field.name
    for field in fields(ArchitectureFeatures)
    if field.name not in _COMMON.split() and not field.name.startswith(("rope_scaling_", "yarn_", "mup_"))
]


def dense_layer(config: TransformerConfig, number: int) -> tuple[WeightMapping, ...]:
    """The weights that every layer with a SwiGLU MLP has."""
    return (*attention(config), *swiglu(config, config.ffn_hidden_size))


def attention(config: TransformerConfig, *, rotates_halves: bool = True) -> tuple[WeightMapping, ...]:
    """The weights of attention and of the two norms, which every layer has. ``rotates_halves`` says whether the rotary
    pairs of transformers are half a head apart, not neighbours as here."""
    hidden, key_value = config.hidden_size, config.key_value_size
    # linear_qkv stacks the rows of q, k and v: [(n + 2g) d, h].
    return (
        WeightMapping("input_layernorm.weight", (HFTensor("input_layernorm.weight", hidden),), is_gain=True),
        WeightMapping(
            "self_attention.linear_qkv.weight",
            (
                HFTensor("self_attn.q_proj.weight", config.query_size, is_rotary=rotates_halves),
                HFTensor("self_attn.k_proj.weight", key_value, is_rotary=rotates_halves),
                HFTensor("self_attn.v_proj.weight", key_value),
            ),
            hidden,
        ),
        WeightMapping(
            "self_attention.linear_proj.weight", (HFTensor("self_attn.o_proj.weight", hidden),), config.query_size
        ),
        WeightMapping("pre_mlp_layernorm.weight", (HFTensor("post_attention_layernorm.weight", hidden),), is_gain=True),
    )


def qk_norm(config: TransformerConfig) -> tuple[WeightMapping, ...]:
    """The gains of the norms of queries and keys."""
    gains = {name: HFTensor(f"self_attn.{name}_norm.weight", config.kv_channels, is_rotary=True) for name in ("q", "k")}
    return tuple(
        WeightMapping(f"self_attention.{name}_layernorm.weight", (gain,), is_gain=True) for name, gain in gains.items()
    )


def swiglu(config: TransformerConfig, ffn: int, block: str = "mlp", ours: str = "mlp") -> tuple[WeightMapping, ...]:
    """The weights of an MLP of width ``ffn``, whose name is ``ours`` here and ``block`` at Hugging Face."""
    hidden = config.hidden_size
    gate_up = HFTensor(f"{block}.gate_proj.weight", ffn), HFTensor(f"{block}.up_proj.weight", ffn)  # [2f, h]
    return (
        WeightMapping(f"{ours}.linear_fc1.weight", gate_up, hidden),
        WeightMapping(f"{ours}.linear_fc2.weight", (HFTensor(f"{block}.down_proj.weight", hidden),), ffn),
    )


def experts(config: TransformerConfig, block: str, gate: str, up: str, down: str) -> tuple[WeightMapping, ...]:
    """The router and the experts of an MoE layer. ``block`` is the name of the MoE block at Hugging Face; ``gate``,
    ``up`` and ``down`` are the names of the projections of an expert."""
    assert config.num_experts is not None
    assert config.moe_ffn_hidden_size is not None
    hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
    names = [f"{block}.experts.{expert}" for expert in range(config.num_experts)]
    # Each expert has first the rows of gate, then the rows of up: [E 2f, h].
    fc1 = (HFTensor(f"{name}.{projection}.weight", ffn) for name in names for projection in (gate, up))
    fc2 = (HFTensor(f"{name}.{down}.weight", hidden) for name in names)  # [E h, f]
    return (
        WeightMapping("mlp.router.weight", (HFTensor(f"{block}.gate.weight", config.num_experts),), hidden),
        WeightMapping("mlp.experts.linear_fc1.weight", tuple(fc1), hidden),
        WeightMapping("mlp.experts.linear_fc2.weight", tuple(fc2), ffn),
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
