"""Megatron-Llama: model-parallel pretraining of Llama models, from two CPU processes to a cluster."""

# Every program imports this file first: any Python 3 must be able to read it.
import sys
from importlib.util import find_spec

_MODULES = """
    torch numpy rich safetensors xxhash sentencepiece tiktoken google.protobuf tokenizers fsspec tqdm yaml
"""
# Modules of the packages that pyproject.toml requires.
MODULES = _MODULES.split()


def _obstacle() -> str:
    """Why nothing can run here, and what to do about it; empty if everything can."""
    if sys.platform == "win32":
        return "Megatron-Llama runs on Linux and macOS: on Windows, install it in WSL 2, which is Linux."
    if sys.version_info < (3, 11):  # noqa: UP036
        return (
            f"Megatron-Llama needs Python 3.11 or later, and {sys.executable} is {sys.version_info[0]}."
            f"{sys.version_info[1]}: start a later one, or activate its environment (source .venv/bin/activate)."
        )
    missing = []
    for module in MODULES:
        try:
            is_installed = find_spec(module) is not None
        except ModuleNotFoundError:  # its parent
            is_installed = False
        if not is_installed:
            missing.append(module)
    if missing:
        return (
            f"{sys.executable} has no {', '.join(missing)}: activate the environment that has them (source "
            ".venv/bin/activate), or install them (pip install -r requirements.txt)."
        )
    return ""


_found = _obstacle()
if _found:
    sys.tracebacklimit = 0  # the sentence alone
    raise ImportError(_found)
