"""FlashAttention 3, read against the ``hopper`` directory of flash-attention (late 2025). Not run on a GPU so far."""

import math

import torch
from torch import Tensor

from megatron.core.kernels.choice import load
from megatron.core.ops.attention_kernels import AttentionOutput, Gradients, HalfPrecisionGpuKernel


class FlashAttention3(HalfPrecisionGpuKernel):
    """FlashAttention 3 (arXiv 2407.08608), for Hopper; keys and values are not repeated for the heads of a group."""

    name = "FlashAttention 3"

    def __init__(self) -> None:
        self._interface = load("flash_attn_interface", "FlashAttention 3")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        output, log_sum_exp, *_ = self._interface._flash_attn_forward(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            softmax_scale=1 / math.sqrt(query.shape[-1]),
            causal=is_causal,
        )
        return AttentionOutput(output.transpose(1, 2), log_sum_exp)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: AttentionOutput, is_causal: bool
    ) -> Gradients:
        assert attended.log_sum_exp is not None
        by_position = [tensor.transpose(1, 2) for tensor in (grad, query, key, value, attended.output)]
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in by_position[1:4]]
        self._interface._flash_attn_backward(
            *by_position,
            attended.log_sum_exp.contiguous(),
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            softmax_scale=1 / math.sqrt(query.shape[-1]),
            is_causal=is_causal,
            # Otherwise blocks add to the query gradient in any order (--deterministic-mode).
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = (tensor.transpose(1, 2) for tensor in grads)
        return grad_query, grad_key, grad_value
