"""Tokenize batches of documents: the work of a process of tools/preprocess_data.py."""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.data import TokenizerConfig
from megatron.data.indexed_dataset import token_dtype
from megatron.data.text_inputs import (
    BadDocument,
    Batch,
    InputFormat,
    SourceRange,
    parse_documents,
    place_of,
    read_batches,
    text_bytes,
)
from megatron.data.tokenizers import Tokenizer, build_tokenizer
from megatron.data.verified_encoder import TokenizedTexts
from megatron.errors import DataError

_NAMED_BAD_DOCUMENTS = 10  # per batch; all are counted


class EncodedKey(NamedTuple):
    """The tokens of a batch for one key."""

    tokens: npt.NDArray[np.integer[Any]]
    """All documents, concatenated, in the dtype of the file unless an id is outside of the vocabulary."""
    lengths: npt.NDArray[np.int32]
    """Tokens of each document that is not empty."""
    empty: int
    """Documents without tokens, which are dropped."""


class EncodedBatch(NamedTuple):
    """The result of a worker."""

    documents: int
    text_bytes: int
    stored_bytes: int
    keys: list[EncodedKey]
    num_bad: int
    bad: list[BadDocument]
    """The first skipped documents."""


class EncodeTask(NamedTuple):
    tokenizer: TokenizerConfig
    form: InputFormat
    append_eod: bool
    skip_bad_documents: bool


@functools.cache
def shared_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """One tokenizer per process; forked workers inherit their parent's."""
    tokenizer = build_tokenizer(config)
    tokenizer.tokenize_to_arrays([])
    return tokenizer


def encode(part: Batch | SourceRange, task: EncodeTask) -> list[EncodedBatch]:
    """Tokenize a batch, or the documents of a range of a file. Raises :class:`DataError` as :func:`encode_batch`."""
    batches = read_batches([part], task.form) if isinstance(part, SourceRange) else [part]
    return [encode_batch(batch, task) for batch in batches]


def encode_batch(batch: Batch, task: EncodeTask, tokenizer: Tokenizer | None = None) -> EncodedBatch:
    """Tokenize a batch. Raises :class:`DataError` with the place of a bad document, unless they are skipped."""
    tokenizer = tokenizer or shared_tokenizer(task.tokenizer)
    good: list[tuple[int, list[str]]] = []
    bad: list[tuple[int, str]] = []
    for number, texts in parse_documents(batch, task.form.keys, "--json-keys"):
        if isinstance(texts, str):
            bad.append((number, texts))
            if not task.skip_bad_documents:
                break
        else:
            good.append((number, texts))
    encoded = _tokenize(good, len(task.form.keys), tokenizer)
    if encoded is None:
        documents, good = good, []
        for number, texts in documents:
            try:
                tokenizer.tokenize_batch(texts)
                good.append((number, texts))
            except DataError as error:
                bad.append((number, f"cannot be tokenized: {str(error).rstrip('.')}"))
        bad.sort()
        encoded = _tokenize(good, len(task.form.keys), tokenizer) or []
    named = [BadDocument(place_of(batch, number), reason) for number, reason in bad[:_NAMED_BAD_DOCUMENTS]]
    if bad and not task.skip_bad_documents:
        raise DataError(f"{named[0].place} {named[0].reason}, or skip such documents with --skip-bad-documents.")
    eod = tokenizer.eod if task.append_eod else None
    keys = [_join_documents(texts, eod, tokenizer.vocab_size) for texts in encoded]
    return EncodedBatch(len(good), text_bytes(batch), batch.stored_bytes, keys, len(bad), named)


def _tokenize(
    documents: list[tuple[int, list[str]]], num_keys: int, tokenizer: Tokenizer
) -> list[TokenizedTexts] | None:
    """The tokens of every key; None if the tokenizer refuses a text."""
    try:
        return [tokenizer.tokenize_to_arrays([texts[key] for _, texts in documents]) for key in range(num_keys)]
    except DataError:
        return None


def _join_documents(texts: TokenizedTexts, eod: int | None, vocab_size: int) -> EncodedKey:
    lengths = texts.lengths[texts.lengths > 0]
    empty = texts.lengths.size - lengths.size
    # In the dtype of the file here, so that less goes to the process that writes; it refuses other ids.
    fits = not texts.tokens.size or 0 <= int(texts.tokens.min()) <= int(texts.tokens.max()) < vocab_size
    dtype = token_dtype(vocab_size) if fits else texts.tokens.dtype
    if eod is None:
        return EncodedKey(texts.tokens.astype(dtype, copy=False), lengths, empty)
    tokens = np.empty(texts.tokens.size + lengths.size, dtype)
    start = 0
    for number, end in enumerate(np.cumsum(lengths, dtype=np.int64).tolist()):
        tokens[start + number : end + number] = texts.tokens[start:end]
        tokens[end + number] = eod
        start = end
    return EncodedKey(tokens, lengths + 1, empty)
