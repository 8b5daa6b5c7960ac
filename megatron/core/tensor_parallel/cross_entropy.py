"""Vocabulary-parallel cross entropy, without gathering the logits.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks reduce one maximum and two sums per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator
from megatron.core.ops.cross_entropy import CrossEntropyKernel, EagerCrossEntropy


class _VocabParallelCrossEntropy(Function):
    """Saves the logits and the log-sum-exp of each token; backward overwrites the logits with their gradient."""

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
        # Padding ids get no probability, so the loss does not depend on the padding. n tokens, v ids without padding:
        width = min(logits.shape[-1], max(0, vocab_size - first_id))
        flat = logits.detach().flatten(0, -2)[:, :width]  # [n, v]
        columns = labels.flatten() - first_id  # [n]
        is_outside = (columns < 0) | (columns >= width)  # labels on other ranks
        columns = columns.masked_fill(is_outside, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_sum_exp = kernel.log_sum_exp(flat, dtype)  # [n]
        if ranks.size > 1:
            maximum = ranks.all_reduce(log_sum_exp.clone(), "max")
            log_sum_exp = maximum + ranks.all_reduce((log_sum_exp - maximum).exp_()).log_()
        if width == 0:
            label_logits = torch.zeros(flat.shape[0], dtype=dtype, device=flat.device)
        else:
            label_logits = flat.gather(-1, columns[:, None]).squeeze(-1).to(dtype).masked_fill_(is_outside, 0.0)
        ctx.save_for_backward(logits, log_sum_exp, columns, is_outside)
        ctx.width, ctx.kernel = width, kernel
        return (log_sum_exp - ranks.all_reduce(label_logits)).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, log_sum_exp, columns, is_outside = ctx.saved_tensors
        flat = logits.detach().flatten(0, -2)  # [n, v/tp], padding included
        flat[:, ctx.width :] = 0.0
        gradient = gradients[0].flatten()
        at_label = -gradient.masked_fill(is_outside, 0.0)
        kernel: CrossEntropyKernel = ctx.kernel
        kernel.write_gradient(flat[:, : ctx.width], log_sum_exp, columns, gradient, at_label)
        return flat.view(logits.shape), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    first_id: int,
    vocab_size: int,
    ranks: Communicator,
    kernel: CrossEntropyKernel | None = None,
) -> Tensor:
    """Negative log likelihood of ``labels`` ``[...]`` per token, in fp32 or wider, on every rank.

    ``logits`` ``[..., v/tp]`` start at the id ``first_id``; ids from ``vocab_size`` on are padding. Backward overwrites
    the logits, so it can run once.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits, labels, first_id, vocab_size, ranks, kernel or EagerCrossEntropy()
    )
    return loss
