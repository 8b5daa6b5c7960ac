"""Megatron-Llama from outside: the command ``megatron-llama`` (``python -m megatron_llama``), and the names for Python.

    import megatron_llama as ml

    with ml.Run(model="tiny", mock_data=True, vocab_size=500, …) as run:
        print(run.step().loss)

The code is in the package ``megatron``. The distribution megatron-core installs a package of the same name, so this
package, whose name is unique, checks that ``megatron`` is the one beside it. docs/python.md is for users.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_llama import check_imports

if TYPE_CHECKING:
    from megatron.errors import CheckpointError, ConfigError, DataError, UserError
    from megatron_llama.commands import command
    from megatron_llama.model import Model
    from megatron_llama.run import Evaluation, Run, Step

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Evaluation",
    "Model",
    "Run",
    "Step",
    "UserError",
    "command",
]
__version__ = "0.1.0"

check_imports()

_PLACES = {
    "megatron_llama.run": ("Evaluation", "Run", "Step"),
    "megatron_llama.model": ("Model",),
    "megatron_llama.commands": ("command",),
    "megatron.errors": ("CheckpointError", "ConfigError", "DataError", "UserError"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command needs no torch for its help."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
