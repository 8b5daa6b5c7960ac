"""Causal self-attention with grouped queries, on the fused output of the query-key-value projection.

An :class:`Attention` divides the causal triangle into tiles and provides the keys of each: here all keys are on this
rank (:class:`LocalAttention`), under context parallelism they are not. A kernel
(:mod:`megatron.core.ops.attention`) computes the tiles, which are merged by their log-sum-exp. A kernel for
packed spans computes all spans of a batch in one call instead, if all keys are on this rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.ops.attention import AttentionKernel, AttentionOutput, Gradients, VarlenKernel
from megatron.core.ops.documents import AttentionSpans
from megatron.torch_compat import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Tile:
    """``queries`` attend to ``keys``, both ranges of local positions, in ``rows`` of the batch."""

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool
    """Whether a query attends to the keys up to its own position in the tile; else to all."""


class TiledAttention:
    """The sum of tiles: outputs and log-sum-exp are merged in fp32 or wider, tile by tile.

    The first tiles must contain every query once. Backward adds the same tiles in the same order.
    """

    def __init__(self, kernel: AttentionKernel, query: Tensor) -> None:
        self._kernel, self._query = kernel, query
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = torch.empty(query.shape, dtype=wide, device=query.device)  # [b, n, s, d]
        self.log_sum_exp = torch.empty(query.shape[:3], dtype=wide, device=query.device)  # [b, n, s]
        self.kept: list[Sequence[Any]] = []

    def add(self, tiles: Iterable[Tile], key: Tensor, value: Tensor, is_first: bool = False) -> None:
        """Attend to ``key`` and ``value`` as well, in ``tiles``."""
        for tile in tiles:
            part = self._kernel.forward(
                self._query[tile.rows, :, tile.queries],
                key[tile.rows, :, tile.keys],
                value[tile.rows, :, tile.keys],
                tile.is_causal,
            )
            self.kept.append(part.kept)
            output = self.output[tile.rows, :, tile.queries]  # [b, n, s_q, d]
            log_sum_exp = self.log_sum_exp[tile.rows, :, tile.queries]  # [b, n, s_q]
            if is_first:
                output.copy_(part.output)
                if part.log_sum_exp is not None:
                    log_sum_exp.copy_(part.log_sum_exp)
            else:
                # Each output is weighted by its part of the sum of exponentials.
                assert part.log_sum_exp is not None
                merged = torch.logaddexp(log_sum_exp, part.log_sum_exp)
                output.mul_((log_sum_exp - merged).exp_().unsqueeze(-1))
                output.addcmul_(part.output, (part.log_sum_exp - merged).exp_().unsqueeze(-1))
                log_sum_exp.copy_(merged)

    def result(self) -> AttentionOutput:
        """The merged output in the query's dtype."""
        return AttentionOutput(self.output.to(self._query.dtype), self.log_sum_exp, self.kept)


class TiledGradients:
    """The backward pass of :class:`TiledAttention`; query gradients accumulate in fp32 or wider."""

    def __init__(self, kernel: AttentionKernel, grad: Tensor, query: Tensor, attended: AttentionOutput) -> None:
        assert attended.log_sum_exp is not None
        self._kernel, self._kept = kernel, iter(attended.kept)
        self._grad, self._query = grad, query
        self._output, self._log_sum_exp = attended.output, attended.log_sum_exp
        self.dtype = self._log_sum_exp.dtype
        self.query = torch.zeros(query.shape, dtype=self.dtype, device=query.device)

    def add(self, tiles: Iterable[Tile], key: Tensor, value: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients of ``tiles`` to the query gradient, ``grad_key`` and ``grad_value``."""
        for tile in tiles:
            queries, keys = (tile.rows, slice(None), tile.queries), (tile.rows, slice(None), tile.keys)
            parts = self._kernel.backward(
                self._grad[queries],
                self._query[queries],
                key[keys],
                value[keys],
                AttentionOutput(self._output[queries], self._log_sum_exp[queries], next(self._kept)),
                tile.is_causal,
            )
            self.query[queries].add_(parts[0])
            grad_key[keys].add_(parts[1])
            grad_value[keys].add_(parts[2])


@dataclass(frozen=True)
class AttentionInputs:
    """Queries ``[b, n, s, d]``, keys and values ``[b, groups, s, d]`` of this rank's positions."""

    query: Tensor
    key: Tensor
    value: Tensor
    spans: AttentionSpans | None = None
    """The ranges of the whole sequences within which attention is causal; None: the sequences."""


class Attention(Protocol):
    """Causal attention over whole sequences, of which this rank has some positions."""

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        """Output ``[b, n, s, d]`` in the dtype of the inputs."""

    def backward(
        self, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Gradients | None = None
    ) -> Gradients:
        """Gradients of query, key and value: ``out`` itself if they are written there, which is optional."""


class LocalAttention:
    """Attention among positions that are all on this rank: one varlen call for all spans, or one tile for each."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel
        self._varlen = kernel if isinstance(kernel, VarlenKernel) else None

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        query, key, value, spans = inputs.query, inputs.key, inputs.value, inputs.spans
        if spans is None:
            return self.kernel.forward(query, key, value, is_causal=True)
        if self._varlen is not None:
            attended = self._varlen.forward_varlen(_packed(query), _packed(key), _packed(value), spans.packed)
            return replace(attended, output=_unpacked(attended.output, rows=query.shape[0]))
        tiled = TiledAttention(self.kernel, query)
        tiled.add(_span_tiles(spans), key, value, is_first=True)
        return tiled.result()

    def backward(
        self, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Gradients | None = None
    ) -> Gradients:
        query, key, value, spans = inputs.query, inputs.key, inputs.value, inputs.spans
        if spans is None:
            return self.kernel.backward(grad, query, key, value, attended, is_causal=True, out=out)
        if self._varlen is not None:
            return self._backward_varlen(self._varlen, spans, grad, inputs, attended, out)
        gradients = TiledGradients(self.kernel, grad, query, attended)
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=gradients.dtype) for tensor in (key, value))
        gradients.add(_span_tiles(spans), key, value, grad_key, grad_value)
        return gradients.query, grad_key, grad_value

    @staticmethod
    def _backward_varlen(
        kernel: VarlenKernel,
        spans: AttentionSpans,
        grad: Tensor,
        inputs: AttentionInputs,
        attended: AttentionOutput,
        out: Gradients | None,
    ) -> Gradients:
        rows = inputs.query.shape[0]
        # Several rows are packed into a copy: gradients written there would not be in ``out``.
        packed_out = None if out is None or rows > 1 else (_packed(out[0]), _packed(out[1]), _packed(out[2]))
        parts = kernel.backward_varlen(
            _packed(grad),
            _packed(inputs.query),
            _packed(inputs.key),
            _packed(inputs.value),
            replace(attended, output=_packed(attended.output)),
            spans.packed,
            packed_out,
        )
        if out is not None and parts is packed_out:
            return out
        grad_query, grad_key, grad_value = (_unpacked(part, rows) for part in parts)
        return grad_query, grad_key, grad_value


def _packed(heads: Tensor) -> Tensor:
    """``[b, heads, s, d]`` as ``[b s, heads, d]``, row by row: a view if there is one row, else a copy."""
    return heads.transpose(1, 2).flatten(0, 1)


def _unpacked(packed: Tensor, rows: int) -> Tensor:
    """``[b s, heads, d]`` as a view ``[b, heads, s, d]``."""
    return packed.unflatten(0, (rows, -1)).transpose(1, 2)


def _span_tiles(spans: AttentionSpans) -> Iterable[Tile]:
    for span in spans.spans:
        positions = slice(span.start, span.stop)
        yield Tile(span.rows, positions, positions, is_causal=True)


@dataclass(frozen=True)
class AttentionShape:
    """The heads of this rank."""

    query_heads: int
    key_value_heads: int
    head_size: int

    @property
    def rotated_size(self) -> int:
        """Width of queries and keys together, the first sections of the fused projection."""
        return (self.query_heads + self.key_value_heads) * self.head_size

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[s, b, (n + 2 groups) d]`` as views: query ``[b, n, s, d]``, key and value ``[b, groups, s, d]``."""
        groups = self.key_value_heads
        heads = fused.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
        query, key, value = heads.split((self.query_heads, groups, groups), dim=1)
        return query, key, value

    def query_heads_of(self, joined: Tensor) -> Tensor:
        """``[s, b, n d]`` as a view ``[b, n, s, d]``."""
        return joined.unflatten(-1, (self.query_heads, self.head_size)).permute(1, 2, 0, 3)


def _take_tensors(kept: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors in ``kept``, for autograd to save, and a function that restores ``kept`` from them."""
    leaves, form = tree_flatten(kept)
    rest = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the class marks the place of a tensor

    def restore(tensors: Sequence[Tensor]) -> Any:
        saved = iter(tensors)
        return tree_unflatten([next(saved) if leaf is Tensor else leaf for leaf in rest], form)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], restore


class _FusedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, shape: AttentionShape, attention: Attention, spans: AttentionSpans | None
    ) -> Tensor:
        qkv = qkv.detach()
        attended = attention.forward(AttentionInputs(*shape.split(qkv), spans))
        # [s, b, n d]: a view, unless the output of the kernel has several rows one after the other in memory. The next
        # layer saves the same tensor.
        joined = attended.output.permute(2, 0, 1, 3).flatten(2).contiguous()
        tensors, ctx.restore = _take_tensors((attended.log_sum_exp, attended.kept))
        ctx.save_for_backward(qkv, joined, *tensors)
        ctx.shape, ctx.attention, ctx.spans = shape, attention, spans
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, joined, *tensors = ctx.saved_tensors
        shape: AttentionShape = ctx.shape
        grad, output = (shape.query_heads_of(tensor) for tensor in (gradients[0], joined.detach()))
        inputs = AttentionInputs(*shape.split(qkv), ctx.spans)
        grad_qkv = torch.empty_like(qkv)  # [s, b, (n + 2 groups) d]
        views = shape.split(grad_qkv)
        parts = ctx.attention.backward(grad, inputs, AttentionOutput(output, *ctx.restore(tensors)), out=views)
        if parts is not views:
            for view, part in zip(views, parts, strict=True):
                view.copy_(part)
        return grad_qkv, None, None, None


def fused_attention(
    qkv: Tensor, shape: AttentionShape, attention: Attention, spans: AttentionSpans | None = None
) -> Tensor:
    """Causal attention on the fused output of the projection: ``[s, b, (n + 2 groups) d] -> [s, b, n d]``."""
    output: Tensor = _FusedAttention.apply(qkv, shape, attention, spans)
    return output
