"""FP8 kernels: quantisation in one pass, and the weight-gradient GEMM that accumulates into the gradient buffer.

Quantisation reads a tensor once, writes it in FP8 as rows, transposed, or both, and records its amax: 3 bytes per bf16
element and layout, or 4 for both, instead of 29 and more. Results are bitwise equal to
:class:`~megatron.core.ops.fp8.EagerQuantization`.

torch's ``_scaled_mm`` overwrites its result, so an addition to the gradient buffer follows: 12 more bytes per weight
and microbatch, which the GEMM here saves. Its speed is unmeasured: it may be slower than cuBLAS's by more than the
addition takes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.fp8 import LARGEST_SCALE, Fp8Format, largest_value
from megatron.core.precision import Layout, QuantizedTensor

TILE = {"BLOCK_M": 128, "BLOCK_K": 64, "num_warps": 8}
"""Rows and columns of a tile: it reads and transposes lines of 128 bytes. Not tuned on a device."""

SCALARS = ["scale_ptr", "inverse_scale_ptr", "amax_ptr", "step_amax_ptr", "a_scale_ptr", "b_scale_ptr"]
"""Pointers to elements of larger tensors. Kernels must not be specialised on their alignment, which differs between
layers: Triton would compile a kernel for each."""


def tiles_of(m: int, k: int) -> tuple[int]:
    """The grid of programs for a matrix ``[m, k]``."""
    return (triton.cdiv(m, TILE["BLOCK_M"]) * triton.cdiv(k, TILE["BLOCK_K"]),)


@triton.jit
def own_tile(
    m: tl.tensor, k: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The rows ``[BLOCK_M, 1]`` and columns ``[1, BLOCK_K]`` of a program's tile of ``[m, k]``, and which elements
    exist. Neighbouring programs have neighbouring columns."""
    tile, tiles_in_row = tl.program_id(0), tl.cdiv(k, BLOCK_K)
    # 64 bits: a matrix may have more than 2^31 elements.
    rows = (tile // tiles_in_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (tile % tiles_in_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    return rows, columns, (rows < m) & (columns < k)


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


@triton.jit(do_not_specialize_on_alignment=SCALARS)
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
    """Quantise a tile."""
    rows, columns, inside = own_tile(m, k, BLOCK_M, BLOCK_K)
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
    elif tl.program_id(0) == 0:
        amax = tl.load(amax_ptr)
        tl.store(inverse_scale_ptr, tl.div_rn(1.0, scale) + (amax - amax))


@triton.jit(do_not_specialize_on_alignment=SCALARS)
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
    rows, columns, inside = own_tile(m, k, BLOCK_M, BLOCK_K)
    x = tl.load(x_ptr + rows * k + columns, mask=inside, other=0)
    tl.store(transposed_ptr + tl.trans(columns * m + rows), tl.trans(x), mask=tl.trans(inside))


class TritonQuantization:
    """A :class:`~megatron.core.ops.fp8.Quantization` of bf16, fp16 and fp32 tensors that are not empty."""

    def quantize(self, tensor: Tensor, target: Fp8Format, amax: Tensor, out: Tensor | None = None) -> QuantizedTensor:
        return self._launch(tensor, target, torch.empty_like(target.scale), amax=amax, out=out)

    def quantize_and_record(self, tensor: Tensor, target: Fp8Format, step_amax: Tensor) -> QuantizedTensor:
        return self._launch(tensor, target, target.scale.reciprocal(), step_amax=step_amax)

    def current_scale(self, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
        scale = torch.empty_like(amax)
        current_scale_kernel[(1,)](
            *(amax, scale),
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
        transpose_tile[tiles_of(m, k)](data.view(torch.uint8), transposed.view(torch.uint8), m, k, **TILE)
        return transposed

    def _launch(
        self,
        tensor: Tensor,
        target: Fp8Format,
        inverse_scale: Tensor,
        amax: Tensor | None = None,
        step_amax: Tensor | None = None,
        out: Tensor | None = None,
    ) -> QuantizedTensor:
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"The Triton kernel does not quantise {tensor.dtype}: use --kernel fp8_quantization=eager.")
        matrix = tensor.flatten(0, -2)  # [m, k]
        m, k = matrix.shape
        assert m * k > 0, "an empty tensor has no amax"
        dtype = target.dtype
        writes_rows, writes_transposed = Layout.ROWS in target.layout, Layout.TRANSPOSED in target.layout
        data = tensor.new_empty(tensor.shape if writes_rows else 0, dtype=dtype) if out is None else out
        assert data.is_contiguous() and data.dtype == dtype
        transposed = tensor.new_empty(k, m, dtype=dtype) if writes_transposed else None
        # A pointer that the kernel does not use is any other.
        rows_ptr = data if transposed is None or writes_rows else transposed
        transposed_ptr = data if transposed is None else transposed
        amax_ptr = inverse_scale if amax is None else amax
        step_amax_ptr = inverse_scale if step_amax is None else step_amax.view(torch.int32)
        source = (matrix, *matrix.stride(), target.scale)
        quantize_tile[tiles_of(m, k)](
            *(*source, rows_ptr, transposed_ptr, inverse_scale, amax_ptr, step_amax_ptr, m, k),
            LARGEST=largest_value(dtype),
            WRITES_ROWS=writes_rows,
            WRITES_TRANSPOSED=writes_transposed,
            RECORDS_AMAX=step_amax is not None,
            **TILE,
            enable_fp_fusion=False,
        )
        return QuantizedTensor(data, inverse_scale, transposed)


GEMM_TILE = {"BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_M": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""A tile of the gradient, the rows that one step of its sum reads, and the tiles of dim 0 that neighbouring programs
compute, because they read the same inputs. Not tuned on a device."""


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def accumulate_tile(
    buffer_ptr: tl.tensor,  # [n, k]
    a_ptr: tl.tensor,  # [n, m]
    b_ptr: tl.tensor,  # [k, m]
    a_scale_ptr: tl.tensor,  # []
    b_scale_ptr: tl.tensor,  # []
    n: tl.tensor,
    k: tl.tensor,
    m: tl.tensor,
    ACCUMULATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """``a @ b^T`` times both scales for one tile of ``buffer``."""
    program, tiles_n, tiles_k = tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K)
    first = program // (GROUP * tiles_k) * GROUP
    height = tl.minimum(tiles_n - first, GROUP)
    within = program % (GROUP * tiles_k)
    rows = (first + within % height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # of a and of the buffer
    columns = (within // height).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)  # rows of b
    summed = tl.arange(0, BLOCK_M)
    a_ptrs = a_ptr + rows[:, None] * m + summed[None, :]
    b_ptrs = b_ptr + columns[None, :] * m + summed[:, None]
    product = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, m, BLOCK_M):
        is_summed = summed < m - start
        a = tl.load(a_ptrs, mask=(rows[:, None] < n) & is_summed[None, :], other=0.0)  # [BLOCK_N, BLOCK_M]
        b = tl.load(b_ptrs, mask=(columns[None, :] < k) & is_summed[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
        # Tensor cores of Hopper keep some 14 bits of an FP8 sum, so each step's sum is added in fp32.
        product = tl.dot(a, b, product, max_num_imprecise_acc=BLOCK_M)
        a_ptrs += BLOCK_M
        b_ptrs += BLOCK_M
    product *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    inside = (rows[:, None] < n) & (columns[None, :] < k)
    buffer_ptrs = buffer_ptr + rows[:, None] * k + columns[None, :]
    if ACCUMULATES:
        product += tl.load(buffer_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(buffer_ptrs, product.to(buffer_ptr.dtype.element_ty), mask=inside)


class TritonFp8WeightGradient:
    """A :class:`~megatron.core.ops.fp8.Fp8WeightGradientKernel` that takes no memory for the product."""

    def write(self, buffer: Tensor, a: QuantizedTensor, b: QuantizedTensor, accumulate: bool) -> None:
        assert buffer.is_contiguous() and a.data.is_contiguous() and b.data.is_contiguous()
        (n, m), k = a.data.shape, b.data.shape[0]
        tiles = triton.cdiv(n, GEMM_TILE["BLOCK_N"]) * triton.cdiv(k, GEMM_TILE["BLOCK_K"])
        accumulate_tile[(tiles,)](
            *(buffer, a.data, b.data, a.inverse_scale, b.inverse_scale, n, k, m),
            ACCUMULATES=accumulate,
            **GEMM_TILE,
            enable_fp_fusion=False,
        )
