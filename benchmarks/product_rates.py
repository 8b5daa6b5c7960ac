"""The rates of single operations on a device: square GEMMs by format, and copies. They are printed beside other
figures, because clocks and power limits differ between cards of one name."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib.results import error_line
from benchmarks.lib.step_timing import seconds_of
from megatron.core.ops.fp8 import E4M3, E5M2, gemm_for
from megatron.core.ops.matmul import InPlaceWeightGradient, linear
from megatron.core.precision import QuantizedTensor


def product_rates(device: torch.device, size: int | None = None) -> dict[str, float | str]:
    """TFLOP/s of ``[size, size]`` GEMMs by format and kind; the first line of the error where one does not run.

    The default size is 8,192 on a GPU and 256 on a CPU.
    """
    size = size or (8192 if device.type == "cuda" else 256)
    actions = _products(device, size)
    return {name: _rate(action, device, 2.0 * size**3) for name, action in actions.items()}


def _rate(action: Callable[[], object], device: torch.device, work: float) -> float | str:
    try:
        return work / seconds_of(action, device) / 1e12
    except Exception as error:
        return error_line(error)


def _products(device: torch.device, size: int) -> dict[str, Callable[[], object]]:
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    buffer = torch.zeros(size, size, device=device)
    one, multiply = torch.ones((), device=device), gemm_for(device)
    narrow, other, wide_range = (QuantizedTensor(m.to(f), one) for m, f in ((left, E4M3), (right, E4M3), (left, E5M2)))

    def fp8(a: QuantizedTensor, dtype: torch.dtype, fast: bool = False) -> Callable[[], Any]:
        return lambda: multiply(a, other, dtype, fast=fast)

    return {
        "bf16": lambda: linear(left, right),
        "bf16, added to fp32 gradients": lambda: InPlaceWeightGradient().write(buffer, left, right, True),
        "e4m3, fast accumulation": fp8(narrow, torch.bfloat16, fast=True),
        "e4m3": fp8(narrow, torch.bfloat16),
        "e5m2 x e4m3": fp8(wide_range, torch.bfloat16),
        "e5m2 x e4m3 to fp32": fp8(wide_range, torch.float32),
    }


def copy_rate(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes read and written per second when a tensor of ``num_bytes`` is copied on the device."""
    num_bytes = num_bytes or (2**30 if device.type == "cuda" else 2**24)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)
