"""The installed package, imported once and passed to the code that uses it."""

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch

OLDEST = (2, 9)
"""The first version with ``autocast`` and ``is_fp8_available``."""


class UnavailableError(Exception):
    """Why Transformer Engine cannot be used, as the end of a sentence."""


@dataclass(frozen=True)
class TransformerEngine:
    """The modules of the package that are used."""

    pytorch: Any
    """``transformer_engine.pytorch``"""
    recipe: Any
    """``transformer_engine.common.recipe``"""
    version: str

    @classmethod
    def find(cls, device: torch.device) -> "TransformerEngine":
        """The package, for layers on ``device``; raises :class:`UnavailableError`."""
        if device.type != "cuda":
            raise UnavailableError("has no kernels for a CPU")
        try:
            version = importlib.metadata.version("transformer-engine")
            if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
                raise UnavailableError(f"is installed in version {version}, which is too old")
            return cls.load(version)
        # A package built for another torch or CUDA fails in many ways when its libraries are loaded.
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UnavailableError(f"cannot be imported ({reason})") from error

    @classmethod
    def load(cls, version: str) -> "TransformerEngine":
        pytorch = importlib.import_module("transformer_engine.pytorch")
        return cls(pytorch, importlib.import_module("transformer_engine.common.recipe"), version)
