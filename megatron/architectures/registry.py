"""The architectures by name. A new one is a module in ``catalog`` and its row here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from megatron.architectures.catalog import llama, qwen2, qwen3
from megatron.architectures.spec import ArchitectureSpec
from megatron.architectures.transformer_config import TransformerConfig

ARCHITECTURES: dict[str, ArchitectureSpec] = {
    architecture.name: architecture for architecture in (llama.ARCHITECTURE, qwen2.ARCHITECTURE, qwen3.ARCHITECTURE)
}

PRESETS: dict[str, Mapping[str, Any]] = {
    name: flags for architecture in ARCHITECTURES.values() for name, flags in architecture.presets.items()
}
PRESET_VOCABULARIES: dict[str, int] = {
    name: size for architecture in ARCHITECTURES.values() for name, size in architecture.vocab_sizes.items()
}

if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = Literal[tuple(PRESETS)]
    """The choices of ``--model``."""


def architecture_of(config: TransformerConfig) -> ArchitectureSpec | None:
    """The family whose features ``config`` has; None for a combination that no family has."""
    return next((architecture for architecture in ARCHITECTURES.values() if architecture.describes(config)), None)
