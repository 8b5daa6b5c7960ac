"""The output layer and its cross entropy without the logits of all tokens.

Logits are computed for some tokens at a time. Forward keeps the log-sum-exp of every token; backward computes each
chunk's logits again, so the output layer costs four GEMMs instead of three (forward, logits again, both gradients).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.gradient import accumulate_main_grad
from megatron.core.ops.matmul import WeightGradientKernel, linear
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.cross_entropy import ShardLabels, TokenGradients, VocabularyShard


@dataclass(frozen=True)
class ChunkedOutputLayer:
    """How the loss of the output layer is computed: ``chunk_size`` tokens at a time."""

    chunk_size: int
    parallel: TensorParallel
    shard: VocabularyShard
    weight_gradient: WeightGradientKernel

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """The range of tokens of every chunk."""
        for start in range(0, num_tokens, self.chunk_size):
            yield slice(start, start + self.chunk_size)

    def gather(self, hidden: Tensor) -> Tensor:
        """All-gather ``[s/(cp tp), b, h]``, this rank's tokens, to all tensor-parallel ranks' tokens ``[n, h]``."""
        return self.parallel.gather_input(QuantizedTensor(hidden)).wait().data.flatten(0, -2)


@dataclass(frozen=True)
class _ChunkedGradients:
    """The backward pass as a :class:`~megatron.core.gradient.GradientProduct`: computing the weight's gradient also
    fills ``grad_hidden``, since both need the chunk's gradient of the logits."""

    output_layer: ChunkedOutputLayer
    hidden: Tensor
    """``[n, h]``."""
    weight: Tensor
    """``[v/tp, h]``."""
    log_sum_exp: Tensor
    """``[n]``, over the whole vocabulary."""
    labels: ShardLabels
    gradients: TokenGradients
    grad_hidden: Tensor
    """``[n, h]``: this rank's part of the sum over the tensor-parallel ranks."""

    def value(self) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        buffer = self.weight.new_empty(self.weight.shape, dtype=wide)
        self.write_to(buffer, accumulate=False)
        return buffer

    def write_to(self, buffer: Tensor | None, accumulate: bool) -> None:
        """With ``buffer`` None, for a frozen weight, only the gradient of the hidden states."""
        for rows in self.output_layer.chunks(self.hidden.shape[0]):
            chunk = self.hidden[rows]  # [m, h]
            logits = linear(chunk, self.weight)  # [m, v/tp]
            self.output_layer.shard.write_gradient(
                logits, self.log_sum_exp[rows], self.labels[rows], self.gradients[rows]
            )
            self.grad_hidden[rows] = linear(logits, self.weight.t())
            if buffer is not None:
                self.output_layer.weight_gradient.write(buffer, logits, chunk, accumulate)
            del logits  # before the next chunk's are allocated
            accumulate = True


class _ChunkedLoss(Function):
    """Saves its input, and for every token the log-sum-exp and the label's column."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, output_layer: ChunkedOutputLayer
    ) -> tuple[Tensor, Tensor]:
        tokens, found, matrix = output_layer.gather(hidden.detach()), output_layer.shard.labels(labels), weight.detach()
        parts = [
            output_layer.shard.statistics(linear(tokens[rows], matrix), found[rows])
            for rows in output_layer.chunks(tokens.shape[0])
        ]
        local_log_sum_exp, label_logits = (torch.cat(part) for part in zip(*parts))
        losses, log_sum_exp = output_layer.shard.losses(local_log_sum_exp, label_logits)
        ctx.save_for_backward(hidden, log_sum_exp, found.columns, found.is_outside)
        ctx.weight, ctx.output_layer = weight, output_layer
        ctx.set_materialize_grads(False)
        return losses.view(labels.shape), log_sum_exp.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, log_sum_exp, columns, is_outside = ctx.saved_tensors
        output_layer: ChunkedOutputLayer = ctx.output_layer
        tokens = output_layer.gather(hidden.detach())  # [n, h]
        grad_hidden = torch.empty_like(tokens)
        product = _ChunkedGradients(
            output_layer,
            tokens,
            ctx.weight.detach(),
            log_sum_exp,
            ShardLabels(columns, is_outside),
            TokenGradients.of(*gradients),
            grad_hidden,
        )
        grad_weight = None
        if ctx.weight.requires_grad:
            grad_weight = accumulate_main_grad(ctx.weight, product)
        else:
            product.write_to(None, accumulate=False)
        grad_tokens = grad_hidden.view(-1, *hidden.shape[1:])  # [s/cp, b, h], to be summed over the ranks
        return output_layer.parallel.reduce_output(grad_tokens).wait(), grad_weight, None, None


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, output_layer: ChunkedOutputLayer
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of ``labels`` ``[s/cp, b]`` and log-sum-exp of the logits per token, in fp32 or wider, on
    every rank, from ``hidden`` ``[s/(cp tp), b, h]`` and the output layer's ``weight`` ``[v/tp, h]``.

    Equal to :func:`~megatron.core.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy` of the logits.
    """
    results: tuple[Tensor, Tensor] = _ChunkedLoss.apply(hidden, weight, labels, output_layer)
    return results
