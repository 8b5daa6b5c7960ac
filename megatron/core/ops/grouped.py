"""Grouped GEMMs: each group of rows has a matrix of its own, as the tokens of an expert have.

Rows ``[m, k]`` are sorted by group. The matrices ``[n, k]`` of the groups are stacked along dim 0 in one 2-D weight,
``[groups n, k]``. A group may have no rows.

    x [m, k]    | rows of group 0 | rows of group 1 |    | rows of group 3 |      group 2 has none
    W           | W0 [n, k]       | W1              | W2 | W3              |
    y [m, n]    | x0 W0^T         | x1 W1^T         |    | x3 W3^T         |
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.gradient import GradientProduct, add_or_overwrite
from megatron.core.ops.matmul import SeparateWeightGradient, WeightGradientKernel, linear, write_linear


@dataclass(frozen=True, eq=False)
class RowCounts:
    """The number of rows of each group, in the order of the groups."""

    host: tuple[int, ...]
    device: Tensor
    """The numbers of ``host`` on the device, ``[groups]`` int64."""

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str = "cpu") -> "RowCounts":
        """Counts of the host, copied to ``device``."""
        return cls(tuple(counts), torch.tensor(tuple(counts), dtype=torch.int64, device=device))

    @cached_property
    def total(self) -> int:
        """The rows of all groups."""
        return sum(self.host)

    @cached_property
    def ends(self) -> Tensor:
        """The end of the rows of each group, on the device: ``[groups]`` int32."""
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
class GroupedWeightGradient(ABC):
    """A :class:`~megatron.core.gradient.GradientProduct` of the rows of each group: ``grad_outputs^T @ inputs``."""

    grad_outputs: Tensor
    inputs: Tensor
    counts: RowCounts

    def value(self) -> Tensor:
        buffer = self.inputs.new_empty(len(self.counts.host) * self.grad_outputs.shape[1], self.inputs.shape[1])
        self.write_to(buffer, accumulate=False)
        return buffer

    @abstractmethod
    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        """Compute it into ``buffer`` ``[groups n, k]``: add, or overwrite."""


@dataclass(frozen=True)
class _LoopWeightGradient(GroupedWeightGradient):
    """A GEMM for each group."""

    kernel: WeightGradientKernel

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        for part, rows in zip(self.counts.matrices(buffer), self.counts.slices()):
            if rows.start < rows.stop:
                self.kernel.write(part, self.grad_outputs[rows], self.inputs[rows], accumulate)
            elif not accumulate:
                part.zero_()


class PaddedGroupedGemm(LoopGroupedGemm):
    """A GEMM for each group on a CPU, of a multiple of :data:`ROWS` rows: those of the group, and some beside them.

    oneDNN compiles a kernel for every new shape, which takes longer than the GEMM of an expert, and routing gives new
    counts in every microbatch (``docs/performance_cpu.md``).
    """

    ROWS = 32

    def output(self, inputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        return self._multiply(inputs, counts.matrices(weight), counts)

    def input_gradient(self, grad_outputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        return self._multiply(grad_outputs, counts.matrices(weight).transpose(1, 2), counts)

    def _multiply(self, inputs: Tensor, matrices: Tensor, counts: RowCounts) -> Tensor:
        """``inputs`` ``[m, k]`` with ``matrices`` ``[groups, n, k]``: ``[m, n]``."""
        output = inputs.new_empty(inputs.shape[0], matrices.shape[1])
        for matrix, (rows, window, own) in zip(matrices, _windows(counts, self.ROWS)):
            if window.start == rows.start:
                # Rows behind those of the group are written again by their own group: groups are multiplied in order.
                write_linear(output[window], inputs[window], matrix)
            else:
                output[rows] = linear(inputs[window], matrix)[own]
        return output

    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        return _PaddedWeightGradient(grad_outputs, inputs, counts, self._kernel)


def _windows(counts: RowCounts, multiple: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields for each group its rows, a window around them whose size is a ``multiple`` or all rows, and its rows in
    the window."""
    # Groups of 5, 2 and 3 rows, windows of 4:
    #     rows      0 1 2 3 4 | 5 6 | 7 8 9
    #     window 0  0 1 2 3 4   5 6   7          8 rows: the next multiple of 4
    #     window 1              5 6   7 8
    #     window 2                6   7 8 9      moved to the left, because there is no row behind
    for rows in counts.slices():
        size = min(counts.total, -(-(rows.stop - rows.start) // multiple) * multiple)
        first = min(rows.start, counts.total - size)
        yield rows, slice(first, first + size), slice(rows.start - first, rows.stop - first)


@dataclass(frozen=True)
class _PaddedWeightGradient(_LoopWeightGradient):
    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        copied_is_gradient = self.grad_outputs.shape[1] <= self.inputs.shape[1]
        for part, (rows, window, own) in zip(
            self.counts.matrices(buffer), _windows(self.counts, PaddedGroupedGemm.ROWS)
        ):
            if rows.start == rows.stop:
                if not accumulate:
                    part.zero_()
                continue
            # Rows of other groups have a zero in one factor, the one that is smaller to copy.
            dy, x = self.grad_outputs[window], self.inputs[window]
            if copied_is_gradient:
                dy = torch.zeros_like(dy)
                dy[own] = self.grad_outputs[rows]
            else:
                x = torch.zeros_like(x)
                x[own] = self.inputs[rows]
            self.kernel.write(part, dy, x, accumulate)


class TorchGroupedGemm:
    """torch's grouped GEMM, one launch for all groups: bf16, and widths that are multiples of 16 bytes. ``kernel``
    computes the weight gradients, a GEMM for each group; None: a grouped GEMM, then an addition."""

    def __init__(self, kernel: WeightGradientKernel | None = None) -> None:
        self._kernel = kernel

    def output(self, inputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        return F.grouped_mm(inputs, counts.matrices(weight).transpose(1, 2), offs=counts.ends)

    def input_gradient(self, grad_outputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        return F.grouped_mm(grad_outputs, counts.matrices(weight), offs=counts.ends)

    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        if self._kernel is not None:
            return _LoopWeightGradient(grad_outputs, inputs, counts, self._kernel)
        return _TorchWeightGradient(grad_outputs, inputs, counts)


@dataclass(frozen=True)
class _TorchWeightGradient(GroupedWeightGradient):
    """One grouped GEMM, then an addition."""

    def value(self) -> Tensor:
        product = F.grouped_mm(self.grad_outputs.t(), self.inputs, offs=self.counts.ends)  # [groups, n, k]
        for part, count in zip(product, self.counts.host):
            if not count:
                part.zero_()  # torch does not say what the product of no rows is
        return product.flatten(0, 1)

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        add_or_overwrite(buffer, self.value(), accumulate)
