"""Cross entropy over a vocabulary divided among ranks; the whole logits exist nowhere.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks exchange one maximum and two sums per token.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator


class _VocabParallelCrossEntropy(Function):
    """Keeps the log-probabilities among the rank's own ids, which torch computes in one pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first_id: int, vocab_size: int, ranks: Communicator
    ) -> Tensor:
        # Ids beyond the vocabulary are padding: they take no probability, so that the loss does not depend on it.
        width = min(logits.shape[-1], max(0, vocab_size - first_id))
        scores = logits[..., :width]
        log_probabilities = scores.log_softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        rows = labels - first_id
        foreign = (rows < 0) | (rows >= width)
        rows = rows.masked_fill(foreign, 0).unsqueeze(-1)
        own_sum, label_score = _log_sum_and_label_score(scores, log_probabilities, rows, foreign)
        log_sum = _log_sum_over_ranks(own_sum, ranks)
        ctx.save_for_backward(log_probabilities, own_sum - log_sum, rows, foreign)
        ctx.like = logits.dtype, logits.shape[-1], ranks.size
        return log_sum - ranks.all_reduce(label_score)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        log_probabilities, share, rows, foreign = ctx.saved_tensors
        dtype, width, size = ctx.like
        if size > 1:
            log_probabilities.add_(share.unsqueeze(-1))
        gradient = log_probabilities.exp_().mul_(gradients[0].unsqueeze(-1))
        if gradient.shape[-1] > 0:
            at_label = -gradients[0].masked_fill(foreign, 0.0)
            gradient.scatter_add_(-1, rows, at_label.unsqueeze(-1))
        padding = width - gradient.shape[-1]
        whole = torch.nn.functional.pad(gradient, (0, padding)) if padding else gradient
        return whole.to(dtype), None, None, None, None


def _log_sum_and_label_score(
    scores: Tensor, log_probabilities: Tensor, rows: Tensor, foreign: Tensor
) -> tuple[Tensor, Tensor]:
    """(log of the sum of the exponentials of this rank's scores, score of the label or 0 where it is foreign)."""
    dtype = log_probabilities.dtype
    if scores.shape[-1] == 0:
        nothing = torch.zeros_like(foreign, dtype=dtype)
        return nothing - math.inf, nothing
    score = scores.gather(-1, rows).to(dtype)
    own_sum = (score - log_probabilities.gather(-1, rows)).squeeze(-1)
    return own_sum, score.squeeze(-1).masked_fill(foreign, 0.0)


def _log_sum_over_ranks(own_sum: Tensor, ranks: Communicator) -> Tensor:
    if ranks.size == 1:
        return own_sum
    maximum = ranks.all_reduce(own_sum.clone(), "max")
    return maximum + ranks.all_reduce((own_sum - maximum).exp()).log()


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, first_id: int, vocab_size: int, ranks: Communicator
) -> Tensor:
    """Negative log likelihood of ``labels`` per token, in fp32 or wider.

    ``logits`` ``[..., v/tp]`` hold the ids from ``first_id`` on; ids from ``vocab_size`` on
    are padding; ``labels`` ``[...]``.
    Every rank gets the whole loss, and the gradient of its own logits. Backward may run once.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, first_id, vocab_size, ranks)
    return loss
