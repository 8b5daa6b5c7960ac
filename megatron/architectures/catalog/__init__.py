"""The architectures by name. A new one is a module here and its row in ``ARCHITECTURES``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from megatron.architectures.catalog.llama import LLAMA
from megatron.architectures.catalog.llama4 import LLAMA4
from megatron.architectures.catalog.mixtral import MIXTRAL
from megatron.architectures.catalog.qwen import QWEN2, QWEN3, QWEN3_MOE
from megatron.architectures.spec import ArchitectureSpec
from megatron.architectures.transformer_config import TransformerConfig

ARCHITECTURES = {spec.name: spec for spec in (LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, LLAMA4)}
PRESETS: dict[str, Mapping[str, Any]] = {}
PRESET_VOCABULARIES: dict[str, int] = {}
for _architecture in ARCHITECTURES.values():
    PRESETS |= _architecture.presets
    PRESET_VOCABULARIES |= _architecture.vocab_sizes

if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = Literal[tuple(PRESETS)]
    """The choices of ``--model``."""


def architecture_of(config: TransformerConfig) -> ArchitectureSpec | None:
    """The architecture whose features ``config`` has; None for an unknown combination."""
    return next((architecture for architecture in ARCHITECTURES.values() if architecture.describes(config)), None)
