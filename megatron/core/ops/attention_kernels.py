"""Kernels of attention: what computes a tile of it, forward and backward.

They return the log-sum-exp of the scores beside the output, so that partial results over different keys can be merged,
and take that of the whole row in backward (FlashAttention, arXiv 2205.14135, appendix B.2). They say what they support;
they are asked once, when the model is built.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import torch_compat

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


@dataclass(frozen=True)
class PartialAttention:
    """What a kernel returns: the queries' outputs over the keys that it was given."""

    output: Tensor
    """``[b, n, s_q, d]``."""
    log_sum_exp: Tensor | None
    """Of every query's scores, ``[b, n, s_q]`` in fp32 or wider; None from kernels that do not tell."""
    kept: tuple[Any, ...] = ()
    """What backward needs beside inputs and outputs."""


class AttentionKernel(Protocol):
    """Attention of ``[b, n, s_q, d]`` queries to ``[b, groups, s_k, d]`` keys and values."""

    name: str
    returns_log_sum_exp: bool
    """Whether what it returns can be merged with attention to other keys."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel runs there."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Attend to all keys; if ``is_causal``, with as many keys as queries, to those up to a query's own place."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """Gradients of query, key and value; output and log-sum-exp in ``attended`` may be those over more keys."""


class ReferenceAttention:
    """The definition, with all scores in memory."""

    name = "reference"
    returns_log_sum_exp = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Everywhere."""
        return True

    def _scores(self, query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
        """``[b, groups, queries per group, s_q, s_k]``."""
        scores = query @ key.transpose(-1, -2).unsqueeze(2) / math.sqrt(query.shape[-1])
        if not is_causal:
            return scores
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        return scores.masked_fill(future, -math.inf)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Softmax of the masked scores times the values."""
        wide_query, wide_key, wide_value = _grouped(query, key, value)
        scores = self._scores(wide_query, wide_key, is_causal)
        log_sum_exp = scores.logsumexp(dim=-1)
        output = (scores - log_sum_exp.unsqueeze(-1)).exp() @ wide_value.unsqueeze(2)
        return PartialAttention(output.flatten(1, 2).to(query.dtype), log_sum_exp.flatten(1, 2))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """The derivative of the softmax, written out."""
        assert attended.log_sum_exp is not None
        wide_query, wide_key, wide_value = _grouped(query, key, value)
        groups = (key.shape[1], -1)
        wide_grad, wide_output = (
            tensor.to(wide_query.dtype).unflatten(1, groups) for tensor in (grad, attended.output)
        )
        scores = self._scores(wide_query, wide_key, is_causal)
        probabilities = (scores - attended.log_sum_exp.unflatten(1, groups).unsqueeze(-1)).exp()
        grad_probabilities = wide_grad @ wide_value.transpose(-1, -2).unsqueeze(2)
        along = (wide_grad * wide_output).sum(dim=-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - along) / math.sqrt(query.shape[-1])
        grad_query = (grad_scores @ wide_key.unsqueeze(2)).flatten(1, 2)
        grad_key = (grad_scores.transpose(-1, -2) @ wide_query).sum(dim=2)
        grad_value = (probabilities.transpose(-1, -2) @ wide_grad).sum(dim=2)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    """In fp32 or wider, and the queries by the group whose key they share: ``[b, groups, n / groups, s_q, d]``."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.to(wide).unflatten(1, (key.shape[1], -1)), key.to(wide), value.to(wide)


class CpuFlashAttention:
    """torch's flash attention for CPUs: scores never leave the cache; groups are not repeated.

    The kernel computes 512 keys at a time, those in the future included, so that a causal tile of up to 512 positions
    costs as much as one without a mask. Such a tile is computed some queries after the other, each with the keys that
    they see, and its gradients in fp32 or wider, for which the kernel is faster than for half precisions (both
    measured: ``docs/performance.md``).
    """

    name = "torch flash (CPU)"
    returns_log_sum_exp = True
    _KEYS, _QUERIES = 512, 64

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Any dtype on the CPU."""
        return device.type == "cpu"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Outputs and the log-sum-exp of the scores."""
        attend = torch_compat.cpu_flash_attention
        if not self._goes_by_queries(query, is_causal):
            return PartialAttention(*attend(query, key, value, 0.0, is_causal))
        output = torch.empty_like(query)
        log_sum_exp = torch.empty(
            query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device
        )
        for queries, keys, mask in self._blocks(query):
            part = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, False, attn_mask=mask)
            output[:, :, queries], log_sum_exp[:, :, queries] = part
        return PartialAttention(output, log_sum_exp)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """Scores are computed again, block by block."""
        output, log_sum_exp = attended.output, attended.log_sum_exp
        assert log_sum_exp is not None
        differentiate = torch_compat.cpu_flash_attention_backward
        if not self._goes_by_queries(query, is_causal):
            grads: Gradients = differentiate(grad, query, key, value, output, log_sum_exp, 0.0, is_causal)
            return grads
        dtype, grad_query = query.dtype, torch.empty_like(query)
        grad, query, key, value, output = (t.to(log_sum_exp.dtype) for t in (grad, query, key, value, output))
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys, mask in self._blocks(query):
            by_queries = (t[:, :, queries] for t in (grad, query, output, log_sum_exp))
            some_grad, some_query, some_output, some_log_sum_exp = by_queries
            seen_key, seen_value = key[:, :, keys], value[:, :, keys]
            parts = differentiate(
                some_grad, some_query, seen_key, seen_value, some_output, some_log_sum_exp, 0.0, False, attn_mask=mask
            )
            grad_query[:, :, queries] = parts[0]
            grad_key[:, :, keys] += parts[1]
            grad_value[:, :, keys] += parts[2]
        return grad_query, grad_key.to(dtype), grad_value.to(dtype)

    def _goes_by_queries(self, query: Tensor, is_causal: bool) -> bool:
        return is_causal and self._QUERIES < query.shape[2] <= self._KEYS

    def _blocks(self, query: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Queries ``[b, n, s, d]`` block by block, the keys up to the last of them, and what is added to the scores."""
        length, size = query.shape[2], self._QUERIES
        before = (length - 1) // size * size
        # The last block's: it sees all keys before it, and of its own those up to the query. Others have fewer before.
        mask = torch.zeros(size, before + size, dtype=query.dtype, device=query.device)
        mask[:, before:] = torch.full((size, size), -math.inf, device=query.device).triu(1)
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield slice(start, stop), slice(stop), mask[: stop - start, before - start : before - start + stop]


class CudaFlashAttention:
    """torch's flash attention for GPUs, for half precisions; groups are not repeated."""

    name = "torch flash (CUDA)"
    returns_log_sum_exp = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Half precisions on a GPU."""
        return device.type == "cuda" and dtype.itemsize == 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Outputs and the log-sum-exp of the scores."""
        attend = torch_compat.flash_attention
        output, log_sum_exp, *kept = attend(query, key, value, 0.0, is_causal)
        return PartialAttention(output, log_sum_exp, tuple(kept[:6]))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """Scores are computed again, block by block."""
        starts_query, starts_key, longest_query, longest_key, seed, offset = attended.kept
        assert attended.log_sum_exp is not None
        grads: Gradients = torch_compat.flash_attention_backward(
            grad,
            query,
            key,
            value,
            attended.output,
            attended.log_sum_exp.contiguous(),
            starts_query,
            starts_key,
            longest_query,
            longest_key,
            0.0,
            is_causal,
            seed,
            offset,
        )
        return grads


class CudnnAttention:
    """cuDNN's fused attention, for half precisions on GPUs."""

    name = "cuDNN"
    returns_log_sum_exp = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Half precisions on a GPU."""
        return device.type == "cuda" and dtype.itemsize == 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Outputs and the log-sum-exp of the scores."""
        attend = torch_compat.cudnn_attention
        output, log_sum_exp, *kept = attend(query, key, value, None, True, 0.0, is_causal)
        return PartialAttention(output, log_sum_exp.view(query.shape[:3]), tuple(kept[:6]))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """Scores are computed again, block by block."""
        starts_query, starts_key, longest_query, longest_key, seed, offset = attended.kept
        assert attended.log_sum_exp is not None
        grads: Gradients = torch_compat.cudnn_attention_backward(
            grad,
            query,
            key,
            value,
            attended.output,
            attended.log_sum_exp.contiguous().unsqueeze(-1),
            seed,
            offset,
            None,
            starts_query,
            starts_key,
            longest_query,
            longest_key,
            0.0,
            is_causal,
        )
        return grads


class TorchAttention:
    """``scaled_dot_product_attention``, which picks the fastest kernel of the device (flash, cuDNN, ...)."""

    name = "torch scaled_dot_product_attention"
    returns_log_sum_exp = False

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Everywhere."""
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """The output carries its graph, which backward walks."""
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
            # Only kernels for half precision share keys and values among queries; others would fall back to one
            # that holds all scores.
            repeats = 1 if q.dtype.itemsize == 2 else q.shape[1] // k.shape[1]
            keys, values = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
            output = F.scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=repeats == 1)
        return PartialAttention(output.detach(), None, (output, q, k, v))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """By autograd on the kept graph."""
        output, *inputs = attended.kept
        grads = torch.autograd.grad(output, inputs, grad)
        return grads[0], grads[1], grads[2]


def attention_kernels(backend: str) -> list[AttentionKernel]:
    """torch's kernels and the reference, in the order in which ``--attention-backend`` prefers them."""
    if backend in ("unfused", "local"):
        return [ReferenceAttention()]
    asked_for: dict[str, list[AttentionKernel]] = {"flash": [CudaFlashAttention()], "fused": [CudnnAttention()]}
    return [
        *asked_for.get(backend, []),
        CpuFlashAttention(),
        TorchAttention(),
        CudaFlashAttention(),
        ReferenceAttention(),
    ]


def choose_attention_kernel(
    backend: str, device: torch.device, dtype: torch.dtype, needs_log_sum_exp: bool = False
) -> AttentionKernel:
    """The first of :func:`attention_kernels` that runs there.

    ``needs_log_sum_exp`` where partial results will be merged.
    """
    return next(
        kernel
        for kernel in attention_kernels(backend)
        if kernel.supports(device, dtype) and (kernel.returns_log_sum_exp or not needs_log_sum_exp)
    )
