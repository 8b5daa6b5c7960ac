"""Documents in packed sequences and chunks of positions: where attention is causal, and positions that restart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import copy_to_device


@dataclass(frozen=True)
class Span:
    """Positions ``[start, stop)`` of the rows ``rows`` of a batch, within which attention is causal."""

    rows: slice
    start: int
    stop: int


@dataclass(frozen=True)
class PackedSpans:
    """The spans of a batch whose rows are packed one after the other, as varlen kernels take them."""

    cu_seqlens: Tensor
    """The first token of every span, and the number of all tokens: ``[spans + 1]`` int32 on the device."""
    max_seqlen: int
    """Tokens of the longest span."""


@dataclass(frozen=True)
class AttentionSpans:
    """The spans of a microbatch of whole sequences, which cover every position once."""

    spans: Sequence[Span]
    rows: int
    """Sequences of the microbatch."""
    length: int
    """Positions of a sequence."""
    device: torch.device
    """The device that computes attention."""

    @cached_property
    def packed(self) -> PackedSpans:
        """The spans for varlen kernels: computed once for all layers, and copied without waiting for the device."""
        # Rows are packed one after the other: position p of row r is token r * length + p.
        firsts = sorted(
            row * self.length + span.start for span in self.spans for row in range(*span.rows.indices(self.rows))
        )
        cu_seqlens = torch.tensor([*firsts, self.rows * self.length], dtype=torch.int32)
        longest = max(span.stop - span.start for span in self.spans)
        return PackedSpans(copy_to_device(cu_seqlens, self.device), longest)

    @cached_property
    def padded(self) -> PackedSpans:
        """:attr:`packed` in one of few shapes, for kernels that prepare each shape: the longest span counts as a whole
        sequence, and empty spans at the end make their number 16 or a larger power of two."""
        starts = self.packed.cu_seqlens
        spans = starts.numel() - 1
        missing = max(16, 1 << (spans - 1).bit_length()) - spans
        return PackedSpans(F.pad(starts, (0, missing), value=self.rows * self.length), self.length)


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch of whole sequences, on the host, since they determine which kernels run."""

    starts: Tensor
    """Whether a document begins at a position, ``[b, s]`` bool on the CPU; one always begins at position 0."""
    masks_attention: bool
    """Whether attention stays inside documents."""
    resets_positions: bool
    """Whether positions count from the beginning of the document."""
    device: torch.device
    """The device that computes attention."""

    @cached_property
    def spans(self) -> list[Span]:
        """The documents, row by row."""
        spans, length = [], self.starts.shape[1]
        # starts  1 0 0 1 0 1 0 0      three documents of a row: [0, 3), [3, 5), [5, 8)
        for row, flags in enumerate(self.starts):
            starts = flags.nonzero().flatten().tolist()
            starts = starts if starts and starts[0] == 0 else [0, *starts]
            for start, stop in zip(starts, [*starts[1:], length]):
                spans.append(Span(slice(row, row + 1), start, stop))
        return spans

    @cached_property
    def attention(self) -> AttentionSpans | None:
        """The documents, if attention stays inside them."""
        if not self.masks_attention:
            return None
        rows, length = self.starts.shape
        return AttentionSpans(self.spans, rows, length, self.device)

    def positions(self) -> Tensor:
        """The position of every token in its document, ``[s, b]``."""
        numbers = torch.arange(self.starts.shape[1])
        # starts           1 0 0 1 0 1 0 0
        # latest start     0 0 0 3 3 5 5 5
        # position         0 1 2 0 1 0 1 2
        latest_start = torch.where(self.starts, numbers, 0).cummax(dim=1).values
        return (numbers - latest_start).t()


def spans_of(attention: AttentionSpans | None, length: int) -> Sequence[Span]:
    """The ranges within which attention is causal; without spans whole rows of ``length``."""
    return [Span(slice(None), 0, length)] if attention is None else attention.spans


def chunked_attention(
    documents: Documents | None, size: int, rows: int, length: int, device: torch.device
) -> AttentionSpans | None:
    """The spans of chunked attention (Llama 4): a chunk begins at every position that is a multiple of ``size``.

    Positions are those of ``rows`` sequences of ``length``, or of documents where they restart; documents that mask
    attention end chunks, too. None if every sequence is one chunk.
    """
    if documents is None or not (documents.masks_attention or documents.resets_positions):
        spans, restarts = [Span(slice(None), 0, length)], False
    else:
        spans, restarts = documents.spans, documents.resets_positions
    chunks = [chunk for span in spans for chunk in _chunks(span, size, restarts)]
    is_whole = all(chunk.stop - chunk.start == length for chunk in chunks)
    return None if is_whole else AttentionSpans(chunks, rows, length, device)


def _chunks(span: Span, size: int, restarts: bool) -> Iterator[Span]:
    """The parts of ``span`` between multiples of ``size``, of positions that begin with it if it ``restarts`` them."""
    # Without restarts the first multiple of size may lie before the span: that chunk is cut at its start.
    origin = span.start if restarts else span.start - span.start % size
    for start in range(origin, span.stop, size):
        yield Span(span.rows, max(start, span.start), min(start + size, span.stop))
