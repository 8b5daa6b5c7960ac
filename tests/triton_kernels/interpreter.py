"""Repairs of Triton's interpreter: conversions between formats of numbers are rounded as GPUs round them, and loops
have bounds that are arguments of the kernel."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

FORMATS = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


def repair_interpreter() -> None:
    """Replace functions of the interpreter in this process.

    Its conversions lose the carry into the exponent, and do not round ties to even (Triton 3.6.0 and 3.9.0). Its
    scalars are arrays of one element, which Triton 3.6.0 converts to an index by ``int``; NumPy 2.4 refuses that.
    """
    interpreter._convert_float = _convert
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _convert(numbers: Any, from_format: Any, to_format: Any, rounding: Any) -> Any:
    """``numbers`` in another format, as an array of their bits."""
    bits = torch.from_numpy(np.frombuffer(numbers.tobytes(), dtype=f"int{from_format.primitive_bitwidth}").copy())
    if from_format.primitive_bitwidth == 8:
        bits = bits.view(torch.uint8)
    converted = converted_as_on_gpus(bits.view(FORMATS[from_format]), FORMATS[to_format])
    array = converted.view(BITS[converted.itemsize]).numpy()
    return array.view(f"uint{to_format.primitive_bitwidth}").reshape(numbers.shape)


def converted_as_on_gpus(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of ``dtype``, of two the even one; FP8 saturates (``cvt.rn.satfinite``)."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        numbers = numbers.clamp(-largest, largest)
    return numbers.to(dtype)
