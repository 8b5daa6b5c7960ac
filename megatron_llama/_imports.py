"""The package ``megatron`` must be ours: megatron-core installs one of the same name."""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent / "megatron"
FOREIGN_FILE = "core/package_info.py"
"""A file of megatron-core that is none of ours."""


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
