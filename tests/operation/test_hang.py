"""The launcher finds what failed: a rank that hangs or crashes, on one node or another, or a node that is lost. With
``--on-hang report`` nothing is ended, under any launcher."""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from megatron.errors import ExitCode
from megatron.operation import hang, ranks, side_watch, watchdog
from megatron.operation.causes import Cause
from megatron.operation.hang import STAYS, command_key, longest_stays, write_stays
from megatron.operation.heartbeat import HEARTBEATS, Heartbeat, HeartbeatMemory, Section
from megatron.operation.nodes import Nodes
from megatron.operation.ranks import end_processes
from tests.end_to_end.run_process import REPOSITORY, Flags, descendants, free_port, wait_until
from tests.operation.broken_job import LIMIT, SECTIONS, Break, BreakableJob, break_one_after_the_other
from tests.operation.campaign_checks import read_reports
from tests.operation.jobs import LAUNCH, PATIENCE, TORCHRUN, Job, cmdline, ended, is_alive
from tests.operation.scripted_ranks import TWO, WATCHED, start, start_node, start_nodes, waiting


@pytest.mark.parametrize("hangs", [1, pytest.param(20, marks=pytest.mark.slow(reason="five minutes of waits"))])
def test_a_rank_that_hangs_is_named_and_all_are_restarted(tmp_path: Path, chance: random.Random, hangs: int) -> None:
    """In a real training. Then one raises an exception: it is named, not the other, which loses its connection."""
    first = Break("gil", chance.randrange(2), chance.choice(SECTIONS))
    drawn = [first, *(Break.draw(chance) for _ in range(hangs - 1))]
    with ended() as jobs:
        # Twice the limit of the campaign by command: two healthy ranks may wait 2 s for each other beside other tests.
        jobs.append(job := BreakableJob(tmp_path, len(drawn) + 1, 2 * LIMIT))
        *reports, last = break_one_after_the_other(job, [*drawn, Break("exception", 1, "optimizer")])
        # How long it takes depends on the machine: the campaign by command reports it.
        assert all(report.is_right and report.seconds > LIMIT for report in reports), reports
        assert last.is_right and last.content["cause"] == Cause.EXCEPTION and last.content["rank"] == 1
        assert last.content["section"] == "optimizer" and "Injected fault" in last.content["message"]
        job.wait_until_quiet()
        assert len(job.reports()) == len(drawn) + 1


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


def shorten_stops() -> None:
    watchdog.STOPPED_SECONDS = 1.0


def test_a_stopped_rank_is_named_in_the_last_box_and_in_a_section_of_which_nothing_is_known(tmp_path: Path) -> None:
    body = STOPPED.replace("Section.OPTIMIZER)", "Section.SAVE)")
    node = start(tmp_path, body, *TWO, prepare=shorten_stops)
    assert node.exit_code() == ExitCode.CRASH
    text = node.text()
    assert "hangs in save of iteration 40" in text[text.rindex("Root Cause (first observed failure):") :]
    (found,) = failures(tmp_path)
    assert (found["rank"], found["cause"], found["section"]) == (1, Cause.STOPPED_PROCESS, "save")
    assert [group["ranks"] for group in found["groups"]] == [[0], [1]]


def let_rank_1_remain() -> None:
    """It seems so, as of a process that waits in the kernel."""
    vars(ranks)["end_processes"] = lambda *arguments, **keywords: [*end_processes(*arguments, **keywords), 1]


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
    """What the launchers of some nodes decide, each with one rank, on a simulated clock."""

    def __init__(self, count: int, *words: str, nodes: type[Nodes] = Nodes) -> None:
        self.seconds = 1000.0
        self.nodes = nodes(HashStore(), count)
        self.memories = [HeartbeatMemory(1) for _ in range(count)]
        self.all = [hang.RankWatch(memory, words, self.now_ns, nodes_seconds=0.0) for memory in self.memories]
        for node, launcher in enumerate(self.all):
            launcher.start([node], count, {0: os.getpid()}, self.nodes, node, 0)

    def now_ns(self) -> int:
        return round(self.seconds * 1e9)

    def attempt(self, node: int) -> Any:
        return self.all[node]._attempt


def test_the_first_launcher_names_the_node_without_a_sign_of_life(tmp_path: Path) -> None:
    """And not one that ends its ranks, and may wait for their save."""
    job = Launchers(3, "--run-dir", str(tmp_path))
    found = None
    for second in range(0, 100, 5):
        job.seconds = 1000.0 + second
        if second < 20:
            assert job.all[1].find_hang([]) is None
        if second == 0:
            assert job.all[2].find_hang([]) is None
        elif second == 5:
            job.all[2].leave()
        found = job.all[0].find_hang([])
        if found is not None:
            break
    assert found is not None and (found.cause, found.rank) == (Cause.NODE_LOST, 1)
    assert 15.0 + hang.LOST_SECONDS < second <= 20.0 + hang.LOST_SECONDS + 5.0


def test_a_launcher_that_has_reported_a_hang_still_gives_signs_of_life(capsys: pytest.CaptureFixture[str]) -> None:
    """With --on-hang report: it is not named as lost, neither while the hang lasts nor when the ranks go on."""

    class AnsweringNodes(Nodes):
        """The launcher of the hang waits for what the other one knows of its rank."""

        def collect(self, topic: str, restarts: int, seconds: float) -> dict[int, Any]:
            job.all[0].find_hang([])
            return super().collect(topic, restarts, seconds)

    job = Launchers(2, "--on-hang", "report", nodes=AnsweringNodes)
    beats = [Heartbeat.attach({HEARTBEATS: memory.path}, 0, job.now_ns) for memory in job.memories]
    for beat in beats:
        beat.start_training(0)
    for second in range(300):
        job.seconds = 1000.0 + second
        for rank in (1, 0):
            if rank == 0 or not 50 <= second < 250:
                beats[rank].start_iteration(second)
                beats[rank].enter(Section.FORWARD_BACKWARD)
            assert job.all[rank].find_hang([]) is None
    text = capsys.readouterr().err
    assert text.count("A hang was found, and nothing is ended (hang). Rank 1") == 1
    assert re.findall(r"The ranks go on, (\d+) s after the report of a hang", text) == ["141"]
    assert "node_lost" not in text


def test_a_launcher_decides_alone_if_the_first_does_not_end_the_attempt() -> None:
    job = Launchers(2)
    beats = [Heartbeat.attach({HEARTBEATS: memory.path}, 0, job.now_ns) for memory in job.memories]
    for beat in beats:
        beat.start_training(0)
    decided: dict[int, int] = {}
    for second in range(300):
        job.seconds = 1000.0 + second
        for node in {0, 1} - decided.keys():
            if second < 50:
                beats[node].start_iteration(second)
                beats[node].enter(Section.FORWARD_BACKWARD)
            if job.all[node].find_hang([]) is not None:
                decided[node] = second
    assert 15 <= decided[1] - decided[0] < 20


@pytest.mark.parametrize("said", [None, "join", "restart"])
def test_a_node_that_leaves_the_rendezvous_is_lost(capsys: pytest.CaptureFixture[str], said: str | None) -> None:
    """If a spare waits, torch restarts the ranks as for a node that joins, which says so before it stops its ranks."""
    job = Launchers(3)
    first, second, _ = job.all
    if said is not None:
        job.nodes.stop_for_join() if said == "join" else job.nodes.restart(0)
    assert not first.have_nodes_left(None) and not first.have_nodes_left({0, 1, 2})
    assert first.have_nodes_left({0, 1}) == (said is None)
    assert not second.have_nodes_left({1})  # the first launcher has left in the meantime, and has said why
    if said is None:
        assert first.reports.failure is not None and second.reports.failure is None
        assert (first.reports.failure.cause, first.reports.failure.rank) == (Cause.NODE_LOST, 2)
    assert job.nodes.must_restart(0) == (said != "join")
    assert capsys.readouterr().err.count("node_lost") == (said is None)


class LostStore(Nodes):
    def collect(self, topic: str, restarts: int, seconds: float) -> dict[int, Any]:
        return {}


def test_with_the_store_lost_the_rendezvous_host_is_named_and_not_all_nodes() -> None:
    """Ranks that lose their connection to a rank on that host may end before the launcher needs the store."""
    job = Launchers(2, nodes=LostStore)
    message = {"message": "... Connection closed by peer"}
    end = SimpleNamespace(message=message, timestamp=0, error_file="", exitcode=1)
    job.all[1].reports.record_ends({0: end}, [0], ExitCode.CRASH, "first:29500")
    failure = job.all[1].reports.failure
    assert failure is not None and (failure.cause, failure.host) == (Cause.NODE_LOST, "first")


def test_a_launcher_that_ends_its_ranks_is_not_named_in_a_hang() -> None:
    """It says nothing of its ranks any more, as a lost one; which is not the same."""
    job = Launchers(3)
    job.all[1].leave()
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


# --- --on-hang report ----------------------------------------------------------------------------------------

FT_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
NOTHING_IS_ENDED = "A hang was found, and nothing is ended"
REPORT: Flags = {"on_hang": "report", "hang_limit_s": 2.0, "hang_limit_data_s": 2.0}
REPORT["save_interval"] = 10**6


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    with ended() as started:
        yield started


def reported(job: Job, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The report for which ``is_it`` holds, once it is there."""
    path = job.save / "failure.json"
    job.wait_for(lambda: path.exists() and is_it(json.loads(path.read_text())))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def side_processes(job: Job) -> list[int]:
    """Those that watch the ranks of a job."""
    return [pid for pid in descendants(job.pid) if b"megatron.operation.side_watch" in cmdline(pid)]


def stop_and_let_go_on(job: Job, stopped: Sequence[int]) -> None:
    """One rank after the other is stopped: each is named, and no process ends."""
    job.wait_for(lambda: len(job.records()) > 20)
    ranks = job.ranks()
    assert len(ranks) == 2
    for number, rank in enumerate(stopped, start=1):
        done = len(job.records())
        os.kill(ranks[rank], signal.SIGSTOP)
        report = reported(job, lambda one, rank=rank: one["rank"] == rank)  # type: ignore[misc]
        assert (report["cause"], report["rank"]) == (Cause.STOPPED_PROCESS, rank)
        waiting = next(group for group in report["groups"] if group["ranks"] == [1 - rank])
        assert waiting["stack"], "the other rank shows where it waits"
        assert all(is_alive(pid) for pid in ranks.values())
        # It is said after it is written.
        job.wait_for(lambda number=number: job.text().count(NOTHING_IS_ENDED) == number)  # type: ignore[misc]
        os.kill(ranks[rank], signal.SIGCONT)
        job.wait_for(lambda done=done: len(job.records()) > done + 20)  # type: ignore[misc]
        job.wait_for(lambda number=number: job.text().count("The ranks go on, ") == number)  # type: ignore[misc]
    assert job.ranks() == ranks


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (LAUNCH, []),
        pytest.param(TORCHRUN, [], marks=pytest.mark.slow),
        pytest.param(
            FT_LAUNCHER,
            ["--ignore-missing-fault-tol-cfg"],
            marks=pytest.mark.slow(reason="needs the package nvidia-resiliency-ext"),
        ),
    ],
)
def test_a_launcher_reports_and_ends_nothing(tmp_path: Path, jobs: list[Job], module: str, flags: list[str]) -> None:
    """Our own reports, under another one a process beside the ranks, which ends with them."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip("pip install nvidia-resiliency-ext")
    jobs.append(job := Job(tmp_path, ["--standalone", *flags], module, flags=REPORT))
    stop_and_let_go_on(job, (1, 0) if module == LAUNCH else (1,))
    beside = side_processes(job)
    assert len(beside) == (module != LAUNCH)
    job.signal(signal.SIGTERM)
    code = job.exit_code()
    assert module != LAUNCH or code == ExitCode.STOPPED
    wait_until(lambda: not any(map(is_alive, beside)), PATIENCE)


def test_the_watching_process_finds_a_clone_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """From whatever directory the ranks were started. One that does not start costs a warning."""
    started: list[dict[str, str]] = []

    def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        started.append(options["env"])
        return subprocess.Popen([sys.executable, "-c", ""], **options)

    heartbeat = Heartbeat()
    side_watch.join(heartbeat, 0, 0, 1, 1, HashStore(), ["pretrain_llama.py"], start)
    assert started[0]["PYTHONPATH"].split(os.pathsep)[0] == str(REPOSITORY)
    assert not heartbeat.is_watched and "WARNING: a hang of rank 0 will not be reported" in capsys.readouterr().err


@pytest.mark.slow(reason="two launchers, started as usual")
def test_nodes_under_torchrun_report_once(tmp_path: Path, jobs: list[Job]) -> None:
    """The watches of both nodes exchange what they know through the store of the ranks."""
    places = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        flags = ["--node-rank", str(node), *places, "--nproc-per-node", "1"]
        run: Flags = {"save": tmp_path / "0/save", "load": tmp_path / "0/save"}
        run |= {"metrics_jsonl": tmp_path / "0/metrics.jsonl"}
        jobs.append(Job(tmp_path / str(node), flags, TORCHRUN, flags={**REPORT, **run}))
    first, second = jobs
    first.wait_for(lambda: len(first.records()) > 20)
    pids = [first.ranks()[0], second.ranks()[0]]
    os.kill(pids[1], signal.SIGSTOP)
    assert reported(first, lambda one: one["rank"] == 1)["cause"] == Cause.STOPPED_PROCESS
    assert sum(job.text().count(NOTHING_IS_ENDED) for job in jobs) == 1
    assert all(map(is_alive, pids))
    os.kill(pids[1], signal.SIGCONT)
    first.wait_for(lambda: any("The ranks go on" in job.text() for job in jobs))


# --- stays ---------------------------------------------------------------------------------------------------

KEY = command_key(["pretrain_llama.py", "--bf16"], 8)


def test_the_longest_stay_of_the_same_command_counts(tmp_path: Path) -> None:
    assert longest_stays(tmp_path, KEY) == longest_stays(None, KEY) == {}
    write_stays(tmp_path, KEY, "a", {"start": 8.0, "save": 0.4})
    write_stays(tmp_path, KEY, "a", {"start": 8.0, "save": 0.5})
    write_stays(tmp_path, KEY, "b", {"start": 2.0, "save": 0.6})
    write_stays(tmp_path, command_key(["pretrain_llama.py", "--bf16"], 16), "c", {"start": 100.0})
    assert longest_stays(tmp_path, KEY) == {"start": 8.0, "save": 0.6}
    assert len(json.loads((tmp_path / STAYS).read_text())["attempts"]) == 3


def test_old_attempts_are_forgotten(tmp_path: Path) -> None:
    for attempt in range(40):
        write_stays(tmp_path, KEY, str(attempt), {"save": float(40 - attempt)})
    assert longest_stays(tmp_path, KEY) == {"save": 20.0}


@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", "[" * 100_000, '{"schema": 1, "attempts": 3}', '{"schema": 1, "attempts": [3, {"command": []}]}'],
)
def test_a_damaged_file_teaches_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / STAYS).write_text(text)
    assert longest_stays(tmp_path, KEY) == {}
    write_stays(tmp_path, KEY, "a", {"save": 1.0})
    assert longest_stays(tmp_path, KEY) == {"save": 1.0}
