"""A directory has one run; a dead one's lock is taken over, a live one's is not."""

import json
import multiprocessing as mp
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.directory import commit
from megatron.checkpoint.lock import LEASE, LOCK, LockLostError, check_lock, check_token, try_lock
from megatron.errors import CheckpointError
from megatron.operation.lease import RENEWAL, Claim, Lease, Owner, ProcessTable
from tests.checkpoint.directories import acquire
from tests.checkpoint.file_faults import small_files
from tests.end_to_end.run_process import REPOSITORY, wait_until
from tests.forked import fork_context

pytestmark = pytest.mark.processes

QUICK = 0.05
"""Seconds between two renewals."""


def hold(root: Path, pipe: Connection) -> None:
    """Try to take the lock, report, and keep it until told to go."""
    try:
        lock = acquire(root)
    except CheckpointError as error:
        pipe.send(str(error))
    else:
        pipe.send("held")
        pipe.recv()
        lock.release()


class Other:
    """Another process that tries to take the lock; a child of this very process, or of the server that forks."""

    def __init__(self, root: Path, is_child: bool = False) -> None:
        context = mp.get_context("fork") if is_child else fork_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(root, theirs), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

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
    other = Other(tmp_path)
    assert other.says() == "held"
    yield other
    other.process.kill()
    other.process.join()


class Clock:
    """A monotonic clock that the test moves; ``meanwhile`` happens when it is read next."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.meanwhile: list[Callable[[], object]] = []

    def __call__(self) -> float:
        while self.meanwhile:
            self.meanwhile.pop()()
        return self.now


def content(root: Path) -> dict[str, Any]:
    """What the lock file says."""
    parsed: dict[str, Any] = json.loads((root / LOCK).read_text())
    return parsed


def write(root: Path, **changes: object) -> dict[str, Any]:
    """The lock of this very process, with other values for some fields; None removes one."""
    lock = acquire(root)
    fields = content(root) | changes
    lock.release()
    fields = {name: value for name, value in fields.items() if value is not None}
    (root / LOCK).write_text(json.dumps(fields))
    return fields


def gone(root: Path) -> str:
    """The value of ``process`` for one on this host that has ended, with a number that is used again."""
    lock = acquire(root)
    process: str = content(root)["process"]
    lock.release()
    return f"{process}9"


def claim_on(root: Path, clock: Callable[[], float] = time.monotonic) -> Claim:
    return Claim(root / LOCK, LEASE, clock=clock)


def take(claim: Claim) -> None:
    """Take the lock at once, and leave nothing behind."""
    lock = try_lock(claim)
    assert isinstance(lock, Lease)
    lock.release()
    assert not [name for name in os.listdir(lock.path.parent) if name.startswith(LOCK)]


ELSEWHERE = {"host": "elsewhere", "process": "another boot/12345"}

# --- the owner can be looked up -------------------------------------------------------------------------------


def test_a_second_run_is_refused_at_once_with_the_owner_named(owner: Other, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as refused:
        acquire(tmp_path)
    assert time.monotonic() - started < LEASE / 4
    assert f"process {owner.pid} on {socket.gethostname()}, which is running" in str(refused.value)
    assert "use another --save" in str(refused.value)
    owner.go()
    acquire(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_process_that_is_stopped_keeps_its_lock(owner: Other, tmp_path: Path) -> None:
    os.kill(owner.pid, signal.SIGSTOP)
    (tmp_path / LOCK).write_text(json.dumps(content(tmp_path) | {"renewed": time.time() - 10 * LEASE}))
    with pytest.raises(CheckpointError, match="which is running"):
        try_lock(claim_on(tmp_path))


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    """Also before its parent has waited for it: until then it is a zombie."""
    child = Other(tmp_path, is_child=True)
    assert child.says() == "held"
    text = (tmp_path / LOCK).read_text()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    take(claim_on(tmp_path))
    child.process.join()
    (tmp_path / LOCK).write_text(text)
    take(claim_on(tmp_path))


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    """That of a process whose number is used again."""
    write(tmp_path, process=gone(tmp_path))
    others = [Other(tmp_path) for _ in range(6)]
    words = [other.says() for other in others]
    assert words.count("held") == 1
    for other, word in zip(others, words):
        if word == "held":
            other.go()
        other.process.join(30)
    assert os.listdir(tmp_path) == []


# --- the owner cannot be looked up ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        ELSEWHERE,
        {"namespace": "pid:[1]", "pid": 99999999},
        # The host was started anew, or it is another one with the same name.
        {"process": "another boot/12345"},
        # An older version wrote no namespace: the number may be that of a process in another container.
        {"namespace": None, "renewals": None, "pid": 99999999},
    ],
    ids=["another host", "another namespace", "another boot", "older version"],
)
@pytest.mark.parametrize("skew", [-3600, 0, 3600], ids=["slow", "same clock", "fast"])
def test_a_lock_is_taken_over_when_it_has_not_changed_for_a_lease_whatever_the_clocks_say(
    tmp_path: Path, changes: dict[str, Any], skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, **changes, renewed=time.time() + skew)
    clock, wall = Clock(), time.time()
    claim = claim_on(tmp_path, clock)
    assert f"waiting at most {LEASE + RENEWAL:.0f} s" in str(try_lock(claim))
    # While the run waits, the wall clock of this host jumps.
    monkeypatch.setattr(time, "time", lambda: wall - 2 * skew)
    clock.now += LEASE + RENEWAL
    assert isinstance(try_lock(claim), str)
    clock.now += 0.1
    lock = try_lock(claim)
    assert isinstance(lock, Lease) and content(tmp_path)["token"] == lock.token
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("skew", [-3600, 0, 3600], ids=["slow", "same clock", "fast"])
def test_a_lock_that_changes_is_held_whatever_the_clocks_say(tmp_path: Path, skew: float) -> None:
    fields = write(tmp_path, **ELSEWHERE, renewed=time.time() + skew)
    claim = claim_on(tmp_path, Clock())
    assert isinstance(try_lock(claim), str)
    (tmp_path / LOCK).write_text(json.dumps(fields | {"renewals": 1}))
    with pytest.raises(CheckpointError, match="on elsewhere, which renewed its lock while this run was waiting"):
        try_lock(claim)


def test_a_lock_that_is_released_is_free_at_once(tmp_path: Path) -> None:
    write(tmp_path, **ELSEWHERE)
    claim = claim_on(tmp_path, Clock())
    assert isinstance(try_lock(claim), str)
    (tmp_path / LOCK).unlink()
    take(claim)


SECOND_RUN = f"""
import sys
from pathlib import Path
from tests.checkpoint.directories import acquire
lock = acquire(Path(sys.argv[1]), {QUICK})
print("TAKEN", flush=True)
sys.stdin.readline()
"""


def test_a_run_in_another_pid_namespace_keeps_its_lock_until_its_lease_is_over(tmp_path: Path) -> None:
    """There it is number 1 or so, which is somebody else's here."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if allowed.returncode != 0:
        pytest.skip(f"this process may not make a PID namespace: {allowed.stderr.strip()}")
    command = [*unshare, sys.executable, "-c", SECOND_RUN, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stdin=pipe, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "TAKEN\n"
        with pytest.raises(CheckpointError, match="renewed its lock while this run was waiting"):
            acquire(tmp_path)
        owner.kill()
    clock = Clock()
    claim = claim_on(tmp_path, clock)
    assert isinstance(try_lock(claim), str)
    clock.now += LEASE + RENEWAL + 1
    take(claim)


# --- what the file system leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", ["", "{}", "[]", '{"host": 1}', '{"host": "a', "\x00" * 50])
def test_a_garbled_lock_keeps_nobody_out(tmp_path: Path, garbage: str) -> None:
    (tmp_path / LOCK).write_text(garbage)
    acquire(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_cannot_be_read_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(CheckpointError, match="Cannot lock"):
        acquire(tmp_path)
    assert (tmp_path / LOCK).is_dir()


def test_the_next_owner_clears_the_drafts_of_others_but_of_the_living_on_this_host(tmp_path: Path) -> None:
    dead, alive = gone(tmp_path), write(tmp_path)
    (tmp_path / LOCK).unlink()
    drafts = {
        "0123abcd": json.dumps(alive | {"process": dead}),
        "4567abcd": json.dumps(alive | ELSEWHERE),
        "89ababcd": "",
        "cdefabcd": json.dumps(alive),
        "notes": "",
    }
    for suffix, text in drafts.items():
        (tmp_path / f"{LOCK}.{suffix}").write_text(text)
    acquire(tmp_path).release()
    assert sorted(os.listdir(tmp_path)) == [f"{LOCK}.cdefabcd", f"{LOCK}.notes"]


def test_a_run_whose_draft_is_cleared_away_gets_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_too_late(source: Path, target: Path) -> None:
        source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", link_too_late)
    with pytest.raises(CheckpointError, match="Another run is taking over"):
        acquire(tmp_path)
    assert os.listdir(tmp_path) == []


# --- the owner ------------------------------------------------------------------------------------------------


def test_an_owner_renews_its_lock_and_notices_when_it_is_lost(tmp_path: Path) -> None:
    lock = acquire(tmp_path, QUICK)
    wait_until(lambda: content(tmp_path)["renewals"] >= 2, 30)
    check_lock(lock)
    stranger = content(tmp_path) | {"token": "another", "host": "elsewhere", "pid": 7}

    def is_noticed() -> bool:
        # A renewal that is under way may still replace the stranger's lock.
        (tmp_path / "new").write_text(json.dumps(stranger))
        os.replace(tmp_path / "new", tmp_path / LOCK)
        return not lock._renewing.is_alive()

    wait_until(is_noticed, 30)
    with pytest.raises(LockLostError, match="taken over by"):
        check_lock(lock)
    lock.release()
    assert content(tmp_path) == stranger, "it is not ours to remove"


def test_a_lock_that_was_removed_by_hand_is_put_back(tmp_path: Path) -> None:
    lock = acquire(tmp_path, QUICK)
    wait_until(lambda: content(tmp_path)["renewals"] >= 1, 30)
    (tmp_path / LOCK).unlink()
    wait_until((tmp_path / LOCK).exists, 30)
    check_lock(lock)
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("meanwhile", ["taken", "taken and released", "nothing"])
def test_a_renewal_that_stalls_for_a_lease_keeps_a_lock_that_nobody_took_alone(tmp_path: Path, meanwhile: str) -> None:
    """It stalls after it has read the lock and before it replaces it. The next one finds a lock that was released."""
    clock, taken, has_stalled = Clock(), list[Lease | str](), threading.Event()
    # Other runs cannot know whether this process is alive.
    owner = replace(Owner.this_process(), host="elsewhere", process="another boot/12345")
    (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
    lock = Lease(Claim(tmp_path / LOCK, LEASE, QUICK, clock), owner)

    def stall() -> None:
        claim = claim_on(tmp_path, clock)
        if meanwhile == "taken":
            assert isinstance(try_lock(claim), str)
        clock.now += LEASE + RENEWAL + 1
        if meanwhile == "taken":
            taken.append(try_lock(claim))
        elif meanwhile == "taken and released":
            (tmp_path / LOCK).unlink()
        has_stalled.set()

    clock.meanwhile.append(stall)
    assert has_stalled.wait(30)
    if meanwhile == "nothing":
        # The file is away for a moment while it is put back.
        renewals = lock._owner.renewals
        wait_until(lambda: lock._owner.renewals > renewals + 2, 30)
        check_lock(lock)
    else:
        wait_until(lambda: not lock._renewing.is_alive(), 30)
        by = f"taken over by process {os.getpid()}" if taken else "was taken over"
        with pytest.raises(LockLostError, match=by):
            check_lock(lock)
        lock.release()
    for other in taken:
        assert isinstance(other, Lease) and content(tmp_path)["token"] == other.token
        check_lock(other)
        other.release()
    if meanwhile == "nothing":
        lock.release()
    assert os.listdir(tmp_path) == []


def lock_on_a_full_disk(place: Path, pipe: Connection) -> None:
    """Hold a lock while the disk is full until it has changed twice, and try to lock again."""
    leave = small_files(place)
    lock = acquire(place, QUICK)
    leave(0)
    renewals = content(place)["renewals"]
    times = {(place / LOCK).stat().st_mtime_ns}

    def has_changed_twice() -> bool:
        times.add((place / LOCK).stat().st_mtime_ns)
        return len(times) > 2

    wait_until(has_changed_twice, 30)
    check_lock(lock)
    assert content(place)["renewals"] <= renewals + 1, "the disk is not full"
    lock.release()
    with pytest.raises(CheckpointError, match="Cannot lock"):
        acquire(place)
    pipe.send(os.listdir(place))


def test_a_full_disk_does_not_keep_a_lock_from_being_renewed(tmp_path: Path) -> None:
    """But a new one is refused, and leaves nothing."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=lock_on_a_full_disk, args=(tmp_path, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60) and ours.recv() == []
    process.join(30)


# --- the fencing token ----------------------------------------------------------------------------------------


def test_a_rename_needs_the_token_of_the_lock(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    saving = tmp_path / ".iter_0000001.saving-0123abcd"
    saving.mkdir()
    with pytest.raises(LockLostError, match=f"taken over by process {os.getpid()}"):
        commit(saving, tmp_path, 1, "{}", "another token")
    lock.release()
    saving.joinpath("manifest.json").unlink()
    with pytest.raises(CheckpointError, match="names no run"):
        commit(saving, tmp_path, 1, "{}", lock.token)
    assert not list(tmp_path.glob("iter_*"))
    lock = acquire(tmp_path)
    check_token(tmp_path, lock.token)
    saving.joinpath("manifest.json").unlink()
    commit(saving, tmp_path, 1, "{}", lock.token)
    assert list(tmp_path.glob("iter_*"))
    lock.release()


def test_a_release_does_not_wait_for_a_file_system_that_stalls(tmp_path: Path) -> None:
    """The lock is left to its lease: at the end of a run nothing else waits for the file system."""
    clock, is_over, has_begun = Clock(), threading.Event(), threading.Event()
    owner = Owner.this_process()
    (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
    lock = Lease(Claim(tmp_path / LOCK, LEASE, QUICK, clock), owner)
    clock.meanwhile += [is_over.wait, has_begun.set]
    assert has_begun.wait(60)
    releasing = threading.Thread(target=lock.release, args=(0.2,), daemon=True)
    releasing.start()
    releasing.join(20)
    is_waiting = releasing.is_alive()
    is_over.set()
    assert not is_waiting and (tmp_path / LOCK).exists()


@pytest.mark.skipif(shutil.which("ps") is None, reason="asks ps")
def test_without_proc_the_owner_is_looked_up_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where the lock of a crashed run is free at once."""
    # As macOS's: after "=" the rest of the argument is the heading of a column.
    ps = 'for word; do case $word in *=?*) echo "a heading: $word"; exit;; esac; done\n'
    ps += f'exec {shutil.which("ps")} "$@"'
    for name, script in (("sysctl", '[ "$*" = "-n kern.bootsessionuuid" ] && echo 4A0C6F'), ("ps", ps)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    table = ProcessTable("/nowhere")
    owner = Owner.this_process(table)
    assert re.fullmatch(r"4A0C6F/\w+ \w+ \d+ \d\d:\d\d:\d\d \d{4}", owner.process)
    assert owner.fate(table) == "alive"
    assert replace(owner, process="4A0C6F/Thu Jan  1 00:00:00 1970").fate(table) == "gone"
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for _ in ("a zombie", "waited for"):
        assert replace(owner, pid=child.pid).fate(table) == "gone"
        child.wait()
