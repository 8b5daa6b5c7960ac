"""Column-parallel, row-parallel and vocabulary-parallel layers.

Each backward starts the collective of the input gradient before it computes the weight gradient, which then
goes straight to the gradient buffer, or waits in the queue (:mod:`megatron.core.gradient`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.fp8 import Fp8Layers, Fp8Role, Fp8Scaling
from megatron.core.gradient import Gradient, WeightGradientQueue, deliver_gradient, slot_of
from megatron.core.ops.matmul import (
    LinearProducts,
    Operand,
    PlainProducts,
    WeightGradientKernel,
    input_gradient_product,
    output_product,
)
from megatron.core.parameter import (
    ParameterInfo,
    TiedEnd,
    columns_box,
    empty_parameter,
    padded_rows_box,
    sharded_boxes,
)
from megatron.core.tensor_parallel.collectives import TensorParallel


class _ColumnParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        parallel: TensorParallel,
        queue: WeightGradientQueue,
        products: LinearProducts,
        graph_only: bool,
    ) -> Tensor:
        operand = products.prepare_input(inputs)
        _keep(ctx, operand, weight)
        ctx.parallel, ctx.queue, ctx.products = parallel, queue, products
        if graph_only:
            return _no_values(inputs, inputs.shape[0] * parallel.sequence_parts, weight)
        output, _ = parallel.edges.enter_and_multiply(operand, output_product(products, weight))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        # Only the rank's part of the sequence was kept. Detached: what is held back must not hold the graph.
        inputs, weight = _kept(ctx)
        parallel: TensorParallel = ctx.parallel
        queue: WeightGradientQueue = ctx.queue
        products: LinearProducts = ctx.products
        grad_outputs = products.prepare_gradient(gradients[0])
        input_gradient = input_gradient_product(products, weight)

        def product(whole: Tensor) -> Gradient:
            return products.weight_gradient(grad_outputs, replace(inputs, data=whole))

        if queue.is_holding:
            queue.hold_back(weight, lambda: parallel.enter(inputs.data), product)
            return parallel.edges.multiply_and_leave(grad_outputs, input_gradient).wait(), None, None, None, None, None
        gathering = parallel.enter(inputs.data)
        grad_inputs = parallel.edges.multiply_and_leave(grad_outputs, input_gradient)
        grad_weight = deliver_gradient(weight, product(gathering.wait()))
        return grad_inputs.wait(), grad_weight, None, None, None, None


class _RowParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        parallel: TensorParallel,
        queue: WeightGradientQueue,
        products: LinearProducts,
        graph_only: bool,
    ) -> Tensor:
        operand = products.prepare_input(inputs)
        _keep(ctx, operand, weight)
        ctx.parallel, ctx.queue, ctx.products = parallel, queue, products
        if graph_only:
            return _no_values(inputs, inputs.shape[0] // parallel.sequence_parts, weight)
        return parallel.edges.multiply_and_leave(operand, output_product(products, weight)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        inputs, weight = _kept(ctx)
        parallel: TensorParallel = ctx.parallel
        queue: WeightGradientQueue = ctx.queue
        products: LinearProducts = ctx.products
        grad_part = products.prepare_gradient(gradients[0])

        def product(whole: Tensor) -> Gradient:
            return products.weight_gradient(replace(grad_part, data=whole), inputs)

        input_gradient = input_gradient_product(products, weight)
        grad_inputs, grad_outputs = parallel.edges.enter_and_multiply(grad_part, input_gradient)
        if queue.is_holding:
            # Holds the rank's part of the sequence and gathers it again, for the whole is as large as a layer's input.
            queue.hold_back(weight, lambda: parallel.enter(grad_part.data), product)
            return grad_inputs, None, None, None, None, None
        return grad_inputs, deliver_gradient(weight, product(grad_outputs.data)), None, None, None, None


def _keep(ctx: Any, inputs: Operand, weight: Tensor) -> None:
    """Keep for the backward pass what :func:`_kept` returns there."""
    # Neither a weight nor a scale is an activation: what is saved may go to the host, and comes back another tensor.
    ctx.save_for_backward(inputs.data)
    ctx.inverse_scale, ctx.weight = inputs.inverse_scale, weight


def _kept(ctx: Any) -> tuple[Operand, Tensor]:
    """The layer's input as it was kept, without a graph, and the weight."""
    (data,) = ctx.saved_tensors
    return Operand(data.detach(), ctx.inverse_scale), ctx.weight


def _no_values(inputs: Tensor, length: int, weight: Tensor) -> Tensor:
    """A tensor of the shape of a product, ``[length, b, out]``, without memory for it."""
    return inputs.new_zeros(()).expand(length, *inputs.shape[1:-1], weight.shape[0])


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
        return parallel.leave(embedded.masked_fill_(foreign.unsqueeze(-1), 0.0)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        rows, foreign = ctx.saved_tensors
        weight: Tensor = ctx.weight
        gradient = ctx.parallel.enter(gradients[0]).wait()
        if ctx.parallel.size > 1:
            gradient = gradient.masked_fill(foreign.unsqueeze(-1), 0.0)
        slot = slot_of(weight)
        if slot is not None:
            slot.add_rows(rows.flatten(), gradient.flatten(0, 1))
            return None, None, None, None
        dense = torch.zeros_like(weight).index_add_(0, rows.flatten(), gradient.flatten(0, 1))
        return None, deliver_gradient(weight, dense), None, None


@dataclass(frozen=True)
class LayerContext:
    """What a parallel layer is built in: the ranks that share it, where its weights live in which format, and who
    computes their gradients when."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device
    weight_gradients: WeightGradientQueue = field(default_factory=WeightGradientQueue, kw_only=True)
    weights_device: torch.device | None = field(default=None, kw_only=True)
    """Where weights are made instead; ``meta`` leaves their memory to data parallelism."""
    weight_gradient: WeightGradientKernel | None = field(default=None, kw_only=True)
    """How their products come into gradient buffers; None: a product, and then a sum."""
    fp8: Fp8Layers | None = field(default=None, kw_only=True)
    """Linear layers that multiply in FP8; None where they multiply in ``dtype``."""

    def empty_parameter(self, info: ParameterInfo) -> nn.Parameter:
        """An uninitialised parameter."""
        return empty_parameter(info, self.dtype, self.weights_device or self.device)

    def linear_products(self, name: str, divided: Collection[Fp8Role]) -> LinearProducts:
        """How the linear layer ``name`` multiplies, of whose tensors each tensor-parallel rank has a part of those that
        are ``divided``, and all of the others."""
        if self.fp8 is None:
            return PlainProducts(self.weight_gradient)
        assert isinstance(self.fp8, Fp8Scaling), "others bring layers of their own"
        return self.fp8.linear_products(name, self.dtype, self.parallel.communicator, divided)


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
        divided: tuple[Fp8Role, ...] = ("input",) if parallel.sequence_parallel else ()
        self.products = context.linear_products(name, ("weight", "output_gradient", *divided))

    def forward(self, inputs: Tensor, *, graph_only: bool = False) -> Tensor:
        """``[s(/tp), b, in] -> [s, b, out/tp]``."""
        return column_parallel_linear(inputs, self.weight, self.context, self.products, graph_only=graph_only)


def column_parallel_linear(
    inputs: Tensor,
    weight: Tensor,
    context: LayerContext,
    products: LinearProducts | None = None,
    *,
    graph_only: bool = False,
) -> Tensor:
    """The column-parallel product with a given weight ``[out/tp, in]``, such as a tied embedding.

    With ``graph_only`` the product is not computed, for a second run whose output nobody reads.
    """
    output: Tensor = _ColumnParallelLinear.apply(
        inputs,
        weight,
        context.parallel,
        context.weight_gradients,
        products or PlainProducts(context.weight_gradient),
        graph_only,
    )
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
        divided: tuple[Fp8Role, ...] = ("output_gradient",) if parallel.sequence_parallel else ()
        self.products = context.linear_products(name, ("weight", "input", *divided))

    def forward(self, inputs: Tensor, *, graph_only: bool = False) -> Tensor:
        """``[s, b, in/tp] -> [s(/tp), b, out]``; with ``graph_only`` the product is not computed."""
        output: Tensor = _RowParallelLinear.apply(
            inputs, self.weight, self.context.parallel, self.context.weight_gradients, self.products, graph_only
        )
        return output


class VocabParallelTable(nn.Module):
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


class VocabParallelEmbedding(VocabParallelTable):
    """Token embedding with the vocabulary divided over the ranks: ``[b, s] -> [s(/tp), b, h]``."""

    backward_reads_weights = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to activations ``[s(/tp), b, h]``."""
        output: Tensor = _VocabParallelEmbedding.apply(tokens, self.weight, self.first_id, self.context.parallel)
        return output
