"""Corpora for each split, files that name them, and data that is remote."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatron.commands.inspect_dataset import InspectConfig, inspect
from megatron.config.data import DataConfig
from megatron.data.corpus_writer import merge_datasets
from megatron.data.dataset_builder import Blend, Sources, read_sources
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.indexed_dataset import IndexedDataset, check_document_ends
from megatron.data.storage import RemoteFile
from megatron.errors import ConfigError, DataError, UserError
from tests.data.corpora import CORPUS_A, build, golden_documents, load, stamps, tokens_of, write

pytestmark = pytest.mark.usefixtures("corpora")
BOTH = ("0.7", "a", "0.3", "b")


# --- the forms of the flags ----------------------------------------------------------------------------------


def test_every_form_names_the_same_corpora() -> None:
    Path("blend.txt").write_text("0.7 a\n0.3 b\n")
    Path("splits.json").write_text(json.dumps({"train": "0.7 a 0.3 b", "valid": ["b"], "test": None}))
    both = Blend(["a", "b"], [0.7, 0.3])
    assert read_sources(DataConfig(data_path=BOTH)) == Sources((both,) * 3, "969, 30, 1")
    assert read_sources(DataConfig(data_args_path="blend.txt")) == Sources((both,) * 3, "969, 30, 1")
    apart = Sources((both, Blend(["b"], None), None), None)
    assert read_sources(DataConfig(train_data_path=BOTH, valid_data_path=("b",))) == apart
    assert read_sources(DataConfig(per_split_data_args_path="splits.json")) == apart
    assert [apart.has(index) for index in range(3)] == [True, True, False]
    assert apart.prefixes == ["a", "b"]
    shared = read_sources(DataConfig(data_path=("a",), split="9,1"))
    assert [shared.has(index) for index in range(3)] == [True, True, False]


def test_corpora_of_a_split_are_that_split_as_a_whole() -> None:
    """With the order that Megatron-LM gives a corpus which is all train (its seed does not know of splits)."""
    train, valid, test = build(counts=(7, 1, 0), train_data_path=("a",), valid_data_path=("b",))
    whole, _, _ = build("a", counts=(7, 0, 0))
    assert tokens_of(train) == tokens_of(whole)
    assert test is None and sorted(set(valid.order.document_index[:].tolist())) == [0, 1, 2]
    assert train.description["split"] is None and train.description["split_matrix"] is None
    assert (train.description["index_split"], valid.description["index_split"]) == ("train", "valid")


def test_single_corpus_of_a_split_loses_its_weight_and_pairs_keep_theirs() -> None:
    train, valid, _ = build(counts=(7, 5, 0), train_data_path=("1", "a"), valid_data_path=BOTH)
    assert isinstance(train, GPTDataset) and train.description["num_samples"] == 7
    assert isinstance(valid, BlendedDataset) and valid.description["weights"] == [0.7, 0.3]
    assert isinstance(build("1", "a")[0], BlendedDataset)


def test_surplus_and_threads_change_what_is_built_and_nothing_else() -> None:
    (plain, _, _), (more, _, _) = build(*BOTH), build(*BOTH, mid_level_dataset_surplus=1.0)
    assert [child["num_samples"] for child in plain.description["datasets"]] == [10, 5]
    assert [child["num_samples"] for child in more.description["datasets"]] == [18, 8]
    threaded, _, _ = build(*BOTH, num_dataset_builder_threads=4, data_cache_path="other")
    assert tokens_of(threaded) == tokens_of(plain)


BLEND = {"data_args_path": "file"}
PER_SPLIT = {"per_split_data_args_path": "file"}
ONE_OBJECT = "must contain one object with the key train"
SECRET = r"--data-args-path https://\*\*\*@host/a contains a password"
THIRD: dict[str, Any] = {"counts": (1, 1, 0), "split": "2,1"}


@pytest.mark.parametrize(
    ("flags", "content", "sentence"),
    [
        ({"data_args_path": "nowhere"}, None, r"The file of data arguments nowhere cannot be read \(No such file"),
        ({"data_args_path": "a.bin"}, None, r"a\.bin is not text \(.*\): use another"),
        (BLEND, " \n", "--data-args-path file lists no corpus"),
        (BLEND, "0 a 0 b", "--data-args-path has weights .*must not be negative or all zero"),
        (BLEND, "-1 a 2 b", "--data-args-path has weights .*must not be negative"),
        (BLEND, "1 https://me:hidden@host/a", SECRET),
        (BLEND, "https://hidden@host/a", SECRET),
        (PER_SPLIT, "{", "--per-split-data-args-path file is not JSON"),
        (PER_SPLIT, "[" * 100_000, "--per-split-data-args-path file is not JSON"),
        (PER_SPLIT, '["a"]', ONE_OBJECT),
        (PER_SPLIT, '{"valid": ["a"]}', ONE_OBJECT),
        (PER_SPLIT, '{"train": ["a"], "dev": ["b"]}', ONE_OBJECT),
        (PER_SPLIT, '{"train": ["a"], "valid": 1}', ONE_OBJECT),
        (PER_SPLIT, '{"train": [0, "a"]}', "The train path has weights"),
        (PER_SPLIT, '{"train": ["ftp://me:hidden@host/a"]}', "The train path ftp://.*password"),
        ({"train_data_path": ("a",)}, None, "5 samples of the valid split are needed, but --valid-data-path gives it"),
        ({"train_data_path": ("a",), "valid_data_path": ("b",), "seq_length": 30}, None, "has 20 tokens.*give it more"),
        ({}, None, "There is no corpus: set --data-path"),
        ({"data_path": ("a",), "seq_length": None}, None, "--seq-length is missing"),
        ({"data_path": ("nowhere",)}, None, r"nowhere\.idx does not exist"),
        (
            {"data_path": ("a",), "split": "1"},
            None,
            "5 samples of the valid split are needed, but --split '1' gives it",
        ),
        ({"data_path": ("a",), "split": "x"}, None, "--split 'x' must be"),
        ({"data_path": ("b",), **THIRD}, None, "The valid split of b has 6 tokens in 1 documents"),
        ({"data_path": ("b", "b"), **THIRD}, None, "No corpus of --data-path has tokens for one sample"),
    ],
)
def test_bad_files_and_splits_are_one_sentence(flags: Any, content: str | None, sentence: str) -> None:
    if content is not None:
        Path("file").write_text(content)
    with pytest.raises(UserError, match=sentence) as caught:
        build(**{"counts": (1, 5, 0), **flags})
    assert "\n" not in str(caught.value)


# --- damage that only the whole index shows ------------------------------------------------------------------

LENGTHS_AT, OFFSETS_AT = 34, 34 + 4 * len(CORPUS_A)


@pytest.mark.parametrize(
    ("place", "value"), [(LENGTHS_AT + 4 * 3, struct.pack("<i", -4)), (OFFSETS_AT + 8 * 3, struct.pack("<q", 94))]
)
def test_a_sequence_outside_of_the_tokens_is_named(place: int, value: bytes) -> None:
    with open("a.idx", "r+b") as file:
        file.seek(place)
        file.write(value)
    with pytest.raises(DataError, match=r"a\.idx places sequence 3 .*outside of a\.bin: write the data again"):
        build("a")


# --- ends of documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["reset_attention_mask", "dataloader_inter_document_masking", "reset_position_ids"])
def test_flags_for_documents_refuse_a_corpus_without_ends(flag: str) -> None:
    write("endless", [list(range(n)) for n in (9, 0, 30, 4, 40)])
    build("endless", eod_mask_loss=True)
    with pytest.raises(DataError, match=r"None of 4 documents of endless ends with .* 999.*--append-eod, or remove"):
        build("endless", **{flag: True})
    build("a", **{flag: True})


def test_some_documents_may_lack_their_end() -> None:
    write("mixed", [[1, 2], [3, 999], [4]])
    check_document_ends(IndexedDataset("mixed"), 999)
    write("empty", [[], []])
    check_document_ends(IndexedDataset("empty"), 999)


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
