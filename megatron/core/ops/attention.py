"""Causal self-attention with grouped queries, on the fused output of the query-key-value projection.

Rotation, attention and their backward are one autograd function: queries and keys are rotated where the
projection wrote them, and backward writes their gradients side by side, without a copy of either. Kernels stand
behind one signature and say what they support; they are asked once, when the model is built.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron.core.ops.rope import rotate_


class AttentionKernel(Protocol):
    """Causal attention over ``[b, n, s, d]`` queries and ``[b, groups, s, d]`` keys and values."""

    name: str

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel runs there."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Outputs ``[b, n, s, d]`` and what backward needs beside inputs and outputs."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, kept: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""


class ReferenceAttention:
    """The definition, with all scores in memory."""

    name = "reference"

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Everywhere."""
        return True

    def _probabilities(self, query: Tensor, key: Tensor) -> Tensor:
        length = query.shape[-2]
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ key.to(wide).transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(dim=-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Softmax of the masked scores times the values."""
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        probabilities = self._probabilities(query, key)
        return (probabilities @ value.to(probabilities.dtype)).to(query.dtype), ()

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, kept: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By autograd on a second forward."""
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            again, _ = self.forward(*inputs)
            grads = torch.autograd.grad(again, inputs, grad)
        return grads[0], grads[1], grads[2]


class CpuFlashAttention:
    """torch's flash attention for CPUs: scores never leave the cache; groups are not repeated."""

    name = "torch flash (CPU)"

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Any dtype on the CPU."""
        return device.type == "cpu"

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Outputs and the log-sum-exp of the scores."""
        output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        return output, (log_sum_exp,)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, kept: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores are computed again, block by block."""
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, kept[0], 0.0, True
        )
        return grads


class TorchAttention:
    """``scaled_dot_product_attention``, which picks the fastest kernel of the device (flash, cuDNN, ...)."""

    name = "torch scaled_dot_product_attention"

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Everywhere."""
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """The output carries its graph, which backward walks."""
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
            # Only kernels for half precision share keys and values among queries; others would fall back to one
            # that holds all scores.
            repeats = 1 if q.dtype.itemsize == 2 else q.shape[1] // k.shape[1]
            keys, values = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
            output = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=repeats == 1)
        return output.detach(), (output, q, k, v)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, kept: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By autograd on the kept graph."""
        grads = torch.autograd.grad(kept[0], kept[1:], grad)
        return grads[0], grads[1], grads[2]


def choose_attention_kernel(backend: str, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """The kernel for ``--attention-backend``: the fastest that runs there, or the plain reference."""
    if backend in ("unfused", "local"):
        return ReferenceAttention()
    cpu = CpuFlashAttention()
    return cpu if cpu.supports(device, dtype) else TorchAttention()


@dataclass(frozen=True)
class AttentionShape:
    """This rank's share of the heads."""

    query_heads: int
    key_value_heads: int
    head_size: int

    @property
    def rotated_size(self) -> int:
        """Width of queries and keys together, which stand first in the fused projection."""
        return (self.query_heads + self.key_value_heads) * self.head_size

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[s, b, (n + 2 groups) d]`` as views: query ``[b, n, s, d]``, key and value ``[b, groups, s, d]``."""
        groups = self.key_value_heads
        heads = fused.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
        query, key, value = heads.split((self.query_heads, groups, groups), dim=1)
        return query, key, value


class _FusedAttention(Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, table: Tensor, shape: AttentionShape, kernel: AttentionKernel) -> Tensor:
        # Detached: the in-place rotation is this function's own affair, not autograd's.
        fused = fused.detach()
        rotate_(fused[..., : shape.rotated_size], table)
        query, key, value = shape.split(fused)
        output, ctx.kept = kernel.forward(query, key, value)
        ctx.save_for_backward(fused, table, output)
        ctx.shape, ctx.kernel = shape, kernel
        return output.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        fused, table, output = ctx.saved_tensors
        shape: AttentionShape = ctx.shape
        grad = gradients[0].unflatten(-1, (shape.query_heads, shape.head_size)).permute(1, 2, 0, 3)
        # autograd frees what it saved, but not this: drop it, or it lives until the next forward is done.
        kept, ctx.kept = ctx.kept, ()
        parts = ctx.kernel.backward(grad, *shape.split(fused), output, kept)
        grad_fused = torch.empty_like(fused)
        for whole, part in zip(shape.split(grad_fused), parts, strict=True):
            whole.copy_(part)
        # A rotation's adjoint is the rotation back.
        rotate_(grad_fused[..., : shape.rotated_size], table.conj())
        return grad_fused, None, None, None


def fused_attention(fused: Tensor, table: Tensor, shape: AttentionShape, kernel: AttentionKernel) -> Tensor:
    """Rotate queries and keys and attend, causally: ``[s, b, (n + 2 groups) d] -> [s, b, n d]``.

    ``fused`` is overwritten (its queries and keys are rotated in place), so it must be a fresh result that
    nobody else reads; ``table`` comes from :func:`~megatron.core.ops.rope.rotary_table` .
    """
    output: Tensor = _FusedAttention.apply(fused, table, shape, kernel)
    return output
