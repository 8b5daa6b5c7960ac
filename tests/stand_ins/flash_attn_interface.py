"""Stands in for FlashAttention 3's interface: what we call of it, in torch."""

import torch
from torch import Tensor


def _weights(q: Tensor, k: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Probabilities ``[b, n, s, s]`` and log-sum-exp."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2).double()
    scores = torch.einsum("bqnd,bknd->bnqk", q.double(), keys) * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp(), log_sum


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[b, s, n, d]`` queries; keys and values may have fewer heads."""
    assert softmax_scale is not None
    probabilities, log_sum = _weights(q, k, softmax_scale, causal)
    values = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).double()
    output = torch.einsum("bnqk,bknd->bqnd", probabilities, values).to(q.dtype)
    return output, log_sum.float(), torch.empty(0), torch.empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Writes the gradients; returns something else."""
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert softmax_scale is not None and softmax_lse.is_contiguous() and dq.is_contiguous()
    inputs = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        probabilities, _ = _weights(inputs[0], inputs[1], softmax_scale, is_causal)
        values = inputs[2].repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        output = torch.einsum("bnqk,bknd->bqnd", probabilities, values)
    for place, gradient in zip((dq, dk, dv), torch.autograd.grad(output, inputs, dout.double())):
        place.copy_(gradient)
    return torch.empty(0)
