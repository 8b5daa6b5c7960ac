"""One process builds a sample order and the others wait for it, whatever becomes of the one that builds."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.storage import load_or_build_once

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("corpora")]

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


def test_of_eight_processes_one_builds_and_all_read_the_same(started: list[subprocess.Popen[str]]) -> None:
    started += [start(0.5) for _ in range(8)]
    lines = [process.communicate(timeout=60)[0].splitlines() for process in started]
    assert sum(line == "builds" for output in lines for line in output) == 1
    assert {output[-1] for output in lines} == {str(order_of_the_corpus())}
    assert len(os.listdir("cache")) == 5


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
    assert time.monotonic() - begun < 5
    assert len(os.listdir("cache")) == 5


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


def write_lock(process: int, host: str) -> None:
    Path("thing.lock").write_text(json.dumps({"host": host, "process": process, "time": time.time()}))


def load_thing() -> str | None:
    return Path("thing").read_text() if os.path.exists("thing") else None


def build_thing() -> str:
    Path("thing").write_text("built here")
    return "built here"


@pytest.mark.parametrize("host", ["another host", f"{socket.gethostname()} pid:[1]"])
def test_a_holder_elsewhere_that_shows_no_life_is_given_up(host: str) -> None:
    """Another container may have the host's name: its process number means nothing here, and its files must stay."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_lock(ended.pid, host)
    half_written = Path(f"thing.npy.{ended.pid}-01234567.incomplete")
    half_written.write_bytes(b"half")
    begun = time.monotonic()
    assert load_or_build_once("thing", load_thing, build_thing, stale_after=1.0) == "built here"
    assert 1.0 <= time.monotonic() - begun < 10
    assert half_written.exists() and not os.path.exists("thing.lock")


def test_a_holder_elsewhere_that_shows_life_is_waited_for() -> None:
    write_lock(1, "another host")

    def build_elsewhere() -> None:
        for _ in range(10):
            time.sleep(0.2)
            with suppress(FileNotFoundError), open("thing.lock", "r+") as file:
                file.write(json.dumps({"host": "another host", "process": 1, "time": time.time()}))
        Path("thing.new").write_text("built elsewhere")
        os.replace("thing.new", "thing")  # never half written

    elsewhere = threading.Thread(target=build_elsewhere)
    elsewhere.start()
    try:
        assert load_or_build_once("thing", load_thing, build_thing, stale_after=1.0) == "built elsewhere"
    finally:
        elsewhere.join()


def test_a_holder_beats() -> None:
    seen = set()

    def build() -> str:
        for _ in range(10):
            seen.add(Path("thing.lock").read_text())
            time.sleep(0.05)
        return build_thing()

    load_or_build_once("thing", load_thing, build, heartbeat_seconds=0.05)
    assert len(seen - {""}) > 2


def test_an_error_of_the_builder_frees_the_lock() -> None:
    def fail() -> str:
        raise KeyError

    with pytest.raises(KeyError):
        load_or_build_once("thing", load_thing, fail)
    assert load_or_build_once("thing", load_thing, build_thing) == "built here"


def test_order_on_disk_is_whole_under_its_name() -> None:
    """A full disk leaves nothing that a later run could take for an order."""

    def full(file: object, array: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch.object(np, "save", full), pytest.raises(Exception, match="No space left on device"):
        order_of_the_corpus()
    assert [name for name in os.listdir("cache") if not name.endswith("description.txt")] == []
    assert sorted(order_of_the_corpus()) == list(range(18))
