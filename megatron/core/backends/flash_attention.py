"""FlashAttention 3, read against the ``hopper`` directory of flash-attention (late 2025). Not run on a GPU so far."""

import math

import torch
from torch import Tensor

from megatron.core.kernels.choice import load
from megatron.core.ops.attention_kernels import Gradients, PartialAttention


class FlashAttention3:
    """FlashAttention 3 (arXiv 2407.08608), for half precisions on Hopper; groups are not repeated."""

    name = "FlashAttention 3"
    returns_log_sum_exp = True

    def __init__(self) -> None:
        self._interface = load("flash_attn_interface", "FlashAttention 3")

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Half precisions on a GPU."""
        return device.type == "cuda" and dtype.itemsize == 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Outputs and the log-sum-exp of the scores."""
        output, log_sum_exp, *_ = self._interface._flash_attn_forward(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            softmax_scale=1 / math.sqrt(query.shape[-1]),
            causal=is_causal,
        )
        return PartialAttention(output.transpose(1, 2), log_sum_exp)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """Scores are computed again, block by block."""
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
            # Queries' gradients are otherwise added up in whatever order blocks come (--deterministic-mode).
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = (tensor.transpose(1, 2) for tensor in grads)
        return grad_query, grad_key, grad_value
