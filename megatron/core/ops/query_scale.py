"""Scales of queries by their position: attention temperature tuning (Llama 4; Nakanishi, arXiv 2501.19399)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def query_scales(positions: Tensor, floor: int, scale: float, dtype: torch.dtype) -> Tensor:
    """``1 + scale log(1 + floor((p + 1) / floor))`` of ``positions`` ``[s]`` or ``[s, b]``, as ``[s, 1 or b, 1]`` in
    ``dtype`` or fp32 if that is wider."""
    by_row = positions if positions.dim() == 2 else positions[:, None]
    steps = torch.div(by_row + 1, floor, rounding_mode="floor").to(torch.float64)
    return (1 + scale * torch.log1p(steps)).unsqueeze(-1).to(torch.promote_types(dtype, torch.float32))


class _ScaledQueries(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, scales: Tensor, query_size: int) -> Tensor:
        ctx.scales, ctx.query_size = scales, query_size
        qkv = qkv.detach()
        qkv[..., :query_size].mul_(scales)
        return qkv

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradients[0][..., : ctx.query_size].mul_(ctx.scales)
        return gradients[0], None, None


def scale_queries(qkv: Tensor, scales: Tensor, query_size: int) -> Tensor:
    """Multiply the queries, the first ``query_size`` of ``[s, b, (n + 2g) d]``, by ``scales`` of
    :func:`query_scales`, in place. Nothing else may read ``qkv`` or its gradient."""
    output: Tensor = _ScaledQueries.apply(qkv, scales, query_size)
    return output
