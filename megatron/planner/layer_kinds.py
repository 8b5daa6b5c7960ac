"""The kinds of a model's layers: layers of one kind have the same weights, operators and memory."""

from dataclasses import dataclass

from megatron.architectures.transformer_config import TransformerConfig


@dataclass(frozen=True, order=True)
class LayerKind:
    is_moe: bool
    has_rope: bool = True
    """Whether the layer has rotary position embedding; only these layers have --qk-l2-norm and --attention-chunk-size,
    and only the others --attention-temperature-tuning."""


def layer_kinds(architecture: TransformerConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer."""
    return tuple(map(LayerKind, architecture.moe_layers(), architecture.rope_layers()))
