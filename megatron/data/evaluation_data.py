"""Data of evaluations: texts and corpora that are read completely, and the bytes of their tokens.

A table has the UTF-8 bytes that a token adds to the text of a document, so the bytes of any tokens are a sum: losses in
bits per byte need it. They are the bytes of the detokenized text: where a tokenizer normalises a text, its bytes differ
from those of the original.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.config.data import TokenizerConfig
from megatron.data.gpt_dataset import Dataset, Sample, build_sample
from megatron.data.indexed_dataset import IndexedDataset, check_token_range
from megatron.data.loader import Microbatch
from megatron.data.text_inputs import InputFormat, list_sources, parse_documents, place_of, read_batches, whole_ranges
from megatron.data.tokenizers import Tokenizer, shared_tokenizer
from megatron.data.verified_encoder import AWKWARD_TEXTS
from megatron.errors import DataError

_PASSES = 1 << 40  # more than any run has

# Windows of 8 tokens over a stream of 18 (E: end of document), with a stride of 4; loss only where labels are in [ ]:
#
#   inputs    E 0 1 2 3 4 5 6 | 3 4 5 6 7 8 9 10  | 7 8 9 10 11 12 13 14  | 11 12 13 14 15 16 17 E
#   labels   [0 1 2 3 4 5 6 7]| 4 5 6 7[8 9 10 11]| 8 9 10 11[12 13 14 15]| 12 13 14 15[16 17] E E


@dataclass(frozen=True)
class TokenArray:
    """The tokens of one text in memory, with the reading methods of an
    :class:`~megatron.data.indexed_dataset.IndexedDataset`."""

    ids: npt.NDArray[Any]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        return self.ids[start : start + length]


TokenStream = IndexedDataset | TokenArray


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
    masked_token: int | None = None  # the loss is masked at this input token (--eod-mask-loss)
    marks_documents: bool = False  # whether samples include document boundaries

    def __len__(self) -> int:
        rest = max(self.stream.num_tokens - self.seq_length, 0)
        return 1 + -(-rest // self.stride)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.stride  # position of the first label; its input is one before
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
    """A dataset again and again. A pass has every sample once, then masked samples up to a multiple of ``unit``, so
    that every data-parallel rank reads whole microbatches."""

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


@dataclass(frozen=True)
class EvaluationText:
    """All tokens of a text."""

    # Every document ends with the end-of-document token if it is tokenized here; a corpus is as it is.
    stream: TokenStream
    num_documents: int
    # UTF-8 bytes of the documents; None for a corpus, and where ids are the text (NullTokenizer).
    num_bytes: int | None


def read_text(name: str, tokenizer: TokenizerConfig, form: InputFormat, index_cache: str | None) -> EvaluationText:
    """The corpus with the prefix ``name``, or else the text of the file, directory or glob ``name``.

    Raises :class:`DataError`.
    """
    stem, ending = os.path.splitext(name)
    if ending in (".bin", ".idx"):
        raise DataError(f"--input {name} is one of the two files of a corpus: use its prefix, {stem}.")
    if os.path.exists(f"{name}.idx"):
        corpus = IndexedDataset(name, index_cache=index_cache)
        corpus.check_sequences()
        check_token_range(corpus, shared_tokenizer(tokenizer).vocab_size, name)
        text, num_tokens = EvaluationText(corpus, len(corpus.document_indices) - 1, None), corpus.num_tokens
    else:
        text = _read_documents(name, tokenizer, form)
        num_tokens = text.stream.num_tokens - text.num_documents
    if not num_tokens:
        raise DataError(f"--input {name} has no tokens: use another text.")
    return text


def _read_documents(name: str, config: TokenizerConfig, form: InputFormat) -> EvaluationText:
    tokenizer = shared_tokenizer(config)
    parts: list[np.ndarray] = [np.zeros(0, np.int32)]
    num_documents, num_bytes = 0, 0
    for batch in read_batches(whole_ranges(list_sources([name])), form):
        texts: list[str] = []
        for number, parsed in parse_documents(batch, form.keys, "--json-key"):
            if isinstance(parsed, str):
                raise DataError(f"{place_of(batch, number)} {parsed}.")
            texts += parsed
        encoded = tokenizer.tokenize_to_arrays(texts)
        parts.append(np.insert(encoded.tokens, np.cumsum(encoded.lengths, dtype=np.int64), tokenizer.eod))
        num_documents += len(texts)
        num_bytes += sum(len(text.encode()) for text in texts)
    has_bytes = config.tokenizer_type != "NullTokenizer"
    return EvaluationText(TokenArray(np.concatenate(parts)), num_documents, num_bytes if has_bytes else None)


def names_of(inputs: Sequence[str]) -> list[str]:
    """A short name for each input, each only once."""
    stems = [os.path.basename(name.rstrip("/")) or name for name in inputs]
    return [stem if stems.count(stem) == 1 else name for stem, name in zip(stems, inputs, strict=True)]


@dataclass(frozen=True)
class TokenBytes:
    """Bytes by token id; special tokens have none."""

    inside: Tensor  # [v] int64: after another token of its document
    first: Tensor  # [v] int64: at the beginning of a document
    end_of_document: int

    def count(self, microbatch: Microbatch) -> int:
        """Bytes of the unmasked labels."""
        labels = microbatch["labels"]  # [mbs, s]
        is_first = microbatch["tokens"] == self.end_of_document
        lengths = torch.where(is_first, self.first[labels], self.inside[labels])
        return int((lengths * (microbatch["loss_mask"] != 0)).sum())


def count_token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes | None:
    """The bytes of the tokens of ``tokenizer``; None if their sum is not the bytes of some texts.

    Ids up to ``vocab_size`` that the tokenizer does not have are no text.
    """
    lengths = tokenizer.byte_lengths()
    if lengths is None:
        return None
    for text in AWKWARD_TEXTS:
        ids = tokenizer.tokenize(text)
        total = sum(lengths.inside[ids[1:]].tolist()) + sum(lengths.first[ids[:1]].tolist())
        if total != len(tokenizer.detokenize(ids).encode()):
            return None
    inside, first = (np.pad(one, (0, vocab_size - len(one))) for one in lengths)
    return TokenBytes(torch.from_numpy(inside), torch.from_numpy(first), tokenizer.eod)


class CountedBytes(Iterator[Microbatch]):
    """Microbatches, whose bytes it counts if there is a table."""

    def __init__(self, microbatches: Iterator[Microbatch], table: TokenBytes | None) -> None:
        self._microbatches, self._table = microbatches, table
        self.num_bytes = 0

    def __next__(self) -> Microbatch:
        microbatch = next(self._microbatches)
        if self._table is not None:
            self.num_bytes += self._table.count(microbatch)
        return microbatch
