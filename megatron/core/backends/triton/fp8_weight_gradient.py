"""The FP8 weight-gradient GEMM that accumulates into the gradient buffer.

torch's ``_scaled_mm`` overwrites its result, so an addition to the gradient buffer follows: 12 more bytes per weight
and microbatch. The speed is unmeasured: Triton's GEMM may be slower than cuBLAS's by more than the addition takes.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.precision import QuantizedTensor

BLOCK_N, BLOCK_K, BLOCK_M, GROUP = 128, 128, 128, 8
"""A tile of the gradient, the rows that one step of its sum reads, and the tiles of dim 0 that neighbouring programs
compute, because they read the same inputs. Not tuned on a device."""
NUM_WARPS, NUM_STAGES = 8, 4

_SCALARS = ["a_scale_ptr", "b_scale_ptr"]


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
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
        accumulate_tile[(triton.cdiv(n, BLOCK_N) * triton.cdiv(k, BLOCK_K),)](
            buffer,
            a.data,
            b.data,
            a.inverse_scale,
            b.inverse_scale,
            n,
            k,
            m,
            ACCUMULATES=accumulate,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            BLOCK_M=BLOCK_M,
            GROUP=GROUP,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
            enable_fp_fusion=False,
        )
