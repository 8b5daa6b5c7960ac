"""What an attention kernel is: its forward and backward pass, over tiles and over packed spans.

A kernel returns the output and the log-sum-exp of the scores, by which outputs over different keys are merged. Its
backward pass takes the log-sum-exp over all keys (FlashAttention, arXiv 2205.14135, appendix B.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.core.ops.documents import PackedSpans

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclass(frozen=True)
class AttentionOutput:
    """The result of a forward pass over the given keys."""

    output: Tensor
    """``[b, n, s_q, d]``; of a varlen call ``[total, n, d]``."""
    log_sum_exp: Tensor | None
    """Log-sum-exp of every query's scores, ``[b, n, s_q]`` in fp32 or wider, of a varlen call ``[n, total]``; None if
    the kernel does not return it."""
    kept: Sequence[Any] = ()
    """Further tensors and values for backward."""


class AttentionKernel(Protocol):
    """Attention of ``[b, n, s_q, d]`` queries to ``[b, groups, s_k, d]`` keys and values."""

    name: str
    returns_log_sum_exp: bool
    """Whether the output can be merged with the output over other keys."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel supports ``dtype`` on ``device``; called when the model is built."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        """Attend to all keys, or if ``is_causal`` (``s_q = s_k``) to the keys up to the query's position."""

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
        """Gradients of query, key and value; ``attended`` may have the output and log-sum-exp over more keys. A kernel
        that can write into the views ``out`` does so and returns ``out`` itself; others ignore it."""


@runtime_checkable
class VarlenKernel(AttentionKernel, Protocol):
    """A kernel that also attends within all spans of a batch in one call, whatever their lengths. Tensors are
    packed: ``[total, n, d]`` queries, ``[total, groups, d]`` keys and values."""

    def forward_varlen(self, query: Tensor, key: Tensor, value: Tensor, spans: PackedSpans) -> AttentionOutput:
        """Causal attention within each span."""

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
        """Gradients of query, key and value; ``out`` as in ``backward``."""


class HalfPrecisionGpuKernel:
    """Base of kernels for half precisions on GPUs."""

    returns_log_sum_exp = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype.itemsize == 2


class AutogradAttention:
    """Base of kernels whose backward pass is autograd: ``kept`` is the output with its graph, and the inputs."""

    returns_log_sum_exp = False

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
        output, *inputs = attended.kept
        grads = torch.autograd.grad(output, inputs, grad)
        return grads[0], grads[1], grads[2]
