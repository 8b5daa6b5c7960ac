"""Runs on fewer nodes than planned: which ranks train, which wait, and that the losses are the same."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.errors import ExitCode
from megatron.operation.heartbeat import Section
from megatron.operation.launch import parse, prepare_elastic
from megatron.operation.named_nodes import FILE, Naming, append
from tests.end_to_end.run_process import (
    REPOSITORY,
    FlagValue,
    assert_close,
    call_training,
    descendants,
    environment,
    free_port,
    iterations,
    wait_until,
    words_of,
)
from tests.forked import fork_context
from tests.messages import assert_helpful
from tests.operation.jobs import LAUNCH, MODEL, PATIENCE, is_alive, read_heartbeats_of
from tests.operation.test_launch import RANK, _launch

FLAGS: dict[str, FlagValue | Path] = {**MODEL, "fp64": True, "save_interval": 2, "max_failed_attempts": 0}


class Node:
    """A launcher of a job of several."""

    def __init__(self, directory: Path, name: str, port: int, nodes: str, processes: int, **changes: FlagValue | Path):
        self.log = directory / f"{name}.log"
        launcher = [sys.executable, "-m", LAUNCH, "--nnodes", nodes, "--nproc-per-node", str(processes)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
        # The first node has the store. A node that was lost is noticed after six seconds.
        is_host = "true" if name == "0" else "false"
        conf = f"is_host={is_host},last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=3"
        launcher += ["--rdzv-conf", conf]
        launcher += ["--local-addr", "127.0.0.1", "--max-restarts", "5"]
        places = {"save": directory / "save", "load": directory / "save", "metrics_jsonl": directory / "metrics.jsonl"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*launcher, str(REPOSITORY / "pretrain_llama.py"), *words_of({**FLAGS, **places, **changes})],
                cwd=REPOSITORY,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def sections(self) -> list[Section]:
        """Where the ranks are."""
        return [beat.section for beat in read_heartbeats_of(self.process.pid).values() if is_alive(beat.pid)]

    def end(self) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """What a test has started, which must not outlive it."""
    started: list[Node] = []
    yield started
    for node in started:
        node.end()


def undisturbed(directory: Path, train_iters: int, **changes: FlagValue) -> list[float]:
    """The losses of one process."""
    metrics = directory / "alone.jsonl"
    flags = {**FLAGS, "train_iters": train_iters, "save_interval": None, "metrics_jsonl": metrics, **changes}
    assert call_training(words_of(flags)).exit_code == ExitCode.COMPLETE
    return [record["lm_loss"] for record in iterations(metrics)]


def world_sizes(log: Path) -> list[int]:
    """The ranks that train in each attempt, from the log of rank 0."""
    lines = log.read_text(errors="replace").splitlines()
    return [int(line.split()[2]) for line in lines if line.startswith("> layout:")]


def test_three_processes_for_a_batch_that_two_divide(tmp_path: Path, nodes: list[Node]) -> None:
    """The third waits, and ends with the others: after the last iteration, and at a signal to its launcher."""
    port, iters = free_port(), 6
    nodes += [Node(tmp_path, f"{place}", port, "1:2", 2 - place, train_iters=iters) for place in range(2)]
    wait_until(lambda: any(node.process.poll() is not None for node in nodes), PATIENCE)
    assert [node.process.wait(PATIENCE) for node in nodes] == [0, 0], [node.log.read_text() for node in nodes]
    logs = "".join(node.log.read_text() for node in nodes)
    assert "1 of 3 ranks wait as spares: data-parallel size 2" in logs
    found = [record["lm_loss"] for record in iterations(tmp_path / "metrics.jsonl")]
    assert_close(found, undisturbed(tmp_path, iters), 1e-9)


@pytest.mark.slow(reason="loses a node and gets it back")
def test_a_node_is_lost_and_comes_back(tmp_path: Path, nodes: list[Node]) -> None:
    """Four ranks, then two, then four; every loss is that of an undisturbed run."""
    port, metrics = free_port(), tmp_path / "metrics.jsonl"
    nodes += [Node(tmp_path, f"{place}", port, "1:2", 2) for place in range(2)]

    def done() -> int:
        return max((int(record["iteration"]) for record in iterations(metrics)), default=0)

    def wait_for(condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            for node in nodes:
                assert node.process.poll() is None, node.log.read_text()
            return condition()

        wait_until(holds, PATIENCE)

    def wait_for_progress() -> None:
        since = done()
        wait_for(lambda: done() >= since + 6)

    wait_for_progress()
    lost = nodes.pop()  # not the node with the store of the rendezvous
    lost.end()
    wait_for_progress()
    nodes.append(Node(tmp_path, "back", port, "1:2", 2))
    logs = [tmp_path / name for name in ("0.log", "back.log")]
    wait_for(lambda: sum(world_sizes(log).count(4) for log in logs) == 2)
    wait_for_progress()
    os.kill(nodes[0].process.pid, signal.SIGTERM)
    os.kill(nodes[1].process.pid, signal.SIGTERM)
    assert [node.process.wait(PATIENCE) for node in nodes] == [75, 75], [node.log.read_text() for node in nodes]
    sizes = world_sizes(tmp_path / "0.log")
    assert sizes[:2] == [4, 2]
    last = {int(record["iteration"]): record["lm_loss"] for record in iterations(metrics)}
    found = [last[iteration] for iteration in sorted(last)]
    assert sorted(last) == list(range(1, len(last) + 1))
    assert_close(found, undisturbed(tmp_path, len(found), lr_decay_iters=MODEL["train_iters"]), 1e-9)


@pytest.mark.slow(reason="starts two launchers")
def test_a_signal_to_the_node_of_a_spare_stops_the_run(tmp_path: Path, nodes: list[Node]) -> None:
    port, metrics = free_port(), tmp_path / "metrics.jsonl"
    nodes += [Node(tmp_path, f"{place}", port, "1:2", 2 - place) for place in range(2)]

    def is_training_with_spare() -> bool:
        return len(iterations(metrics)) > 2 and any(node.sections() == [Section.SPARE] for node in nodes)

    wait_until(is_training_with_spare, PATIENCE)
    (spare,) = [node for node in nodes if node.sections() == [Section.SPARE]]
    os.kill(spare.process.pid, signal.SIGTERM)
    assert [node.process.wait(PATIENCE) for node in nodes] == [75, 75], [node.log.read_text() for node in nodes]


# --- nodes that were named twice -----------------------------------------------------------------------------

REPORT = """
open(f"{DIRECTORY}/rank.{os.environ['NODE']}.{RANK}.{os.environ['WORLD_SIZE']}", "w").close()
time.sleep(1.0)
"""


def launch_as(host: str, words: list[str], log: Path) -> None:
    """A launcher on a machine of this name."""
    os.environ["NODE"] = host
    socket.gethostname = lambda: host
    _launch(words, log)


def ranks_of(directory: Path, nodes: str, hosts: str) -> set[str]:
    """Start a launcher with two ranks on each of the ``hosts``; "node.rank.number of ranks" of all of them."""
    script, port = directory / "rank.py", free_port()
    script.write_text(
        RANK.format(repository=str(REPOSITORY), directory=directory, body=f"DIRECTORY = {str(directory)!r}{REPORT}")
    )
    processes = []
    for host in hosts:
        words = ["--nnodes", nodes, "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
        words += ["--rdzv-conf", f"is_host={'true' if host == hosts[0] else 'false'}"]
        arguments = (host, [*words, str(script), "--run-dir", str(directory)], directory / f"{host}.log")
        processes.append(fork_context().Process(target=launch_as, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE)
    logs = "".join((directory / f"{host}.log").read_text() for host in hosts)
    assert [process.exitcode for process in processes] == [0] * len(hosts), logs
    assert "Traceback" not in logs
    return {path.name.removeprefix("rank.") for path in directory.glob("rank.*.*.*")}


def test_a_node_that_was_named_twice_has_the_last_ranks(tmp_path: Path) -> None:
    for attempt in ("1", "2"):
        append(tmp_path / FILE, Naming("a", "hang", attempt, 0.0))
    assert ranks_of(tmp_path, "1:2", "ab") == {"b.0.4", "b.1.4", "a.2.4", "a.3.4"}
    assert "Node a was named 2 times (hang, hang)" in "".join(path.read_text() for path in tmp_path.glob("*.log"))


@pytest.mark.slow(reason="waits for a place in the rendezvous")
def test_a_node_that_was_named_twice_leaves_its_place_to_one_that_waits(tmp_path: Path) -> None:
    for attempt in ("1", "2"):
        append(tmp_path / FILE, Naming("b", "hang", attempt, 0.0))
    assert {name.partition(".")[0] for name in ranks_of(tmp_path, "2", "abc")} == {"a", "c"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nnodes", "1:2"], "--nnodes 1:2, --rdzv-backend c10d"),
        (["--nnodes", "two"], "--nnodes two"),
    ],
)
def test_a_number_of_nodes_that_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.operation import launch

    assert launch.main([*words, "script.py"]) == ExitCode.ACTION_REQUIRED
    assert_helpful(capsys.readouterr().err.removeprefix("ERROR: ").strip(), named)


def test_how_long_further_nodes_are_waited_for() -> None:
    words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf"]
    ours, theirs = (parse([*words, value, "script.py"]) for value in ("read_timeout=9", "last_call_timeout=3"))
    assert prepare_elastic(ours) and prepare_elastic(theirs)
    assert ours.rdzv_conf == "read_timeout=9,last_call_timeout=15" and theirs.rdzv_conf == "last_call_timeout=3"
    assert not prepare_elastic(parse(["--nnodes", "2", "script.py"]))
