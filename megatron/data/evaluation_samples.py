"""Samples of evaluations that read a text, or a dataset, completely."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import Dataset, Sample, build_sample

_PASSES = 1 << 40  # more than any run has


class TokenStream(Protocol):
    """All tokens of a text, as of :class:`~megatron.data.indexed_dataset.IndexedDataset`."""

    @property
    def num_tokens(self) -> int: ...

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from position ``start``."""


@dataclass(frozen=True)
class TokenArray:
    """A stream in memory."""

    ids: npt.NDArray[Any]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        return self.ids[start : start + length]


@dataclass(frozen=True)
class Windows:
    """Windows of ``seq_length`` tokens over a stream, which predict every token of it exactly once.

    The first window predicts the first ``seq_length`` tokens; its first input is ``end_of_document``. Every other
    window begins ``stride`` tokens after the one before, and predicts its last ``stride`` tokens, each from at least
    ``seq_length - stride`` tokens of context. The last window is padded.
    """

    stream: TokenStream
    seq_length: int
    stride: int
    end_of_document: int
    masked_token: int | None = None
    """The loss is masked at this input token (``--eod-mask-loss``: end-of-document)."""
    marks_documents: bool = False
    """Whether samples include document boundaries."""

    def __len__(self) -> int:
        rest = max(self.stream.num_tokens - self.seq_length, 0)
        return 1 + -(-rest // self.stride)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.stride  # of the labels
        begin, end = max(start - 1, 0), min(start + self.seq_length, self.stream.num_tokens)
        text = np.full(self.seq_length + 1, self.end_of_document, dtype=np.int64)
        first = begin - (start - 1)
        text[first : first + end - begin] = self.stream.tokens(begin, end - begin)
        sample = build_sample(text, self.masked_token, self.end_of_document if self.marks_documents else None)
        sample["loss_mask"][end - start :] = 0.0
        if index:
            sample["loss_mask"][: self.seq_length - self.stride] = 0.0
        return sample


@dataclass(frozen=True)
class WholePasses:
    """A dataset again and again: every pass has every sample once, and then masked samples up to a multiple of ``unit``
    samples, which every data-parallel rank reads in whole microbatches."""

    dataset: Dataset
    unit: int

    @property
    def samples_per_pass(self) -> int:
        return -(-len(self.dataset) // self.unit) * self.unit

    def __len__(self) -> int:
        return self.samples_per_pass * _PASSES

    def __getitem__(self, index: int) -> Sample:
        place = index % self.samples_per_pass
        if place < len(self.dataset):
            return self.dataset[place]
        sample = self.dataset[0]
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}
