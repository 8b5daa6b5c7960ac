"""Megatron-Llama from outside: the command ``megatron-llama`` (``python -m megatron_llama``), and the names for Python.

    import megatron_llama as ml

    with ml.Run(model="tiny", mock_data=True, vocab_size=500, …) as run:
        print(run.step().loss)

The code is in the package ``megatron``. The distribution megatron-core installs a package of the same name, so this
package, whose name is unique, checks that ``megatron`` is the one beside it. docs/python.md is for users.
"""

from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.architectures.transformer_config import TransformerConfig
    from megatron.core.models.layer import BuildContext, RMSNorm, SequencePositions, TransformerLayer
    from megatron.core.models.parallelize import OwnLayers
    from megatron.core.ops.attention import AttentionMask
    from megatron.core.parameter import constant, normal
    from megatron.data.data_module import DataContext
    from megatron.errors import CheckpointError, ConfigError, DataError, UserError
    from megatron.training.build.run import RunParts
    from megatron.training.loop.trainer import Listener
    from megatron_llama.commands import command
    from megatron_llama.model import Model
    from megatron_llama.run import Evaluation, Run, Step

__all__ = [
    "AttentionMask",
    "BuildContext",
    "CheckpointError",
    "ConfigError",
    "DataContext",
    "DataError",
    "Evaluation",
    "Listener",
    "Model",
    "OwnLayers",
    "RMSNorm",
    "Run",
    "RunParts",
    "SequencePositions",
    "Step",
    "TransformerConfig",
    "TransformerLayer",
    "UserError",
    "command",
    "constant",
    "normal",
]
__version__ = "0.1.0"

OURS = Path(__file__).resolve().parent.parent / "megatron"
# A file of megatron-core that is none of ours.
FOREIGN_FILE = "core/package_info.py"


def check_imports() -> None:
    """Raise :class:`ImportError` if ``import megatron`` finds another package, or files of two packages."""
    problem = foreign_package(find_spec("megatron"), OURS)
    if problem is not None:
        raise ImportError(
            f"{problem}: megatron-core has the same import name as Megatron-Llama. Install Megatron-Llama in a virtual "
            "environment without megatron-core, and start Python outside of a clone of Megatron-LM."
        )


def foreign_package(found: ModuleSpec | None, ours: Path) -> str | None:
    """What is wrong with the package that ``import megatron`` finds, if it is not the one in ``ours``."""
    if found is None:
        return "The package megatron is missing"
    # A namespace package, such as that of megatron-core, has no file.
    places = [Path(place).resolve() for place in found.submodule_search_locations or ()]
    if found.origin is None or ours not in places:
        return f"import megatron finds {', '.join(map(str, places)) or found.origin}, and not {ours}"
    if (ours / FOREIGN_FILE).exists():
        return f"{ours} holds files of megatron-core"
    return None


check_imports()

_PLACES = {
    "megatron_llama.run": ("Evaluation", "Run", "Step"),
    "megatron_llama.model": ("Model",),
    "megatron_llama.commands": ("command",),
    "megatron.training.build.run": ("RunParts",),
    # What a layer of one's own is made of.
    "megatron.core.models.layer": ("BuildContext", "RMSNorm", "SequencePositions", "TransformerLayer"),
    "megatron.core.models.parallelize": ("OwnLayers",),
    "megatron.core.ops.attention": ("AttentionMask",),
    "megatron.core.parameter": ("constant", "normal"),
    "megatron.architectures.transformer_config": ("TransformerConfig",),
    "megatron.data.data_module": ("DataContext",),
    "megatron.training.loop.trainer": ("Listener",),
    "megatron.errors": ("CheckpointError", "ConfigError", "DataError", "UserError"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command needs no torch for its help."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
