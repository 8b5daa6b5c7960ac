"""Column-parallel, row-parallel and vocabulary-parallel layers.

Each backward starts the collective of the input gradient before it computes the weight gradient, which then
goes straight to the gradient buffer (:mod:`megatron.core.gradient`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.gradient import deliver_gradient, slot_of
from megatron.core.ops.matmul import linear, weight_gradient
from megatron.core.parameter import ParameterInfo, columns_box, empty_parameter, padded_rows_box, sharded_boxes
from megatron.core.tensor_parallel.collectives import TensorParallel


class _ColumnParallelLinear(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.parallel = parallel
        return linear(parallel.enter(inputs).wait(), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        parallel: TensorParallel = ctx.parallel
        # Only the rank's part of the sequence was kept; gather it again while the input gradient is computed.
        whole_inputs = parallel.enter(inputs)
        grad_inputs = parallel.leave(linear(gradients[0], weight.t()))
        grad_weight = deliver_gradient(weight, weight_gradient(gradients[0], whole_inputs.wait()))
        return grad_inputs.wait(), grad_weight, None


class _RowParallelLinear(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.parallel = parallel
        return parallel.leave(linear(inputs, weight)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        grad_outputs = ctx.parallel.enter(gradients[0]).wait()
        return linear(grad_outputs, weight.t()), deliver_gradient(weight, weight_gradient(grad_outputs, inputs)), None


class _VocabParallelEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_id: int, parallel: TensorParallel) -> Tensor:
        # [b, s] -> [s, b]: the sequence comes first from here on.
        rows = tokens.t() - first_id
        foreign = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(foreign, 0)
        ctx.save_for_backward(rows, foreign, weight)
        ctx.parallel = parallel
        embedded = F.embedding(rows, weight)
        if parallel.size == 1:
            return embedded
        return parallel.leave(embedded.masked_fill_(foreign.unsqueeze(-1), 0.0)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        rows, foreign, weight = ctx.saved_tensors
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
    """What a parallel layer is built in: the ranks that share it, and where its weights live in which format."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device


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
        self.parallel = parallel = context.parallel
        self.local_sections = [section // parallel.size for section in output_sections]
        layout = sharded_boxes(output_sections, (input_size,), parallel.rank, parallel.size)
        info = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        self.weight = empty_parameter(info, context.dtype, context.device)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s(/tp), b, in] -> [s, b, out/tp]``."""
        return column_parallel_linear(inputs, self.weight, self.parallel)


def column_parallel_linear(inputs: Tensor, weight: Tensor, parallel: TensorParallel) -> Tensor:
    """The column-parallel product with a given weight ``[out/tp, in]``, such as a tied embedding."""
    output: Tensor = _ColumnParallelLinear.apply(inputs, weight, parallel)
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
        self.parallel = parallel = context.parallel
        layout = columns_box(output_size, input_size, parallel.rank, parallel.size)
        info = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        self.weight = empty_parameter(info, context.dtype, context.device)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[s, b, in/tp] -> [s(/tp), b, out]``."""
        output: Tensor = _RowParallelLinear.apply(inputs, self.weight, self.parallel)
        return output


class _VocabularyTable(nn.Module):
    """A weight ``[v/tp, h]`` with a row for each id of this rank's part of the vocabulary.

    The vocabulary is padded with ids that no token has, so that the ranks divide it evenly.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        context: LayerContext,
        init_std: float,
    ) -> None:
        super().__init__()
        self.parallel = parallel = context.parallel
        layout = padded_rows_box(vocab_size, padded_vocab_size, hidden_size, parallel.rank, parallel.size)
        info = ParameterInfo(f"{name}.weight", *layout, init_std, weight_decay=True, tensor_parallel_sharded=True)
        self.weight = empty_parameter(info, context.dtype, context.device)
        self.first_id = parallel.rank * info.local_shape[0]


class VocabParallelEmbedding(_VocabularyTable):
    """Token embedding with the vocabulary divided over the ranks: ``[b, s] -> [s(/tp), b, h]``."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to activations ``[s(/tp), b, h]``."""
        output: Tensor = _VocabParallelEmbedding.apply(tokens, self.weight, self.first_id, self.parallel)
        return output


class VocabParallelHead(_VocabularyTable):
    """Output head with the vocabulary divided over the ranks: ``[s(/tp), b, h] -> [s, b, v/tp]``."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Activations ``[s(/tp), b, h]`` to this rank's part of the logits ``[s, b, v/tp]``."""
        return column_parallel_linear(hidden, self.weight, self.parallel)
