"""Packages that stand in for others that are not installed, or need a GPU."""

import sys
from functools import cache
from pathlib import Path

from megatron.core.backends.transformer_engine import TransformerEngine


def transformer_engine() -> TransformerEngine:
    """The stand-in for Transformer Engine, for the process's next model: like the real one it knows of all modules that
    there were. Once it is there, the process does not find the real one."""
    engine = _load_transformer_engine()
    engine.pytorch.STATE.modules.clear()
    return engine


@cache
def _load_transformer_engine() -> TransformerEngine:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return TransformerEngine.load("stand-in")
    finally:
        sys.path.pop(0)
