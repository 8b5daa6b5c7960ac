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
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import lock as lock_module
from megatron.checkpoint.directory import commit
from megatron.checkpoint.lock import LEASE, LOCK, RENEWAL, LockAttempt, LockLostError, RunLock, acquire, check_token
from megatron.errors import CheckpointError
from tests.checkpoint.file_faults import NotAllowed, small_disk
from tests.end_to_end.run_process import REPOSITORY, wait_until
from tests.forked import fork_context

pytestmark = pytest.mark.processes


def hold(root: Path, pipe: Connection) -> None:
    """Try to take the lock, report, and keep it until told to go."""
    try:
        lock = acquire(root)
    except CheckpointError as error:
        pipe.send(str(error))
        return
    pipe.send("held")
    pipe.recv()
    lock.release()


class Other:
    """Another process that tries to take the lock."""

    def __init__(self, root: Path, context: ForkServerContext | ForkContext) -> None:
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


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
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


def take(attempt: LockAttempt) -> None:
    """Take the lock at once, and leave nothing behind."""
    lock = attempt.poll()
    assert lock is not None
    lock.release()
    assert not [name for name in os.listdir(lock.root) if name.startswith(LOCK)]


ELSEWHERE = {"host": "elsewhere", "process": "another boot/12345"}

# --- the owner can be looked up -------------------------------------------------------------------------------


def test_a_second_run_is_refused_at_once_with_the_owner_named(owner: Other, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as refused:
        acquire(tmp_path)
    assert time.monotonic() - started < LEASE / 4
    assert f"process {owner.process.pid} on {socket.gethostname()}, which is running" in str(refused.value)
    assert "use another --save" in str(refused.value)
    owner.go()
    acquire(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_process_that_is_stopped_keeps_its_lock(owner: Other, tmp_path: Path) -> None:
    assert owner.process.pid is not None
    os.kill(owner.process.pid, signal.SIGSTOP)
    old = content(tmp_path) | {"renewed": time.time() - 10 * LEASE}
    (tmp_path / LOCK).write_text(json.dumps(old))
    with pytest.raises(CheckpointError, match="which is running"):
        LockAttempt(tmp_path).poll()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(owner: Other, tmp_path: Path) -> None:
    assert owner.process.pid is not None
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.join()
    take(LockAttempt(tmp_path))


def test_a_process_that_has_ended_does_not_keep_the_lock_until_its_parent_has_waited_for_it(tmp_path: Path) -> None:
    # A child of this very process, which leaves it a zombie.
    child = Other(tmp_path, mp.get_context("fork"))
    assert child.says() == "held" and child.process.pid is not None
    os.kill(child.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    take(LockAttempt(tmp_path))


def test_a_process_number_that_is_used_again_does_not_keep_the_lock(tmp_path: Path) -> None:
    write(tmp_path, process=gone(tmp_path))
    take(LockAttempt(tmp_path))


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    write(tmp_path, process=gone(tmp_path))
    others = [Other(tmp_path, fork_context()) for _ in range(6)]
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
    attempt = LockAttempt(tmp_path, clock)
    assert attempt.poll() is None
    assert f"waiting at most {LEASE + RENEWAL:.0f} s" in attempt.reason_to_wait
    # While the run waits, the wall clock of this host jumps.
    monkeypatch.setattr(time, "time", lambda: wall - 2 * skew)
    clock.now += LEASE + RENEWAL
    assert attempt.poll() is None
    clock.now += 0.1
    lock = attempt.poll()
    assert lock is not None and content(tmp_path)["token"] == lock.token
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("skew", [-3600, 0, 3600], ids=["slow", "same clock", "fast"])
def test_a_lock_that_changes_is_held_whatever_the_clocks_say(tmp_path: Path, skew: float) -> None:
    fields = write(tmp_path, **ELSEWHERE, renewed=time.time() + skew)
    attempt = LockAttempt(tmp_path, Clock())
    assert attempt.poll() is None
    (tmp_path / LOCK).write_text(json.dumps(fields | {"renewals": 1}))
    with pytest.raises(CheckpointError, match="on elsewhere, which renewed its lock while this run was waiting"):
        attempt.poll()


def test_a_lock_that_is_released_is_free_at_once(tmp_path: Path) -> None:
    write(tmp_path, **ELSEWHERE)
    attempt = LockAttempt(tmp_path, Clock())
    assert attempt.poll() is None
    (tmp_path / LOCK).unlink()
    take(attempt)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that are renewed often."""
    monkeypatch.setattr(lock_module, "RENEWAL", 0.05)


def in_another_namespace(program: str, root: Path) -> "subprocess.Popen[str]":
    """A program in a PID namespace of its own, on the same host under the same name."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if allowed.returncode != 0:
        pytest.skip(f"this process may not make a PID namespace: {allowed.stderr.strip()}")
    return subprocess.Popen(
        [*unshare, sys.executable, "-c", program, str(root)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


SECOND_RUN = """
import sys
from pathlib import Path
from megatron.checkpoint.lock import acquire
try:
    lock = acquire(Path(sys.argv[1]))
except Exception as error:
    print(error, flush=True)
else:
    print("TAKEN", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.usefixtures("quick")
def test_a_run_in_another_pid_namespace_is_refused_while_the_owner_lives(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    second = in_another_namespace(SECOND_RUN, tmp_path)
    words, _ = second.communicate(timeout=6 * RENEWAL + 30)
    assert f"in use by process {os.getpid()}" in words and "renewed its lock while this run was waiting" in words
    lock.check()
    lock.release()


def test_the_owner_in_another_pid_namespace_keeps_its_lock_until_its_lease_is_over(tmp_path: Path) -> None:
    owner = in_another_namespace(SECOND_RUN, tmp_path)
    assert owner.stdout is not None and owner.stdout.readline() == "TAKEN\n"
    # There it is number 1 or so, which is somebody else's here.
    clock = Clock()
    assert LockAttempt(tmp_path, clock).poll() is None
    owner.kill()
    owner.wait()
    attempt = LockAttempt(tmp_path, clock)
    assert attempt.poll() is None
    clock.now += LEASE + RENEWAL + 1
    take(attempt)


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


@pytest.mark.usefixtures("quick")
def test_an_owner_renews_its_lock_and_notices_when_it_is_lost(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    wait_until(lambda: content(tmp_path)["renewals"] >= 2, 30)
    lock.check()
    stranger = content(tmp_path) | {"token": "another", "host": "elsewhere", "pid": 7}

    def is_noticed() -> bool:
        # A renewal that is under way may still replace the stranger's lock.
        (tmp_path / "new").write_text(json.dumps(stranger))
        os.replace(tmp_path / "new", tmp_path / LOCK)
        return not lock._renewing.is_alive()

    wait_until(is_noticed, 30)
    with pytest.raises(LockLostError, match="taken over by"):
        lock.check()
    lock.release()
    assert content(tmp_path) == stranger, "it is not ours to remove"


@pytest.mark.usefixtures("quick")
def test_a_lock_that_was_removed_by_hand_is_put_back(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    wait_until(lambda: content(tmp_path)["renewals"] >= 1, 30)
    (tmp_path / LOCK).unlink()
    wait_until((tmp_path / LOCK).exists, 30)
    lock.check()
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("quick")
def test_an_owner_that_was_suspended_for_a_lease_does_not_put_its_lock_back(tmp_path: Path) -> None:
    clock, owner = Clock(), lock_module.Owner.this_process()
    (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
    lock = RunLock(tmp_path / LOCK, owner, clock)
    wait_until(lambda: content(tmp_path)["renewals"] >= 1, 30)
    # Meanwhile another run has taken the lock, saved, and released it.
    clock.now += LEASE + 1
    (tmp_path / LOCK).unlink()

    def is_lost() -> bool:
        try:
            lock.check()
        except LockLostError:
            return True
        except CheckpointError:
            pass
        return False

    wait_until(is_lost, 30)
    assert not (tmp_path / LOCK).exists()
    lock.release()


def held_elsewhere(root: Path, clock: Clock) -> RunLock:
    """A lock of this process, of which other runs cannot know whether it is alive."""
    owner = replace(lock_module.Owner.this_process(), host="elsewhere", process="another boot/12345")
    (root / LOCK).write_text(json.dumps(asdict(owner)))
    return RunLock(root / LOCK, owner, clock)


def stall_a_renewal(monkeypatch: pytest.MonkeyPatch, during: Callable[[], None]) -> None:
    """Run ``during`` in the next renewal, after it has read the lock and before it replaces it."""
    draft, stalls = lock_module._draft, [during]

    @contextmanager
    def stalled(path: Path, owner: lock_module.Owner) -> Iterator[Path]:
        if stalls:
            stalls.pop()()
        with draft(path, owner) as written:
            yield written

    monkeypatch.setattr(lock_module, "_draft", stalled)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("meanwhile", ["taken", "taken and released", "nothing"])
def test_a_renewal_that_stalls_for_a_lease_keeps_a_lock_that_nobody_took_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    clock, taken, has_stalled = Clock(), list[RunLock | None](), threading.Event()
    lock = held_elsewhere(tmp_path, clock)

    def stall() -> None:
        attempt = LockAttempt(tmp_path, clock)
        if meanwhile == "taken":
            assert attempt.poll() is None
        clock.now += LEASE + RENEWAL + 1
        if meanwhile == "taken":
            taken.append(attempt.poll())
        elif meanwhile == "taken and released":
            (tmp_path / LOCK).unlink()
        has_stalled.set()

    stall_a_renewal(monkeypatch, stall)
    assert has_stalled.wait(30)
    if meanwhile == "nothing":
        # The file is away for a moment while it is put back.
        renewals = lock._owner.renewals
        wait_until(lambda: lock._owner.renewals > renewals + 2, 30)
        lock.check()
    else:
        wait_until(lambda: not lock._renewing.is_alive(), 30)
        by = f"taken over by process {os.getpid()}" if taken else "was taken over"
        with pytest.raises(LockLostError, match=by):
            lock.check()
        lock.release()
    for other in taken:
        assert other is not None and content(tmp_path)["token"] == other.token
        other.check()
        other.release()
    if meanwhile == "nothing":
        lock.release()
    assert os.listdir(tmp_path) == []


def renew_on_a_full_disk(place: Path, pipe: Connection) -> None:
    """Hold a lock while the disk is full, and report that it changes."""
    try:
        leave = small_disk(place)
    except NotAllowed as error:
        pipe.send(str(error))
        return
    lock = acquire(place)
    leave(0)
    before = (place / LOCK).stat().st_mtime_ns
    renewals = content(place)["renewals"]
    wait_until(lambda: (place / LOCK).stat().st_mtime_ns != before, 30)
    before = (place / LOCK).stat().st_mtime_ns
    wait_until(lambda: (place / LOCK).stat().st_mtime_ns != before, 30)
    lock.check()
    assert content(place)["renewals"] <= renewals + 1, "the disk is not full"
    pipe.send("renewed")


@pytest.mark.usefixtures("quick")
def test_a_full_disk_does_not_keep_a_lock_from_being_renewed(tmp_path: Path) -> None:
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=renew_on_a_full_disk, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    words = ours.recv()
    process.join(30)
    if words != "renewed":
        pytest.skip(words)


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


def test_a_release_does_not_wait_for_a_file_system_that_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is left to its lease: at the end of a run nothing else waits for the file system."""
    is_over, has_begun = threading.Event(), threading.Event()
    monkeypatch.setattr(lock_module, "RENEWAL", 0.01)
    monkeypatch.setattr(lock_module, "RELEASE_SECONDS", 0.2, raising=False)

    def stall(lock: RunLock) -> None:
        has_begun.set()
        is_over.wait()

    monkeypatch.setattr(RunLock, "_renew", stall)
    lock = acquire(tmp_path)
    assert has_begun.wait(60)
    releasing = threading.Thread(target=lock.release, daemon=True)
    releasing.start()
    releasing.join(20)
    is_waiting = releasing.is_alive()
    is_over.set()
    assert not is_waiting and (tmp_path / LOCK).exists()


@pytest.mark.skipif(shutil.which("ps") is None, reason="asks ps")
@pytest.mark.parametrize("ending", ["killed", "running"])
def test_without_proc_the_owner_is_looked_up_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """As on macOS, where the lock of a crashed run is free at once."""
    monkeypatch.setattr(lock_module, "_PROC", "/nowhere", raising=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    # As macOS's: after "=" the rest of the argument is the heading of a column.
    ps = 'for word; do case $word in *=?*) echo "a heading: $word"; exit;; esac; done\n'
    ps += f'exec {shutil.which("ps")} "$@"'
    for name, script in (("sysctl", '[ "$*" = "-n kern.bootsessionuuid" ] && echo 4A0C6F'), ("ps", ps)):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: other.pid)
        owner = lock_module.Owner.this_process()
    assert re.fullmatch(r"4A0C6F/\w+ \w+ \d+ \d\d:\d\d:\d\d \d{4}", owner.process)
    if ending == "killed":
        other.kill()
        other.wait()
    (tmp_path / LOCK).write_text(json.dumps(asdict(owner)))
    try:
        if ending == "running":
            assert owner.fate() == "alive"
        else:
            take(LockAttempt(tmp_path))
    finally:
        other.kill()
        other.wait()


def test_without_proc_another_process_of_the_same_number_is_not_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_PROC", "/nowhere", raising=False)
    monkeypatch.setattr(lock_module, "_boot", lambda: "4A0C6F")
    owner = replace(lock_module.Owner.this_process(), process="4A0C6F/Thu Jan  1 00:00:00 1970")
    assert owner.fate() == "gone"
