"""Launchers of two nodes agree on what failed: a rank of the other node that hangs or crashes, a node that is lost."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore

from megatron.errors import ExitCode
from megatron.operation import launch, watch, watchdog
from megatron.operation.causes import Cause
from megatron.operation.culprit import Evidence
from megatron.operation.heartbeat import HeartbeatMemory, Section
from megatron.operation.nodes import Nodes
from megatron.operation.processes import end_processes
from tests.end_to_end.run_process import descendants, free_port, wait_until
from tests.operation.campaign_checks import read_reports
from tests.operation.jobs import PATIENCE
from tests.operation.scripted_ranks import TWO, WATCHED, start, start_node, start_nodes, waiting

STOPPED = f"""{WATCHED}
heartbeat.enter(Section.OPTIMIZER)
os.kill(os.getpid(), signal.SIGSTOP) if RANK else wait_in(Section.GRADS_REDUCE)
"""
CRASHED = f"""{WATCHED}
if RANK:
    touch("failed")
    fail("ZeroDivisionError: division by zero")
wait_for_file("failed")
fail("... Connection closed by peer")
"""
"""Rank 0 fails as a consequence, when rank 1 fails."""


def failures(directory: Path) -> list[dict[str, Any]]:
    return read_reports(directory / "run")


def test_without_restarts_the_last_box_names_the_rank(tmp_path: Path) -> None:
    node = start(tmp_path, STOPPED, *TWO)
    assert node.exit_code() == ExitCode.CRASH
    text = node.text()
    assert "hangs in optimizer of iteration 40" in text[text.rindex("Root Cause (first observed failure):") :]
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"], found["section"]) == (1, Cause.STOPPED_PROCESS, "optimizer")
    assert [group["ranks"] for group in found["groups"]] == [[0], [1]]


def shorten_stops() -> None:
    watchdog.STOPPED_SECONDS = 1.0


@pytest.mark.parametrize("section", ["START", "SAVE"])
def test_a_stopped_rank_is_named_and_restarted_in_a_section_of_which_nothing_is_known(
    tmp_path: Path, section: str
) -> None:
    body = STOPPED.replace("Section.OPTIMIZER)", f"Section.{section})")
    node = start(tmp_path, body, *TWO, "--max-restarts", "1", prepare=shorten_stops)
    assert node.exit_code() == ExitCode.COMPLETE
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"]) == (1, Cause.STOPPED_PROCESS)


def let_rank_1_remain() -> None:
    """It seems so, as of a process that waits in the kernel."""
    vars(launch)["end_processes"] = lambda *arguments, **keywords: [*end_processes(*arguments, **keywords), 1]


def test_a_rank_that_cannot_be_killed_is_named_and_its_launcher_ends(tmp_path: Path) -> None:
    """Although restarts are left: new ranks would find the devices in use."""
    node = start(tmp_path, STOPPED, *TWO, "--max-restarts", "3", prepare=let_rank_1_remain)
    assert node.exit_code() == ExitCode.CRASH
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"]) == (1, Cause.HANG)
    assert "does not end after SIGKILL" in found["message"]
    assert len(list(tmp_path.glob("started.*"))) == 2


# --- launchers without ranks, that share a store -------------------------------------------------------------


class Launchers:
    """What the launchers of some nodes decide, each with one rank."""

    def __init__(self, count: int, *words: str) -> None:
        self.nodes = Nodes(HashStore(), count)
        self.all = [watch.RankWatch(HeartbeatMemory(1), words) for _ in range(count)]
        for node, launcher in enumerate(self.all):
            launcher.start([node], count, {0: os.getpid()}, self.nodes, node, 0)

    def attempt(self, node: int) -> Any:
        return self.all[node]._attempt


@dataclass
class Clock:
    """A clock that the test sets."""

    moment: float = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("megatron.operation.watch.time.monotonic", lambda: clock.moment)
    return clock


def test_the_first_launcher_names_the_node_without_a_sign_of_life(tmp_path: Path, clock: Clock) -> None:
    """And not one that ends its ranks, and may wait for their save."""
    job = Launchers(3, "--run-dir", str(tmp_path))
    found = None
    for second in range(0, 100, 5):
        clock.moment = 1000.0 + second
        job.all[1].find_hang([]) if second < 20 else None
        job.all[2].leave() if second == 20 else job.all[2].find_hang([]) if second < 20 else None
        found = job.all[0].find_hang([])
        if found is not None:
            break
    assert found is not None and (found.cause, found.rank) == (Cause.NODE_LOST, 1)
    assert 15.0 + watch.LOST_SECONDS < second <= 20.0 + watch.LOST_SECONDS + 5.0


def test_a_launcher_that_has_reported_a_hang_still_gives_signs_of_life(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --on-hang report: it is not named as lost, neither while the hang lasts nor when the ranks go on."""
    job = Launchers(2, "--on-hang", "report")
    evidence = Evidence(rank=1, local_rank=0, host="b", pid=1, section="step", seconds=61.0, state="S")
    with (
        mock.patch.object(watch.RankWatch, "_evidence", lambda *arguments: [evidence]),
        mock.patch.object(watch.RankWatch, "_evidence_of_all", lambda *arguments: [evidence]),
    ):
        for second in range(300):
            clock.moment = 1000.0 + second
            for node, launcher in enumerate(job.all):
                hang = [watchdog.Overrun(0, Section.STEP, 61.0, 60.0)] if node and second < 200 else []
                with mock.patch.object(launcher, "_sample", lambda *arguments, hang=hang: hang):
                    assert launcher.find_hang([]) is None
    text = capsys.readouterr().err
    assert text.count("A hang was found, and nothing is ended (hang). Rank 1") == 1
    assert text.count("The ranks go on, 200 s after the report of a hang.") == 1 and "node_lost" not in text


@pytest.mark.parametrize("said", [None, "join", "restart"])
def test_a_node_that_torch_removes_from_the_rendezvous_is_lost(
    capsys: pytest.CaptureFixture[str], said: str | None
) -> None:
    """If a spare waits, torch restarts the ranks as for a node that joins, which says so before it stops its ranks."""
    job = Launchers(3)
    first, second, _ = job.all
    if said is not None:
        job.nodes.stop_for_join() if said == "join" else job.nodes.restart(0)
    assert not first.have_nodes_left(None) and not first.have_nodes_left({0, 1, 2})
    assert first.have_nodes_left({0, 1}) == (said is None)
    assert not second.have_nodes_left({1})  # the first launcher has left in the meantime, and has said why
    if said is None:
        assert first.failure is not None and second.failure is None
        assert (first.failure.cause, first.failure.rank) == (Cause.NODE_LOST, 2)
    assert job.nodes.must_restart(0) == (said != "join")
    assert capsys.readouterr().err.count("node_lost") == (said is None)


def test_with_the_store_lost_the_rendezvous_host_is_named_and_not_all_nodes() -> None:
    """Ranks that lose their connection to a rank on that host may end before the launcher needs the store."""
    job = Launchers(2)
    message = {"message": "... Connection closed by peer"}
    end = SimpleNamespace(message=message, timestamp=0, error_file="", exitcode=1)
    with mock.patch.object(job.nodes, "collect", lambda *_: {}):
        job.all[1].record_ends({0: end}, [0], ExitCode.CRASH, "first:29500")
    failure = job.all[1].failure
    assert failure is not None and (failure.cause, failure.host) == (Cause.NODE_LOST, "first")


def test_a_launcher_that_ends_its_ranks_is_not_named_in_a_hang() -> None:
    """It says nothing of its ranks any more, as a lost one; which is not the same."""
    job = Launchers(3)
    job.all[1].leave()
    with mock.patch.object(watch, "NODES_SECONDS", -1.0):
        evidence = job.all[0]._evidence_of_all(job.attempt(0), [], job.nodes)
    assert [(one.rank, one.is_lost) for one in evidence] == [(0, False), (2, True)]


def test_the_launchers_of_other_nodes_know_that_a_rank_waits_for_storage() -> None:
    job = Launchers(2)
    for waits in (True, False):
        job.attempt(1).watchdog.waits_for_storage = waits
        for node in (1, 0, 0):
            job.attempt(node).beat_at = 0.0
            job.all[node]._find_lost_nodes(job.attempt(node), job.nodes, 1000.0)
        assert job.attempt(0).others_wait == waits


# --- two nodes, and the host of the rendezvous ---------------------------------------------------------------


@pytest.mark.slow(reason="launchers on two nodes")
@pytest.mark.parametrize("kind", ["static", "c10d"])
@pytest.mark.parametrize(
    ("body", "cause"), [(STOPPED, Cause.STOPPED_PROCESS), (CRASHED, Cause.EXCEPTION)], ids=["stopped", "crashed"]
)
def test_one_report_names_the_rank_of_the_other_node(tmp_path: Path, kind: str, body: str, cause: Cause) -> None:
    nodes = start_nodes(tmp_path, kind, body, restarts=1)
    assert [node.exit_code() for node in nodes] == [ExitCode.COMPLETE] * 2, [node.text() for node in nodes]
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"]) == (1, cause)


SILENT = f"""{WATCHED}
open(f"{{DIRECTORY}}/pid.{{RANK}}", "w").write(str(os.getpid()))
wait_in(Section.SAVE)
"""
"""In a save, of which nothing is known; no rank has an error."""
LOST = f"""{WATCHED}
open(f"{{DIRECTORY}}/pid.{{RANK}}", "w").write(str(os.getpid()))
if RANK:
    wait_in(Section.GRADS_REDUCE)
touch("waits.0")
wait_for_file("lost")
fail("... Connection closed by peer")
"""
"""Rank 0 has an error when its node has lost the other one."""


@pytest.mark.slow(reason="launchers on two nodes, and 45 s")
@pytest.mark.parametrize(("kind", "body"), [("static", SILENT), ("c10d", SILENT), ("static", LOST)])
def test_a_node_that_is_lost_is_named_within_a_minute(tmp_path: Path, kind: str, body: str) -> None:
    """Also if no rank fails."""
    nodes = start_nodes(tmp_path, kind, body, restarts=0)
    wait_until(lambda: waiting(tmp_path) == 2, PATIENCE)
    first = int((tmp_path / "pid.0").read_text())
    (lost,) = [node for node in nodes if first not in descendants(node.pid)]
    lost.end()
    (tmp_path / "lost").touch()
    began = time.monotonic()
    wait_until(lambda: len(failures(tmp_path)) == 1, PATIENCE)
    assert time.monotonic() - began < 60.0
    assert body == LOST or time.monotonic() - began > watch.LOST_SECONDS - 10.0
    (found,) = failures(tmp_path)
    assert (found["cause"], found["rank"]) == (Cause.NODE_LOST, 1)
    assert "rank 1" in found["message"] and found["host"] in found["message"]
    for node in nodes:
        node.end()


TRAINS = f"""{WATCHED.replace("hang_limit_s=1.0", "hang_limit_s=20.0")}
heartbeat.enter(Section.OPTIMIZER)
touch(f"waits.{{RANK}}")
while not os.path.exists(f"{{DIRECTORY}}/end"):
    time.sleep(0.05)
    heartbeat.start_iteration(41)
sys.exit(int(open(f"{{DIRECTORY}}/end").read()))
"""


@pytest.mark.slow(reason="launchers on three nodes")
@pytest.mark.parametrize("code", [ExitCode.COMPLETE, ExitCode.ACTION_REQUIRED, None], ids=["complete", "2", "lost"])
def test_a_launcher_that_waits_ends_with_0_only_if_the_run_is_complete(tmp_path: Path, code: ExitCode | None) -> None:
    """Kubernetes takes 0 for success. If the rendezvous host is lost, all others name it."""
    port = free_port()
    nodes = [start_node(tmp_path, "c10d", port, node, TRAINS, restarts=3) for node in range(2)]
    wait_until(lambda: waiting(tmp_path) == 2, PATIENCE)
    nodes.append(start_node(tmp_path, "c10d", port, 2, TRAINS, restarts=3))
    time.sleep(6.0)  # until the third waits for a place
    if code is None:
        nodes[0].end()
        assert [node.exit_code() for node in nodes[1:]] == [ExitCode.CRASH] * 2, nodes[2].text()
        for node in nodes[1:]:
            assert "lost the rendezvous host 127.0.0.1:" in node.text() and "Traceback" not in node.text()
        (found,) = failures(tmp_path)
        assert (found["cause"], found["host"]) == (Cause.NODE_LOST, "127.0.0.1")
    else:
        (tmp_path / "draft").write_text(str(int(code)))
        (tmp_path / "draft").rename(tmp_path / "end")
        assert [node.exit_code() for node in nodes] == [code] * 3, nodes[2].text()
        assert "ended before it needed this node" in nodes[2].text()
