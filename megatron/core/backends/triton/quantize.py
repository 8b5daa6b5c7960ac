"""FP8 quantisation in one pass: read a tensor once, write it in FP8 as rows, transposed, or both, and record its amax.

3 bytes per bf16 element and layout, or 4 for both, instead of 29 and more. Results are bitwise equal to
:class:`~megatron.core.ops.fp8.EagerQuantization`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.fp8 import LARGEST_SCALE, largest_value
from megatron.core.precision import Layout, QuantizedTensor

BLOCK_M, BLOCK_K, NUM_WARPS = 128, 64, 8
"""Rows and columns of a tile: it reads and transposes lines of 128 bytes. Not tuned on a device."""

_SCALARS = ["scale_ptr", "inverse_scale_ptr", "amax_ptr", "step_amax_ptr"]
"""Pointers to elements of larger tensors. Kernels must not be specialised on their alignment, which differs between
layers: Triton would compile a kernel for each."""


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """The bits of ``|x|`` for fp32 ``x``, which are ordered as the magnitudes are, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """fp32 ``x`` times ``scale`` in the FP8 ``dtype``, whose largest value is ``LARGEST``, saturated; NaN stays."""
    return tl.clamp(x * scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def record_amax(bits: tl.tensor, step_amax_ptr: tl.tensor, inverse_scale_ptr: tl.tensor) -> None:
    """Raise the amax at ``step_amax_ptr`` (as int32) to ``bits``, the :func:`magnitude_bits` of a tile's amax. If that
    is not finite, the scale at ``inverse_scale_ptr`` becomes NaN; all programs write the same value."""
    # Kernels on a stream are ordered; an order within this one would make each program wait for its stores.
    tl.atomic_max(step_amax_ptr, bits, sem="relaxed")
    if bits >= 0x7F800000:  # infinity
        tl.store(inverse_scale_ptr, float("nan"))


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def quantize_tile(
    x_ptr: tl.tensor,  # [m, k] with any strides
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_ptr: tl.tensor,  # []
    rows_ptr: tl.tensor,  # [m, k]
    transposed_ptr: tl.tensor,  # [k, m]
    inverse_scale_ptr: tl.tensor,  # [], initialised if the amax is recorded
    amax_ptr: tl.tensor,  # [], the amax of x unless it is recorded
    step_amax_ptr: tl.tensor,  # [], the bits of fp32
    m: tl.tensor,
    k: tl.tensor,
    LARGEST: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    WRITES_TRANSPOSED: tl.constexpr,
    RECORDS_AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Quantise a tile; neighbouring programs have neighbouring columns."""
    tile, tiles_in_row = tl.program_id(0), tl.cdiv(k, BLOCK_K)
    rows = (tile // tiles_in_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (tile % tiles_in_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < m) & (columns < k)
    x = tl.load(x_ptr + rows * row_stride + columns * column_stride, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    quantized = to_fp8(x, scale, rows_ptr.dtype.element_ty, LARGEST)
    if WRITES_ROWS:
        tl.store(rows_ptr + rows * k + columns, quantized, mask=inside)
    if WRITES_TRANSPOSED:
        # Through shared memory, so that both stores are of neighbouring bytes.
        tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(quantized), mask=tl.trans(inside))
    if RECORDS_AMAX:
        record_amax(tl.max(magnitude_bits(x)), step_amax_ptr, inverse_scale_ptr)
    elif tile == 0:
        amax = tl.load(amax_ptr)
        tl.store(inverse_scale_ptr, tl.div_rn(1.0, scale) + (amax - amax))


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def current_scale_kernel(
    amax_ptr: tl.tensor,  # []
    scale_ptr: tl.tensor,  # []
    LARGEST: tl.constexpr,
    MARGIN_FACTOR: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
) -> None:
    """:func:`~megatron.core.ops.fp8.scale_from_amax` in torch's order of operations."""
    amax = tl.load(amax_ptr)
    scale = tl.minimum(tl.div_rn(1.0, amax) * LARGEST * MARGIN_FACTOR, LARGEST_SCALE)
    tl.store(scale_ptr, tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0))


@triton.jit
def transpose_tile(
    x_ptr: tl.tensor,  # [m, k] bytes
    transposed_ptr: tl.tensor,  # [k, m]
    m: tl.tensor,
    k: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tile, tiles_in_row = tl.program_id(0), tl.cdiv(k, BLOCK_K)
    rows = (tile // tiles_in_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (tile % tiles_in_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < m) & (columns < k)
    x = tl.load(x_ptr + rows * k + columns, mask=inside, other=0)
    tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(x), mask=tl.trans(inside))


class TritonQuantization:
    """A :class:`~megatron.core.ops.fp8.Quantization` of bf16, fp16 and fp32 tensors that are not empty."""

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        amax: Tensor,
        dtype: torch.dtype,
        layout: Layout,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        return self._launch(tensor, scale, torch.empty_like(scale), amax, None, dtype, layout, out)

    def quantize_and_record(
        self, tensor: Tensor, scale: Tensor, step_amax: Tensor, dtype: torch.dtype, layout: Layout
    ) -> QuantizedTensor:
        return self._launch(tensor, scale, scale.reciprocal(), None, step_amax, dtype, layout)

    def current_scale(self, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
        scale = torch.empty_like(amax)
        current_scale_kernel[(1,)](
            amax,
            scale,
            LARGEST=largest_value(dtype),
            MARGIN_FACTOR=2.0**-margin,
            LARGEST_SCALE=LARGEST_SCALE,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return scale

    def transpose(self, data: Tensor) -> Tensor:
        data = data.contiguous()
        m, k = data.shape
        transposed = data.new_empty(k, m)
        transpose_tile[(_tiles(m, k),)](
            data.view(torch.uint8), transposed.view(torch.uint8), m, k, BLOCK_M, BLOCK_K, num_warps=NUM_WARPS
        )
        return transposed

    def _launch(
        self,
        tensor: Tensor,
        scale: Tensor,
        inverse_scale: Tensor,
        amax: Tensor | None,
        step_amax: Tensor | None,
        dtype: torch.dtype,
        layout: Layout,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"The Triton kernel does not quantise {tensor.dtype}: use --kernel fp8_quantization=eager.")
        matrix = tensor.flatten(0, -2)  # [m, k]
        m, k = matrix.shape
        assert m * k > 0, "an empty tensor has no amax"
        writes_rows, writes_transposed = Layout.ROWS in layout, Layout.TRANSPOSED in layout
        data = tensor.new_empty(tensor.shape if writes_rows else 0, dtype=dtype) if out is None else out
        assert data.is_contiguous() and data.dtype == dtype
        transposed = tensor.new_empty(k, m, dtype=dtype) if writes_transposed else None
        quantize_tile[(_tiles(m, k),)](
            matrix,
            *matrix.stride(),
            scale,
            data if transposed is None or writes_rows else transposed,
            data if transposed is None else transposed,
            inverse_scale,
            inverse_scale if amax is None else amax,
            inverse_scale if step_amax is None else step_amax.view(torch.int32),
            m,
            k,
            LARGEST=largest_value(dtype),
            WRITES_ROWS=writes_rows,
            WRITES_TRANSPOSED=writes_transposed,
            RECORDS_AMAX=step_amax is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        return QuantizedTensor(data, inverse_scale, transposed)


def _tiles(m: int, k: int) -> int:
    return triton.cdiv(m, BLOCK_M) * triton.cdiv(k, BLOCK_K)
