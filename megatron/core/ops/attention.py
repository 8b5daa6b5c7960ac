"""Causal self-attention with grouped queries, on the fused output of the query-key-value projection.

An *attention* (:class:`Attention`) says what attends to what and where keys come from: here all keys are on this rank
(:class:`LocalAttention`), under context parallelism they are not. It divides its work into tiles, which a *kernel*
(:mod:`megatron.core.ops.attention_kernels`) computes, and merges them by the log-sum-exp of their scores.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.ops.attention_kernels import AttentionKernel, Gradients, PartialAttention
from megatron.core.ops.documents import Documents, Span, attention_spans
from megatron.torch_compat import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Tile:
    """A part of attention: ``queries`` attend to ``keys``, both ranges of local positions, in ``rows`` of the batch."""

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool
    """Whether a query sees only the keys up to its own place in the tile; else all."""


class TiledAttention:
    """The sum of tiles: outputs and their log-sum-exp, merged in fp32 or wider as tiles come in.

    The first tiles must hold every query once. In backward the same tiles come in the same order.
    """

    def __init__(self, kernel: AttentionKernel, query: Tensor) -> None:
        self._kernel, self._query = kernel, query
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = torch.empty(query.shape, dtype=wide, device=query.device)
        self.log_sum_exp = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        self.kept: list[tuple[Any, ...]] = []

    def add(self, tiles: Iterable[Tile], key: Tensor, value: Tensor, is_first: bool = False) -> None:
        """Let the queries of ``tiles`` see keys and values, too."""
        for tile in tiles:
            part = self._kernel.forward(
                self._query[tile.rows, :, tile.queries],
                key[tile.rows, :, tile.keys],
                value[tile.rows, :, tile.keys],
                tile.is_causal,
            )
            self.kept.append(part.kept)
            output = self.output[tile.rows, :, tile.queries]
            log_sum_exp = self.log_sum_exp[tile.rows, :, tile.queries]
            if is_first:
                output.copy_(part.output)
                if part.log_sum_exp is not None:
                    log_sum_exp.copy_(part.log_sum_exp)
            else:
                assert part.log_sum_exp is not None
                _merge_(output, log_sum_exp, part.output, part.log_sum_exp)


def _merge_(output: Tensor, log_sum_exp: Tensor, more: Tensor, more_log_sum_exp: Tensor) -> None:
    """Add to softmax-weighted means those over other keys: each weighs as much as the exponentials it sums."""
    merged = torch.logaddexp(log_sum_exp, more_log_sum_exp)
    output.mul_((log_sum_exp - merged).exp_().unsqueeze(-1))
    output.addcmul_(more, (more_log_sum_exp - merged).exp_().unsqueeze(-1))
    log_sum_exp.copy_(merged)


class TiledGradients:
    """The backward pass of :class:`TiledAttention`; gradients of queries add up in fp32 or wider."""

    def __init__(
        self,
        kernel: AttentionKernel,
        grad: Tensor,
        query: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        kept: Iterable[tuple[Any, ...]],
    ) -> None:
        self._kernel, self._kept = kernel, iter(kept)
        self._grad, self._query, self._output, self._log_sum_exp = grad, query, output, log_sum_exp
        self.query = torch.zeros(query.shape, dtype=log_sum_exp.dtype, device=query.device)

    def add(self, tiles: Iterable[Tile], key: Tensor, value: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients through ``tiles`` to those of the queries, and to ``grad_key`` and ``grad_value``."""
        for tile in tiles:
            queries, keys = (tile.rows, slice(None), tile.queries), (tile.rows, slice(None), tile.keys)
            parts = self._kernel.backward(
                self._grad[queries],
                self._query[queries],
                key[keys],
                value[keys],
                PartialAttention(self._output[queries], self._log_sum_exp[queries], next(self._kept)),
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
    documents: Documents | None = None
    """Of the whole sequences."""

    def spans(self, length: int) -> list[Span]:
        """The ranges within which attention is causal, in sequences of ``length``."""
        return attention_spans(self.documents, length)


class Attention(Protocol):
    """Causal attention over whole sequences, of which this rank has some positions."""

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, tuple[Any, ...]]:
        """Outputs ``[b, n, s, d]``, and the tensors that backward needs in addition to inputs and outputs."""

    def backward(self, grad: Tensor, inputs: AttentionInputs, output: Tensor, kept: tuple[Any, ...]) -> Gradients:
        """Gradients of query, key and value."""


class LocalAttention:
    """Attention among positions that are all on this rank; documents are computed one by one."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, tuple[Any, ...]]:
        query, key, value = inputs.query, inputs.key, inputs.value
        if inputs.documents is None or not inputs.documents.masks_attention:
            whole = self.kernel.forward(query, key, value, is_causal=True)
            return whole.output, (whole.log_sum_exp, whole.kept)
        tiled = TiledAttention(self.kernel, query)
        tiled.add(_document_tiles(inputs), key, value, is_first=True)
        return tiled.output.to(query.dtype), (tiled.log_sum_exp, tiled.kept)

    def backward(self, grad: Tensor, inputs: AttentionInputs, output: Tensor, kept: tuple[Any, ...]) -> Gradients:
        query, key, value = inputs.query, inputs.key, inputs.value
        log_sum_exp, rest = kept
        if inputs.documents is None or not inputs.documents.masks_attention:
            whole = PartialAttention(output, log_sum_exp, rest)
            return self.kernel.backward(grad, query, key, value, whole, is_causal=True)
        gradients = TiledGradients(self.kernel, grad, query, output, log_sum_exp, rest)
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=log_sum_exp.dtype) for tensor in (key, value))
        gradients.add(_document_tiles(inputs), key, value, grad_key, grad_value)
        return gradients.query, grad_key, grad_value


def _document_tiles(inputs: AttentionInputs) -> Iterable[Tile]:
    for span in inputs.spans(inputs.query.shape[2]):
        positions = slice(span.start, span.stop)
        yield Tile(span.rows, positions, positions, is_causal=True)


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

    def query_heads_of(self, joined: Tensor) -> Tensor:
        """``[s, b, n d]`` as a view ``[b, n, s, d]``."""
        return joined.unflatten(-1, (self.query_heads, self.head_size)).permute(1, 2, 0, 3)


def _take_tensors(kept: tuple[Any, ...]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors in ``kept``, for autograd to save, and what puts them back into their places."""
    leaves, form = tree_flatten(kept)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def restore(tensors: Sequence[Tensor]) -> Any:
        tensor_at = dict(zip(places, tensors, strict=True))
        return tree_unflatten([tensor_at.get(place, leaf) for place, leaf in enumerate(others)], form)

    return tensors, restore


class _FusedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, shape: AttentionShape, attention: Attention, documents: Documents | None
    ) -> Tensor:
        qkv = qkv.detach()
        output, kept = attention.forward(AttentionInputs(*shape.split(qkv), documents))
        # [s, b, n d], which the next layer saves as well.
        joined = output.permute(2, 0, 1, 3).flatten(2)
        tensors, ctx.restore = _take_tensors(kept)
        ctx.save_for_backward(qkv, joined, *tensors)
        ctx.shape, ctx.attention, ctx.documents = shape, attention, documents
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, joined, *tensors = ctx.saved_tensors
        shape: AttentionShape = ctx.shape
        grad, output = (shape.query_heads_of(tensor) for tensor in (gradients[0], joined.detach()))
        inputs = AttentionInputs(*shape.split(qkv), ctx.documents)
        parts = ctx.attention.backward(grad, inputs, output, ctx.restore(tensors))
        # Side by side, as the backward pass of the projection reads them.
        grad_qkv = torch.empty_like(qkv)
        for whole, part in zip(shape.split(grad_qkv), parts, strict=True):
            whole.copy_(part)
        return grad_qkv, None, None, None


def fused_attention(
    qkv: Tensor, shape: AttentionShape, attention: Attention, documents: Documents | None = None
) -> Tensor:
    """Causal attention on queries, keys and values side by side: ``[s, b, (n + 2g) d] -> [s, b, n d]``."""
    output: Tensor = _FusedAttention.apply(qkv, shape, attention, documents)
    return output
