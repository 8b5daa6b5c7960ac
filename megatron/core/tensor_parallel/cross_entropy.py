"""Vocabulary-parallel cross entropy, without gathering the logits.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks reduce one maximum and two sums per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator
from megatron.core.ops.cross_entropy import CrossEntropyKernel, EagerCrossEntropy


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

    @classmethod
    def of(
        cls, columns: int, first_id: int, vocab_size: int, ranks: Communicator, kernel: CrossEntropyKernel
    ) -> "VocabularyShard":
        """The shard of a rank with ``columns`` ids, padding included; ids from ``vocab_size`` on are padding."""
        return cls(first_id, min(columns, max(0, vocab_size - first_id)), ranks, kernel)

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
        self, logits: Tensor, log_sum_exp: Tensor, labels: ShardLabels, gradients: "TokenGradients"
    ) -> None:
        """Overwrite ``logits`` ``[n, v/tp]`` with their gradient."""
        logits[:, self.width :] = 0.0
        at_label = -gradients.loss.masked_fill(labels.is_outside, 0.0)
        # The derivative of the log-sum-exp is the probabilities, that of the loss is the same minus one at the label.
        self.kernel.write_gradient(
            logits[:, : self.width], log_sum_exp, labels.columns, gradients.of_probabilities, at_label
        )


@dataclass(frozen=True)
class TokenGradients:
    """The gradients of the losses and of the log-sum-exp of ``n`` tokens."""

    loss: Tensor
    """``[n]``."""
    log_sum_exp: Tensor | None
    """``[n]``; None if only the losses were used."""

    @classmethod
    def of(cls, loss: Tensor, log_sum_exp: Tensor | None) -> "TokenGradients":
        """From gradients of any shape."""
        return cls(loss.flatten(), None if log_sum_exp is None else log_sum_exp.flatten())

    @property
    def of_probabilities(self) -> Tensor:
        """The factor of each token's probabilities in the gradient of its logits, ``[n]``."""
        return self.loss if self.log_sum_exp is None else self.loss + self.log_sum_exp

    def __getitem__(self, rows: slice) -> "TokenGradients":
        return TokenGradients(self.loss[rows], None if self.log_sum_exp is None else self.log_sum_exp[rows])


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
        shard.write_gradient(flat, log_sum_exp, ShardLabels(columns, is_outside), TokenGradients.of(*gradients))
        return flat.view(logits.shape), None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    first_id: int,
    vocab_size: int,
    ranks: Communicator,
    kernel: CrossEntropyKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of ``labels`` ``[...]`` and log-sum-exp of the logits per token, in fp32 or wider, on
    every rank.

    ``logits`` ``[..., v/tp]`` start at the id ``first_id``; ids from ``vocab_size`` on are padding. Backward overwrites
    the logits, so it can run once. The log-sum-exp may be left unused, the losses may not.
    """
    shard = VocabularyShard.of(logits.shape[-1], first_id, vocab_size, ranks, kernel or EagerCrossEntropy())
    results: tuple[Tensor, Tensor] = _VocabParallelCrossEntropy.apply(logits, labels, shard)
    return results
