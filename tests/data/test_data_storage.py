"""Corpora behind a URL are read, copied and merged as local ones; trouble is one sentence with the file."""

import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatron.commands.datasets import InspectConfig, inspect
from megatron.data.corpus_writer import merge_datasets
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.storage import RemoteFile
from megatron.errors import ConfigError, DataError
from tests.data.corpora import CORPUS_A, build, golden_documents, load, stamps, tokens_of, write

pytestmark = pytest.mark.usefixtures("corpora")
BOTH = ("0.7", "a", "0.3", "b")


# --- remote data ---------------------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Any:
    """Both corpora in a file system of fsspec."""
    system = fsspec.filesystem("memory")
    for name in os.listdir("."):
        if name.endswith((".bin", ".idx", ".digests.json")):
            system.pipe_file(f"/data/{name}", Path(name).read_bytes())
    yield system
    system.rm("/data", recursive=True)


REMOTE = ("0.7", "memory://data/a", "0.3", "memory://data/b")


def test_remote_corpora_give_the_samples_of_local_ones(remote: Any) -> None:
    assert tokens_of(build(*REMOTE, data_cache_path="there")[0]) == tokens_of(build(*BOTH)[0])
    copy = pickle.loads(pickle.dumps(IndexedDataset("memory://data/a", index_cache="cache")))
    assert [copy.get(i).tolist() for i in range(10)] == golden_documents(CORPUS_A)


def test_remote_corpora_are_merged_and_inspected_as_local_ones(remote: Any) -> None:
    merge_datasets(["memory://data/a", "memory://data/b"], "there")
    merge_datasets(["a", "b"], "here")
    for kind in (".bin", ".idx"):
        assert Path(f"there{kind}").read_bytes() == Path(f"here{kind}").read_bytes()
    lines = list(inspect(InspectConfig("memory://data/a", documents=(0,), check=True)))
    assert lines == list(inspect(InspectConfig("a", documents=(0,), check=True)))


def test_loader_processes_open_their_own_file_systems(remote: Any) -> None:
    dataset, _, _ = build(*REMOTE, data_cache_path="cache")
    loader = load(dataset, micro_batch_size=2, num_workers=2)
    for start in (0, 2, 4):
        assert next(loader)["tokens"].tolist() == [dataset[start + i]["tokens"].tolist() for i in range(2)]


def test_a_file_system_is_not_shared_over_a_fork(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of s3fs and its like hang in a forked process."""
    file = RemoteFile("memory://data/a.bin")
    opened: list[str] = []

    def open_again(url: str) -> tuple[Any, str]:
        opened.append(url)
        return remote, "/data/a.bin"

    monkeypatch.setattr("megatron.data.storage.file_system", open_again)
    file.read_ranges([(0, 4)])
    assert opened == []
    monkeypatch.setattr(os, "getpid", lambda: -1)
    file.read_ranges([(0, 4)])
    assert opened == ["memory://data/a.bin"]


def test_index_is_copied_once_and_again_when_it_changes(remote: Any) -> None:
    def read() -> list[list[int]]:
        return tokens_of(build(*REMOTE, data_cache_path="cache", object_storage_cache_path="indices")[0])

    first = read()
    assert sorted(name.partition("-")[2] for name in os.listdir("indices")) == ["a.idx", "b.idx"]
    before = stamps("indices"), stamps("cache")
    assert read() == first
    assert (stamps("indices"), stamps("cache")) == before, "copied or built again"
    write("a", golden_documents(CORPUS_A[::-1]))
    for kind in (".bin", ".idx"):
        remote.pipe_file(f"/data/a{kind}", Path(f"a{kind}").read_bytes())
    assert read() == tokens_of(build(*BOTH, data_cache_path="local")[0]) != first


@pytest.mark.parametrize(
    ("prefix", "flags", "sentence"),
    [
        ("memory://data/c", {}, "memory://data/c.idx does not exist: set --data-path to prefixes without"),
        ("nosuch://data/a", {}, "nosuch://data/a.idx cannot be opened .*nosuch"),
        ("memory://data/a", {"data_cache_path": None}, "corpus memory://data/a is remote: .*--data-cache-path"),
        ("memory://data/a", {"object_storage_cache_path": "a.bin/x"}, "Cannot write a copy .*a.bin/x .*--object-stor"),
        ("memory://data/short", {}, r"memory://data/short.bin has 3 bytes, but memory://data/short.idx requires 40"),
        ("memory://data/wrong", {}, r"memory://data/wrong.idx is not an index of tokens.*write the data again"),
    ],
)
def test_remote_trouble_is_one_sentence(remote: Any, prefix: str, flags: dict[str, Any], sentence: str) -> None:
    remote.pipe_file("/data/short.bin", b"abc")
    remote.pipe_file("/data/short.idx", Path("b.idx").read_bytes())
    remote.pipe_file("/data/wrong.bin", b"abc")
    remote.pipe_file("/data/wrong.idx", b"PARQUET" * 20)
    with pytest.raises((ConfigError, DataError), match=sentence) as caught:
        build(prefix, **{"data_cache_path": "cache", **flags})
    assert "\n" not in str(caught.value)


def test_a_broken_connection_is_named_with_its_file(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, _, _ = build(*REMOTE, data_cache_path="cache")

    def fail(*arguments: object, **keywords: object) -> None:
        raise TimeoutError("no answer\nafter 60 s")

    monkeypatch.setattr(type(remote), "cat_ranges", fail)
    with pytest.raises(DataError, match=r"memory://data/[ab]\.bin cannot be read \(no answer after 60 s\): check"):
        dataset[0]


def test_documents_of_a_sample_are_asked_for_at_the_same_time(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = IndexedDataset("memory://data/a", index_cache="cache")
    asked: list[int] = []
    read = RemoteFile.read_ranges

    def count(file: RemoteFile, ranges: Any) -> list[bytes]:
        asked.append(len(ranges))
        return read(file, ranges)

    monkeypatch.setattr(RemoteFile, "read_ranges", count)
    parts = corpus.ranges([(0, 2, None), (1, 0, None), (4, 0, 0), (2, 1, 2)])
    assert asked == [4]
    documents = golden_documents(CORPUS_A)
    assert np.concatenate(parts).tolist() == documents[0][2:] + documents[1] + documents[2][1:3]
