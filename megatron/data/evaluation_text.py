"""Texts to evaluate: files of text, tokenized in memory, and corpora."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.data import TokenizerConfig
from megatron.data.evaluation_data import TokenArray, TokenStream
from megatron.data.indexed_dataset import IndexedDataset, check_token_range
from megatron.data.text_inputs import InputFormat, list_sources, parse_documents, place_of, read_batches, whole_ranges
from megatron.data.tokenizers import shared_tokenizer
from megatron.errors import DataError


@dataclass(frozen=True)
class EvaluationText:
    """All tokens of a text."""

    stream: TokenStream
    """Every document ends with the end-of-document token if it is tokenized here; a corpus is as it is."""
    num_documents: int
    num_bytes: int | None
    """UTF-8 bytes of the documents; None for a corpus, and where ids are the text (NullTokenizer)."""


def read_text(name: str, tokenizer: TokenizerConfig, form: InputFormat, index_cache: str | None) -> EvaluationText:
    """The corpus with the prefix ``name``, or else the text of the file, directory or glob ``name``.

    Raises :class:`DataError`.
    """
    stem, ending = os.path.splitext(name)
    if ending in (".bin", ".idx"):
        raise DataError(f"--input {name} is one of the two files of a corpus: use its prefix, {stem}.")
    if os.path.exists(f"{name}.idx"):
        return _read_corpus(name, tokenizer, index_cache)
    return _read_documents(name, tokenizer, form)


def _read_corpus(prefix: str, config: TokenizerConfig, index_cache: str | None) -> EvaluationText:
    corpus = IndexedDataset(prefix, index_cache=index_cache)
    corpus.check_sequences()
    check_token_range(corpus, shared_tokenizer(config).vocab_size, prefix)
    _check_not_empty(prefix, corpus.num_tokens)
    return EvaluationText(corpus, len(corpus.document_indices) - 1, None)


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
    ids = np.concatenate(parts)
    _check_not_empty(name, len(ids) - num_documents)
    has_bytes = config.tokenizer_type != "NullTokenizer"
    return EvaluationText(TokenArray(ids), num_documents, num_bytes if has_bytes else None)


def _check_not_empty(name: str, num_tokens: int) -> None:
    if not num_tokens:
        raise DataError(f"--input {name} has no tokens: use another text.")


def names_of(inputs: Sequence[str]) -> list[str]:
    """A short name for each input, each only once."""
    stems = [os.path.basename(name.rstrip("/")) or name for name in inputs]
    return [stem if stems.count(stem) == 1 else name for stem, name in zip(stems, inputs, strict=True)]
