"""Documents in packed sequences, for attention within documents and positions that restart."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Positions ``[start, stop)`` of the rows ``rows`` of a batch, within which attention is causal."""

    rows: slice
    start: int
    stop: int


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch of whole sequences, on the host, since they determine which kernels run."""

    starts: Tensor
    """Whether a document begins at a position, ``[b, s]`` bool on the CPU; one always begins at position 0."""
    masks_attention: bool
    """Whether attention stays inside documents."""
    resets_positions: bool
    """Whether positions count from the beginning of the document."""

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
