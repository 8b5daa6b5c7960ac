"""Cross entropy over a vocabulary divided among ranks; the whole logits exist nowhere.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks exchange one maximum and two sums per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator
from megatron.core.ops.cross_entropy import CrossEntropyKernel, EagerCrossEntropy


class _VocabParallelCrossEntropy(Function):
    """Keeps the logits and one number per token, and writes the gradient over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first_id: int,
        vocab_size: int,
        ranks: Communicator,
        kernel: CrossEntropyKernel,
    ) -> Tensor:
        # Ids beyond the vocabulary are padding: they take no probability, so that the loss does not depend on it.
        width = min(logits.shape[-1], max(0, vocab_size - first_id))
        scores = logits.detach().flatten(0, -2)[:, :width]
        rows = labels.flatten() - first_id
        foreign = (rows < 0) | (rows >= width)
        rows = rows.masked_fill(foreign, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_sum = _log_sum_over_ranks(kernel.log_sum(scores, dtype), ranks)
        label_score = _label_score(scores, rows, foreign, dtype)
        ctx.save_for_backward(logits, log_sum, rows, foreign)
        ctx.width, ctx.kernel = width, kernel
        return (log_sum - ranks.all_reduce(label_score)).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, log_sum, rows, foreign = ctx.saved_tensors
        whole = logits.detach().flatten(0, -2)
        whole[:, ctx.width :] = 0.0
        gradient = gradients[0].flatten()
        at_label = -gradient.masked_fill(foreign, 0.0)
        kernel: CrossEntropyKernel = ctx.kernel
        kernel.write_gradient(whole[:, : ctx.width], log_sum, rows, gradient, at_label)
        return whole.view(logits.shape), None, None, None, None, None


def _label_score(scores: Tensor, rows: Tensor, foreign: Tensor, dtype: torch.dtype) -> Tensor:
    """Score of each token's label, 0 where it is foreign."""
    if scores.shape[-1] == 0:
        return torch.zeros(scores.shape[0], dtype=dtype, device=scores.device)
    return scores.gather(-1, rows[:, None]).squeeze(-1).to(dtype).masked_fill_(foreign, 0.0)


def _log_sum_over_ranks(own_sum: Tensor, ranks: Communicator) -> Tensor:
    if ranks.size == 1:
        return own_sum
    maximum = ranks.all_reduce(own_sum.clone(), "max")
    return maximum + ranks.all_reduce((own_sum - maximum).exp_()).log_()


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    first_id: int,
    vocab_size: int,
    ranks: Communicator,
    kernel: CrossEntropyKernel | None = None,
) -> Tensor:
    """Negative log likelihood of ``labels`` per token, in fp32 or wider.

    ``logits`` ``[..., v/tp]`` hold the ids from ``first_id`` on; ids from ``vocab_size`` on
    are padding; ``labels`` ``[...]``.
    Every rank gets the whole loss, and the gradient of its own logits. Backward may run once: it uses up the logits.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits, labels, first_id, vocab_size, ranks, kernel or EagerCrossEntropy()
    )
    return loss
