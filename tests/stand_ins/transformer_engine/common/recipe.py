"""Recipes: which numbers, and whose magnitudes scale them."""

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    """Largest numbers of the forward and of the backward pass."""

    E4M3 = (448.0, 448.0)
    HYBRID = (448.0, 57344.0)


@dataclass(kw_only=True)
class DelayedScaling:
    """By magnitudes of the past."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True


@dataclass(kw_only=True)
class Float8CurrentScaling:
    """By the tensor itself."""

    fp8_format: Format = Format.HYBRID


@dataclass(kw_only=True)
class MXFP8BlockScaling:
    """By blocks of 32; here as :class:`Float8CurrentScaling`."""

    fp8_format: Format = Format.E4M3


@dataclass(kw_only=True)
class Float8BlockScaling:
    """By blocks of 128; here as :class:`Float8CurrentScaling`."""

    fp8_format: Format = Format.E4M3
