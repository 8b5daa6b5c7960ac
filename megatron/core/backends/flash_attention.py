"""FlashAttention 3, read against the ``hopper`` directory of flash-attention (August 2026). Not run on a GPU so far."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import load
from megatron.core.ops.attention import AttentionOutput, Gradients, HalfPrecisionGpuKernel
from megatron.core.ops.documents import PackedSpans


class FlashAttention3(HalfPrecisionGpuKernel):
    """FlashAttention 3 (arXiv 2407.08608), for Hopper; keys and values are not repeated for the heads of a group."""

    name = "FlashAttention 3"

    def __init__(self) -> None:
        self._interface = load("flash_attn_interface", "FlashAttention 3")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        attended = self._forward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal)
        return AttentionOutput(attended.output.transpose(1, 2), attended.log_sum_exp)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: AttentionOutput,
        is_causal: bool,
        out: Gradients | None = None,
    ) -> Gradients:
        assert attended.log_sum_exp is not None
        inputs = [tensor.transpose(1, 2) for tensor in (grad, query, key, value, attended.output)]  # [b, s, heads, d]
        grads = (_empty_like(query), _empty_like(key), _empty_like(value)) if out is None else out
        by_position = [tensor.transpose(1, 2) for tensor in grads]
        self._backward(inputs, attended.log_sum_exp.contiguous(), by_position, is_causal)
        return grads

    def forward_varlen(self, query: Tensor, key: Tensor, value: Tensor, spans: PackedSpans) -> AttentionOutput:
        return self._forward(query, key, value, True, **_lengths(spans))

    def backward_varlen(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: AttentionOutput,
        spans: PackedSpans,
        out: Gradients | None = None,
    ) -> Gradients:
        assert attended.log_sum_exp is not None
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)) if out is None else out
        inputs = [grad, query, key, value, attended.output]
        self._backward(inputs, attended.log_sum_exp, grads, True, **_lengths(spans))
        return grads

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **lengths: Any) -> AttentionOutput:
        """``[b, s, heads, d]``, or packed with ``lengths`` ``[total, heads, d]``."""
        output, log_sum_exp, *_ = self._interface._flash_attn_forward(
            query, key, value, softmax_scale=1 / math.sqrt(query.shape[-1]), causal=is_causal, **lengths
        )
        return AttentionOutput(output, log_sum_exp)

    def _backward(
        self, inputs: Sequence[Tensor], log_sum_exp: Tensor, grads: Sequence[Tensor], is_causal: bool, **lengths: Any
    ) -> None:
        """Write the gradients of query, key and value into ``grads``, whose last dim is contiguous. ``inputs``: the
        gradient of the output, query, key, value, output."""
        self._interface._flash_attn_backward(
            *inputs,
            log_sum_exp,
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            softmax_scale=1 / math.sqrt(inputs[1].shape[-1]),
            is_causal=is_causal,
            # Otherwise blocks add to the query gradient in any order (--deterministic-mode).
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **lengths,
        )


def _empty_like(heads: Tensor) -> Tensor:
    """An empty tensor ``[b, heads, s, d]`` in the memory layout ``[b, s, heads, d]``."""
    return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _lengths(spans: PackedSpans) -> dict[str, Any]:
    starts, longest = spans.cu_seqlens, spans.max_seqlen
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
