"""A directory has one run; a dead one's lock is taken over, a live one's is not."""

import json
import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

import pytest

from megatron.checkpoint import lock as lock_module
from megatron.checkpoint.lock import LEASE, LOCK, RunLock
from megatron.config.errors import CheckpointError
from tests.forked import fork_context


def hold(root: Path, pipe: Connection) -> None:
    """Try to take the lock, tell, and keep it until told to go."""
    try:
        lock = RunLock(root)
    except CheckpointError as error:
        pipe.send(str(error))
        return
    pipe.send("held")
    pipe.recv()
    lock.release()


class Other:
    """Another process that tries to take the lock."""

    def __init__(self, root: Path, context: ForkServerContext | SpawnContext) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(root, theirs), daemon=True)
        self.process.start()

    def says(self) -> str:
        assert self.pipe.poll(60)
        words: str = self.pipe.recv()
        return words

    def go(self) -> None:
        self.pipe.send("go")
        self.process.join(30)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Other]:
    """A process that holds the lock."""
    other = Other(tmp_path, fork_context())
    assert other.says() == "held"
    yield other
    other.process.kill()
    other.process.join()


def test_a_second_run_is_refused_at_once_with_the_owner_named(owner: Other, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path)
    assert time.monotonic() - started < 2
    assert f"process {owner.process.pid} on {socket.gethostname()}" in str(refused.value)
    assert "choose another --save" in str(refused.value)
    owner.go()
    RunLock(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_the_lock_of_a_killed_process_is_taken_over_at_once(owner: Other, tmp_path: Path) -> None:
    assert owner.process.pid is not None
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.join()
    started = time.monotonic()
    RunLock(tmp_path).release()
    assert time.monotonic() - started < 2
    assert os.listdir(tmp_path) == []


def write(root: Path, **changes: object) -> None:
    """A lock of a live process, changed."""
    lock = RunLock(root)
    content = json.loads((root / LOCK).read_text())
    lock.release()
    (root / LOCK).write_text(json.dumps(content | changes))


def test_a_process_that_has_ended_does_not_keep_the_lock_until_its_parent_takes_notice(
    tmp_path: Path,
) -> None:
    # A child of this very process, which leaves it a zombie.
    child = Other(tmp_path, mp.get_context("spawn"))
    assert child.says() == "held" and child.process.pid is not None
    os.kill(child.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    RunLock(tmp_path).release()


def test_a_lock_of_another_host_holds_for_its_lease(tmp_path: Path) -> None:
    write(tmp_path, host="elsewhere", renewed=time.time() - LEASE / 2)
    with pytest.raises(CheckpointError, match="on elsewhere"):
        RunLock(tmp_path)
    write_over = json.loads((tmp_path / LOCK).read_text()) | {"renewed": time.time() - LEASE - 1}
    (tmp_path / LOCK).write_text(json.dumps(write_over))
    RunLock(tmp_path).release()


def test_a_process_number_that_is_used_again_does_not_keep_the_lock(tmp_path: Path) -> None:
    write(tmp_path, process="another boot/12345")
    RunLock(tmp_path).release()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"host": 1}', "\x00" * 50])
def test_a_garbled_lock_keeps_nobody_out(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    RunLock(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_the_next_owner_clears_the_drafts_of_the_dead_and_leaves_those_of_the_living(tmp_path: Path) -> None:
    write(tmp_path)
    alive = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).unlink()
    drafts = {
        "0123abcd": json.dumps(alive | {"process": "another boot/12345"}),
        "4567abcd": json.dumps(alive | {"host": "elsewhere", "renewed": time.time() - LEASE - 1}),
        "89ababcd": "",
        "cdefabcd": json.dumps(alive),
        "notes": "",
    }
    for suffix, content in drafts.items():
        (tmp_path / f"{LOCK}.{suffix}").write_text(content)
    RunLock(tmp_path).release()
    assert sorted(os.listdir(tmp_path)) == [f"{LOCK}.cdefabcd", f"{LOCK}.notes"]


def test_a_run_whose_draft_is_cleared_away_gets_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = RunLock(tmp_path)
    link = os.link

    def link_too_late(source: Path, target: Path) -> None:
        source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", link_too_late)
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
        RunLock(tmp_path)
    owner.release()


def test_an_owner_renews_its_lock_and_notices_when_it_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "LEASE", 0.6)
    lock = RunLock(tmp_path)
    first = json.loads((tmp_path / LOCK).read_text())
    deadline = time.monotonic() + 30
    while json.loads((tmp_path / LOCK).read_text())["renewed"] == first["renewed"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.check()
    stranger = first | {"token": "another", "host": "elsewhere", "pid": 7}
    (tmp_path / LOCK).write_text(json.dumps(stranger))
    with pytest.raises(CheckpointError, match="taken over by process 7 on elsewhere"):
        lock.check()
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text()) == stranger, "it is not ours to remove"


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    write(tmp_path, process="another boot/12345")
    others = [Other(tmp_path, fork_context()) for _ in range(6)]
    words = [other.says() for other in others]
    assert words.count("held") == 1
    for other, word in zip(others, words):
        if word == "held":
            other.go()
        other.process.join(30)
    assert os.listdir(tmp_path) == []
