"""Vocabulary-parallel cross entropy, without gathering the logits, and if wanted for some tokens at a time.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks reduce one maximum and two sums per token. The kernels pass
over a rank's logits ``[n, v]``: ``n`` tokens, ``v`` ids of the rank's vocabulary shard.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator
from megatron.core.device import Compiler, inductor
from megatron.core.gradient import accumulate_main_grad
from megatron.core.ops.matmul import WeightGradientKernel, linear
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import TensorParallel

_CPU_CHUNK_BYTES = 2 << 20  # fits in a CPU's cache
GPU_CHUNK_BYTES = 128 << 20  # enough to keep a GPU busy


# The loss of a token with label y is log-sum-exp(z) - z_y. Its derivative by z is softmax(z), minus 1 at y; the z-loss
# (the squared log-sum-exp) adds a multiple of softmax(z). Both are one pass over the logits.


class CrossEntropyKernel(Protocol):
    """The passes over all logits; ``v`` is 0 on a rank whose ids are all padding."""

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Log-sum-exp of each row, ``[n]`` in ``dtype``."""

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        """Overwrite ``logits`` with their gradient: ``gradient [n]`` times the probabilities
        ``exp(logits - log_sum_exp)``, plus ``at_label [n]`` at ``columns [n]``."""


class EagerCrossEntropy:
    """Converts ``chunk_bytes`` of rows to fp32 at a time, so that fp32 logits of a whole microbatch are never allocated
    and a CPU finds each chunk in its cache. The default depends on the device."""

    def __init__(self, chunk_bytes: int | None = None) -> None:
        self._chunk_bytes = chunk_bytes

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        log_sum_exp = torch.full((logits.shape[0],), -math.inf, dtype=dtype, device=logits.device)
        for part in self._chunks(logits, dtype):
            torch.logsumexp(logits[part].to(dtype), dim=-1, out=log_sum_exp[part])
        return log_sum_exp

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        for part in self._chunks(logits, log_sum_exp.dtype):
            chunk = logits[part]  # [rows of a chunk, v]
            # In place if the logits have this dtype, else a copy.
            probabilities = chunk.to(log_sum_exp.dtype).sub_(log_sum_exp[part, None]).exp_()
            probabilities.mul_(gradient[part, None]).scatter_add_(-1, columns[part, None], at_label[part, None])
            chunk.copy_(probabilities)

    def _chunks(self, logits: Tensor, dtype: torch.dtype) -> Iterator[slice]:
        """Slices of the rows of ``[n, v]``, each of at most ``chunk_bytes`` in ``dtype``; none if ``v`` is 0."""
        tokens, width = logits.shape
        if width == 0:
            return
        size = self._chunk_bytes or (_CPU_CHUNK_BYTES if logits.device.type == "cpu" else GPU_CHUNK_BYTES)
        step = max(1, size // (width * dtype.itemsize))
        for start in range(0, tokens, step):
            yield slice(start, start + step)


class CompiledCrossEntropy:
    """All rows at once through a compiler, which fuses the conversion to fp32."""

    def __init__(self, compiler: Compiler = inductor) -> None:
        self._log_sum_exp = compiler(_log_sum_exp)
        self._write_gradient = compiler(_write_gradient)

    def log_sum_exp(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        if logits.shape[1] == 0:
            return torch.full((logits.shape[0],), -math.inf, dtype=dtype, device=logits.device)
        log_sum_exp: Tensor = self._log_sum_exp(logits, dtype)
        return log_sum_exp

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor
    ) -> None:
        if logits.shape[1] > 0:
            self._write_gradient(logits, log_sum_exp, columns, gradient, at_label)


def _log_sum_exp(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.logsumexp(logits.to(dtype), dim=-1)


def _write_gradient(logits: Tensor, log_sum_exp: Tensor, columns: Tensor, gradient: Tensor, at_label: Tensor) -> None:
    probabilities = (logits.to(log_sum_exp.dtype) - log_sum_exp[:, None]).exp()
    # Compares every column with the label's: a scatter would be a separate kernel.
    is_label = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    logits.copy_(probabilities * gradient[:, None] + torch.where(is_label, at_label[:, None], 0.0))


@dataclass(frozen=True)
class ShardLabels:
    """The labels of ``n`` tokens on a rank's shard of the vocabulary."""

    columns: Tensor
    """``[n]``: the label's column of the logits, 0 if the label is on another rank."""
    is_outside: Tensor
    """``[n]``: whether the label is on another rank."""

    def __getitem__(self, rows: slice) -> "ShardLabels":
        return ShardLabels(self.columns[rows], self.is_outside[rows])


@dataclass(frozen=True)
class VocabularyShard:
    """A rank's ids ``[first_id, first_id + width)``, without padding: padding ids get no probability, so the loss does
    not depend on the padding."""

    first_id: int
    width: int
    ranks: Communicator
    kernel: CrossEntropyKernel

    def labels(self, labels: Tensor) -> ShardLabels:
        columns = labels.flatten() - self.first_id  # [n]
        is_outside = (columns < 0) | (columns >= self.width)
        return ShardLabels(columns.masked_fill(is_outside, 0), is_outside)

    def statistics(self, logits: Tensor, labels: ShardLabels) -> tuple[Tensor, Tensor]:
        """This rank's log-sum-exp and label logits, ``[n]`` in fp32 or wider, of ``logits`` ``[n, v/tp]``. The label
        logit is 0 if the label is on another rank."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        flat = logits[:, : self.width]
        log_sum_exp = self.kernel.log_sum_exp(flat, dtype)
        if self.width == 0:
            return log_sum_exp, torch.zeros_like(log_sum_exp)
        at_label = flat.gather(-1, labels.columns[:, None]).squeeze(-1)
        return log_sum_exp, at_label.to(dtype).masked_fill_(labels.is_outside, 0.0)

    def losses(self, log_sum_exp: Tensor, label_logits: Tensor) -> tuple[Tensor, Tensor]:
        """The losses ``[n]``, and the log-sum-exp over all ranks, from the :meth:`statistics` of this rank."""
        if self.ranks.size > 1:
            maximum = self.ranks.all_reduce(log_sum_exp.clone(), "max")
            log_sum_exp = maximum + self.ranks.all_reduce((log_sum_exp - maximum).exp_()).log_()
        return log_sum_exp - self.ranks.all_reduce(label_logits), log_sum_exp

    def write_gradient(
        self, logits: Tensor, log_sum_exp: Tensor, labels: ShardLabels, of_losses: Tensor, of_probabilities: Tensor
    ) -> None:
        """Overwrite ``logits`` ``[n, v/tp]`` with their gradient, from the :func:`token_gradients`."""
        logits[:, self.width :] = 0.0
        at_label = -of_losses.masked_fill(labels.is_outside, 0.0)
        self.kernel.write_gradient(logits[:, : self.width], log_sum_exp, labels.columns, of_probabilities, at_label)


def token_gradients(of_losses: Tensor, of_log_sum_exp: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of the losses of ``n`` tokens, and the factors of their probabilities in the gradient of the
    logits, ``[n]`` each. The gradient of the log-sum-exp is None if only the losses were used."""
    # By a logit: d log_sum_exp = p, and d loss = p - 1 at the label, p elsewhere (p: its probability).
    of_losses = of_losses.flatten()
    return of_losses, of_losses if of_log_sum_exp is None else of_losses + of_log_sum_exp.flatten()


class _VocabParallelCrossEntropy(Function):
    """Saves the logits and the log-sum-exp of each token; backward overwrites the logits with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
        flat, found = logits.detach().flatten(0, -2), shard.labels(labels)
        losses, log_sum_exp = shard.losses(*shard.statistics(flat, found))
        ctx.save_for_backward(logits, log_sum_exp, found.columns, found.is_outside)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return losses.view(labels.shape), log_sum_exp.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        logits, log_sum_exp, columns, is_outside = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        flat = logits.detach().flatten(0, -2)  # [n, v/tp], padding included
        shard.write_gradient(flat, log_sum_exp, ShardLabels(columns, is_outside), *token_gradients(*gradients))
        return flat.view(logits.shape), None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of ``labels`` ``[...]`` and log-sum-exp of the logits per token, in fp32 or wider, on
    every rank.

    The columns of ``logits`` ``[..., v/tp]`` are the ids of ``shard``, then padding. Backward overwrites the logits, so
    it can run once. The log-sum-exp may be left unused, the losses may not.
    """
    results: tuple[Tensor, Tensor] = _VocabParallelCrossEntropy.apply(logits, labels, shard)
    return results


@dataclass(frozen=True)
class ChunkedOutputLayer:
    """The output layer and its cross entropy without the logits of all tokens, but of ``chunk_size`` tokens at a time.

    Forward keeps the log-sum-exp of every token; backward computes each chunk's logits again, so the output layer costs
    four GEMMs instead of three (forward, logits again, both gradients).
    """

    chunk_size: int
    parallel: TensorParallel
    shard: VocabularyShard
    weight_gradient: WeightGradientKernel

    def chunks(self, num_tokens: int) -> Iterator[slice]:
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
    of_losses: Tensor
    of_probabilities: Tensor
    """``[n]`` each: the :func:`token_gradients`."""
    grad_hidden: Tensor
    """``[n, h]``: this rank's part of the sum over the tensor-parallel ranks."""

    def value(self) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        buffer = self.weight.new_empty(self.weight.shape, dtype=wide)
        self.write_to(buffer, accumulate=False)
        return buffer

    def write_to(self, buffer: Tensor | None, accumulate: bool) -> None:
        """Computes only the gradient of the hidden states if ``buffer`` is None, for a frozen weight."""
        for rows in self.output_layer.chunks(self.hidden.shape[0]):
            chunk = self.hidden[rows]  # [m, h]
            logits = linear(chunk, self.weight)  # [m, v/tp]
            gradients = self.of_losses[rows], self.of_probabilities[rows]
            self.output_layer.shard.write_gradient(logits, self.log_sum_exp[rows], self.labels[rows], *gradients)
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
            *token_gradients(*gradients),
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

    Equal to :func:`vocab_parallel_cross_entropy` of the logits.
    """
    results: tuple[Tensor, Tensor] = _ChunkedLoss.apply(hidden, weight, labels, output_layer)
    return results
