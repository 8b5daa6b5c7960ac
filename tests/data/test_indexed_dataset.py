"""The .bin/.idx files: byte-equal to Megatron-LM's, and damage is named in one sentence."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.indexed_dataset import IndexedDataset, check_token_range
from megatron.errors import DataError
from tests.data.corpora import CORPUS_A, CORPUS_B, golden_documents, md5, write

INDEX_OF_B = """
    4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000
    0a000000 04000000 06000000
    0000000000000000 1400000000000000 1c00000000000000
    0000000000000000 0100000000000000 0200000000000000 0300000000000000
"""


def test_files_equal_those_of_megatron_byte_for_byte(tmp_path: Path) -> None:
    a = write(tmp_path / "a", golden_documents(CORPUS_A))
    b = write(tmp_path / "b", golden_documents(CORPUS_B, start=500))
    assert md5(f"{a}.bin") == "e72c411bf04d1c1214ec55b9db499e95"
    assert md5(f"{a}.idx") == "045bc847e634ccdcb75bbbcc71b20c20"
    assert md5(f"{b}.bin") == "bea6878fcec7394ee1baedfaae60d70e"
    assert md5(f"{b}.idx") == "8ffc3e62e93cd366d1cbb4017ca19584"
    assert Path(f"{b}.idx").read_bytes() == bytes.fromhex(INDEX_OF_B)


def test_writing_in_bulk_gives_the_same_bytes(tmp_path: Path) -> None:
    documents = golden_documents(CORPUS_A)
    one_by_one = write(tmp_path / "one", documents)
    with IndexedDatasetWriter(str(tmp_path / "bulk"), 1000) as writer:
        writer.add_documents(np.concatenate(documents[:4]), [len(d) for d in documents[:4]])
        writer.add_documents(np.concatenate(documents[4:]), [len(d) for d in documents[4:]])
    for kind in (".bin", ".idx"):
        assert md5(one_by_one + kind) == md5(str(tmp_path / "bulk") + kind)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("vocab_size", [65_499, 65_500, 128_256])
def test_round_trip(tmp_path: Path, mmap: bool, vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    documents = [generator.integers(vocab_size, size=n).tolist() for n in (3, 0, 1, 50, 0)]
    dataset = IndexedDataset(write(tmp_path / "corpus", documents, vocab_size), mmap=mmap)
    assert dataset.dtype == (np.uint16 if vocab_size < 65_500 else np.int32)
    assert len(dataset) == 5 and dataset.num_tokens == 54
    assert dataset.sequence_lengths.tolist() == [3, 0, 1, 50, 0]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert [dataset.get(i).tolist() for i in range(5)] == documents
    assert dataset.get(3, 10).tolist() == documents[3][10:]
    assert dataset.get(3, 10, 5).tolist() == documents[3][10:15]
    with pytest.raises(IndexError):
        dataset.get(0, 2, 2)


def test_empty_corpus_and_trailing_modes_are_readable(tmp_path: Path) -> None:
    assert len(IndexedDataset(write(tmp_path / "empty", []))) == 0
    prefix = write(tmp_path / "modes", [[1, 2], [3]])
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(2))
    assert IndexedDataset(prefix).get(1).tolist() == [3]


def test_files_appear_only_when_complete(tmp_path: Path) -> None:
    old = write(tmp_path / "corpus", [[1, 2, 3]])
    files = ["corpus.bin", "corpus.digests.json", "corpus.idx"]
    before = [md5(str(tmp_path / name)) for name in files]
    with pytest.raises(KeyError), IndexedDatasetWriter(old, 1000) as writer:
        writer.add_document([4])
        raise KeyError
    assert sorted(os.listdir(tmp_path)) == files
    assert [md5(str(tmp_path / name)) for name in files] == before
    assert IndexedDataset(write(tmp_path / "corpus", [[4]])).get(0).tolist() == [4]


@pytest.mark.parametrize("token", [1000, -1, 70_000])
def test_writer_refuses_ids_outside_the_vocabulary(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match="vocabulary of 1000 ids"):
        write(tmp_path / "corpus", [[1, token]])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("prefix", "remedy"),
    [
        ("corpus", "did you mean {}/corpus_text_document?"),
        ("corpus_txt_document", "did you mean {}/corpus_text_document?"),
        ("", "did you mean {}/corpus_text_document?"),
        ("corpus_text_document.bin", "set --data-path to {}/corpus_text_document, the prefix of both files."),
        ("corpus_text_document.idx", "set --data-path to {}/corpus_text_document, the prefix of both files."),
        ("corpus.jsonl", "is a text, so tokenize it with tools/preprocess_data.py --input {}/corpus.jsonl"),
        ("other", "set --data-path to prefixes without .bin or .idx, and make"),
        ("nowhere/other", "set --data-path to prefixes without .bin or .idx, and make"),
    ],
)
def test_a_corpus_that_is_not_there_is_answered_with_what_is(tmp_path: Path, prefix: str, remedy: str) -> None:
    for name in ("corpus_text_document.idx", "corpus_text_document.bin", "corpus.jsonl"):
        (tmp_path / name).touch()
    path = str(tmp_path / prefix).rstrip("/")
    with pytest.raises(DataError) as caught:
        IndexedDataset(path)
    assert str(caught.value).startswith(f"{path}.idx does not exist: ")
    assert remedy.format(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "place", "content", "sentence"),
    [
        (".idx", None, b"", r"corpus\.idx does not exist: set --data-path to prefixes"),
        (".bin", None, b"", r"corpus\.bin does not exist: set --data-path to prefixes"),
        (".idx", slice(None), b"", r"corpus\.idx is too short to be an index: write the data again"),
        (".idx", slice(7), b"PARQUET", r"corpus\.idx is not an index of tokens.*: write the data again"),
        (".idx", slice(9, 10), b"\x02", r"corpus\.idx has format version 2, .*: write the data again"),
        (".idx", slice(17, 18), b"\x09", r"corpus\.idx has unknown token dtype code 9 .*: write the data"),
        (".idx", slice(-1, None), b"", r"corpus\.idx has 101 bytes, but its header requires 102: write the"),
        (".bin", slice(-1, None), b"", r"corpus\.bin has 39 bytes, but .*corpus\.idx requires 40: copy it again"),
        (".idx", slice(94, 95), b"\x07", r"corpus\.idx has document boundaries that do not match"),
    ],
)
def test_damage_is_one_sentence_with_file_and_remedy(
    tmp_path: Path, kind: str, place: slice | None, content: bytes, sentence: str
) -> None:
    prefix = write(tmp_path / "corpus", golden_documents(CORPUS_B))
    path = Path(prefix + kind)
    damaged = bytearray(path.read_bytes())
    path.unlink()
    if place is not None:
        damaged[place] = content
        path.write_bytes(damaged)
    with pytest.raises(DataError, match=sentence) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mmap", [True, False])
def test_another_tokenizer_is_noticed(tmp_path: Path, mmap: bool) -> None:
    prefix = write(tmp_path / "corpus", [list(range(100))] * 1000)
    check_token_range(IndexedDataset(prefix, mmap), 100, prefix)
    with pytest.raises(DataError, match=r"corpus\.bin holds token id 99, .*tokenizer does not match the data"):
        check_token_range(IndexedDataset(prefix, mmap), 99, prefix)
    check_token_range(IndexedDataset(write(tmp_path / "empty", [])), 1, "empty")


@pytest.mark.parametrize(("corpora", "runs"), [(1, 256), (16, 256), (64, 64), (1000, 16)])
def test_a_start_reads_less_of_each_corpus_of_a_large_blend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpora: int, runs: int
) -> None:
    dataset, asked = IndexedDataset(write(tmp_path / "corpus", [[1] * 1_100_000])), list[tuple[int, int]]()
    tokens_of = dataset.runs

    def record(places: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        asked.extend(places)
        return tokens_of(places)

    monkeypatch.setattr(dataset, "runs", record)
    check_token_range(dataset, 2, dataset.prefix, corpora)
    assert len(asked) == runs and asked[-1] == (1_100_000 - 4096, 4096)
