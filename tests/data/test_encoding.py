"""Batches of tokens: in the dtype of the file, with the end of every document, and no id changed silently."""

from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.data import encoding
from megatron.data.encoding import EncodedBatch, EncodeTask, encode_batch
from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.text_inputs import Batch, InputFormat
from megatron.data.tokenizers import NullTokenizer
from megatron.errors import DataError


class UncheckedTokenizer(NullTokenizer):
    """Returns ids outside of the vocabulary, too, as a defective library might."""

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def encoded(monkeypatch: pytest.MonkeyPatch, text: str, vocab_size: int, append_eod: bool) -> EncodedBatch:
    monkeypatch.setattr(encoding, "shared_tokenizer", lambda config: UncheckedTokenizer(vocab_size))
    batch = Batch("text.txt", "line", 1, 0, len(text), text.encode())
    return encode_batch(batch, EncodeTask(TokenizerConfig("NullTokenizer"), InputFormat(), append_eod, False))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (100_000, np.int32)])
@pytest.mark.parametrize("append_eod", [True, False])
def test_tokens_have_the_dtype_of_the_file(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, dtype: type, append_eod: bool
) -> None:
    (key,) = encoded(monkeypatch, "1 2 3\n\n4\n   \n5 6\n", vocab_size, append_eod).keys
    end = [UncheckedTokenizer(vocab_size).eod] if append_eod else []
    assert key.tokens.tolist() == [1, 2, 3, *end, 4, *end, 5, 6, *end]
    assert key.tokens.dtype == dtype
    assert key.lengths.tolist() == [length + len(end) for length in (3, 1, 2)]


@pytest.mark.parametrize("bad", [65_536 + 7, -1])
def test_ids_outside_of_the_vocabulary_reach_the_writer_unchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: int
) -> None:
    (key,) = encoded(monkeypatch, f"1 {bad} 3\n", 100, True).keys
    with pytest.raises(DataError, match=str(bad)), IndexedDatasetWriter(str(tmp_path / "out"), 100) as writer:
        writer.add_documents(key.tokens, key.lengths)
    assert not list(tmp_path.iterdir())
