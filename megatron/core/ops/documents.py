"""Documents in packed sequences, for attention within documents and positions that restart."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.device import copy_to_device


@dataclass(frozen=True)
class Span:
    """Positions ``[start, stop)`` of the rows ``rows`` of a batch, within which attention is causal."""

    rows: slice
    start: int
    stop: int


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a batch whose rows are packed one after the other, as varlen kernels take them."""

    cu_seqlens: Tensor
    """The first token of every document, and the number of all tokens: ``[documents + 1]`` int32 on the device."""
    max_seqlen: int
    """Tokens of the longest document."""


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
        for row, flags in enumerate(self.starts):
            starts = flags.nonzero().flatten().tolist()
            starts = starts if starts and starts[0] == 0 else [0, *starts]
            for start, stop in zip(starts, [*starts[1:], length]):
                spans.append(Span(slice(row, row + 1), start, stop))
        return spans

    @cached_property
    def packed(self) -> PackedDocuments:
        """The documents for varlen kernels: computed once for all layers, and copied without waiting for the device."""
        length = self.starts.shape[1]
        firsts = [span.rows.start * length + span.start for span in self.spans]
        cu_seqlens = torch.tensor([*firsts, self.starts.numel()], dtype=torch.int32)
        longest = max(span.stop - span.start for span in self.spans)
        return PackedDocuments(copy_to_device(cu_seqlens, self.device), longest)

    def positions(self) -> Tensor:
        """The position of every token in its document, ``[s, b]``."""
        numbers = torch.arange(self.starts.shape[1])
        latest_start = torch.where(self.starts, numbers, 0).cummax(dim=1).values
        return (numbers - latest_start).t()


def attention_spans(documents: Documents | None, length: int) -> list[Span]:
    """The ranges within which attention is causal: documents, or whole rows of ``length``."""
    if documents is None or not documents.masks_attention:
        return [Span(slice(None), 0, length)]
    return documents.spans
