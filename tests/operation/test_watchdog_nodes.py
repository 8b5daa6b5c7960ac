"""Launchers of two nodes agree on what failed: a rank of the other node that hangs or crashes, a node that is lost."""

import json
import os
import signal
import time
from contextlib import suppress
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
from tests.end_to_end.run_process import REPOSITORY, descendants, free_port, wait_until
from tests.forked import fork_context
from tests.operation.test_launch import PATIENCE, TWO, Node, start, two_nodes
from tests.operation.test_launch import RANK as TEMPLATE
from tests.operation.test_launch import _launch as run_launcher

RANK = """
from megatron.config.operation import OperationConfig
from megatron.errors import report_crash, write_error_file
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.processes import die_with_parent
from megatron.operation.run_settings import RunSettings

die_with_parent()
heartbeat = Heartbeat.attach(os.environ, int(os.environ["LOCAL_RANK"]))
heartbeat.dump_stacks_on_signal()
run = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run")
heartbeat.write_settings(RunSettings(RANK, 2, run, OperationConfig(hang_limit_s=1.0)).to_json())

def train(iterations):
    heartbeat.start_training(0)
    for iteration in range(1, iterations + 1):
        heartbeat.start_iteration(iteration)
        for section in (Section.STEP, Section.FORWARD_BACKWARD, Section.GRADS_REDUCE, Section.OPTIMIZER):
            heartbeat.enter(section)
            time.sleep(0.02)

def wait_for_other_rank():
    heartbeat.enter(Section.GRADS_REDUCE)
    open(os.path.join(os.path.dirname(run), f"waits.{RANK}"), "w").close()
    time.sleep(600)

def fail(text):
    report_crash(text, RuntimeError(), os.environ["TORCHELASTIC_ERROR_FILE"])
    os._exit(1)

if ATTEMPT:
    sys.exit(0)
train(40)
"""
"""A rank without torch and without collectives, whose heartbeat is real."""
STOPPED = f"""{RANK}
heartbeat.enter(Section.OPTIMIZER)
os.kill(os.getpid(), signal.SIGSTOP) if RANK else wait_for_other_rank()
"""
CRASHED = f"""{RANK}
failed = os.path.join(os.path.dirname(run), "failed")
if RANK:
    open(failed, "w").close()
    fail("ZeroDivisionError: division by zero")
while not os.path.exists(failed):
    time.sleep(0.01)
fail("... Connection closed by peer")
"""
"""Rank 0 fails as a consequence, when rank 1 fails."""
LOST = f"""{RANK}
if RANK:
    wait_for_other_rank()
while not os.path.exists(os.path.join(os.path.dirname(run), "lost")):
    time.sleep(0.01)
fail("... Connection closed by peer")
"""


def failures(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((directory / "run" / "failures").glob("[0-9]*.json"))]


def test_on_one_node_a_stopped_rank_is_named_and_restarted(tmp_path: Path) -> None:
    assert start(tmp_path, STOPPED, *TWO, "--max-restarts", "1").exit_code() == ExitCode.COMPLETE
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"], found["section"]) == (1, Cause.STOPPED_PROCESS, "optimizer")
    assert [group["ranks"] for group in found["groups"]] == [[0], [1]]


def launch_impatiently(words: list[str], log: Path) -> None:
    with mock.patch.object(watchdog, "STOPPED_SECONDS", 1.0):
        run_launcher(words, log)


@pytest.mark.parametrize("section", ["START", "SAVE"])
def test_a_stopped_rank_is_named_in_a_section_of_which_nothing_is_known(tmp_path: Path, section: str) -> None:
    script, log = tmp_path / "rank.py", tmp_path / "node0.log"
    body = STOPPED.replace("Section.OPTIMIZER)", f"Section.{section})")
    script.write_text(TEMPLATE.format(repository=str(REPOSITORY), directory=tmp_path, body=body))
    words = [*TWO, "--max-restarts", "1", str(script)]
    process = fork_context().Process(target=launch_impatiently, args=(words, log))
    process.start()
    assert Node(process, log).exit_code() == ExitCode.COMPLETE
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"]) == (1, Cause.STOPPED_PROCESS)


def test_the_first_launcher_names_the_node_without_a_sign_of_life(tmp_path: Path) -> None:
    """And not one that ends its ranks, and may wait for their save."""
    memory, nodes = HeartbeatMemory(1), Nodes(HashStore(), 3)
    moment = 1000.0
    with mock.patch("megatron.operation.watch.time.monotonic", lambda: moment):
        launchers = [watch.RankWatch(memory, ["--run-dir", str(tmp_path)]) for _ in range(3)]
        for node, launcher in enumerate(launchers):
            launcher.start([node], 3, {0: os.getpid()}, nodes, node, 0)
        found = None
        for second in range(0, 100, 5):
            moment = 1000.0 + second
            launchers[1].find_hang([]) if second < 20 else None
            launchers[2].leave() if second == 20 else launchers[2].find_hang([]) if second < 20 else None
            found = launchers[0].find_hang([])
            if found is not None:
                break
    assert found is not None and (found.cause, found.rank) == (Cause.NODE_LOST, 1)
    assert 15.0 + watch.LOST_SECONDS < second <= 20.0 + watch.LOST_SECONDS + 5.0
    memory.close()


def test_a_launcher_that_has_reported_a_hang_still_gives_signs_of_life(capsys: pytest.CaptureFixture[str]) -> None:
    """With --on-hang report: it is not named as lost, neither while the hang lasts nor when the ranks go on."""
    memory, nodes = HeartbeatMemory(1), Nodes(HashStore(), 2)
    moment = 1000.0
    evidence = Evidence(rank=1, local_rank=0, host="b", pid=1, section="step", seconds=61.0, state="S")
    with (
        mock.patch("megatron.operation.watch.time.monotonic", lambda: moment),
        mock.patch.object(watch.RankWatch, "_evidence", lambda *arguments: [evidence]),
        mock.patch.object(watch.RankWatch, "_evidence_of_all", lambda *arguments: [evidence]),
    ):
        launchers = [watch.RankWatch(memory, ["--on-hang", "report"]) for _ in range(2)]
        for node, launcher in enumerate(launchers):
            launcher.start([node], 2, {0: os.getpid()}, nodes, node, 0)
        for second in range(300):
            moment = 1000.0 + second
            for node, launcher in enumerate(launchers):
                hang = [watchdog.Overrun(0, Section.STEP, 61.0, 60.0)] if node and second < 200 else []
                with mock.patch.object(launcher, "_sample", lambda *arguments, hang=hang: hang):
                    assert launcher.find_hang([]) is None
    text = capsys.readouterr().err
    assert text.count("A hang was found, and nothing is ended (hang). Rank 1") == 1
    assert text.count("The ranks go on, 200 s after the report of a hang.") == 1 and "node_lost" not in text
    memory.close()


@pytest.mark.parametrize("said", [None, "join", "restart"])
def test_a_node_that_torch_removes_from_the_rendezvous_is_lost(
    capsys: pytest.CaptureFixture[str], said: str | None
) -> None:
    """If a spare waits, torch restarts the ranks as for a node that joins, which says so before it stops its ranks."""
    memory, nodes = HeartbeatMemory(1), Nodes(HashStore(), 3)
    first, second, lost = (watch.RankWatch(memory, []) for _ in range(3))
    for node, launcher in enumerate((first, second, lost)):
        launcher.start([node], 3, {0: os.getpid()}, nodes, node, 0)
    if said is not None:
        nodes.stop_for_join() if said == "join" else nodes.restart(0)
    assert not first.have_nodes_left(None) and not first.have_nodes_left({0, 1, 2})
    assert first.have_nodes_left({0, 1}) == (said is None)
    assert not second.have_nodes_left({1})  # the first launcher has left in the meantime, and has said why
    if said is None:
        assert first.failure is not None and second.failure is None
        assert (first.failure.cause, first.failure.rank) == (Cause.NODE_LOST, 2)
    assert nodes.must_restart(0) == (said != "join")
    assert capsys.readouterr().err.count("node_lost") == (said is None)
    memory.close()


def test_with_the_store_lost_the_rendezvous_host_is_named_and_not_all_nodes() -> None:
    """Ranks that lose their connection to a rank on that host may end before the launcher needs the store."""
    memory, nodes = HeartbeatMemory(1), Nodes(HashStore(), 2)
    launcher = watch.RankWatch(memory, [])
    launcher.start([1], 2, {0: os.getpid()}, nodes, 1, 0)
    message = {"message": "... Connection closed by peer"}
    end = SimpleNamespace(message=message, timestamp=0, error_file="", exitcode=1)
    with mock.patch.object(nodes, "collect", lambda *_: {}):
        launcher.record_ends({0: end}, [0], ExitCode.CRASH, "first:29500")
    assert launcher.failure is not None
    assert (launcher.failure.cause, launcher.failure.host) == (Cause.NODE_LOST, "first")
    memory.close()


def test_a_launcher_that_ends_its_ranks_is_not_named_in_a_hang() -> None:
    """It says nothing of its ranks any more, as a lost one; which is not the same."""
    memory, nodes = HeartbeatMemory(1), Nodes(HashStore(), 3)
    launchers = [watch.RankWatch(memory, []) for _ in range(3)]
    for node, launcher in enumerate(launchers):
        launcher.start([node], 3, {0: os.getpid()}, nodes, node, 0)
    launchers[1].leave()
    attempt = launchers[0]._attempt
    assert attempt is not None
    with mock.patch.object(watch, "NODES_SECONDS", -1.0):
        evidence = launchers[0]._evidence_of_all(attempt, [], nodes)
    assert [(one.rank, one.is_lost) for one in evidence] == [(0, False), (2, True)]
    memory.close()


def test_the_launchers_of_other_nodes_know_that_a_rank_waits_for_storage() -> None:
    memory, nodes = HeartbeatMemory(1), Nodes(HashStore(), 2)
    launchers = [watch.RankWatch(memory, []) for _ in range(2)]
    for node, launcher in enumerate(launchers):
        launcher.start([node], 2, {0: os.getpid()}, nodes, node, 0)
    attempts = [launcher._attempt for launcher in launchers if launcher._attempt is not None]
    for waits in (True, False):
        attempts[1].watchdog.waits_for_storage = waits
        for node in (1, 0, 0):
            attempts[node].beat_at = 0.0
            launchers[node]._find_lost_nodes(attempts[node], nodes, 1000.0)
        assert attempts[0].others_wait == waits
    memory.close()


def test_without_restarts_the_last_box_names_the_rank(tmp_path: Path) -> None:
    node = start(tmp_path, STOPPED, *TWO)
    assert node.exit_code() == ExitCode.CRASH
    text = node.log.read_text()
    assert "hangs in optimizer of iteration 40" in text[text.rindex("Root Cause (first observed failure):") :]


@pytest.mark.slow(reason="launchers on two nodes")
@pytest.mark.parametrize("kind", ["static", "c10d"])
@pytest.mark.parametrize(
    ("body", "cause"), [(STOPPED, Cause.STOPPED_PROCESS), (CRASHED, Cause.EXCEPTION)], ids=["stopped", "crashed"]
)
def test_one_report_names_the_rank_of_the_other_node(tmp_path: Path, kind: str, body: str, cause: Cause) -> None:
    nodes = two_nodes(tmp_path, kind, body, restarts=1)
    assert [node.exit_code() for node in nodes] == [ExitCode.COMPLETE] * 2, [node.log.read_text() for node in nodes]
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"]) == (1, cause)


@pytest.mark.slow(reason="launchers on two nodes")
def test_a_node_that_is_lost_is_named(tmp_path: Path) -> None:
    nodes = two_nodes(tmp_path, "static", LOST, restarts=1)
    wait_until((tmp_path / "waits.1").exists, PATIENCE)
    end(nodes[1])
    (tmp_path / "lost").write_text("")
    wait_until(lambda: len(failures(tmp_path)) == 1, PATIENCE)
    (found,) = failures(tmp_path)
    assert (found["cause"], found["rank"]) == (Cause.NODE_LOST, 1)
    assert "rank 1" in found["message"] and found["host"] in found["message"]
    end(nodes[0])


SILENT = f"""{RANK}
open(os.path.join(os.path.dirname(run), f"pid.{{RANK}}"), "w").write(str(os.getpid()))
heartbeat.enter(Section.SAVE)
open(os.path.join(os.path.dirname(run), f"waits.{{RANK}}"), "w").close()
time.sleep(600)
"""
"""In a save, of which nothing is known; no rank has an error."""


@pytest.mark.slow(reason="launchers on two nodes, and 45 s")
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_a_node_that_is_lost_is_named_within_a_minute_although_no_rank_fails(tmp_path: Path, kind: str) -> None:
    nodes = two_nodes(tmp_path, kind, SILENT, restarts=0)
    wait_until(lambda: len(list(tmp_path.glob("waits.*"))) == 2, PATIENCE)
    lost = next(node for node in nodes if not _is_first(node, tmp_path))
    end(lost)
    began = time.monotonic()
    wait_until(lambda: len(failures(tmp_path)) == 1, PATIENCE)
    assert watch.LOST_SECONDS - 10.0 < time.monotonic() - began < 60.0
    (found,) = failures(tmp_path)
    assert (found["cause"], found["rank"]) == (Cause.NODE_LOST, 1)
    for node in nodes:
        if node is not lost:
            end(node)


def _is_first(node: Node, directory: Path) -> bool:
    """Whether rank 0 is on this node."""
    assert node.process.pid is not None
    return int((directory / "pid.0").read_text()) in descendants(node.process.pid)


def end(node: Node) -> None:
    """Kill a launcher with everything that it has started."""
    assert node.process.pid is not None
    for pid in [node.process.pid, *descendants(node.process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.process.join(PATIENCE)


def launch_with_unkillable_rank(words: list[str], log: Path) -> None:
    """Rank 1 seems to remain, as a process does that waits in the kernel."""

    def end_all_but_one(*arguments: Any, **keywords: Any) -> list[int]:
        return [*end_processes(*arguments, **keywords), 1]

    with mock.patch.object(launch, "end_processes", end_all_but_one):
        run_launcher(words, log)


def test_a_rank_that_cannot_be_killed_is_named_and_its_launcher_ends(tmp_path: Path) -> None:
    """Although restarts are left: new ranks would find the devices in use."""
    script, log = tmp_path / "rank.py", tmp_path / "node0.log"
    script.write_text(TEMPLATE.format(repository=str(REPOSITORY), directory=tmp_path, body=STOPPED))
    words = [*TWO, "--max-restarts", "3", str(script)]
    process = fork_context().Process(target=launch_with_unkillable_rank, args=(words, log))
    process.start()
    assert Node(process, log).exit_code() == ExitCode.CRASH
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"]) == (1, Cause.HANG)
    assert "does not end after SIGKILL" in found["message"]
    assert len(list(tmp_path.glob("started.*"))) == 2


# --- the host of the rendezvous, and links -------------------------------------------------------------------

TRAINS = f"""{RANK.replace("hang_limit_s=1.0", "hang_limit_s=20.0")}
directory = os.path.dirname(run)
heartbeat.enter(Section.OPTIMIZER)
open(os.path.join(directory, f"waits.{{RANK}}"), "w").close()
while not os.path.exists(os.path.join(directory, "end")):
    time.sleep(0.05)
    heartbeat.start_iteration(41)
sys.exit(int(open(os.path.join(directory, "end")).read()))
"""


def launchers(directory: Path, count: int) -> list[Node]:
    """Launchers of a job on two nodes, of which the first has the store of the rendezvous, and the third waits."""
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "127.0.0.1"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "3", "--rdzv-conf"]
    nodes = []
    for node in range(count):
        nodes.append(start(directory, TRAINS, *flags, f"is_host={'false' if node else 'true'}", node=node))
        if node == 1:
            wait_until(lambda: len(list(directory.glob("waits.*"))) == 2, PATIENCE)
    return nodes


@pytest.mark.slow(reason="launchers on two nodes")
def test_a_rendezvous_host_that_is_lost_is_named(tmp_path: Path) -> None:
    nodes = launchers(tmp_path, 2)
    end(nodes[0])
    assert nodes[1].exit_code() == ExitCode.CRASH
    text = nodes[1].log.read_text()
    assert "lost the rendezvous host 127.0.0.1:" in text and "Traceback" not in text
    (found,) = failures(tmp_path)
    assert (found["cause"], found["host"]) == (Cause.NODE_LOST, "127.0.0.1")


@pytest.mark.slow(reason="launchers on three nodes")
@pytest.mark.parametrize("code", [ExitCode.COMPLETE, ExitCode.ACTION_REQUIRED, None], ids=["complete", "2", "lost"])
def test_a_launcher_that_waits_ends_with_0_only_if_the_run_is_complete(tmp_path: Path, code: ExitCode | None) -> None:
    """Kubernetes takes 0 for success."""
    nodes = launchers(tmp_path, 3)
    time.sleep(6.0)  # until the third waits for a place
    if code is None:
        end(nodes[0])
        assert [node.exit_code() for node in nodes[1:]] == [ExitCode.CRASH] * 2, nodes[2].log.read_text()
        assert "lost the rendezvous host 127.0.0.1:" in nodes[2].log.read_text()
    else:
        (tmp_path / "draft").write_text(str(int(code)))
        (tmp_path / "draft").rename(tmp_path / "end")
        assert [node.exit_code() for node in nodes] == [code] * 3, nodes[2].log.read_text()
        assert "ended before it needed this node" in nodes[2].log.read_text()
