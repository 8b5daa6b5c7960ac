"""Cross entropy over a vocabulary divided among ranks; the whole logits exist nowhere.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks exchange one maximum and two sums per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first_id: int, vocab_size: int, ranks: Communicator
    ) -> Tensor:
        # Half-precision logits are widened once; wider ones are overwritten, since nobody reads them again.
        scores = logits.float() if logits.dtype.itemsize < 4 else logits.detach()
        # Ids beyond the vocabulary are padding: they take no probability, so that the loss does not depend on it.
        scores[..., max(0, vocab_size - first_id) :] = -torch.inf
        maximum = ranks.all_reduce(scores.amax(dim=-1), "max")
        scores.sub_(maximum.unsqueeze(-1))
        rows = labels - first_id
        foreign = (rows < 0) | (rows >= scores.shape[-1])
        rows = rows.masked_fill(foreign, 0).unsqueeze(-1)
        label_score = scores.gather(-1, rows).squeeze(-1).masked_fill_(foreign, 0.0)
        exponentials = scores.exp_()
        sums = ranks.all_reduce(torch.stack((exponentials.sum(dim=-1), label_score)))
        ctx.save_for_backward(exponentials, sums[0], rows, foreign)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        exponentials, total, rows, foreign = ctx.saved_tensors
        scale = gradients[0] / total
        gradient = exponentials.mul_(scale.unsqueeze(-1))
        at_label = -gradients[0].masked_fill(foreign, 0.0)
        gradient.scatter_add_(-1, rows, at_label.unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, first_id: int, vocab_size: int, ranks: Communicator
) -> Tensor:
    """Negative log likelihood of ``labels`` per token, in fp32 or wider.

    ``logits`` ``[..., v/tp]`` hold the ids from ``first_id`` on and are overwritten; ids from ``vocab_size`` on
    are padding; ``labels`` ``[...]``.
    Every rank gets the whole loss, and the gradient of its own logits. Backward may run once.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, first_id, vocab_size, ranks)
    return loss
