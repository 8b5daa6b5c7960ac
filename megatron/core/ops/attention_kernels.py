"""The reference and the kernels of torch and FlashAttention 3, and the order in which ``--attention-backend`` prefers
torch's."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import torch_compat
from megatron.core.device import load
from megatron.core.ops.attention import (
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    AutogradAttention,
    Gradients,
    HalfPrecisionGpuKernel,
    VarlenKernel,
)
from megatron.core.ops.documents import PackedSpans


class ReferenceAttention(VarlenKernel):
    """The definition; materialises all scores, and computes in fp32 or wider."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        return self._forward(inputs, _future(inputs))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        return self._backward(grad, attended, _future(attended.inputs))

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        *_, output, log_sum_exp = self._forward(_one_row(inputs), _future_or_other_span(inputs)).tensors
        return AttentionOutput(inputs, output[0].transpose(0, 1), log_sum_exp[0])

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *_, output, log_sum_exp = attended.tensors
        grad, output = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (grad, output))  # [1, n, total, d]
        one_row = AttentionOutput(_one_row(attended.inputs), output, log_sum_exp.unsqueeze(0))
        grads = self._backward(grad, one_row, _future_or_other_span(attended.inputs))
        grad_query, grad_key, grad_value = (part[0].transpose(0, 1) for part in grads)
        return grad_query, grad_key, grad_value

    def _scores(self, query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
        """``[b, groups, n / groups, s_q, s_k]``; without ``hidden`` ``[s_q, s_k]`` keys."""
        scores = query @ key.transpose(-1, -2).unsqueeze(2) / math.sqrt(query.shape[-1])
        return scores if hidden is None else scores.masked_fill(hidden, -math.inf)

    def _forward(self, inputs: AttentionInputs, hidden: Tensor | None) -> AttentionOutput:
        query, key, value = _grouped(inputs)
        scores = self._scores(query, key, hidden)
        log_sum_exp = scores.logsumexp(dim=-1)  # [b, groups, n / groups, s_q]
        output = (scores - log_sum_exp.unsqueeze(-1)).exp() @ value.unsqueeze(2)  # [b, groups, n / groups, s_q, d]
        return AttentionOutput(inputs, output.flatten(1, 2).to(inputs.query.dtype), log_sum_exp.flatten(1, 2))

    def _backward(self, grad: Tensor, attended: AttentionOutput, hidden: Tensor | None) -> Gradients:
        query, key, value = _grouped(attended.inputs)
        groups, (*_, output, log_sum_exp) = (key.shape[1], -1), attended.tensors
        grad, output = (one.to(query.dtype).unflatten(1, groups) for one in (grad, output))
        scores = self._scores(query, key, hidden)
        probabilities = (scores - log_sum_exp.unflatten(1, groups).unsqueeze(-1)).exp()
        grad_probabilities = grad @ value.transpose(-1, -2).unsqueeze(2)
        delta = (grad * output).sum(dim=-1, keepdim=True)  # [b, groups, n / groups, s_q, 1]
        grad_scores = probabilities * (grad_probabilities - delta) / math.sqrt(query.shape[-1])
        grad_query = (grad_scores @ key.unsqueeze(2)).flatten(1, 2)
        # The heads of a group have the same key and value, so their gradients are summed.
        grad_key = (grad_scores.transpose(-1, -2) @ query).sum(dim=2)
        grad_value = (probabilities.transpose(-1, -2) @ grad).sum(dim=2)
        dtype = attended.inputs.query.dtype
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype)


def _future(inputs: AttentionInputs) -> Tensor | None:
    """Whether a key is later than the query: ``[s, s]``; None if all keys are visible."""
    if not inputs.is_causal:
        return None
    length = inputs.key.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=inputs.key.device).triu(1)


def _future_or_other_span(packed: AttentionInputs) -> Tensor:
    """Whether a key is later than the query, or in another span: ``[total, total]``."""
    positions = torch.arange(packed.query.shape[0], device=packed.query.device)
    number = (positions.unsqueeze(1) >= packed.packed_spans.cu_seqlens).sum(dim=1)  # of the span, [total]
    return (positions > positions.unsqueeze(1)) | (number != number.unsqueeze(1))


def _one_row(packed: AttentionInputs) -> AttentionInputs:
    """Packed ``[total, heads, d]`` as one sequence ``[1, heads, total, d]``."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (packed.query, packed.key, packed.value))
    return AttentionInputs(query, key, value)


def _grouped(inputs: AttentionInputs) -> Gradients:
    """Query, key and value in fp32 or wider, the queries of a group together: ``[b, groups, n / groups, s_q, d]``."""
    query, key, value = inputs.query, inputs.key, inputs.value
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.to(wide).unflatten(1, (key.shape[1], -1)), key.to(wide), value.to(wide)


class CpuFlashAttention(AttentionKernel):
    """torch's flash attention for CPUs; keys and values are not repeated for the heads of a group.

    torch's kernel computes 512 keys at a time and does not skip masked ones, so that a causal tile of up to 512
    positions costs as much as an unmasked one. Such a tile is computed in blocks of 64 queries with the keys up to the
    last of them, and its gradients in fp32 or wider, for which torch's kernel is faster than for half precisions (both
    measured: ``docs/performance.md``).
    """

    _KEYS, _QUERIES = 512, 64

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu"

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        query, key, value, attend = inputs.query, inputs.key, inputs.value, torch_compat.cpu_flash_attention
        if not self._splits_queries(inputs):
            return AttentionOutput(inputs, *attend(query, key, value, 0.0, inputs.is_causal))
        output = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum_exp = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        for queries, keys, mask in self._blocks(query):
            part = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, False, attn_mask=mask)
            output[:, :, queries], log_sum_exp[:, :, queries] = part
        return AttentionOutput(inputs, output, log_sum_exp)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        query, key, value, output, log_sum_exp = tensors = attended.tensors
        differentiate = torch_compat.cpu_flash_attention_backward
        if not self._splits_queries(attended.inputs):
            grads: Gradients = differentiate(grad, *tensors, 0.0, attended.inputs.is_causal)
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

    def _splits_queries(self, inputs: AttentionInputs) -> bool:
        return inputs.is_causal and self._QUERIES < inputs.query.shape[2] <= self._KEYS

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


class CudaFlashAttention(HalfPrecisionGpuKernel, VarlenKernel):
    """torch's flash attention for GPUs; keys and values are not repeated for the heads of a group."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors = inputs.query, inputs.key, inputs.value
        output, log_sum_exp, *kept = torch_compat.flash_attention(*tensors, 0.0, inputs.is_causal)
        return AttentionOutput(inputs, output, log_sum_exp, tuple(kept[:6]))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = grad, *attended.tensors
        *lengths, seed, offset = attended.kept  # starts of queries and keys, longest of queries and keys
        options = *lengths, 0.0, attended.inputs.is_causal, seed, offset
        grads: Gradients = torch_compat.flash_attention_backward(*tensors, log_sum_exp.contiguous(), *options)
        return grads

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors, lengths = (inputs.query, inputs.key, inputs.value), _lengths(inputs.packed_spans)
        output, log_sum_exp, *kept = torch_compat.varlen_flash_attention(*tensors, *lengths, 0.0, True, False)
        return AttentionOutput(inputs, output, log_sum_exp, tuple(kept[:2]))

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        options = *_lengths(attended.inputs.packed_spans), 0.0, True, *attended.kept
        grads: Gradients = torch_compat.varlen_flash_attention_backward(grad, *attended.tensors, *options)
        return grads


def _lengths(spans: PackedSpans) -> tuple[Tensor, Tensor, int, int]:
    """Starts of queries and keys, longest of queries and keys."""
    return spans.cu_seqlens, spans.cu_seqlens, spans.max_seqlen, spans.max_seqlen


class CudnnAttention(HalfPrecisionGpuKernel, AttentionKernel):
    """cuDNN's fused attention."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors = inputs.query, inputs.key, inputs.value
        output, log_sum_exp, *kept = torch_compat.cudnn_attention(*tensors, None, True, 0.0, inputs.is_causal)
        return AttentionOutput(inputs, output, log_sum_exp.view(inputs.query.shape[:3]), tuple(kept[:6]))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = grad, *attended.tensors
        *lengths, seed, offset = attended.kept  # starts of queries and keys, longest of queries and keys
        options = seed, offset, None, *lengths, 0.0, attended.inputs.is_causal
        log_sum_exp = log_sum_exp.contiguous().unsqueeze(-1)
        grads: Gradients = torch_compat.cudnn_attention_backward(*tensors, log_sum_exp, *options)
        return grads


class CudnnVarlenAttention(CudnnAttention, VarlenKernel):
    """cuDNN's fused attention, within all documents in one call.

    cuDNN builds a plan for a new shape while the step waits, so shapes do not depend on the documents
    (:attr:`~megatron.core.ops.documents.AttentionSpans.padded`). Read against torch's ``varlen_attn``, in which this
    path is switched off. Not run on a GPU so far.
    """

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors, lengths = (inputs.query, inputs.key, inputs.value), self._few_lengths(inputs)
        output, log_sum_exp, *kept = torch_compat.varlen_cudnn_attention(*tensors, None, *lengths, True, 0.0, True)
        # The log-sum-exp is [total, n, 1].
        return AttentionOutput(inputs, output, log_sum_exp.squeeze(-1).t(), tuple(kept[4:6]))

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = grad, *attended.tensors
        options = *attended.kept, None, *self._few_lengths(attended.inputs), 0.0, True
        log_sum_exp = log_sum_exp.t().contiguous().unsqueeze(-1)
        grads: Gradients = torch_compat.varlen_cudnn_attention_backward(*tensors, log_sum_exp, *options)
        return grads

    def _few_lengths(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, int]:
        assert inputs.spans is not None, "a varlen call needs spans"
        return _lengths(inputs.spans.padded)


class TorchAttention(AutogradAttention):
    """``scaled_dot_product_attention``, which picks the fastest kernel of the device (flash, cuDNN, ...)."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        with torch.enable_grad():
            q, k, v = (one.detach().requires_grad_() for one in (inputs.query, inputs.key, inputs.value))
            # Only half-precision kernels take grouped queries; others would fall back to a kernel that materialises
            # all scores.
            repeats = 1 if q.dtype.itemsize == 2 else q.shape[1] // k.shape[1]
            keys, values = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (k, v))
            output = F.scaled_dot_product_attention(
                q, keys, values, is_causal=inputs.is_causal, enable_gqa=repeats == 1
            )
        return AttentionOutput(inputs, output.detach(), None, (output, q, k, v))


class FlashAttention3(HalfPrecisionGpuKernel, VarlenKernel):
    """FlashAttention 3 (arXiv 2407.08608), for Hopper; keys and values are not repeated for the heads of a group.

    Read against the ``hopper`` directory of flash-attention (August 2026). Not run on a GPU so far.
    """

    def __init__(self) -> None:
        self._interface = load("flash_attn_interface", "FlashAttention 3")

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        by_position = [one.transpose(1, 2) for one in (inputs.query, inputs.key, inputs.value)]  # [b, s, heads, d]
        output, log_sum_exp = self._forward(by_position, inputs.is_causal)
        return AttentionOutput(inputs, output.transpose(1, 2), log_sum_exp)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        query, key, value, output, log_sum_exp = attended.tensors
        by_position = [one.transpose(1, 2) for one in (grad, query, key, value, output)]  # [b, s, heads, d]
        grads = (_empty_like(query), _empty_like(key), _empty_like(value)) if out is None else out
        written = [one.transpose(1, 2) for one in grads]
        self._backward(by_position, log_sum_exp.contiguous(), written, attended.inputs.is_causal)
        return grads

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors, lengths = (inputs.query, inputs.key, inputs.value), _named_lengths(inputs.packed_spans)
        return AttentionOutput(inputs, *self._forward(tensors, True, **lengths))

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = grad, *attended.tensors
        _, query, key, value, _ = tensors
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)) if out is None else out
        self._backward(tensors, log_sum_exp, grads, True, **_named_lengths(attended.inputs.packed_spans))
        return grads

    def _forward(self, inputs: Sequence[Tensor], is_causal: bool, **lengths: Any) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of query, key and value ``[b, s, heads, d]``, or packed with ``lengths``
        ``[total, heads, d]``."""
        output, log_sum_exp, *_ = self._interface._flash_attn_forward(
            *inputs, softmax_scale=1 / math.sqrt(inputs[0].shape[-1]), causal=is_causal, **lengths
        )
        return output, log_sum_exp

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


def _named_lengths(spans: PackedSpans) -> dict[str, Any]:
    starts, longest = spans.cu_seqlens, spans.max_seqlen
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}


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
    backend: str, device: torch.device, dtype: torch.dtype, needs_log_sum_exp: bool = False
) -> AttentionKernel:
    """The first of :func:`attention_kernels` that supports ``dtype`` on ``device``."""
    return next(
        kernel
        for kernel in attention_kernels(backend)
        if kernel.supports(device, dtype) and (kernel.returns_log_sum_exp or not needs_log_sum_exp)
    )
