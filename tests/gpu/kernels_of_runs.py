"""The kernels that runs choose by their flags, and comparisons with fp64."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.benchmark_step import parse
from megatron.config.precision import IMPLEMENTATIONS
from megatron.core.kernels.selection import Kernels
from megatron.errors import ConfigError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of the relative error in the Euclidean norm; bf16 rounds to 2^-9, a wrong mask or row is off by more than a tenth."""


def precision_flag(dtype: torch.dtype) -> list[str]:
    return {torch.float64: ["--fp64"], torch.float32: [], torch.bfloat16: ["--bf16"]}[dtype]


def kernels_with(device: torch.device, dtype: torch.dtype, *flags: str) -> Kernels:
    """The kernels of a run with ``flags``; the test is skipped, with the reason, if one of them is not available."""
    found = _kernels_or_reason(device, dtype, flags)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _kernels_or_reason(device: torch.device, dtype: torch.dtype, flags: tuple[str, ...]) -> Kernels | str:
    words = ["--model", "tiny", "--seq-length", "64", "--vocab-size", "256", *precision_flag(dtype), *flags]
    config = parse(words).slice
    config.check()
    try:
        return config.choose_kernels(config.topology(device))
    except ConfigError as error:
        return str(error)


def implementations(operation: str) -> list[str]:
    return list(IMPLEMENTATIONS[operation])


def on_cpu(*values: Any) -> Any:
    """A row that a CPU runs, too."""
    return pytest.param(*values, marks=pytest.mark.rehearsed)


def assert_close(
    found: Tensor, wanted: Tensor, dtype: torch.dtype, of: str = "result", tolerance: float | None = None
) -> None:
    """Compare with ``wanted`` in fp64, as computed in ``dtype``."""
    assert found.shape == wanted.shape
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error <= (tolerance or TOLERANCE[dtype]), f"{of} has a relative error of {error:.1e}"


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)
