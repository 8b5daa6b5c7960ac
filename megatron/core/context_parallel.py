"""Context-parallel attention: the division of a sequence, three exchanges, and their combination in levels.

A sequence is cut into two chunks per rank; rank i has chunks i and 2 size - 1 - i, one after the other ("zig-zag"), so
that every rank has the same part of the causal triangle (Llama 3, arXiv 2407.21783, section 3.3.2).

``p2p``: keys and values are sent around the ring of ranks (ring attention, arXiv 2310.01889, on balanced chunks).
``allgather``: every rank gathers all keys and values (Llama 3, arXiv 2407.21783, section 3.3.2). ``a2a``: an all-to-all
exchanges positions for heads, and each rank attends over the whole sequence with its shard of the heads (DeepSpeed
Ulysses, arXiv 2309.14509).

``a2a+p2p`` has two levels (USP, arXiv 2405.07719; LoongTrain, arXiv 2406.18485): ``a2a`` in groups of A neighbouring
ranks, then ring attention over the P groups with each rank's shard of the heads.
"""

#     sequence    | chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | chunk 5 | chunk 6 | chunk 7 |
#     rank             0         1         2         3         3         2         1         0

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.config.parallel import CONTEXT_PARALLEL_TYPES, ContextParallelType, Exchange
from megatron.core.communication import Communicator, Work
from megatron.core.ops.attention import (
    Attention,
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionOutput,
    Gradients,
    LocalAttention,
    Tile,
    TiledAttention,
    TiledGradients,
    earlier_tile,
)
from megatron.core.ops.documents import Span, spans_of


@dataclass(frozen=True)
class ContextSplit:
    """The positions of one context-parallel rank."""

    rank: int = 0
    size: int = 1

    @property
    def chunks(self) -> tuple[int, int]:
        """The chunks of this rank, of ``2 * size``."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int) -> Tensor:
        """The positions of this rank's tokens in a sequence of ``length``, ``[length / size]``."""
        if self.size == 1:
            return torch.arange(length)
        chunk = length // (2 * self.size)
        return torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in self.chunks])

    def local_ranges(self, span: Span, length: int) -> tuple[range, range]:
        """The local positions of ``span`` in the rank's first and second chunk; if neither is empty, the two ranges
        adjoin."""
        chunk = length // (2 * self.size)
        first, second = (
            range(offset + max(span.start - start, 0), offset + min(span.stop - start, chunk))
            for offset, start in ((0, self.chunks[0] * chunk), (chunk, self.chunks[1] * chunk))
        )
        return first, second

    def position(self, local: int, length: int) -> int:
        """The position in the sequence of local position ``local``."""
        chunk = length // (2 * self.size)
        return self.chunks[local // chunk] * chunk + local % chunk

    def natural(self, by_rank: Tensor) -> Tensor:
        """All ranks' positions ``[size, length / size, ...]`` to ``[length, ...]`` in the order of the sequence."""
        chunks = by_rank.unflatten(1, (2, -1)).flatten(0, 1)  # [2 size, chunk, ...]
        order = [2 * rank for rank in range(self.size)] + [2 * rank + 1 for rank in reversed(range(self.size))]
        return chunks[order].flatten(0, 1)

    def by_rank(self, natural: Tensor) -> Tensor:
        """The inverse of :meth:`natural`."""
        chunks = natural.unflatten(0, (2 * self.size, -1))
        order = [number for rank in range(self.size) for number in ContextSplit(rank, self.size).chunks]
        return chunks[order].unflatten(0, (self.size, 2)).flatten(1, 2)


def ring_tiles(
    split: ContextSplit, source: int, spans: Sequence[Span], length: int, mask: AttentionMask
) -> Iterator[Tile]:
    """The tiles of this rank's queries and the keys of rank ``source``: half of its keys, or of this rank's queries.

    A document in both chunks of a rank ends the first and starts the second, which adjoin in local positions, so that
    each document is at most one tile.
    """
    source_split = ContextSplit(source, split.size)
    if mask.window is not None:
        yield from _window_tiles(split, source_split, spans, length, mask)
        return
    for span in spans:
        query_ranges, key_ranges = split.local_ranges(span, length), source_split.local_ranges(span, length)
        if source == split.rank:
            queries, keys = _joined(query_ranges), _joined(query_ranges)
        elif source < split.rank:
            # The source's first chunk precedes both of this rank's chunks, its second follows both.
            queries, keys = _joined(query_ranges), key_ranges[0]
        else:
            # This rank's first chunk precedes both of the source's chunks, its second follows both.
            queries, keys = query_ranges[1], _joined(key_ranges)
        if len(queries) and len(keys):
            of_tile = replace(mask, is_causal=source == split.rank)
            yield Tile(span.rows, _slice(queries), _slice(keys), of_tile)


def _window_tiles(
    split: ContextSplit, source: ContextSplit, spans: Sequence[Span], length: int, mask: AttentionMask
) -> Iterator[Tile]:
    """The tiles of :func:`ring_tiles` under a window, whose place depends on positions: a tile for each chunk of the
    queries and each earlier chunk of the keys, unless it is outside of the window."""
    if source == split:
        yield from diagonal_tiles(split, spans, length, mask)
    for span in spans:
        for query_chunk, queries in zip(split.chunks, split.local_ranges(span, length)):
            for key_chunk, keys in zip(source.chunks, source.local_ranges(span, length)):
                if key_chunk < query_chunk and len(queries) and len(keys):
                    distance = split.position(queries.start, length) - source.position(keys.start, length)
                    tile = earlier_tile(span.rows, queries, keys, distance, mask)
                    if tile is not None:
                        yield tile


def diagonal_tiles(split: ContextSplit, spans: Sequence[Span], length: int, mask: AttentionMask) -> Iterator[Tile]:
    """The tiles of each chunk's queries and the keys of the same chunk, in local positions."""
    for span in spans:
        for positions in split.local_ranges(span, length):
            if len(positions):
                yield Tile(span.rows, _slice(positions), _slice(positions), mask)


def earlier_tiles(split: ContextSplit, spans: Sequence[Span], length: int, mask: AttentionMask) -> Iterator[Tile]:
    """The tiles of each chunk's queries (local positions) and all earlier keys (positions in the sequence)."""
    chunk = length // (2 * split.size)
    for span in spans:
        for number, queries in zip(split.chunks, split.local_ranges(span, length)):
            if len(queries) and span.start < number * chunk:
                distance = split.position(queries.start, length) - span.start
                tile = earlier_tile(span.rows, queries, range(span.start, number * chunk), distance, mask)
                if tile is not None:
                    yield tile


def _joined(ranges: tuple[range, range]) -> range:
    first, second = ranges
    if len(first) and len(second):
        assert first.stop == second.start, ranges
        return range(first.start, second.stop)
    return first if len(first) else second


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)


class _AttentionOverRanks(Attention):
    """Attention of a rank's queries to the keys of all ranks."""

    def __init__(self, kernel: AttentionKernel, ranks: Communicator) -> None:
        self._kernel, self._ranks = kernel, ranks
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _whole(self, inputs: AttentionInputs) -> tuple[Sequence[Span], int]:
        """The spans within which attention is causal, and the length of the whole sequence."""
        length = inputs.query.shape[2] * self._ranks.size
        return spans_of(inputs.spans, length), length


class RingAttention(_AttentionOverRanks):
    """Keys and values are sent around the ring while each rank attends to the keys that it has."""

    # step       rank 0    rank 1    rank 2    rank 3
    # 0          kv 0      kv 1      kv 2      kv 3       each rank's own keys, with the causal mask
    # 1          kv 3      kv 0      kv 1      kv 2       a tile needs no mask from here on
    # 2          kv 2      kv 3      kv 0      kv 1
    # 3          kv 1      kv 2      kv 3      kv 0       nothing is sent any more

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        spans, length = self._whole(inputs)
        rank, size = self._ranks.rank, self._ranks.size
        tiled = TiledAttention(self._kernel, inputs)
        key_value = torch.stack((inputs.key, inputs.value))  # [2, b, groups, s, d]
        for step in range(size):
            # Post the next keys, compute with the current ones, merge the two softmaxes, wait.
            arriving = self._ranks.start_shift(key_value) if step < size - 1 else None
            tiles = ring_tiles(self._split, (rank - step) % size, spans, length, inputs.mask)
            key, value = key_value
            tiled.add(tiles, key, value)
            if arriving is not None:
                key_value = arriving.wait()
        return tiled.result()

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        # The gradients of keys and values follow them around the ring, a step behind; each rank adds its part. Both are
        # sent in one launch: with one hardware queue a second one would wait for the first and block the attention
        # that is launched after it.
        inputs = attended.inputs
        spans, length = self._whole(inputs)
        rank, size = self._ranks.rank, self._ranks.size
        gradients = TiledGradients(self._kernel, grad, attended)
        key_value = torch.stack((inputs.key, inputs.value))  # [2, b, groups, s, d]
        moving: list[Tensor] = []
        for step in range(size):
            if step < size - 1:
                moving = [key_value, *moving]
            shift = self._ranks.start_shifts(moving)
            grad_key_value = torch.zeros_like(key_value, dtype=gradients.dtype)
            tiles = ring_tiles(self._split, (rank - step) % size, spans, length, inputs.mask)
            gradients.add(tiles, *key_value, *grad_key_value)
            arrived = shift.wait()
            if step < size - 1:
                key_value, *arrived = arrived
            for grads_so_far in arrived:
                grad_key_value += grads_so_far
            moving = [grad_key_value]
        # A last step, and the sums of all ranks are back at the rank of their keys.
        grad_key, grad_value = self._ranks.start_shift(grad_key_value).wait()
        return gradients.query, grad_key, grad_value


class AllGatherAttention(_AttentionOverRanks):
    """All keys and values are gathered while the rank attends to the keys of its own chunks."""

    def _start_gather(self, inputs: AttentionInputs) -> Work[Tensor]:
        """All ranks' keys and values in the order of the sequence, ``[2, b, groups, s, d]``."""
        by_position = torch.stack((inputs.key, inputs.value)).movedim(3, 0).contiguous()  # [s/cp, 2, b, groups, d]
        gathering = self._ranks.start_all_gather(by_position)
        ranks = self._ranks.size
        return gathering.then(lambda whole: self._split.natural(whole.unflatten(0, (ranks, -1))).movedim(0, 3))

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        spans, length = self._whole(inputs)
        tiled = TiledAttention(self._kernel, inputs)
        gathering = self._start_gather(inputs)
        tiled.add(diagonal_tiles(self._split, spans, length, inputs.mask), inputs.key, inputs.value)
        tiled.add(earlier_tiles(self._split, spans, length, inputs.mask), *gathering.wait())
        return tiled.result()

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        # Keys and values are gathered again; a reduce-scatter sums their gradients over the ranks.
        inputs = attended.inputs
        spans, length = self._whole(inputs)
        gradients = TiledGradients(self._kernel, grad, attended)
        gathering = self._start_gather(inputs)
        key, value = inputs.key, inputs.value
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=gradients.dtype) for tensor in (key, value))
        gradients.add(diagonal_tiles(self._split, spans, length, inputs.mask), key, value, grad_key, grad_value)
        key_value = gathering.wait()
        grad_key_value = torch.zeros_like(key_value, dtype=gradients.dtype)  # [2, b, groups, s, d]
        gradients.add(earlier_tiles(self._split, spans, length, inputs.mask), *key_value, *grad_key_value)
        by_rank = self._split.by_rank(grad_key_value.movedim(3, 0)).flatten(0, 1)  # [s, 2, b, groups, d]
        for own, reduced in zip((grad_key, grad_value), self._ranks.reduce_scatter(by_rank).movedim(0, 3)):
            own += reduced
        return gradients.query, grad_key, grad_value


class UlyssesAttention(Attention):
    """Attention over the positions of all ``ranks`` with a shard of the heads; both kinds of heads must be divisible.

    ``inner`` attends with these heads: locally, or over the groups of a hierarchy. Rank a of group p holds the chunks
    pA + a and 2AP - 1 - (pA + a) of 2AP. In the order of the sequence the chunks of a group are therefore two
    contiguous ones, p and 2P - 1 - p of 2P: the zig-zag split over P ranks, which balances the ring of ``inner``.
    """

    def __init__(self, ranks: Communicator, inner: Attention) -> None:
        self._ranks, self._inner = ranks, inner
        self._split = ContextSplit(ranks.rank, ranks.size)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """``[b, heads, s/cp, d]`` each to ``[b, heads/cp, s, d]``, in one all-to-all."""
        parts = [tensor.unflatten(1, (self._ranks.size, -1)).permute(1, 3, 2, 0, 4) for tensor in tensors]
        received = self._ranks.all_to_all(torch.cat(parts, dim=2))  # [cp, s/cp, all heads/cp, b, d]
        heads = [part.shape[2] for part in parts]
        return [part.permute(2, 1, 0, 3) for part in self._split.natural(received).split(heads, dim=1)]

    def _to_positions(self, *tensors: Tensor) -> list[Tensor]:
        """The inverse of :meth:`_to_heads`."""
        together = torch.cat([tensor.permute(2, 1, 0, 3) for tensor in tensors], dim=1)  # [s, all heads/cp, b, d]
        received = self._ranks.all_to_all(self._split.by_rank(together))  # [cp, s/cp, all heads/cp, b, d]
        heads = [tensor.shape[1] for tensor in tensors]
        return [part.permute(3, 0, 2, 1, 4).flatten(1, 2) for part in received.split(heads, dim=2)]

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        query, key, value = self._to_heads(inputs.query, inputs.key, inputs.value)
        inner = self._inner.forward(AttentionInputs(query, key, value, inputs.spans, inputs.mask))
        kept = query, key, value, inner.output, inner.log_sum_exp, inner.kept
        return AttentionOutput(inputs, self._to_positions(inner.output)[0], None, kept)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        query, key, value, *inner = attended.kept
        (inner_grad,) = self._to_heads(grad)
        inner_inputs = AttentionInputs(query, key, value, attended.inputs.spans, attended.inputs.mask)
        grads = self._inner.backward(inner_grad, AttentionOutput(inner_inputs, *inner))
        # An all-to-all sums nothing, so gradients need no wider dtype.
        grad_query, grad_key, grad_value = self._to_positions(*(part.to(grad.dtype) for part in grads))
        return grad_query, grad_key, grad_value


def build_attention(
    levels: Sequence[Exchange], communicators: Sequence[Communicator], kernel: AttentionKernel
) -> Attention:
    """Attention by the exchanges ``levels``, each over its communicator, from neighbouring ranks outwards."""
    if not levels:
        return LocalAttention(kernel)
    ranks = communicators[0]
    if levels[0] == "a2a":
        return UlyssesAttention(ranks, build_attention(levels[1:], communicators[1:], kernel))
    assert len(levels) == 1, "only a2a can be combined with a further exchange"
    return RingAttention(kernel, ranks) if levels[0] == "p2p" else AllGatherAttention(kernel, ranks)


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sequence, and their exchanges: one for all layers, or one for each layer."""

    ranks: Communicator = field(default_factory=lambda: Communicator((0,), 0))
    comm_types: Sequence[ContextParallelType] = ("p2p",)
    levels: Sequence[Communicator] = ()
    """The levels of the same ranks, for types of several levels."""

    @property
    def split(self) -> ContextSplit:
        return ContextSplit(self.ranks.rank, self.ranks.size)

    def attention(self, layer: int, kernel: AttentionKernel) -> Attention:
        if self.ranks.size == 1:
            return LocalAttention(kernel)
        exchanges = CONTEXT_PARALLEL_TYPES[self.comm_types[layer if len(self.comm_types) > 1 else 0]].levels
        return build_attention(exchanges, self.levels if len(exchanges) > 1 else (self.ranks,), kernel)
