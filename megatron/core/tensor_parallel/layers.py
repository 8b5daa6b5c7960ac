"""Column-parallel, row-parallel and vocabulary-parallel layers.

Each backward starts the collective of the input gradient before it computes the weight gradient, which then
goes straight to the gradient buffer, or waits in the queue (:mod:`megatron.core.gradient`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.fp8 import Fp8Layers, Fp8Role, Fp8Scaling
from megatron.core.gradient import WeightGradStore, accumulate_main_grad, main_grad_of
from megatron.core.ops.matmul import Gemm, PlainGemm, WeightGradientKernel
from megatron.core.ops.quantized import QuantizedTensor
from megatron.core.parameter import (
    ParameterInfo,
    TiedEnd,
    columns_box,
    empty_parameter,
    padded_rows_box,
    sharded_boxes,
)
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.overlap import RowGemm


@dataclass(frozen=True)
class LinearOp:
    """What a linear layer is besides its weight: its GEMMs, and on which side of them the ranks communicate."""

    parallel: TensorParallel
    gemm: Gemm
    weight_gradients: WeightGradStore
    is_column: bool
    """Column-parallel: all-gather, then GEMM. Row-parallel: GEMM, then reduction."""


class _ParallelLinear(Function):
    """``y = x W^T`` at the edge of a tensor-parallel region: ``[s(/tp), b, in] -> [s, b, out/tp]`` if column-parallel,
    ``[s, b, in/tp] -> [s(/tp), b, out]`` if row-parallel."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, op: LinearOp, skip_output: bool) -> Tensor:
        x = op.gemm.quantize_input(inputs)
        # Under sequence parallelism backward gathers x again: only this rank's rows are kept. The weight and a scale of
        # the whole tensor are no activations, so hooks on saved tensors (CPU offload) must not see them.
        ctx.save_for_backward(*x.row_tensors)
        ctx.scaling, ctx.weight, ctx.op = x.scaling, weight, op
        if skip_output:
            return _no_values(inputs, op, weight)
        matrix = weight.t() if op.gemm.is_plain else None
        gemm = partial(op.gemm.output, weight=weight)
        if op.is_column:
            return op.parallel.overlap.gather_gemm(x, gemm, matrix)[0]
        return op.parallel.overlap.gemm_reduce(x, gemm, matrix).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        op: LinearOp = ctx.op
        parallel, weight, wgrad = op.parallel, ctx.weight, op.gemm.weight_gradient
        # Detached: a deferred weight gradient must not keep the graph alive.
        x = ctx.scaling.with_rows([tensor.detach() for tensor in ctx.saved_tensors])
        dy = op.gemm.quantize_gradient(gradients[0])
        dgrad = partial(op.gemm.input_gradient, weight=weight)
        matrix = weight if op.gemm.is_plain else None
        if op.is_column:
            return _column_backward(op, x, dy, weight, dgrad, matrix)
        dx, whole_dy = parallel.overlap.gather_gemm(dy, dgrad, matrix)
        if op.weight_gradients.is_deferring:
            # Keeps this rank's rows of dy and gathers them again: all rows are as large as a layer's input.
            op.weight_gradients.put(weight, lambda: parallel.gather_input(dy), lambda dy: wgrad(dy, x))
            return dx, None, None, None
        return dx, accumulate_main_grad(weight, wgrad(whole_dy, x)), None, None


def _column_backward(
    op: LinearOp, x: QuantizedTensor, dy: QuantizedTensor, weight: Tensor, dgrad: RowGemm, matrix: Tensor | None
) -> tuple[Tensor, Tensor | None, None, None]:
    """The input gradient is reduced while the weight gradient is multiplied."""
    parallel, wgrad = op.parallel, op.gemm.weight_gradient
    if op.weight_gradients.is_deferring:
        op.weight_gradients.put(weight, lambda: parallel.gather_input(x), lambda x: wgrad(dy, x))
        return parallel.overlap.gemm_reduce(dy, dgrad, matrix).wait(), None, None, None
    gathering = parallel.gather_input(x)
    dx = parallel.overlap.gemm_reduce(dy, dgrad, matrix)
    grad_weight = accumulate_main_grad(weight, wgrad(dy, gathering.wait()))
    return dx.wait(), grad_weight, None, None


def _no_values(inputs: Tensor, op: LinearOp, weight: Tensor) -> Tensor:
    """A tensor of the shape of the output, without memory for it."""
    rows, parts = inputs.shape[0], op.parallel.sequence_parts
    rows = rows * parts if op.is_column else rows // parts
    return inputs.new_zeros(()).expand(rows, *inputs.shape[1:-1], weight.shape[0])


class _VocabParallelEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_id: int, parallel: TensorParallel) -> Tensor:
        # [b, s] -> [s, b]: the sequence comes first from here on.
        rows = tokens.t() - first_id
        foreign = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(foreign, 0)
        ctx.save_for_backward(rows, foreign)
        ctx.weight, ctx.parallel = weight, parallel
        embedded = F.embedding(rows, weight)
        if parallel.size == 1:
            return embedded
        return parallel.reduce_output(embedded.masked_fill_(foreign.unsqueeze(-1), 0.0)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        rows, foreign = ctx.saved_tensors
        weight: Tensor = ctx.weight
        gradient = ctx.parallel.gather_input(QuantizedTensor(gradients[0])).wait().data
        if ctx.parallel.size > 1:
            gradient = gradient.masked_fill(foreign.unsqueeze(-1), 0.0)
        main_grad = main_grad_of(weight)
        if main_grad is not None:
            main_grad.add_rows(rows.flatten(), gradient.flatten(0, 1))
            return None, None, None, None
        dense = torch.zeros_like(weight).index_add_(0, rows.flatten(), gradient.flatten(0, 1))
        return None, accumulate_main_grad(weight, dense), None, None


@dataclass(frozen=True)
class LayerContext:
    """What a parallel layer is built in: the ranks that share it, where its weights live in which format, and who
    computes their gradients when."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device
    weight_gradients: WeightGradStore = field(default_factory=WeightGradStore, kw_only=True)
    weights_device: torch.device | None = field(default=None, kw_only=True)
    """Where weights are made instead; ``meta`` leaves their memory to data parallelism."""
    weight_gradient: WeightGradientKernel | None = field(default=None, kw_only=True)
    """How their products come into gradient buffers; None: a product, and then a sum."""
    fp8: Fp8Layers | None = field(default=None, kw_only=True)
    """Linear layers that multiply in FP8; None where they multiply in ``dtype``."""

    def empty_parameter(self, info: ParameterInfo) -> nn.Parameter:
        """An uninitialised parameter."""
        return empty_parameter(info, self.dtype, self.weights_device or self.device)

    def linear_op(self, name: str, is_column: bool) -> LinearOp:
        """The linear layer ``name``."""
        return LinearOp(self.parallel, self._gemm(name, is_column), self.weight_gradients, is_column)

    def _gemm(self, name: str, is_column: bool) -> Gemm:
        if self.fp8 is None:
            return PlainGemm(self.weight_gradient)
        assert isinstance(self.fp8, Fp8Scaling), "others bring layers of their own"
        # The amax of a tensor of which each tensor-parallel rank has a part is reduced over these ranks.
        sharded: set[Fp8Role] = {"weight", "output_gradient" if is_column else "input"}
        if self.parallel.sequence_parallel:
            sharded.add("input" if is_column else "output_gradient")
        return self.fp8.gemm(name, self.dtype, self.parallel.communicator, sharded)


class ColumnParallelLinear(nn.Module):
    """``y = x W^T`` with the outputs divided over the ranks: ``[s(/tp), b, in] -> [s, b, out/tp]``.

    ``output_sections`` are the sizes of the matrices fused into one weight (query, key, value; gate, up): every
    rank holds its part of each, and its outputs are these parts side by side.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_sections: Sequence[int],
        context: LayerContext,
        init_std: float,
    ) -> None:
        super().__init__()
        self.context = context
        parallel = context.parallel
        layout = sharded_boxes(output_sections, (input_size,), parallel.rank, parallel.size)
        info = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        self.weight = context.empty_parameter(info)
        self.op, self.skip_output = context.linear_op(name, is_column=True), False

    @property
    def last_linear(self) -> "ColumnParallelLinear":
        """The layer itself, for a recomputed segment that is this layer alone."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s(/tp), b, in] -> [s, b, out/tp]``; with ``skip_output`` the graph is built and nothing is multiplied."""
        output: Tensor = _ParallelLinear.apply(inputs, self.weight, self.op, self.skip_output)
        return output


def column_parallel_linear(inputs: Tensor, weight: Tensor, op: LinearOp) -> Tensor:
    """The column-parallel product with a given weight ``[out/tp, in]``, such as a tied embedding."""
    output: Tensor = _ParallelLinear.apply(inputs, weight, op, False)
    return output


class RowParallelLinear(nn.Module):
    """``y = x W^T`` with the inputs divided over the ranks: ``[s, b, in/tp] -> [s(/tp), b, out]``."""

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        context: LayerContext,
        init_std: float,
    ) -> None:
        super().__init__()
        self.context = context
        parallel = context.parallel
        layout = columns_box(output_size, input_size, parallel.rank, parallel.size)
        info = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        self.weight = context.empty_parameter(info)
        self.op, self.skip_output = context.linear_op(name, is_column=False), False

    @property
    def last_linear(self) -> "RowParallelLinear":
        """The layer itself, for a recomputed segment that is this layer alone."""
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s, b, in/tp] -> [s(/tp), b, out]``; with ``skip_output`` the graph is built and nothing is multiplied."""
        output: Tensor = _ParallelLinear.apply(inputs, self.weight, self.op, self.skip_output)
        return output


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        # Detached: autograd forbids in-place changes of views, which the GEMM's output is on some devices.
        return inputs.detach().add_(bias.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        return gradients[0], accumulate_main_grad(ctx.bias, gradients[0].flatten(0, -2).sum(dim=0, dtype=wide))


class Bias(nn.Module):
    """The bias of a column-parallel layer, added in place to its output ``[s, b, out/tp]``."""

    def __init__(self, name: str, output_sections: Sequence[int], context: LayerContext) -> None:
        super().__init__()
        parallel = context.parallel
        layout = sharded_boxes(output_sections, (), parallel.rank, parallel.size)
        info = ParameterInfo(f"{name}.bias", *layout, init_std=0.0, weight_decay=False, tensor_parallel_sharded=True)
        self.bias = context.empty_parameter(info)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = _AddBias.apply(inputs, self.bias)
        return output


class VocabParallelWeight(nn.Module):
    """A weight ``[v/tp, h]`` with a row for each id of this rank's part of the vocabulary; the output head's.

    The vocabulary is padded with ids that no token has, so that the ranks divide it evenly. ``uses``
    and ``tied_end`` are facts of a tied weight (:class:`~megatron.core.parameter.ParameterInfo`).
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        context: LayerContext,
        init_std: float,
        uses: int = 1,
        tied_end: TiedEnd | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        parallel = context.parallel
        layout = padded_rows_box(vocab_size, padded_vocab_size, hidden_size, parallel.rank, parallel.size)
        info = ParameterInfo(
            f"{name}.weight",
            *layout,
            init_std,
            weight_decay=True,
            tensor_parallel_sharded=True,
            uses=uses,
            is_vocabulary=True,
            tied_end=tied_end,
        )
        self.weight = context.empty_parameter(info)
        self.first_id = parallel.rank * info.local_shape[0]


class VocabParallelEmbedding(VocabParallelWeight):
    """Token embedding with the vocabulary divided over the ranks: ``[b, s] -> [s(/tp), b, h]``."""

    backward_reads_weights = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to activations ``[s(/tp), b, h]``."""
        output: Tensor = _VocabParallelEmbedding.apply(tokens, self.weight, self.first_id, self.context.parallel)
        return output
