"""Bytes of the text of tokens, for losses in bits per byte.

A table has the UTF-8 bytes that a token adds to the text of a document, so the bytes of any tokens are a sum. They are
the bytes of the detokenized text: where a tokenizer normalises a text, its bytes differ from those of the original.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.data.loader import Microbatch
from megatron.data.tokenizers import Tokenizer
from megatron.data.verified_encoder import AWKWARD_TEXTS


@dataclass(frozen=True)
class TokenBytes:
    """Bytes by token id."""

    inside: Tensor
    """Bytes of a token after another one of its document, [v] int64; special tokens have none."""
    first: Tensor
    """Bytes of a token at the beginning of a document, [v] int64."""
    end_of_document: int

    def count(self, microbatch: Microbatch) -> int:
        """Bytes of the unmasked labels."""
        labels = microbatch["labels"]
        is_first = microbatch["tokens"] == self.end_of_document
        lengths = torch.where(is_first, self.first[labels], self.inside[labels])
        return int((lengths * (microbatch["loss_mask"] != 0)).sum())


def count_token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes | None:
    """The bytes of the tokens of ``tokenizer``; None if they cannot be told token by token.

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
