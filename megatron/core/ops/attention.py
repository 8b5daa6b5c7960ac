"""Causal self-attention with grouped queries, on the fused output of the query-key-value projection.

An :class:`AttentionKernel` computes one tile: some queries and some keys. It returns the output and the log-sum-exp of
the scores, by which outputs over different keys are merged; its backward pass takes the log-sum-exp over all keys
(FlashAttention, arXiv 2205.14135, appendix B.2). An :class:`Attention` divides the causal triangle into tiles and
provides the keys of each: here all keys are on this rank (:class:`LocalAttention`), under context parallelism they are
not. A kernel for packed spans computes all spans of a batch in one call instead, if all keys are on this rank.

    keys ->     0 1 2 3 | 4 5 6 7       two tiles of a causal triangle, for the queries 4 to 7:
    queries 4   x x x x | x . . .       left: keys 0 to 3, a mask that is not causal
            5   x x x x | x x . .       right: keys 4 to 7, a causal mask
            6   x x x x | x x x .       merged by their log-sum-exp
            7   x x x x | x x x x
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.ops.documents import AttentionSpans, PackedSpans
from megatron.errors import ConfigError
from megatron.torch_compat import tree_flatten, tree_unflatten

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query attends to, and how the scores change before the softmax.

    The last query is at the position of the last key, as in FlashAttention: of ``s_q`` queries and ``s_k`` keys query
    ``i`` is at the position of key ``i + s_k - s_q``. A window of 2 keys before the own one:

        keys ->     0 1 2 3 4 5         a causal tile               keys ->     0 1 2 3
        queries 3   . x x x . .                                     queries 4   . . x x     a tile of earlier keys:
                4   . . x x x .                                             5   . . . x     ``window`` is 0, because
                5   . . . x x x                                                             query 5 is at key 3
    """

    is_causal: bool = True
    """Whether a query attends to no key after its own position; else to all that the window has."""
    window: int | None = None
    """The number of keys before its own position to which a query attends (arXiv 2004.05150, section 3.1); None: all.
    Every query has a key."""
    soft_cap: float | None = None
    """A score ``x`` becomes ``soft_cap * tanh(x / soft_cap)`` (Gemma 2, arXiv 2408.00118, section 2); None: ``x``."""

    def hidden(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Whether a key is masked, ``[s_q, s_k]`` bool, from the positions ``[s_q]`` and ``[s_k]``; None: none is."""
        distance = queries.unsqueeze(-1) - keys  # [s_q, s_k]
        if self.window is None:
            return distance < 0 if self.is_causal else None
        is_before = distance > self.window
        return is_before | (distance < 0) if self.is_causal else is_before


CAUSAL = AttentionMask()


def masks_of(config: TransformerConfig) -> list[AttentionMask]:
    """The mask of every layer."""
    return [AttentionMask(window=window, soft_cap=config.attn_logit_softcapping) for window in config.windows()]


def hardest_mask(config: TransformerConfig) -> AttentionMask:
    """The mask that the kernel of all layers must compute."""
    masks = masks_of(config)
    return next((mask for mask in masks if mask.window is not None), masks[0])


@dataclass(frozen=True)
class AttentionInputs:
    """Queries ``[b, n, s_q, d]``, keys and values ``[b, groups, s_k, d]``: of this rank's positions, or of a tile.

    For a varlen call they are packed: ``[total, n, d]`` and ``[total, groups, d]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    spans: AttentionSpans | None = None
    """The ranges of the whole sequences within which attention is causal; None: the sequences."""
    mask: AttentionMask = CAUSAL
    """The mask of a tile, or within every range; a causal tile has as many keys as queries."""

    def packed(self) -> "AttentionInputs":
        """The tensors for a varlen call, row by row."""
        return replace(self, query=pack_rows(self.query), key=pack_rows(self.key), value=pack_rows(self.value))

    @property
    def packed_spans(self) -> PackedSpans:
        """The spans of a varlen call."""
        assert self.spans is not None, "a varlen call needs spans"
        return self.spans.packed


@dataclass(frozen=True)
class AttentionOutput:
    """The result of a forward pass, as the backward pass needs it."""

    inputs: AttentionInputs
    output: Tensor
    """``[b, n, s_q, d]``; of a varlen call ``[total, n, d]``."""
    log_sum_exp: Tensor | None
    """Log-sum-exp of every query's scores, ``[b, n, s_q]`` in fp32 or wider, of a varlen call ``[n, total]``; None if
    the kernel does not return it."""
    kept: Sequence[Any] = ()
    """Further tensors and values for backward."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value, output and log-sum-exp, of a kernel that returns the last."""
        assert self.log_sum_exp is not None
        return self.inputs.query, self.inputs.key, self.inputs.value, self.output, self.log_sum_exp


class Attention(ABC):
    """Attention over whole sequences, of which this rank has some positions, or over one tile."""

    @abstractmethod
    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        """Output ``[b, n, s_q, d]`` in the dtype of the inputs."""

    @abstractmethod
    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        """Gradients of query, key and value: ``out`` itself if they are written there, which is optional."""


class AttentionKernel(Attention):
    """Attention in one tile. In the backward pass ``attended`` may have the output and log-sum-exp over more keys."""

    returns_log_sum_exp = True
    """Whether the output can be merged with the output over other keys."""
    has_windows = False
    """Whether the kernel computes masks with a window."""
    has_soft_cap = False
    """Whether the kernel caps scores."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel supports ``dtype`` on ``device``; called when the model is built."""
        return True

    @classmethod
    def supports_mask(cls, mask: AttentionMask) -> bool:
        """Whether the kernel computes ``mask``."""
        return (mask.window is None or cls.has_windows) and (mask.soft_cap is None or cls.has_soft_cap)

    @classmethod
    def check_mask(cls, mask: AttentionMask) -> None:
        """Raise :class:`ConfigError` for a mask that a layer of one's own has, and that the kernel would ignore."""
        if not cls.supports_mask(mask):
            raise ConfigError(
                f"{cls.__name__} does not compute {mask}: set --window-size and --attn-logit-softcapping, by which "
                "kernels are chosen, or --attention-backend local."
            )


class VarlenKernel(AttentionKernel):
    """A kernel that also attends within all spans of a batch in one call, whatever their lengths."""

    @abstractmethod
    def forward_varlen(self, inputs: AttentionInputs) -> AttentionOutput:
        """Causal attention within each span of packed ``inputs``."""

    @abstractmethod
    def backward_varlen(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        """Gradients of query, key and value, packed; ``out`` as in ``backward``."""


class HalfPrecisionGpuKernel:
    """The support of kernels for half precisions on GPUs; the first base class."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype.itemsize == 2


class AutogradAttention(AttentionKernel):
    """Base of kernels whose backward pass is autograd: ``kept`` is the output with its graph, and the inputs."""

    returns_log_sum_exp = False

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        output, *leaves = attended.kept
        grads = torch.autograd.grad(output, leaves, grad)
        return grads[0], grads[1], grads[2]


@dataclass(frozen=True)
class Tile:
    """``queries`` attend to ``keys``, both ranges of local positions, in ``rows`` of the batch."""

    rows: slice
    queries: slice
    keys: slice
    mask: AttentionMask
    """A causal tile has the queries' own keys, and is the first tile of these queries; others have earlier keys."""

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionInputs:
        """The part of all ``[b, heads, s, d]`` that lies in the tile."""
        keys = (self.rows, slice(None), self.keys)
        return AttentionInputs(query[self.rows, :, self.queries], key[keys], value[keys], mask=self.mask)


def earlier_tile(rows: slice, queries: range, keys: range, distance: int, mask: AttentionMask) -> Tile | None:
    """The tile of ``queries`` and of ``keys`` that are all earlier, cut to what the window of ``mask`` has; None if it
    has nothing. ``distance`` is the position of the first query minus that of the first key."""
    window = mask.window
    if window is not None:
        # Query i attends to the keys from i + distance - window on.
        queries = queries[: max(window + len(keys) - distance, 0)]
        first = max(distance - window, 0)
        keys, distance = keys[first:], distance - first
        # Counted from the last query, which is then at the last key, not ``distance + s_q - s_k`` after it.
        window -= distance + len(queries) - len(keys)
        window = window if window < len(keys) - 1 else None
    if not len(queries) or not len(keys):
        return None
    mask = replace(mask, is_causal=False, window=window)
    return Tile(rows, slice(queries.start, queries.stop), slice(keys.start, keys.stop), mask)


class TiledAttention:
    """The sum of tiles: outputs and log-sum-exp are merged in fp32 or wider, tile by tile.

    The first tiles are causal and contain every query once. Backward adds the same tiles in the same order.
    """

    def __init__(self, kernel: AttentionKernel, inputs: AttentionInputs) -> None:
        kernel.check_mask(inputs.mask)
        self._kernel, self._inputs, query = kernel, inputs, inputs.query
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = torch.empty(query.shape, dtype=wide, device=query.device)  # [b, n, s, d]
        self.log_sum_exp = torch.empty(query.shape[:3], dtype=wide, device=query.device)  # [b, n, s]
        self.kept: list[Sequence[Any]] = []

    def add(self, tiles: Iterable[Tile], key: Tensor, value: Tensor) -> None:
        """Attend to ``key`` and ``value`` as well, in ``tiles``."""
        for tile in tiles:
            part = self._kernel.forward(tile.inputs(self._inputs.query, key, value))
            self.kept.append(part.kept)
            output = self.output[tile.rows, :, tile.queries]  # [b, n, s_q, d]
            log_sum_exp = self.log_sum_exp[tile.rows, :, tile.queries]  # [b, n, s_q]
            if tile.mask.is_causal:
                output.copy_(part.output)
                if part.log_sum_exp is not None:
                    log_sum_exp.copy_(part.log_sum_exp)
            else:
                # Each output is weighted by its part of the sum of exponentials: with l = log(e^l1 + e^l2),
                # o = o1 e^(l1 - l) + o2 e^(l2 - l).
                assert part.log_sum_exp is not None
                merged = torch.logaddexp(log_sum_exp, part.log_sum_exp)
                output.mul_((log_sum_exp - merged).exp_().unsqueeze(-1))
                output.addcmul_(part.output, (part.log_sum_exp - merged).exp_().unsqueeze(-1))
                log_sum_exp.copy_(merged)

    def result(self) -> AttentionOutput:
        """The merged output in the query's dtype."""
        output = self.output.to(self._inputs.query.dtype)
        return AttentionOutput(self._inputs, output, self.log_sum_exp, self.kept)


class TiledGradients:
    """The backward pass of :class:`TiledAttention`; query gradients accumulate in fp32 or wider."""

    def __init__(self, kernel: AttentionKernel, grad: Tensor, attended: AttentionOutput) -> None:
        self._kernel, self._kept, self._grad = kernel, iter(attended.kept), grad
        self._query, _, _, self._output, self._log_sum_exp = attended.tensors
        self.dtype = self._log_sum_exp.dtype
        self.query = torch.zeros(self._query.shape, dtype=self.dtype, device=grad.device)

    def add(self, tiles: Iterable[Tile], key: Tensor, value: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients of ``tiles`` to the query gradient, ``grad_key`` and ``grad_value``."""
        for tile in tiles:
            queries, keys = (tile.rows, slice(None), tile.queries), (tile.rows, slice(None), tile.keys)
            # The log-sum-exp is over all keys, so that the probabilities of a tile are those of the whole row.
            inputs, log_sum_exp = tile.inputs(self._query, key, value), self._log_sum_exp[queries]
            attended = AttentionOutput(inputs, self._output[queries], log_sum_exp, next(self._kept))
            parts = self._kernel.backward(self._grad[queries], attended)
            self.query[queries].add_(parts[0])
            grad_key[keys].add_(parts[1])
            grad_value[keys].add_(parts[2])


class LocalAttention(Attention):
    """Attention among positions that are all on this rank: one varlen call for all spans, or one tile for each."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel
        self._varlen = kernel if isinstance(kernel, VarlenKernel) else None

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        self.kernel.check_mask(inputs.mask)
        if inputs.spans is None:
            return self.kernel.forward(inputs)
        if self._varlen is not None:
            attended = self._varlen.forward_varlen(inputs.packed())
            return replace(attended, inputs=inputs, output=unpack_rows(attended.output, rows=inputs.query.shape[0]))
        tiled = TiledAttention(self.kernel, inputs)
        tiled.add(_span_tiles(inputs.spans, inputs.mask), inputs.key, inputs.value)
        return tiled.result()

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        inputs = attended.inputs
        if inputs.spans is None:
            return self.kernel.backward(grad, attended, out)
        if self._varlen is None:
            gradients = TiledGradients(self.kernel, grad, attended)
            grad_key, grad_value = (torch.zeros_like(one, dtype=gradients.dtype) for one in (inputs.key, inputs.value))
            tiles = _span_tiles(inputs.spans, inputs.mask)
            gradients.add(tiles, inputs.key, inputs.value, grad_key, grad_value)
            return gradients.query, grad_key, grad_value
        rows = inputs.query.shape[0]
        # Several rows are packed into a copy: gradients written there would not be in ``out``.
        packed_out = None if out is None or rows > 1 else (pack_rows(out[0]), pack_rows(out[1]), pack_rows(out[2]))
        packed = replace(attended, inputs=inputs.packed(), output=pack_rows(attended.output))
        parts = self._varlen.backward_varlen(pack_rows(grad), packed, packed_out)
        if out is not None and parts is packed_out:
            return out
        grad_query, grad_key, grad_value = (unpack_rows(part, rows) for part in parts)
        return grad_query, grad_key, grad_value


def pack_rows(heads: Tensor) -> Tensor:
    """``[b, heads, s, d]`` as ``[b s, heads, d]``, row by row: a view if there is one row, else a copy."""
    return heads.transpose(1, 2).flatten(0, 1)


def unpack_rows(packed: Tensor, rows: int) -> Tensor:
    """``[b s, heads, d]`` as a view ``[b, heads, s, d]``."""
    return packed.unflatten(0, (rows, -1)).transpose(1, 2)


def _span_tiles(spans: AttentionSpans, mask: AttentionMask) -> Iterable[Tile]:
    for span in spans.spans:
        positions = slice(span.start, span.stop)
        yield Tile(span.rows, positions, positions, mask)


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
        ctx: Any,
        qkv: Tensor,
        shape: AttentionShape,
        attention: Attention,
        spans: AttentionSpans | None,
        mask: AttentionMask,
        sinks: Tensor | None,
    ) -> Tensor:
        qkv = qkv.detach()
        attended = attention.forward(AttentionInputs(*shape.split(qkv), spans, mask))
        if sinks is not None:
            attended = _with_sinks(attended, sinks.detach())
        # [s, b, n d]: a view, unless the output of the kernel has several rows one after the other in memory. The next
        # layer saves the same tensor.
        joined = attended.output.permute(2, 0, 1, 3).flatten(2).contiguous()
        tensors, ctx.restore = _take_tensors((attended.log_sum_exp, attended.kept))
        ctx.save_for_backward(qkv, joined, sinks, *tensors)
        ctx.shape, ctx.attention, ctx.spans, ctx.mask = shape, attention, spans, mask
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, Tensor | None]:
        qkv, joined, sinks, *tensors = ctx.saved_tensors
        shape: AttentionShape = ctx.shape
        grad, output = (shape.query_heads_of(tensor) for tensor in (gradients[0], joined.detach()))
        inputs = AttentionInputs(*shape.split(qkv), ctx.spans, ctx.mask)
        attended = AttentionOutput(inputs, output, *ctx.restore(tensors))
        grad_qkv = torch.empty_like(qkv)  # [s, b, (n + 2 groups) d]
        views = shape.split(grad_qkv)
        parts = ctx.attention.backward(grad, attended, out=views)
        if parts is not views:
            for view, part in zip(views, parts, strict=True):
                view.copy_(part)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            # The sink's probability times the gradient of its score: its value is zero, so that only delta is left.
            *_, log_sum_exp = attended.tensors
            delta = (grad * output).sum(dim=-1, dtype=log_sum_exp.dtype)  # [b, n, s]
            probability = (_per_head(sinks, log_sum_exp) - log_sum_exp).exp()
            grad_sinks = (-probability * delta).sum(dim=(0, 2)).view_as(sinks).to(sinks.dtype)
        return grad_qkv, None, None, None, None, grad_sinks


def _with_sinks(attended: AttentionOutput, sinks: Tensor) -> AttentionOutput:
    """The output of a softmax over the keys and a further score of each head, ``sinks`` ``[n, 1]``, with the value 0.

    The log-sum-exp is then over both, so that the backward pass of any kernel has the probabilities of this softmax.
    """
    assert attended.log_sum_exp is not None, "sinks need the log-sum-exp"
    total = torch.logaddexp(attended.log_sum_exp, _per_head(sinks, attended.log_sum_exp))  # [b, n, s]
    share = (attended.log_sum_exp - total).exp().unsqueeze(-1)  # of the keys
    return replace(attended, output=(attended.output * share).to(attended.output.dtype), log_sum_exp=total)


def _per_head(sinks: Tensor, log_sum_exp: Tensor) -> Tensor:
    return sinks.view(-1, 1).to(log_sum_exp.dtype)  # [n, 1]


def fused_attention(
    qkv: Tensor,
    shape: AttentionShape,
    attention: Attention,
    spans: AttentionSpans | None = None,
    mask: AttentionMask = CAUSAL,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention on the fused output of the projection: ``[s, b, (n + 2 groups) d] -> [s, b, n d]``.

    ``sinks`` ``[n, 1]`` are further scores of the heads, whose value is 0."""
    output: Tensor = _FusedAttention.apply(qkv, shape, attention, spans, mask, sinks)
    return output
