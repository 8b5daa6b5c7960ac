"""How ranks divide a sequence, and which part of the causal triangle each computes when. Pure arithmetic.

A sequence is cut in two chunks per rank; rank i holds chunks i and 2 size - 1 - i, one after the other ("zig-zag"), so
that every rank has the same share of the causal triangle (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.attention import Tile
from megatron.core.ops.documents import Span


@dataclass(frozen=True)
class ContextSplit:
    """The part of ``rank`` among ``size``."""

    rank: int = 0
    size: int = 1

    @property
    def chunks(self) -> tuple[int, int]:
        """The chunks of this rank, of ``2 * size``."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int) -> Tensor:
        """The places of this rank's tokens in the sequence of ``length``, ``[length / size]``."""
        if self.size == 1:
            return torch.arange(length)
        chunk = length // (2 * self.size)
        return torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in self.chunks])

    def pieces(self, span: Span, length: int) -> tuple[range, range]:
        """The local positions of ``span`` in the rank's first and second chunk. If both have some, these adjoin."""
        chunk = length // (2 * self.size)
        first, second = (
            range(offset + max(span.start - start, 0), offset + min(span.stop - start, chunk))
            for offset, start in ((0, self.chunks[0] * chunk), (chunk, self.chunks[1] * chunk))
        )
        return first, second

    def natural(self, by_rank: Tensor) -> Tensor:
        """``[size, length / size, ...]``, every rank's part, to ``[length, ...]`` in the order of the sequence."""
        chunks = by_rank.unflatten(1, (2, -1)).flatten(0, 1)
        order = [2 * rank for rank in range(self.size)] + [2 * rank + 1 for rank in reversed(range(self.size))]
        return chunks[order].flatten(0, 1)

    def by_rank(self, natural: Tensor) -> Tensor:
        """The inverse of :meth:`natural`."""
        chunks = natural.unflatten(0, (2 * self.size, -1))
        order = [number for rank in range(self.size) for number in ContextSplit(rank, self.size).chunks]
        return chunks[order].unflatten(0, (self.size, 2)).flatten(1, 2)


def ring_tiles(split: ContextSplit, source: int, spans: Sequence[Span], length: int) -> Iterator[Tile]:
    """What the queries of ``split`` see of the keys of rank ``source``: half of its tokens, or of the rank's own.

    A document that lies in both chunks of a rank fills the end of the first and the beginning of the second, which
    adjoin in local positions, so each document is one tile at most.
    """
    others = ContextSplit(source, split.size)
    for span in spans:
        mine, theirs = split.pieces(span, length), others.pieces(span, length)
        if source == split.rank:
            queries, keys = _joined(mine), _joined(mine)
        elif source < split.rank:
            # Its first chunk lies before both of ours, its second behind both.
            queries, keys = _joined(mine), theirs[0]
        else:
            # Our first chunk lies before both of its, our second behind both.
            queries, keys = mine[1], _joined(theirs)
        if len(queries) and len(keys):
            yield Tile(span.rows, _slice(queries), _slice(keys), is_causal=source == split.rank)


def diagonal_tiles(split: ContextSplit, spans: Sequence[Span], length: int) -> Iterator[Tile]:
    """What the queries of each chunk see of the keys of the same chunk, in local positions of both."""
    for span in spans:
        for piece in split.pieces(span, length):
            if len(piece):
                yield Tile(span.rows, _slice(piece), _slice(piece), is_causal=True)


def earlier_tiles(split: ContextSplit, spans: Sequence[Span], length: int) -> Iterator[Tile]:
    """What the queries of each chunk see of all earlier chunks, with keys by their place in the sequence."""
    chunk = length // (2 * split.size)
    for span in spans:
        for number, piece in zip(split.chunks, split.pieces(span, length)):
            if len(piece) and span.start < number * chunk:
                yield Tile(span.rows, _slice(piece), slice(span.start, number * chunk), is_causal=False)


def _joined(pieces: tuple[range, range]) -> range:
    first, second = pieces
    if len(first) and len(second):
        assert first.stop == second.start, pieces
        return range(first.start, second.stop)
    return first if len(first) else second


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)
