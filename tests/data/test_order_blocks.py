"""Blocks of cached sample orders: a start reads the first ones, and a damaged one is refused when it is first read."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import gpt_dataset
from megatron.data.block_use import block_uses
from megatron.data.corpus_digests import BLOCK_BYTES, encode_file, file_digests, new_digests
from megatron.data.digests import seal
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.loader import build_loader
from megatron.data.order_cache import load_or_build
from megatron.data.sample_order import IndexArray
from megatron.errors import DataError

ROWS = 3 * BLOCK_BYTES // 8 + 1000
"""Of an array of pairs with four blocks, of which the last is short."""
HEADER_BYTES = 128
WANTED = np.random.default_rng(0).integers(1 << 31, size=(ROWS, 2)).astype(np.int32)
SENTENCE = (
    r"^The cached sample order .*pairs\.npy is damaged \(the digest of its bytes {} to {} does not match\): remove "
)


def load(directory: Path, array: npt.NDArray[Any] = WANTED, may_build: bool = True) -> IndexArray:
    """The array ``pairs`` of the entry in ``directory``."""

    def build() -> dict[str, npt.NDArray[Any]]:
        assert may_build, "built although it was cached"
        return {"pairs": array}

    description, shapes = {"class": "Pairs", "split": "train"}, {"pairs": array.shape}
    return load_or_build(str(directory), description, shapes=shapes, newer_than=0.0, build=build)["pairs"]


def file_of(directory: Path) -> Path:
    (path,) = directory.glob("*-pairs.npy")
    return path


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("entry")
    assert np.array_equal(load(directory)[:], WANTED)
    return directory


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bit=st.integers(8 * BLOCK_BYTES, 8 * (HEADER_BYTES + 8 * ROWS) - 1), data=st.data())
def test_a_flipped_bit_is_found_before_a_row_of_its_block_is_returned(
    entry: Path, bit: int, data: st.DataObject
) -> None:
    path, block = file_of(entry), bit // 8 // BLOCK_BYTES
    first = -(-(block * BLOCK_BYTES - HEADER_BYTES) // 8)
    end = min(first + BLOCK_BYTES // 8, ROWS)
    flip(path, bit)
    try:
        array = load(entry, may_build=False)
        others = np.delete(np.arange(ROWS), np.s_[first:end])
        assert np.array_equal(array[others], WANTED[others])
        assert array[first - 1].tolist() == WANTED[first - 1].tolist()
        row = data.draw(st.integers(first, end - 1))
        sentence = SENTENCE.format(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, HEADER_BYTES + 8 * ROWS))
        for rows in (
            row,
            row - ROWS,
            slice(row, row + 1),
            slice(first - 1, first + 1),
            slice(None),
            np.array([0, row]),
        ):
            with pytest.raises(DataError, match=sentence):
                array[rows]
    finally:
        flip(path, bit)


@pytest.mark.parametrize("bit", [3, 8 * 70, 8 * HEADER_BYTES, 8 * BLOCK_BYTES - 1])
def test_damage_in_the_first_block_is_mended_at_the_start(
    tmp_path: Path, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path)
    flip(file_of(tmp_path), bit)
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(load(tmp_path)[:], WANTED)
    assert f"{file_of(tmp_path)} is damaged" in caplog.text and "building it again" in caplog.text
    assert np.array_equal(load(tmp_path, may_build=False)[:], WANTED)


def test_what_the_sentence_says_mends_the_entry(tmp_path: Path) -> None:
    load(tmp_path)
    flip(file_of(tmp_path), 8 * 2 * BLOCK_BYTES)
    with pytest.raises(DataError, match="remove this file, and the next start builds it again"):
        load(tmp_path, may_build=False)[:]
    file_of(tmp_path).unlink()
    assert np.array_equal(load(tmp_path)[:], WANTED)


@pytest.mark.parametrize("rows", [ROWS, -ROWS - 1, np.array([ROWS])])
def test_a_row_that_does_not_exist_is_an_index_error(entry: Path, rows: int | npt.NDArray[np.int64]) -> None:
    with pytest.raises(IndexError):
        load(entry, may_build=False)[rows]
    assert load(entry, may_build=False)[ROWS:].shape == (0, 2)


def bytes_read() -> int:
    """Bytes that this process has read, and bytes of files that are mapped and were touched."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = sum(int(status[name].split()[0]) << 10 for name in ("RssFile", "RssShmem"))
    return int(Path("/proc/self/io").read_text().split()[1]) + mapped


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts the bytes")
@pytest.mark.parametrize("gigabytes", [1 / 64, 8])
def test_a_start_reads_few_bytes_whatever_the_size_of_the_order(tmp_path: Path, gigabytes: float) -> None:
    load(tmp_path, np.zeros((1, 2), np.int32))
    load(tmp_path, np.zeros((1, 2), np.int32))  # what Python loads at the first use is loaded
    rows = int(gigabytes * 2**30) // 8
    path = file_of(tmp_path)
    with path.open("wb") as file:  # a sparse file of zeros
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (rows, 2)})
        os.truncate(path, file.tell() + 8 * rows)
    (digests,) = tmp_path.glob("*-digests.json")
    digests.write_text(seal("digests", json.dumps({"format_version": 2, "files": {"pairs": zero_digests(path)}})))
    before = bytes_read()
    array = load(tmp_path, np.broadcast_to(np.int32(0), (rows, 2)), may_build=False)
    assert bytes_read() - before < 3 * BLOCK_BYTES
    assert array[rows - 1].tolist() == [0, 0]
    assert bytes_read() - before < 5 * BLOCK_BYTES


def zero_digests(path: Path) -> dict[str, int | str]:
    """The digests of a file that is zero after its first block."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first, middle, last = (new_digests() for _ in range(3))
        first.update(file.read(BLOCK_BYTES))
    middle.update(bytes(BLOCK_BYTES))
    last.update(bytes(size % BLOCK_BYTES))
    texts = [str(encode_file(file_digests(part))["blocks"]) for part in (first, middle, last)]
    return {"bytes": size, "blocks": texts[0] + texts[1] * (size // BLOCK_BYTES - 1) + texts[2]}


def test_an_entry_of_the_first_format_is_built_again_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It had one digest of each file."""
    load(tmp_path)
    (digests,) = tmp_path.glob("*-digests.json")
    record = {"bytes": file_of(tmp_path).stat().st_size, "xxh3_128": "0" * 32}
    digests.write_text(seal("digests", json.dumps({"format_version": 1, "files": {"pairs": record}})))
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(load(tmp_path)[:], WANTED)
    assert f"{digests} has format version 1, where this code reads 2: building it again" in caplog.text
    load(tmp_path, may_build=False)


def test_what_a_start_does_not_compare_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure after the build would otherwise be found in the middle of the run."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    load(tmp_path / "small", WANTED[:10])
    assert not synced
    load(tmp_path / "large")
    assert synced == [file_of(tmp_path / "large").stat().st_size]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300,000 documents of two tokens, so that every array of the order has several blocks."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "corpus")
    with IndexedDatasetWriter(prefix, 1000) as writer:
        writer.add_documents(np.random.default_rng(1).integers(1000, size=600_000), np.full(300_000, 2))
    return prefix


def dataset_of(corpus: str, cache: Path | None) -> GPTDataset:
    split = SampleSettings(seq_length=1, seed=1, split="1", cache_directory=None if cache is None else str(cache))
    return GPTDataset(IndexedDataset(corpus), 0, 599_000, split)


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
def test_no_sample_is_read_through_a_damaged_block(
    corpus: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = dataset_of(corpus, None)
    dataset_of(corpus, tmp_path)
    (path,) = tmp_path.glob(f"*-{name}.npy")
    flip(path, 8 * (path.stat().st_size - 3))
    monkeypatch.setattr(gpt_dataset, "build_sample_order", None)
    dataset = dataset_of(corpus, tmp_path)
    refused = 0
    samples = np.random.default_rng(2).integers(len(right), size=500)
    for index in samples.tolist():
        try:
            assert equal(dataset[index], right[index])
        except DataError as error:
            assert str(error).startswith(f"The cached sample order {path} is damaged")
            refused += 1
    assert 0 < refused < 500
    with pytest.raises(DataError, match="is damaged"):
        block_uses(dataset, samples)
    read = build_loader(
        dataset,
        vocab_size=1000,
        consumed_samples=len(dataset) - 4000,
        micro_batch_size=1000,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=1,
    )
    with pytest.raises(DataError, match="is damaged"):
        for _ in read:
            pass


def equal(one: Mapping[str, npt.NDArray[Any]], other: Mapping[str, npt.NDArray[Any]]) -> bool:
    return all(np.array_equal(one[key], other[key]) for key in (*one, *other))
