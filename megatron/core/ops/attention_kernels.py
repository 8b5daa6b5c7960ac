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
    CAUSAL,
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionOutput,
    AutogradAttention,
    Gradients,
    HalfPrecisionGpuKernel,
    VarlenKernel,
    pack_rows,
    unpack_rows,
)
from megatron.core.ops.documents import PackedSpans


class ReferenceAttention(VarlenKernel):
    """The definition; materialises all scores, and computes in fp32 or wider."""

    has_windows = has_soft_cap = True

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        return self._forward(inputs, _hidden(inputs))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        return self._backward(grad, attended, _hidden(attended.inputs))

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        *_, output, log_sum_exp = self._forward(_one_row(inputs), _hidden_or_other_span(inputs)).tensors
        return AttentionOutput(inputs, output[0].transpose(0, 1), log_sum_exp[0])

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *_, output, log_sum_exp = attended.tensors
        grad, output = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (grad, output))  # [1, n, total, d]
        one_row = AttentionOutput(_one_row(attended.inputs), output, log_sum_exp.unsqueeze(0))
        grads = self._backward(grad, one_row, _hidden_or_other_span(attended.inputs))
        grad_query, grad_key, grad_value = (part[0].transpose(0, 1) for part in grads)
        return grad_query, grad_key, grad_value

    @staticmethod
    def scores(query: Tensor, key: Tensor, cap: float | None) -> Tensor:
        """``[b, groups, n / groups, s_q, s_k]``."""
        scores = query @ key.transpose(-1, -2).unsqueeze(2) / math.sqrt(query.shape[-1])
        return scores if cap is None else cap * (scores / cap).tanh()

    def _forward(self, inputs: AttentionInputs, hidden: Tensor | None) -> AttentionOutput:
        query, key, value = _grouped(inputs)
        scores = _without(hidden, self.scores(query, key, inputs.mask.soft_cap))
        log_sum_exp = scores.logsumexp(dim=-1)  # [b, groups, n / groups, s_q]
        output = (scores - log_sum_exp.unsqueeze(-1)).exp() @ value.unsqueeze(2)  # [b, groups, n / groups, s_q, d]
        return AttentionOutput(inputs, output.flatten(1, 2).to(inputs.query.dtype), log_sum_exp.flatten(1, 2))

    def _backward(self, grad: Tensor, attended: AttentionOutput, hidden: Tensor | None) -> Gradients:
        query, key, value = _grouped(attended.inputs)
        groups, (*_, output, log_sum_exp) = (key.shape[1], -1), attended.tensors
        grad, output = (one.to(query.dtype).unflatten(1, groups) for one in (grad, output))
        cap = attended.inputs.mask.soft_cap
        scores = self.scores(query, key, cap)
        probabilities = (_without(hidden, scores) - log_sum_exp.unflatten(1, groups).unsqueeze(-1)).exp()
        grad_probabilities = grad @ value.transpose(-1, -2).unsqueeze(2)
        delta = (grad * output).sum(dim=-1, keepdim=True)  # [b, groups, n / groups, s_q, 1]
        grad_scores = probabilities * (grad_probabilities - delta) / math.sqrt(query.shape[-1])
        if cap is not None:
            grad_scores *= 1.0 - (scores / cap).square()  # the derivative of the hyperbolic tangent
        grad_query = (grad_scores @ key.unsqueeze(2)).flatten(1, 2)
        # The heads of a group have the same key and value, so their gradients are summed.
        grad_key = (grad_scores.transpose(-1, -2) @ query).sum(dim=2)
        grad_value = (probabilities.transpose(-1, -2) @ grad).sum(dim=2)
        dtype = attended.inputs.query.dtype
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Output ``[b, n, s_q, d]`` and log-sum-exp ``[b, n, s_q]`` of attention to the keys that are ``visible``,
    ``[1 or b, 1, s_q, s_k]``."""
    scores = ReferenceAttention.scores(*_grouped(AttentionInputs(query, key, value))[:2], cap)
    scores = _without(None if visible is None else ~visible.unsqueeze(2), scores)
    output = scores.softmax(dim=-1) @ value.to(scores.dtype).unsqueeze(2)  # [b, groups, n / groups, s_q, d]
    return output.flatten(1, 2).to(query.dtype), scores.logsumexp(dim=-1).flatten(1, 2)


def _without(hidden: Tensor | None, scores: Tensor) -> Tensor:
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _hidden(inputs: AttentionInputs) -> Tensor | None:
    """Whether a key is masked, ``[s_q, s_k]``; None if all keys are visible."""
    queries, keys = (torch.arange(one.shape[2], device=one.device) for one in (inputs.query, inputs.key))
    return inputs.mask.hidden(queries + (len(keys) - len(queries)), keys)


def _hidden_or_other_span(packed: AttentionInputs) -> Tensor:
    """Whether a key is masked, or in another span: ``[total, total]``."""
    positions = torch.arange(packed.query.shape[0], device=packed.query.device)
    number = (positions.unsqueeze(1) >= packed.packed_spans.cu_seqlens).sum(dim=1)  # of the span, [total]
    is_other = number != number.unsqueeze(1)
    hidden = packed.mask.hidden(positions, positions)
    return is_other if hidden is None else is_other | hidden


def _one_row(packed: AttentionInputs) -> AttentionInputs:
    """Packed ``[total, heads, d]`` as one sequence ``[1, heads, total, d]``."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (packed.query, packed.key, packed.value))
    return AttentionInputs(query, key, value, mask=packed.mask)


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
    measured: ``docs/performance.md``). A tile with a window, which torch's kernel has not, is computed in such blocks
    with the keys of the window.
    """

    has_windows = True
    _KEYS, _QUERIES = 512, 64

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu"

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        query, key, value, attend = inputs.query, inputs.key, inputs.value, torch_compat.cpu_flash_attention
        if not self._splits_queries(inputs):
            return AttentionOutput(inputs, *attend(query, key, value, 0.0, inputs.mask.is_causal))
        output = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum_exp = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        for queries, keys, mask in self._blocks(inputs, query.dtype):
            part = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, False, attn_mask=mask)
            output[:, :, queries], log_sum_exp[:, :, queries] = part
        return AttentionOutput(inputs, output, log_sum_exp)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        query, key, value, output, log_sum_exp = tensors = attended.tensors
        differentiate = torch_compat.cpu_flash_attention_backward
        if not self._splits_queries(attended.inputs):
            grads: Gradients = differentiate(grad, *tensors, 0.0, attended.inputs.mask.is_causal)
            return grads
        grad_query = torch.empty_like(query) if out is None else out[0]
        dtype, wide = query.dtype, log_sum_exp.dtype
        grad, query, key, value, output = (t.to(wide) for t in (grad, query, key, value, output))
        grad_key = grad_value = None
        for queries, keys, mask in reversed(list(self._blocks(attended.inputs, wide))):
            some_grad, some_query, some_output, some_lse = (
                t[:, :, queries] for t in (grad, query, output, log_sum_exp)
            )
            block = some_grad, some_query, key[:, :, keys], value[:, :, keys], some_output, some_lse
            parts = differentiate(*block, 0.0, False, attn_mask=mask)
            grad_query[:, :, queries] = parts[0]
            if grad_key is None and (keys.start, keys.stop) == (0, key.shape[2]):
                _, grad_key, grad_value = parts  # the last block has all keys; those of the others are added to it
                continue
            if grad_key is None or grad_value is None:
                grad_key, grad_value = torch.zeros(key.shape, dtype=wide), torch.zeros(value.shape, dtype=wide)
            grad_key[:, :, keys] += parts[1]
            grad_value[:, :, keys] += parts[2]
        assert grad_key is not None and grad_value is not None
        if out is None:
            return grad_query, grad_key.to(dtype), grad_value.to(dtype)
        out[1].copy_(grad_key)
        out[2].copy_(grad_value)
        return out

    def _splits_queries(self, inputs: AttentionInputs) -> bool:
        is_short = self._QUERIES < inputs.query.shape[2] <= self._KEYS
        return inputs.mask.window is not None or (inputs.mask.is_causal and is_short)

    def _blocks(self, inputs: AttentionInputs, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Blocks of the queries, the keys to which they attend, and the mask ``[queries, keys]`` added to the scores;
        None if nothing is masked."""
        mask, queries, keys = inputs.mask, inputs.query.shape[2], inputs.key.shape[2]
        size, before = self._QUERIES, keys - queries  # query i is at key i + before
        if mask.is_causal:  # a mask of the distances in a block with all keys before it, of which blocks use a part
            longest = (queries - 1) // size * size
            longest = longest if mask.window is None else min(longest, mask.window)
            shared = _added(mask, torch.arange(size) + longest, torch.arange(longest + size), dtype)
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            first = 0 if mask.window is None else max(start + before - mask.window, 0)
            if mask.is_causal:
                assert shared is not None
                columns = slice(first - start + longest, stop - start + longest)
                yield slice(start, stop), slice(first, stop), shared[: stop - start, columns]
            else:
                added = _added(mask, torch.arange(start, stop) + before, torch.arange(first, keys), dtype)
                yield slice(start, stop), slice(first, keys), added


def _added(mask: AttentionMask, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``mask`` as numbers that are added to the scores of these positions, ``[s_q, s_k]``."""
    hidden = mask.hidden(queries, keys)
    return None if hidden is None else torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


class CudaFlashAttention(HalfPrecisionGpuKernel, VarlenKernel):
    """torch's flash attention for GPUs; keys and values are not repeated for the heads of a group.

    Tiles with a window are varlen calls, because torch's other operator has no window. Not run on a GPU so far.
    """

    has_windows = True

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        if inputs.mask.window is not None:
            rows, packed = inputs.query.shape[0], inputs.packed()
            attended = self._varlen(packed, _lengths_of_rows(inputs))
            *_, log_sum_exp = attended.tensors
            log_sum_exp = log_sum_exp.unflatten(1, (rows, -1)).transpose(0, 1)  # [b, n, s_q]
            return AttentionOutput(inputs, unpack_rows(attended.output, rows), log_sum_exp, attended.kept)
        tensors = inputs.query, inputs.key, inputs.value
        output, log_sum_exp, *kept = torch_compat.flash_attention(*tensors, 0.0, inputs.mask.is_causal)
        return AttentionOutput(inputs, output, log_sum_exp, tuple(kept[:6]))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = attended.tensors
        inputs = attended.inputs
        if inputs.mask.window is not None:
            log_sum_exp = log_sum_exp.transpose(0, 1).flatten(1).contiguous()  # [n, b s_q]
            packed = AttentionOutput(inputs.packed(), pack_rows(attended.output), log_sum_exp, attended.kept)
            parts = self._varlen_backward(pack_rows(grad), packed, _lengths_of_rows(inputs))
            grad_query, grad_key, grad_value = (unpack_rows(part, grad.shape[0]) for part in parts)
            return grad_query, grad_key, grad_value
        *lengths, seed, offset = attended.kept  # starts of queries and keys, longest of queries and keys
        options = *lengths, 0.0, inputs.mask.is_causal, seed, offset
        grads: Gradients = torch_compat.flash_attention_backward(grad, *tensors, log_sum_exp.contiguous(), *options)
        return grads

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        return self._varlen(inputs, _lengths(inputs.packed_spans))

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        return self._varlen_backward(grad, attended, _lengths(attended.inputs.packed_spans))

    def _varlen(self, packed: AttentionInputs, lengths: "Lengths") -> AttentionOutput:
        options = *lengths, 0.0, packed.mask.is_causal, False
        output, log_sum_exp, *kept = torch_compat.varlen_flash_attention(
            packed.query, packed.key, packed.value, *options, **_window_sizes(packed.mask)
        )
        return AttentionOutput(packed, output, log_sum_exp, tuple(kept[:2]))

    def _varlen_backward(self, grad: Tensor, attended: AttentionOutput, lengths: "Lengths") -> Gradients:
        mask = attended.inputs.mask
        options = *lengths, 0.0, mask.is_causal, *attended.kept
        grads: Gradients = torch_compat.varlen_flash_attention_backward(
            grad, *attended.tensors, *options, **_window_sizes(mask)
        )
        return grads


Lengths = tuple[Tensor, Tensor, int, int]
"""Starts of queries and keys, longest of queries and keys."""


def _lengths(spans: PackedSpans) -> Lengths:
    return spans.cu_seqlens, spans.cu_seqlens, spans.max_seqlen, spans.max_seqlen


def _lengths_of_rows(inputs: AttentionInputs) -> Lengths:
    """The lengths of a varlen call whose spans are the rows of a tile."""
    rows, queries, keys = inputs.query.shape[0], inputs.query.shape[2], inputs.key.shape[2]
    starts = torch.arange(rows + 1, dtype=torch.int32, device=inputs.query.device)
    return starts * queries, starts * keys, queries, keys


def _window_sizes(mask: AttentionMask) -> dict[str, Any]:
    """The window's arguments of FlashAttention, counted from the last query and the last key."""
    if mask.window is None:
        return {}
    return {"window_size_left": mask.window, "window_size_right": 0 if mask.is_causal else -1}


class CudnnAttention(HalfPrecisionGpuKernel, AttentionKernel):
    """cuDNN's fused attention."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors = inputs.query, inputs.key, inputs.value
        output, log_sum_exp, *kept = torch_compat.cudnn_attention(*tensors, None, True, 0.0, inputs.mask.is_causal)
        return AttentionOutput(inputs, output, log_sum_exp.view(inputs.query.shape[:3]), tuple(kept[:6]))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = grad, *attended.tensors
        *lengths, seed, offset = attended.kept  # starts of queries and keys, longest of queries and keys
        options = seed, offset, None, *lengths, 0.0, attended.inputs.mask.is_causal
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
                q, keys, values, is_causal=inputs.mask.is_causal, enable_gqa=repeats == 1
            )
        return AttentionOutput(inputs, output.detach(), None, (output, q, k, v))


class FlashAttention3(HalfPrecisionGpuKernel, VarlenKernel):
    """FlashAttention 3 (arXiv 2407.08608), for Hopper; keys and values are not repeated for the heads of a group.

    Read against the ``hopper`` directory of flash-attention (August 2026). Not run on a GPU so far.
    """

    has_windows = has_soft_cap = True

    def __init__(self) -> None:
        self._interface = load("flash_attn_interface", "FlashAttention 3")

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        by_position = [one.transpose(1, 2) for one in (inputs.query, inputs.key, inputs.value)]  # [b, s, heads, d]
        output, log_sum_exp = self._forward(by_position, inputs.mask)
        return AttentionOutput(inputs, output.transpose(1, 2), log_sum_exp)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        query, key, value, output, log_sum_exp = attended.tensors
        by_position = [one.transpose(1, 2) for one in (grad, query, key, value, output)]  # [b, s, heads, d]
        grads = (_empty_like(query), _empty_like(key), _empty_like(value)) if out is None else out
        written = [one.transpose(1, 2) for one in grads]
        self._backward(by_position, log_sum_exp.contiguous(), written, attended.inputs.mask)
        return grads

    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        tensors, lengths = (inputs.query, inputs.key, inputs.value), _named_lengths(inputs.packed_spans)
        return AttentionOutput(inputs, *self._forward(tensors, inputs.mask, **lengths))

    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        *tensors, log_sum_exp = grad, *attended.tensors
        _, query, key, value, _ = tensors
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)) if out is None else out
        lengths = _named_lengths(attended.inputs.packed_spans)
        self._backward(tensors, log_sum_exp, grads, attended.inputs.mask, **lengths)
        return grads

    def _forward(self, inputs: Sequence[Tensor], mask: AttentionMask, **lengths: Any) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of query, key and value ``[b, s, heads, d]``, or packed with ``lengths``
        ``[total, heads, d]``."""
        output, log_sum_exp, *_ = self._interface._flash_attn_forward(
            *inputs,
            softmax_scale=1 / math.sqrt(inputs[0].shape[-1]),
            causal=mask.is_causal,
            softcap=mask.soft_cap or 0.0,
            **_window_sizes(mask),
            **lengths,
        )
        return output, log_sum_exp

    def _backward(
        self,
        inputs: Sequence[Tensor],
        log_sum_exp: Tensor,
        grads: Sequence[Tensor],
        mask: AttentionMask,
        **lengths: Any,
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
            is_causal=mask.is_causal,
            softcap=mask.soft_cap or 0.0,
            **_window_sizes(mask),
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
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    needs_log_sum_exp: bool = False,
    mask: AttentionMask = CAUSAL,
) -> AttentionKernel:
    """The first of :func:`attention_kernels` that supports ``dtype`` on ``device``, and ``mask``."""
    return next(
        kernel
        for kernel in attention_kernels(backend)
        if kernel.supports(device, dtype)
        and kernel.supports_mask(mask)
        and (kernel.returns_log_sum_exp or not needs_log_sum_exp)
    )
