"""Weight gradients of experts in one launch: a GEMM for each group of rows, added to the gradient buffer.

A GEMM for each expert is a launch for each, and with many experts the host launches more slowly than the GPU
multiplies. torch's grouped GEMM is one launch, but its product is rounded to bf16 and then added: 4 more bytes per
weight and microbatch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.gradient import GradientProduct
from megatron.core.ops.grouped import GroupedWeightGradient, RowCounts, TorchGroupedGemm

TILE = {"BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_M": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""A tile of the gradient, the rows that one step of its sum reads, and the tiles of dim 0 that neighbouring programs
compute, because they read the same inputs. Not tuned on a device."""


@triton.jit
def accumulate_group_tile(
    buffer_ptr: tl.tensor,  # [groups n, k]
    grad_ptr: tl.tensor,  # [m, n]
    input_ptr: tl.tensor,  # [m, k]
    ends_ptr: tl.tensor,  # [groups]
    n: tl.tensor,
    k: tl.tensor,
    ACCUMULATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """``grad^T @ input`` over the rows of a group, for one tile of its part of ``buffer``."""
    group, program, tiles_n, tiles_k = tl.program_id(1), tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0).to(tl.int64)
    end = tl.load(ends_ptr + group).to(tl.int64)
    first = program // (GROUP * tiles_k) * GROUP
    height = tl.minimum(tiles_n - first, GROUP)
    within = program % (GROUP * tiles_k)
    rows = (first + within % height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # of the gradient's tile
    columns = (within // height).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    summed = start + tl.arange(0, BLOCK_M)
    grad_ptrs = grad_ptr + summed[:, None] * n + rows[None, :]
    input_ptrs = input_ptr + summed[:, None] * k + columns[None, :]
    product = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for _ in range(tl.cdiv(end - start, BLOCK_M)):
        # Rows behind the group are another group's.
        dy = tl.load(grad_ptrs, mask=(summed[:, None] < end) & (rows[None, :] < n), other=0.0)  # [BLOCK_M, BLOCK_N]
        x = tl.load(input_ptrs, mask=(summed[:, None] < end) & (columns[None, :] < k), other=0.0)  # [BLOCK_M, BLOCK_K]
        product = tl.dot(tl.trans(dy), x, product)
        summed += BLOCK_M
        grad_ptrs += BLOCK_M * n
        input_ptrs += BLOCK_M * k
    inside = (rows[:, None] < n) & (columns[None, :] < k)
    buffer_ptrs = buffer_ptr + (group.to(tl.int64) * n + rows[:, None]) * k + columns[None, :]
    if ACCUMULATES:
        product += tl.load(buffer_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(buffer_ptrs, product.to(buffer_ptr.dtype.element_ty), mask=inside)


class TritonGroupedGemm(TorchGroupedGemm):
    """torch's grouped GEMM for outputs and input gradients, and the kernel above for weight gradients."""

    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        return _TritonWeightGradient(grad_outputs.contiguous(), inputs.contiguous(), counts)


@dataclass(frozen=True)
class _TritonWeightGradient(GroupedWeightGradient):
    """One launch for all groups."""

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        assert buffer.is_contiguous()
        n, k = self.grad_outputs.shape[1], self.inputs.shape[1]
        tiles = triton.cdiv(n, TILE["BLOCK_N"]) * triton.cdiv(k, TILE["BLOCK_K"])
        accumulate_group_tile[(tiles, len(self.counts.host))](
            *(buffer, self.grad_outputs, self.inputs, self.counts.ends, n, k), ACCUMULATES=accumulate, **TILE
        )
