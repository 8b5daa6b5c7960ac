"""Grouped GEMMs: each group of rows has a matrix of its own, as the tokens of an expert have.

Rows ``[m, k]`` are sorted by group. The matrices ``[n, k]`` of the groups are stacked along dim 0 in one 2-D weight,
``[groups n, k]``. A group may have no rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.gradient import GradientProduct
from megatron.core.ops.matmul import SeparateWeightGradient, WeightGradientKernel, write_linear


@dataclass(frozen=True, eq=False)
class RowCounts:
    """How many rows each group has, in the order of the groups."""

    host: tuple[int, ...]
    device: Tensor
    """The same numbers on the device, ``[groups]`` int64."""

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str = "cpu") -> "RowCounts":
        """Counts that the host knows, copied to ``device``."""
        return cls(tuple(counts), torch.tensor(tuple(counts), dtype=torch.int64, device=device))

    @cached_property
    def total(self) -> int:
        """The rows of all groups."""
        return sum(self.host)

    @cached_property
    def ends(self) -> Tensor:
        """Where the rows of each group end, on the device: ``[groups]`` int32."""
        return self.device.cumsum(0).int()

    def slices(self) -> Iterator[slice]:
        """The rows of each group."""
        for end, count in zip(accumulate(self.host), self.host):
            yield slice(end - count, end)

    def matrices(self, weight: Tensor) -> Tensor:
        """The matrix of each group, ``[groups, n, k]``: a view of ``weight`` ``[groups n, k]``."""
        return weight.view(len(self.host), -1, weight.shape[1])


class GroupedGemm(Protocol):
    """The three GEMMs of ``y = x W^T`` with the matrix of its group for every row."""

    def output(self, inputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        """``x W^T``: ``inputs`` ``[m, k]`` and ``weight`` ``[groups n, k]`` to ``[m, n]``."""

    def input_gradient(self, grad_outputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        """``dy W``: ``grad_outputs`` ``[m, n]`` and ``weight`` ``[groups n, k]`` to ``[m, k]``."""

    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        """``dy^T x`` of each group, stacked: ``[groups n, k]``, not computed yet. The gradient of a group without rows
        is zero."""


class LoopGroupedGemm:
    """The reference: a GEMM for each group, for all dtypes and widths. ``kernel`` computes the weight gradients."""

    def __init__(self, kernel: WeightGradientKernel | None = None) -> None:
        self._kernel = kernel or SeparateWeightGradient()

    def output(self, inputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        matrices = counts.matrices(weight)  # [groups, n, k]
        output = inputs.new_empty(inputs.shape[0], matrices.shape[1])
        for matrix, rows in zip(matrices, counts.slices()):
            write_linear(output[rows], inputs[rows], matrix)
        return output

    def input_gradient(self, grad_outputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        gradient = grad_outputs.new_empty(grad_outputs.shape[0], weight.shape[1])
        for matrix, rows in zip(counts.matrices(weight), counts.slices()):
            write_linear(gradient[rows], grad_outputs[rows], matrix.t())
        return gradient

    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        return _LoopWeightGradient(grad_outputs, inputs, counts, self._kernel)


@dataclass(frozen=True)
class _LoopWeightGradient:
    """A :class:`~megatron.core.gradient.GradientProduct`: a GEMM for each group."""

    grad_outputs: Tensor
    inputs: Tensor
    counts: RowCounts
    kernel: WeightGradientKernel

    def value(self) -> Tensor:
        return gradient_value(self, self.grad_outputs, self.inputs, self.counts)

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        for part, rows in zip(self.counts.matrices(buffer), self.counts.slices()):
            if rows.start < rows.stop:
                self.kernel.write(part, self.grad_outputs[rows], self.inputs[rows], accumulate)
            elif not accumulate:
                part.zero_()


def gradient_value(product: GradientProduct, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> Tensor:
    """The value of a weight-gradient ``product`` of these operands: ``[groups n, k]`` in their dtype."""
    buffer = inputs.new_empty(len(counts.host) * grad_outputs.shape[1], inputs.shape[1])
    product.write_to(buffer, accumulate=False)
    return buffer
