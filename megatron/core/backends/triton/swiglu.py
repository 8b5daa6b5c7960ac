"""SwiGLU that writes its output in FP8, in the layouts that the next linear layer reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.backends.triton.fp8 import BLOCK_K, BLOCK_M, NUM_WARPS, magnitude_bits, record_amax, to_fp8
from megatron.core.ops.fp8 import DelayedQuantization, largest_value
from megatron.core.ops.swiglu import CompiledSwiGLU
from megatron.core.precision import Layout, QuantizedTensor

_SCALARS = ["scale_ptr", "inverse_scale_ptr", "step_amax_ptr"]
"""Pointers to elements of larger tensors. Kernels must not be specialised on their alignment, which differs between
layers: Triton would compile a kernel for each."""


class TritonSwiGLU(CompiledSwiGLU):
    """If the next linear layer quantises its input with a known scale, this kernel writes the output in FP8 alone: 6
    bytes per element for both layouts instead of 10. Otherwise the same as :class:`CompiledSwiGLU`."""

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        return quantized_swiglu(gate_and_up, quantization)


def quantized_swiglu(gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
    """``silu(gate) * up`` of ``[..., 2f] = [gate, up]``, computed in fp32 and rounded once, to FP8.

    Raises ``step_amax`` to the amax if that is larger. If the amax is not finite, the inverse scale is NaN.
    """
    assert gate_and_up.is_contiguous(), gate_and_up.stride()
    *shape, width = gate_and_up.shape
    m, k = gate_and_up.numel() // width, width // 2
    layout, dtype = quantization.layout, quantization.dtype
    data = gate_and_up.new_empty((*shape, k) if Layout.ROWS in layout else 0, dtype=dtype)
    transposed = gate_and_up.new_empty((k, m) if Layout.TRANSPOSED in layout else 0, dtype=dtype)
    inverse_scale = quantization.scale.reciprocal()
    _swiglu_tile[triton.cdiv(m, BLOCK_M) * triton.cdiv(k, BLOCK_K),](
        gate_and_up,
        quantization.scale,
        data,
        transposed,
        inverse_scale,
        quantization.step_amax.view(torch.int32),
        m,
        k,
        LARGEST=largest_value(dtype),
        WRITES_ROWS=Layout.ROWS in layout,
        WRITES_TRANSPOSED=Layout.TRANSPOSED in layout,
        BLOCK_M=BLOCK_M,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return QuantizedTensor(data, inverse_scale, transposed if Layout.TRANSPOSED in layout else None)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _swiglu_tile(
    gate_and_up_ptr: tl.tensor,  # [m, 2 k]
    scale_ptr: tl.tensor,  # []
    rows_ptr: tl.tensor,  # [m, k]
    transposed_ptr: tl.tensor,  # [k, m]
    inverse_scale_ptr: tl.tensor,  # []
    step_amax_ptr: tl.tensor,  # [], the bits of fp32
    m: tl.tensor,
    k: tl.tensor,
    LARGEST: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    WRITES_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write a tile of the output; neighbouring programs have neighbouring columns."""
    tile, tiles_in_row = tl.program_id(0), tl.cdiv(k, BLOCK_K)
    rows = (tile // tiles_in_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (tile % tiles_in_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < m) & (columns < k)
    gate_ptr = gate_and_up_ptr + rows * (2 * k) + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + k, mask=inside, other=0.0).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    record_amax(tl.max(magnitude_bits(output)), step_amax_ptr, inverse_scale_ptr)
    quantized = to_fp8(output, tl.load(scale_ptr), rows_ptr.dtype.element_ty, LARGEST)
    if WRITES_ROWS:
        tl.store(rows_ptr + rows * k + columns, quantized, mask=inside)
    if WRITES_TRANSPOSED:
        # Through shared memory, so that both stores are of neighbouring bytes.
        tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(quantized), mask=tl.trans(inside))
