"""The architectures by name. A new one is a module in ``catalog`` and its row here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from megatron.architectures.catalog import (
    llama,
    llama4,
    mixtral,
)
from megatron.architectures.catalog import (
    qwen as qwen2,
)
from megatron.architectures.catalog import (
    qwen as qwen3,
)
from megatron.architectures.catalog import (
    qwen as qwen3_moe,
)
from megatron.architectures.spec import ArchitectureSpec
from megatron.architectures.transformer_config import TransformerConfig

_MODULES = (llama, qwen2, qwen3, mixtral, qwen3_moe, llama4)
ARCHITECTURES = {module.ARCHITECTURE.name: module.ARCHITECTURE for module in _MODULES}
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
