"""Cached sample orders: a start reads the first blocks, and a damaged block is refused when it is first read."""

import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.corpus_digests import block_uses
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.digests import BLOCK_BYTES, FileDigests, new_digests, seal
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_cache import load_or_build
from megatron.data.sample_order import IndexArray
from megatron.errors import DataError
from tests.data.corpora import CORPUS_A, golden_documents, settings_of, stamps, tokens_of, write
from tests.data.corpora import load as load_samples
from tests.data.file_damage import DAMAGES, flip

ROWS = 3 * BLOCK_BYTES // 8 + 1000
"""Of an array of pairs with four blocks, of which the last is short."""
HEADER_BYTES = 128
WANTED = np.random.default_rng(0).integers(1 << 31, size=(ROWS, 2)).astype(np.int32)
SENTENCE = (
    r"^The cached sample order .*pairs\.npy is damaged \(the digest of its bytes {} to {} does not match\): "
    "remove this file, and the next start builds it again"
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
    assert caplog.text.count(f"The cached sample order {file_of(tmp_path)} is damaged") == 1
    assert "building it again" in caplog.text
    assert np.array_equal(load(tmp_path, may_build=False)[:], WANTED)


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
    texts = [str(FileDigests.of(part).encode()["blocks"]) for part in (first, middle, last)]
    return {"bytes": size, "blocks": texts[0] + texts[1] * (size // BLOCK_BYTES - 1) + texts[2]}


@pytest.mark.parametrize("content", [None, {"bytes": 0, "xxh3_128": "0" * 32}])
def test_an_entry_without_digests_of_this_format_is_built_again_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: dict[str, Any] | None
) -> None:
    """Megatron-LM and older versions write none, and the first format had one digest of each file."""
    load(tmp_path)
    (digests,) = tmp_path.glob("*-digests.json")
    digests.unlink()
    if content is not None:
        digests.write_text(seal("digests", json.dumps({"format_version": 1, "files": {"pairs": content}})))
    flip(file_of(tmp_path), 8 * 2 * BLOCK_BYTES)
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(load(tmp_path)[:], WANTED)
    reason = "has no digests (another program or an older version wrote it)"
    said = reason if content is None else f"{digests} has format version 1, where this code reads 2: building it again"
    assert caplog.text.count(said) == 1
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
def test_no_sample_is_read_through_a_damaged_block(corpus: str, tmp_path: Path, name: str) -> None:
    right = dataset_of(corpus, None)
    dataset_of(corpus, tmp_path)
    (path,) = tmp_path.glob(f"*-{name}.npy")
    flip(path, 8 * (path.stat().st_size - 3))
    before = stamps(tmp_path)
    dataset = dataset_of(corpus, tmp_path)
    assert stamps(tmp_path) == before, "built although it was cached"
    refused = 0
    samples = np.random.default_rng(2).integers(len(right), size=500)
    for index in samples.tolist():
        try:
            sample, wanted = dataset[index], right[index]
            assert all(np.array_equal(sample[key], array) for key, array in wanted.items())
        except DataError as error:
            assert str(error).startswith(f"The cached sample order {path} is damaged")
            refused += 1
    assert 0 < refused < 500
    with pytest.raises(DataError, match="is damaged"):
        block_uses(dataset, samples)
    with pytest.raises(DataError, match="is damaged"):
        list(load_samples(dataset, consumed_samples=len(dataset) - 4000, micro_batch_size=1000, num_workers=1))


# --- entries of whole corpora --------------------------------------------------------------------------------


def cached(num_samples: int = 7, cache: str | None = "cache") -> GPTDataset:
    return GPTDataset(IndexedDataset("a"), 0, num_samples, settings_of(cache=cache))


def test_order_is_cached_under_the_names_of_megatron(corpora: Path) -> None:
    built = cached()
    stem = "7eed49f6baa69ba17261e1457380063c-GPTDataset-train"
    arrays = [f"{name}_index.npy" for name in ("document", "sample", "shuffle")]
    assert sorted(os.listdir("cache")) == [f"{stem}-{n}" for n in ("description.txt", "digests.json", *arrays)]
    before = stamps("cache")
    with mock.patch("megatron.data.gpt_dataset.build_sample_order", side_effect=AssertionError):
        assert tokens_of(cached()) == tokens_of(built)
    assert stamps("cache") == before


def test_order_of_a_corpus_from_a_clock_ahead_is_cached_too(corpora: Path) -> None:
    """Otherwise every rank would find it too old, and build it for itself, one after the other."""
    ahead = time.time() + 100.5
    os.utime("a.idx", (ahead, ahead))
    cached()
    before = stamps("cache")
    cached()
    assert stamps("cache") == before


def newer_corpus_of_the_same_size() -> None:
    for name in os.listdir("cache"):
        os.utime(f"cache/{name}", (1, 1))
    write("a", golden_documents(CORPUS_A[::-1]))


def another_corpus_of_the_same_age() -> None:
    write("a", golden_documents([*CORPUS_A, 20]))
    os.utime("a.idx", (1, 1))


@pytest.mark.parametrize("change", [newer_corpus_of_the_same_size, another_corpus_of_the_same_age])
def test_cache_of_a_former_corpus_of_this_name_is_built_anew(corpora: Path, change: Callable[[], None]) -> None:
    old = cached().order.sample_index[:]
    change()
    new = cached().order.sample_index[:]
    assert np.array_equal(new, cached(cache=None).order.sample_index[:]) and not np.array_equal(new, old)


def test_unwritable_cache_is_one_sentence(corpora: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot write the sample order to a\.bin/cache .*--data-cache-path"):
        cached(cache="a.bin/cache")


# --- damaged files: built again with a warning; never other samples, never a traceback -----------------------

Order = list[list[int]]


def order(cache: str | None) -> Order:
    """Every array of a blend of two corpora and of both corpora, read through the cache."""
    children = [GPTDataset(IndexedDataset(name), 0, 300, settings_of(cache=cache)) for name in ("a", "b")]
    blend = BlendedDataset(children, [0.6, 0.4], 400, 0, cache)
    arrays = [*children[0].order, *children[1].order, blend.dataset_index, blend.dataset_sample_index]
    return [array[:].ravel().tolist() for array in arrays]


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """Corpora in the working directory with a cache of their orders in ``cache``; the order."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(3)
    for name in ("a", "b"):
        write(name, [generator.integers(1000, size=n).tolist() for n in generator.integers(1, 30, size=60)])
    wanted = order(None)
    assert order("cache") == wanted
    return wanted


def damage_the_cache(wanted: Order, trials: int, seed: int) -> tuple[int, int]:
    """Damage one file of the cache per trial; how many entries were built again, and how many were used."""
    good = {path: path.read_bytes() for path in sorted(Path("cache").iterdir())}
    rebuilt = 0
    for trial in range(trials):
        chance = random.Random(f"{seed} {trial}")
        victim, damage = chance.choice(list(good)), chance.choice(list(DAMAGES))
        DAMAGES[damage](victim, chance)
        before = None if damage == "missing" else victim.stat().st_mtime_ns
        assert order("cache") == wanted, f"trial {trial}: {damage} of {victim} was read"
        rebuilt += not victim.exists() or victim.stat().st_mtime_ns != before
        if victim.name.endswith("description.txt"):  # nothing reads it
            victim.write_bytes(good[victim])
        assert sorted(Path("cache").iterdir()) == list(good)
        assert all(path.read_bytes() == content for path, content in good.items()), f"trial {trial}: {damage}"
    return rebuilt, trials - rebuilt


@pytest.mark.parametrize("trials", [60, pytest.param(400, marks=pytest.mark.whole_matrix)])
def test_of_damaged_caches_none_gives_another_order_and_none_a_traceback(damaged: Order, trials: int) -> None:
    rebuilt, unread = damage_the_cache(damaged, trials, seed=trials)
    print(f"{trials} damaged caches: {rebuilt} built again, {unread} not read or unchanged")
    assert rebuilt > trials // 2


def test_waiting_processes_do_not_read_a_damaged_entry_again_and_again(damaged: Order) -> None:
    """The digests go first when an entry is built again, so whoever waits finds no entry."""
    seen: list[bool] = []
    real = np.save

    def look(*arguments: object, **keywords: object) -> None:
        seen.append(len(list(Path("cache").glob("*-digests.json"))) == 2)
        real(*arguments, **keywords)  # type: ignore[arg-type]

    os.truncate(next(iter(Path("cache").glob("*GPTDataset*-shuffle_index.npy"))), 1)
    with mock.patch.object(np, "save", look):
        assert order("cache") == damaged
    assert seen == [True] * 3
