"""Corpora behind a URL are read as local ones; one process builds while the others wait, whatever becomes of it."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest

from megatron.commands.datasets import InspectConfig, inspect
from megatron.data.corpus_writer import merge_datasets
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.storage import RemoteFile, load_or_build_once
from megatron.errors import ConfigError, DataError
from megatron.operation.lease import Claim, Owner
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
    corpus = IndexedDataset("memory://data/a", index_cache="cache")
    assert [corpus.get(i).tolist() for i in range(10)] == golden_documents(CORPUS_A)


def test_remote_corpora_are_merged_and_inspected_as_local_ones(remote: Any) -> None:
    merge_datasets(["memory://data/a", "memory://data/b"], "there")
    merge_datasets(["a", "b"], "here")
    for kind in (".bin", ".idx"):
        assert Path(f"there{kind}").read_bytes() == Path(f"here{kind}").read_bytes()
    lines = list(inspect(InspectConfig("memory://data/a", documents=(0,), check=True)))
    assert lines == list(inspect(InspectConfig("a", documents=(0,), check=True)))


def test_threads_share_a_file_system(remote: Any) -> None:
    dataset, _, _ = build(*REMOTE, data_cache_path="cache")
    loader = load(dataset, micro_batch_size=2, num_workers=3)
    for start in range(0, 12, 2):
        assert next(loader)["tokens"].tolist() == [dataset[start + i]["tokens"].tolist() for i in range(2)]


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


# --- results that are built once ------------------------------------------------------------------------------


REPOSITORY = Path(__file__).parents[2]

BUILDER = """
import os, sys, time
from megatron.data import gpt_dataset
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset

build = gpt_dataset.build_sample_order

def slowly(*arguments, **keywords):
    print("builds", flush=True)
    time.sleep(float(sys.argv[1]))
    return build(*arguments, **keywords)

gpt_dataset.build_sample_order = slowly
names, replace = iter(range(9)), os.replace

def give_a_name(written, path):
    # Files are on the disk, and about to be found; argv[2] says before which of them to stop.
    if next(names) == int(sys.argv[2]):
        print("writes", flush=True)
        time.sleep(600)
    replace(written, path)

os.replace = give_a_name
dataset = GPTDataset(IndexedDataset("a"), 0, 16, SampleSettings(8, 1234, "1", cache_directory="cache"))
print(dataset.order.shuffle_index[:].tolist(), flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(seconds: float, stops_before: int = -1) -> subprocess.Popen[str]:
    """A process that takes at least so long to build the order, and stops before one of its files has its name."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BUILDER, str(seconds), str(stops_before)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def order_of_the_corpus(cache: str | None = "cache") -> list[int]:
    settings = SampleSettings(8, 1234, "1", cache_directory=cache)
    shuffled: list[int] = GPTDataset(IndexedDataset("a"), 0, 16, settings).order.shuffle_index[:].tolist()
    return shuffled


@pytest.mark.processes
def test_of_eight_processes_one_builds_and_all_read_the_same(started: list[subprocess.Popen[str]]) -> None:
    started += [start(0.5) for _ in range(8)]
    lines = [process.communicate(timeout=300)[0].splitlines() for process in started]
    assert sum(line == "builds" for output in lines for line in output) == 1
    assert {output[-1] for output in lines} == {str(order_of_the_corpus())}
    assert len(os.listdir("cache")) == 5


@pytest.mark.processes
def test_after_kill_9_while_building_the_next_run_builds_at_once_and_cleans_up(
    started: list[subprocess.Popen[str]],
) -> None:
    started.append(victim := start(600))
    assert victim.stdout is not None and victim.stdout.readline() == "builds\n"
    (lock,) = Path("cache").glob("*.lock")
    half_written = f"{str(lock).removesuffix('.lock')}-shuffle_index.npy.{victim.pid}-01234567.incomplete"
    Path(half_written).write_bytes(b"half")
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    begun = time.monotonic()
    assert sorted(order_of_the_corpus()) == list(range(18))
    assert time.monotonic() - begun < 60  # the lease is twice as long
    assert len(os.listdir("cache")) == 5


@pytest.mark.processes
def test_after_kill_9_before_any_of_the_files_has_its_name_the_order_is_whole(
    started: list[subprocess.Popen[str]],
) -> None:
    """Description, three arrays, digests: what was written stays or goes, but is never taken for what it is not."""
    expected = order_of_the_corpus(None)
    for number in range(5):
        started.append(victim := start(0.0, stops_before=number))
        assert victim.stdout is not None
        assert [victim.stdout.readline() for _ in range(2)] == ["builds\n", "writes\n"]
        assert len(list(Path("cache").glob("*.incomplete"))) == 1
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert order_of_the_corpus() == expected
        assert len(os.listdir("cache")) == 5
        shutil.rmtree("cache")


def load_thing() -> str | None:
    return Path("thing").read_text() if os.path.exists("thing") else None


def build_thing() -> str:
    Path("thing").write_text("built here")
    return "built here"


@pytest.mark.processes
def test_a_holder_elsewhere_that_shows_no_life_is_given_up() -> None:
    """Its process number means nothing here, and its files must stay."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = Owner(socket.gethostname(), ended.pid, "another boot/1", "token", time.time(), "pid:[1]", 0)
    Path("thing.lock").write_text(json.dumps(asdict(owner)))
    half_written = Path(f"thing.npy.{ended.pid}-01234567.incomplete")
    half_written.write_bytes(b"half")
    begun = time.monotonic()
    assert load_or_build_once("thing", load_thing, build_thing, lease_s=0.8, renewal_s=0.2) == "built here"
    assert 1.0 <= time.monotonic() - begun < 60
    assert half_written.exists() and not os.path.exists("thing.lock")


def test_an_error_of_the_builder_frees_the_lock() -> None:
    def fail() -> str:
        raise KeyError

    with pytest.raises(KeyError):
        load_or_build_once("thing", load_thing, fail)
    assert load_or_build_once("thing", load_thing, build_thing) == "built here"


def test_one_builds_where_a_file_system_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def build() -> str:
        assert Claim(Path("thing.lock"), 60.0, needs_links=False).poll() == "alive"
        return build_thing()

    monkeypatch.setattr(os, "link", refuse)
    assert load_or_build_once("thing", load_thing, build) == "built here"
    assert not os.path.exists("thing.lock")
    with pytest.raises(OSError, match="not permitted"):
        Claim(Path("thing.lock"), 60.0).poll()


def test_order_on_disk_is_whole_under_its_name() -> None:
    """A full disk leaves nothing that a later run could take for an order."""

    def full(file: object, array: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch.object(np, "save", full), pytest.raises(Exception, match="No space left on device"):
        order_of_the_corpus()
    assert [name for name in os.listdir("cache") if not name.endswith("description.txt")] == []
    assert sorted(order_of_the_corpus()) == list(range(18))
