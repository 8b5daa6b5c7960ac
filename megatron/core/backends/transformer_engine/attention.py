"""Attention by Transformer Engine, which picks among FlashAttention, cuDNN and its own kernels."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.backends.transformer_engine import TransformerEngine
from megatron.core.ops.attention import AttentionOutput, AutogradAttention


class TransformerEngineAttention(AutogradAttention):
    """``DotProductAttention``; it does not return the log-sum-exp."""

    name = "Transformer Engine"

    def __init__(self, engine: TransformerEngine) -> None:
        self._engine = engine
        self._modules: dict[tuple[int, int, int], Any] = {}

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype.itemsize == 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        heads, groups, size = shape = query.shape[1], key.shape[1], query.shape[3]
        if shape not in self._modules:
            self._modules[shape] = self._engine.pytorch.DotProductAttention(
                heads, size, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd"
            )
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
            by_position = (tensor.permute(2, 0, 1, 3) for tensor in (q, k, v))  # [s, b, n, d]
            # Attention is never in FP8.
            with self._engine.pytorch.autocast(enabled=False):
                joined = self._modules[shape](*by_position, attn_mask_type="causal" if is_causal else "no_mask")
            output = joined.view(*joined.shape[:2], heads, -1).permute(1, 2, 0, 3)  # [b, n, s, d]
        return AttentionOutput(output.detach(), None, (output, q, k, v))
