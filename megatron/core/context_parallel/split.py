"""How context-parallel ranks divide a sequence, and which tiles of the causal triangle each computes. Pure arithmetic.

A sequence is cut into two chunks per rank; rank i has chunks i and 2 size - 1 - i, one after the other ("zig-zag"), so
that every rank has the same part of the causal triangle (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.attention import Tile
from megatron.core.ops.documents import Span


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
        """The local positions of ``span`` in the rank's first and second chunk; if neither is empty, they adjoin."""
        chunk = length // (2 * self.size)
        first, second = (
            range(offset + max(span.start - start, 0), offset + min(span.stop - start, chunk))
            for offset, start in ((0, self.chunks[0] * chunk), (chunk, self.chunks[1] * chunk))
        )
        return first, second

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


def ring_tiles(split: ContextSplit, source: int, spans: Sequence[Span], length: int) -> Iterator[Tile]:
    """The tiles of this rank's queries and the keys of rank ``source``: half of its keys, or of this rank's queries.

    A document in both chunks of a rank ends the first and starts the second, which adjoin in local positions, so that
    each document is at most one tile.
    """
    source_split = ContextSplit(source, split.size)
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
            yield Tile(span.rows, _slice(queries), _slice(keys), is_causal=source == split.rank)


def diagonal_tiles(split: ContextSplit, spans: Sequence[Span], length: int) -> Iterator[Tile]:
    """The tiles of each chunk's queries and the keys of the same chunk, in local positions."""
    for span in spans:
        for positions in split.local_ranges(span, length):
            if len(positions):
                yield Tile(span.rows, _slice(positions), _slice(positions), is_causal=True)


def earlier_tiles(split: ContextSplit, spans: Sequence[Span], length: int) -> Iterator[Tile]:
    """The tiles of each chunk's queries (local positions) and all earlier keys (positions in the sequence)."""
    chunk = length // (2 * split.size)
    for span in spans:
        for number, positions in zip(split.chunks, split.local_ranges(span, length)):
            if len(positions) and span.start < number * chunk:
                yield Tile(span.rows, _slice(positions), slice(span.start, number * chunk), is_causal=False)


def _joined(ranges: tuple[range, range]) -> range:
    first, second = ranges
    if len(first) and len(second):
        assert first.stop == second.start, ranges
        return range(first.start, second.stop)
    return first if len(first) else second


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)
