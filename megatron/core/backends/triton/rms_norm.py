"""RMSNorm that writes its output in FP8, in the layouts that the next linear layer reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.backends.triton.fp8 import BLOCK_K, BLOCK_M, NUM_WARPS, magnitude_bits, record_amax, to_fp8
from megatron.core.ops.fp8 import DelayedQuantization, largest_value
from megatron.core.ops.norm import CompiledRMSNorm
from megatron.core.precision import Layout, QuantizedTensor

_SCALARS = ["scale_ptr", "inverse_scale_ptr", "step_amax_ptr"]
"""Elements of larger tensors: with their alignment every layer would compile its own kernels."""


class TritonRMSNorm(CompiledRMSNorm):
    """Where a linear layer follows that quantises with a known scale, the output is not written in bf16: 3 bytes per
    element for rows instead of 7, and 6 for both layouts instead of 8. Otherwise :class:`CompiledRMSNorm`."""

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        return quantized_rms_norm(inputs, weight, epsilon, quantization)


def quantized_rms_norm(
    inputs: Tensor, gain: Tensor, epsilon: float, quantization: DelayedQuantization
) -> tuple[QuantizedTensor, Tensor]:
    """``inputs / rms(inputs) * gain`` of ``[..., k]``, computed in fp32 and rounded once, to FP8; and the inverse RMS
    ``[..., 1]`` in fp32.

    Raises ``step_amax`` to the amax if that is larger. If the amax is not finite, the inverse scale is NaN.
    """
    inputs, gain = inputs.contiguous(), gain.contiguous()
    *shape, k = inputs.shape
    m = inputs.numel() // k
    layout, dtype = quantization.layout, quantization.dtype
    largest = largest_value(dtype)
    data = inputs.new_empty((*shape, k) if Layout.ROWS in layout else 0, dtype=dtype)
    inverse_rms = inputs.new_empty((*shape, 1), dtype=torch.float32)
    inverse_scale = quantization.scale.reciprocal()
    block = triton.next_power_of_2(k)
    _row[m,](
        inputs,
        gain,
        quantization.scale,
        data,
        inverse_rms,
        inverse_scale,
        quantization.step_amax.view(torch.int32),
        k,
        epsilon,
        LARGEST=largest,
        WRITES_ROWS=Layout.ROWS in layout,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    if Layout.TRANSPOSED not in layout:
        return QuantizedTensor(data, inverse_scale), inverse_rms
    transposed = inputs.new_empty(k, m, dtype=dtype)
    _transposed_tile[triton.cdiv(m, BLOCK_M) * triton.cdiv(k, BLOCK_K),](
        inputs,
        gain,
        inverse_rms,
        quantization.scale,
        transposed,
        m,
        k,
        LARGEST=largest,
        BLOCK_M=BLOCK_M,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return QuantizedTensor(data, inverse_scale, transposed), inverse_rms


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _row(
    x_ptr: tl.tensor,  # [m, k]
    gain_ptr: tl.tensor,  # [k]
    scale_ptr: tl.tensor,  # []
    rows_ptr: tl.tensor,  # [m, k]
    inverse_rms_ptr: tl.tensor,  # [m]
    inverse_scale_ptr: tl.tensor,  # []
    step_amax_ptr: tl.tensor,  # [], the bits of fp32
    k: tl.tensor,
    epsilon: tl.tensor,
    LARGEST: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the inverse RMS of a row, the quantised row, and record the amax."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < k
    x = tl.load(x_ptr + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x) / k + epsilon)
    tl.store(inverse_rms_ptr + row, inverse_rms)
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    output = x * inverse_rms * gain
    record_amax(tl.max(magnitude_bits(output)), step_amax_ptr, inverse_scale_ptr)
    if WRITES_ROWS:
        quantized = to_fp8(output, tl.load(scale_ptr), rows_ptr.dtype.element_ty, LARGEST)
        tl.store(rows_ptr + row * k + columns, quantized, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def _transposed_tile(
    x_ptr: tl.tensor,  # [m, k]
    gain_ptr: tl.tensor,  # [k]
    inverse_rms_ptr: tl.tensor,  # [m]
    scale_ptr: tl.tensor,  # []
    transposed_ptr: tl.tensor,  # [k, m]
    m: tl.tensor,
    k: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write a tile of the transpose, with the numbers of the rows; neighbouring programs have neighbouring columns."""
    tile, tiles_in_row = tl.program_id(0), tl.cdiv(k, BLOCK_K)
    rows = (tile // tiles_in_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (tile % tiles_in_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < m) & (columns < k)
    x = tl.load(x_ptr + rows * k + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=columns < k, other=0.0).to(tl.float32)
    inverse_rms = tl.load(inverse_rms_ptr + rows, mask=rows < m, other=0.0)
    quantized = to_fp8(x * inverse_rms * gain, tl.load(scale_ptr), transposed_ptr.dtype.element_ty, LARGEST)
    # Through shared memory, so that loads and stores are of neighbouring bytes.
    tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(quantized), mask=tl.trans(inside))
