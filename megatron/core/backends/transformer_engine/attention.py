"""Attention by Transformer Engine, which picks among FlashAttention, cuDNN and its own kernels."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.backends.transformer_engine.package import TransformerEngine
from megatron.core.ops.attention_kernels import Gradients, PartialAttention


class TransformerEngineAttention:
    """``DotProductAttention`` (an :class:`~megatron.core.ops.attention_kernels.AttentionKernel`); it does not return
    the log-sum-exp."""

    name = "Transformer Engine"
    returns_log_sum_exp = False

    def __init__(self, engine: TransformerEngine) -> None:
        self._engine = engine
        self._modules: dict[tuple[int, int, int], Any] = {}

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Half precisions on a GPU."""
        return device.type == "cuda" and dtype.itemsize == 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """The output carries its graph, which backward walks."""
        module = self._module(query.shape[1], key.shape[1], query.shape[3])
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
            # [b, n, s, d] to [s, b, n, d], as the projection wrote them.
            by_position = (tensor.permute(2, 0, 1, 3) for tensor in (q, k, v))
            # Attention is not in FP8, whatever the layers around it are.
            with self._engine.pytorch.autocast(enabled=False):
                joined = module(*by_position, attn_mask_type="causal" if is_causal else "no_mask")
            output = joined.view(*joined.shape[:2], query.shape[1], -1).permute(1, 2, 0, 3)
        return PartialAttention(output.detach(), None, (output, q, k, v))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """By autograd on the kept graph."""
        output, *inputs = attended.kept
        grads = torch.autograd.grad(output, inputs, grad)
        return grads[0], grads[1], grads[2]

    def _module(self, heads: int, groups: int, size: int) -> Any:
        """The module for this rank's heads; it has no weights."""
        shape = heads, groups, size
        if shape not in self._modules:
            self._modules[shape] = self._engine.pytorch.DotProductAttention(
                heads, size, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd"
            )
        return self._modules[shape]
