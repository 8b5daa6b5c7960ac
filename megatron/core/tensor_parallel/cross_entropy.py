"""Cross entropy over a vocabulary divided among ranks; the whole logits exist nowhere.

Source: Megatron-LM (arXiv 1909.08053, section 3): ranks exchange one maximum and two sums per token.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator

_CHUNK_BYTES = {"cpu": 2 << 20}  # a CPU's cache holds that
_CHUNK_BYTES_ELSEWHERE = 128 << 20  # enough to keep a GPU busy


class _VocabParallelCrossEntropy(Function):
    """Keeps the logits and one number per token, and writes the gradient over the logits.

    Both passes widen some tokens at a time, so that no fp32 logits of a whole microbatch ever exist, and on a CPU
    nothing leaves its cache between the operations on it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first_id: int,
        vocab_size: int,
        ranks: Communicator,
        chunk_bytes: int,
    ) -> Tensor:
        # Ids beyond the vocabulary are padding: they take no probability, so that the loss does not depend on it.
        width = min(logits.shape[-1], max(0, vocab_size - first_id))
        scores = logits.flatten(0, -2)[:, :width]
        rows = labels.flatten() - first_id
        foreign = (rows < 0) | (rows >= width)
        rows = rows.masked_fill(foreign, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_sum = _log_sum_over_ranks(_own_log_sum(scores, dtype, chunk_bytes), ranks)
        label_score = _label_score(scores, rows, foreign, dtype)
        ctx.save_for_backward(logits, log_sum, rows, foreign)
        ctx.width, ctx.chunk_bytes = width, chunk_bytes
        return (log_sum - ranks.all_reduce(label_score)).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, log_sum, rows, foreign = ctx.saved_tensors
        whole = logits.detach().flatten(0, -2)
        whole[:, ctx.width :] = 0.0
        gradient = gradients[0].flatten()
        at_label = -gradient.masked_fill(foreign, 0.0)
        for part in _chunks(whole[:, : ctx.width], log_sum.dtype, ctx.chunk_bytes):
            scores = whole[part, : ctx.width]
            # A view of the logits where these are wide, otherwise a copy.
            probabilities = scores.to(log_sum.dtype).sub_(log_sum[part, None]).exp_()
            probabilities.mul_(gradient[part, None]).scatter_add_(-1, rows[part, None], at_label[part, None])
            scores.copy_(probabilities)
        return whole.view(logits.shape), None, None, None, None, None


def _chunks(scores: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Iterator[slice]:
    """Slices of the tokens of ``[n, v]`` that are not too large in ``dtype``; none where there are no ids."""
    tokens, width = scores.shape
    if width == 0:
        return
    step = max(1, chunk_bytes // (width * dtype.itemsize))
    for start in range(0, tokens, step):
        yield slice(start, start + step)


def _own_log_sum(scores: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    """Log of the sum of the exponentials of this rank's scores, for each token."""
    log_sum = torch.full((scores.shape[0],), -math.inf, dtype=dtype, device=scores.device)
    for part in _chunks(scores, dtype, chunk_bytes):
        torch.logsumexp(scores[part].to(dtype), dim=-1, out=log_sum[part])
    return log_sum


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
    kernel_device: torch.device | None = None,
) -> Tensor:
    """Negative log likelihood of ``labels`` per token, in fp32 or wider.

    ``logits`` ``[..., v/tp]`` hold the ids from ``first_id`` on; ids from ``vocab_size`` on
    are padding; ``labels`` ``[...]``. How much is widened at once suits ``kernel_device``, by default the logits'.
    Every rank gets the whole loss, and the gradient of its own logits. Backward may run once: it uses up the logits.
    """
    chunk_bytes = _CHUNK_BYTES.get((kernel_device or logits.device).type, _CHUNK_BYTES_ELSEWHERE)
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, first_id, vocab_size, ranks, chunk_bytes)
    return loss
