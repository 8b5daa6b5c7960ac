"""torch's attention kernels and the reference, and the order in which ``--attention-backend`` prefers them."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import torch_compat
from megatron.core.ops.attention import (
    AttentionKernel,
    AttentionOutput,
    AutogradAttention,
    Gradients,
    HalfPrecisionGpuKernel,
)
from megatron.core.ops.documents import PackedSpans


class ReferenceAttention:
    """The definition; materialises all scores."""

    name = "reference"
    returns_log_sum_exp = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        return self._forward(query, key, value, _future(key) if is_causal else None)

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
        return self._backward(grad, query, key, value, attended, _future(key) if is_causal else None)

    def forward_varlen(self, query: Tensor, key: Tensor, value: Tensor, spans: PackedSpans) -> AttentionOutput:
        hidden = _future_or_other_span(spans, query)
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))  # [1, n, total, d]
        attended = self._forward(query, key, value, hidden)
        assert attended.log_sum_exp is not None
        return AttentionOutput(attended.output[0].transpose(0, 1), attended.log_sum_exp[0])

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
        grad, query, key, value, output = (
            tensor.transpose(0, 1).unsqueeze(0) for tensor in (grad, query, key, value, attended.output)
        )  # [1, n, total, d]
        one_row = AttentionOutput(output, attended.log_sum_exp.unsqueeze(0))
        hidden = _future_or_other_span(spans, attended.output)
        grads = self._backward(grad, query, key, value, one_row, hidden)
        grad_query, grad_key, grad_value = (part[0].transpose(0, 1) for part in grads)
        return grad_query, grad_key, grad_value

    def _scores(self, query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
        """``[b, groups, n / groups, s_q, s_k]``; without ``hidden`` ``[s_q, s_k]`` keys."""
        scores = query @ key.transpose(-1, -2).unsqueeze(2) / math.sqrt(query.shape[-1])
        return scores if hidden is None else scores.masked_fill(hidden, -math.inf)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> AttentionOutput:
        wide_query, wide_key, wide_value = _grouped(query, key, value)
        scores = self._scores(wide_query, wide_key, hidden)
        log_sum_exp = scores.logsumexp(dim=-1)  # [b, groups, n / groups, s_q]
        output = (scores - log_sum_exp.unsqueeze(-1)).exp() @ wide_value.unsqueeze(2)
        return AttentionOutput(output.flatten(1, 2).to(query.dtype), log_sum_exp.flatten(1, 2))

    def _backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: AttentionOutput, hidden: Tensor | None
    ) -> Gradients:
        assert attended.log_sum_exp is not None
        wide_query, wide_key, wide_value = _grouped(query, key, value)
        groups = (key.shape[1], -1)
        wide_grad, wide_output = (
            tensor.to(wide_query.dtype).unflatten(1, groups) for tensor in (grad, attended.output)
        )
        scores = self._scores(wide_query, wide_key, hidden)
        probabilities = (scores - attended.log_sum_exp.unflatten(1, groups).unsqueeze(-1)).exp()
        grad_probabilities = wide_grad @ wide_value.transpose(-1, -2).unsqueeze(2)
        delta = (wide_grad * wide_output).sum(dim=-1, keepdim=True)  # [b, groups, n / groups, s_q, 1]
        grad_scores = probabilities * (grad_probabilities - delta) / math.sqrt(query.shape[-1])
        grad_query = (grad_scores @ wide_key.unsqueeze(2)).flatten(1, 2)
        grad_key = (grad_scores.transpose(-1, -2) @ wide_query).sum(dim=2)
        grad_value = (probabilities.transpose(-1, -2) @ wide_grad).sum(dim=2)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _future(key: Tensor) -> Tensor:
    """Whether a key is later than the query: ``[s, s]``."""
    length = key.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)


def _future_or_other_span(spans: PackedSpans, packed: Tensor) -> Tensor:
    """Whether a key is later than the query, or in another span: ``[total, total]`` for ``packed [total, ...]``."""
    positions = torch.arange(packed.shape[0], device=packed.device)
    number = (positions.unsqueeze(1) >= spans.cu_seqlens).sum(dim=1)  # of the span, [total]
    return (positions > positions.unsqueeze(1)) | (number != number.unsqueeze(1))


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    """In fp32 or wider, with the queries of a group together: ``[b, groups, n / groups, s_q, d]``."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.to(wide).unflatten(1, (key.shape[1], -1)), key.to(wide), value.to(wide)


class CpuFlashAttention:
    """torch's flash attention for CPUs; keys and values are not repeated for the heads of a group.

    torch's kernel computes 512 keys at a time and does not skip masked ones, so that a causal tile of up to 512
    positions costs as much as an unmasked one. Such a tile is computed in blocks of 64 queries with the keys up to the
    last of them, and its gradients in fp32 or wider, for which torch's kernel is faster than for half precisions (both
    measured: ``docs/performance.md``).
    """

    name = "torch flash (CPU)"
    returns_log_sum_exp = True
    _KEYS, _QUERIES = 512, 64

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        attend = torch_compat.cpu_flash_attention
        if not self._splits_queries(query, is_causal):
            return AttentionOutput(*attend(query, key, value, 0.0, is_causal))
        output = torch.empty_like(query)
        log_sum_exp = torch.empty(
            query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device
        )
        for queries, keys, mask in self._blocks(query):
            part = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, False, attn_mask=mask)
            output[:, :, queries], log_sum_exp[:, :, queries] = part
        return AttentionOutput(output, log_sum_exp)

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
        output, log_sum_exp = attended.output, attended.log_sum_exp
        assert log_sum_exp is not None
        differentiate = torch_compat.cpu_flash_attention_backward
        if not self._splits_queries(query, is_causal):
            grads: Gradients = differentiate(grad, query, key, value, output, log_sum_exp, 0.0, is_causal)
            return grads
        grad_query = torch.empty_like(query) if out is None else out[0]
        dtype, length = query.dtype, query.shape[2]
        grad, query, key, value, output = (t.to(log_sum_exp.dtype) for t in (grad, query, key, value, output))
        # The last block has all keys: the gradients of the other blocks are added to its own.
        for queries, keys, mask in reversed(list(self._blocks(query))):
            some_grad, some_query, some_output, some_lse = (
                t[:, :, queries] for t in (grad, query, output, log_sum_exp)
            )
            block = some_grad, some_query, key[:, :, keys], value[:, :, keys], some_output, some_lse
            parts = differentiate(*block, 0.0, False, attn_mask=mask)
            grad_query[:, :, queries] = parts[0]
            if queries.stop == length:
                _, grad_key, grad_value = parts
            else:
                grad_key[:, :, keys] += parts[1]
                grad_value[:, :, keys] += parts[2]
        if out is None:
            return grad_query, grad_key.to(dtype), grad_value.to(dtype)
        out[1].copy_(grad_key)
        out[2].copy_(grad_value)
        return out

    def _splits_queries(self, query: Tensor, is_causal: bool) -> bool:
        return is_causal and self._QUERIES < query.shape[2] <= self._KEYS

    def _blocks(self, query: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of the queries ``[b, n, s, d]``, the keys up to the end of each block, and the mask of its scores."""
        length, size = query.shape[2], self._QUERIES
        before = (length - 1) // size * size
        # The mask of the last block, of which the others use the right part: [64, keys before the block + 64].
        mask = torch.zeros(size, before + size, dtype=query.dtype, device=query.device)
        mask[:, before:] = torch.full((size, size), -math.inf, device=query.device).triu(1)
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield slice(start, stop), slice(stop), mask[: stop - start, before - start : before - start + stop]


class CudaFlashAttention(HalfPrecisionGpuKernel):
    """torch's flash attention for GPUs; keys and values are not repeated for the heads of a group."""

    name = "torch flash (CUDA)"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        output, log_sum_exp, *kept = torch_compat.flash_attention(query, key, value, 0.0, is_causal)
        return AttentionOutput(output, log_sum_exp, tuple(kept[:6]))

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
        *lengths, seed, offset = attended.kept  # starts of queries and keys, longest of queries and keys
        assert attended.log_sum_exp is not None
        tensors = grad, query, key, value, attended.output, attended.log_sum_exp.contiguous()
        grads: Gradients = torch_compat.flash_attention_backward(*tensors, *lengths, 0.0, is_causal, seed, offset)
        return grads

    def forward_varlen(self, query: Tensor, key: Tensor, value: Tensor, spans: PackedSpans) -> AttentionOutput:
        output, log_sum_exp, *kept = torch_compat.varlen_flash_attention(
            query, key, value, *_lengths(spans), 0.0, True, False
        )
        return AttentionOutput(output, log_sum_exp, tuple(kept[:2]))

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
        tensors = grad, query, key, value, attended.output, attended.log_sum_exp
        differentiate = torch_compat.varlen_flash_attention_backward
        grads: Gradients = differentiate(*tensors, *_lengths(spans), 0.0, True, *attended.kept)
        return grads


def _lengths(spans: PackedSpans) -> tuple[Tensor, Tensor, int, int]:
    """Starts of queries and keys, longest of queries and keys."""
    return spans.cu_seqlens, spans.cu_seqlens, spans.max_seqlen, spans.max_seqlen


class CudnnAttention(HalfPrecisionGpuKernel):
    """cuDNN's fused attention."""

    name = "cuDNN"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        output, log_sum_exp, *kept = torch_compat.cudnn_attention(query, key, value, None, True, 0.0, is_causal)
        return AttentionOutput(output, log_sum_exp.view(query.shape[:3]), tuple(kept[:6]))

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
        *lengths, seed, offset = attended.kept  # starts of queries and keys, longest of queries and keys
        assert attended.log_sum_exp is not None
        tensors = grad, query, key, value, attended.output, attended.log_sum_exp.contiguous().unsqueeze(-1)
        differentiate = torch_compat.cudnn_attention_backward
        grads: Gradients = differentiate(*tensors, seed, offset, None, *lengths, 0.0, is_causal)
        return grads


class TorchAttention(AutogradAttention):
    """``scaled_dot_product_attention``, which picks the fastest kernel of the device (flash, cuDNN, ...)."""

    name = "torch scaled_dot_product_attention"

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> AttentionOutput:
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
            # Only half-precision kernels take grouped queries; others would fall back to a kernel that materialises
            # all scores.
            repeats = 1 if q.dtype.itemsize == 2 else q.shape[1] // k.shape[1]
            keys, values = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
            output = F.scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=repeats == 1)
        return AttentionOutput(output.detach(), None, (output, q, k, v))


def attention_kernels(backend: str, masks_attention: bool = False) -> list[AttentionKernel]:
    """torch's kernels and the reference, in the order in which ``--attention-backend`` prefers them. With spans the
    kernel that no flag names is one with a varlen call."""
    if backend in ("unfused", "local"):
        return [ReferenceAttention()]
    preferred: dict[str, list[AttentionKernel]] = {"flash": [CudaFlashAttention()], "fused": [CudnnAttention()]}
    on_gpus: list[AttentionKernel] = [TorchAttention(), CudaFlashAttention()]
    if masks_attention:
        on_gpus.reverse()
    return [*preferred.get(backend, []), CpuFlashAttention(), *on_gpus, ReferenceAttention()]


def choose_attention_kernel(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    needs_log_sum_exp: bool = False,
    masks_attention: bool = False,
) -> AttentionKernel:
    """The first of :func:`attention_kernels` that supports ``dtype`` on ``device``."""
    return next(
        kernel
        for kernel in attention_kernels(backend, masks_attention)
        if kernel.supports(device, dtype) and (kernel.returns_log_sum_exp or not needs_log_sum_exp)
    )
