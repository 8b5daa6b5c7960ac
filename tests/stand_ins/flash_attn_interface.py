"""Stands in for FlashAttention 3's interface: what we call of it, in torch."""

import torch
from torch import Tensor


def _weights(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
    sides: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Probabilities ``[b, n, s_q, s_k]`` and log-sum-exp. The last query is at the last key."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2).double()
    scores = torch.einsum("bqnd,bknd->bnqk", q.double(), keys) * softmax_scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    left, right = sides[0], 0 if causal else sides[1]
    queries, keys_at = (torch.arange(one.shape[1], device=q.device) for one in (q, k))
    distance = (queries + k.shape[1] - q.shape[1])[:, None] - keys_at
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if right >= 0:
        hidden = hidden | (distance < -right)
    if left >= 0:
        hidden = hidden | (distance > left)
    if cu_seqlens is not None:
        number = torch.zeros(q.shape[1], device=q.device).index_fill(0, cu_seqlens[:-1].long(), 1).cumsum(0)
        hidden = hidden | (number != number[:, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp(), log_sum


def _check_lengths(
    q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, longest: tuple[int | None, int | None]
) -> None:
    assert (cu_seqlens_q is None) == (cu_seqlens_k is None) == (None in longest)
    assert q.dim() == (4 if cu_seqlens_q is None else 3)
    if cu_seqlens_q is not None:
        assert cu_seqlens_q is cu_seqlens_k and longest[0] == longest[1]
        assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.device == q.device and cu_seqlens_q.is_contiguous()


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[b, s, n, d]`` queries, or with lengths ``[total, n, d]``; keys and values may have fewer heads."""
    _check_lengths(q, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    assert softmax_scale is not None and all(tensor.stride(-1) == 1 for tensor in (q, k, v))
    if cu_seqlens_q is not None:
        q, k, v = q[None], k[None], v[None]
    probabilities, log_sum = _weights(
        q, k, softmax_scale, causal, cu_seqlens_q, (window_size_left, window_size_right), softcap
    )
    values = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).double()
    output = torch.einsum("bnqk,bknd->bqnd", probabilities, values).to(q.dtype).contiguous()
    if cu_seqlens_q is not None:
        output, log_sum = output[0], log_sum[0]
    return output, log_sum.float(), torch.empty(0), torch.empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Writes the gradients; returns something else."""
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    _check_lengths(q, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    assert (dq.shape, dk.shape, dv.shape, out.shape) == (q.shape, k.shape, v.shape, q.shape)
    assert softmax_scale is not None and softmax_lse.is_contiguous()
    assert all(tensor.stride(-1) == 1 for tensor in (dout, q, k, v, out, dq, dk, dv))
    if cu_seqlens_q is not None:
        dout, q, k, v, dq, dk, dv = (tensor[None] for tensor in (dout, q, k, v, dq, dk, dv))
    inputs = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        probabilities, _ = _weights(
            inputs[0], inputs[1], softmax_scale, is_causal, cu_seqlens_q, (window_size_left, window_size_right), softcap
        )
        values = inputs[2].repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        output = torch.einsum("bnqk,bknd->bqnd", probabilities, values)
    for place, gradient in zip((dq, dk, dv), torch.autograd.grad(output, inputs, dout.double())):
        place.copy_(gradient)
    return torch.empty(0)
