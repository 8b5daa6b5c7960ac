"""How many ranks train when nodes are missing, which wait, and which nodes are left out; how a launcher ends them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, ExitCode
from megatron.operation import launch
from megatron.operation.elastic import usable_world_size
from megatron.operation.heartbeat import Section
from megatron.operation.launch import parse, prepare_elastic
from megatron.operation.nodes import NamedNodes, Naming
from megatron.operation.ranks import RunningProcess, end_processes
from megatron.training.batch_schedule import check_batches
from tests.end_to_end.run_process import (
    TINY_RUN,
    Flags,
    FlagValue,
    assert_close,
    call_training,
    free_port,
    losses,
    wait_until,
    words_of,
)
from tests.messages import assert_helpful
from tests.operation.jobs import MODEL, PATIENCE, PRETRAIN, Launcher, ended, is_alive, rendezvous
from tests.operation.scripted_ranks import start


class Unkillable:
    """A process in the kernel, which no signal ends."""

    pid = 2**22 + 1

    def poll(self) -> int | None:
        return None


@pytest.mark.processes
def test_a_process_that_does_not_end_is_named_within_a_limit() -> None:
    ordinary = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    sent: list[tuple[int, signal.Signals]] = []

    def send(pid: int, number: signal.Signals) -> None:
        sent.append((pid, number))
        if pid == ordinary.pid:
            ordinary.send_signal(number)
            ordinary.wait(PATIENCE)

    processes: dict[int, RunningProcess] = {0: ordinary, 1: Unkillable()}
    assert end_processes(processes, signal.SIGTERM, 0.2, 0.2, send) == [1]
    assert sent == [(ordinary.pid, signal.SIGTERM), (Unkillable.pid, signal.SIGTERM), (Unkillable.pid, signal.SIGKILL)]
    assert ordinary.poll() == -signal.SIGTERM
    assert end_processes({0: ordinary}, signal.SIGTERM, 5.0, 5.0, send) == []


class Ended(Unkillable):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def poll(self) -> int | None:
        return self.exit_code


@pytest.mark.parametrize(("exit_code", "is_crash"), [(0, False), (75, False), (1, True), (-signal.SIGTERM, True)])
def test_only_a_crash_shortens_the_wait_for_the_others(exit_code: int, is_crash: bool) -> None:
    processes: dict[int, RunningProcess] = {0: Ended(exit_code), 1: Unkillable()}
    sent: list[float] = []
    seconds = PATIENCE if is_crash else 0.5
    end_processes(processes, signal.SIGTERM, seconds, 0.0, lambda pid, number: sent.append(time.monotonic()), 0.05)
    assert (sent[1] - sent[0] < seconds) == is_crash


def config_of(**changes: FlagValue) -> RunConfig:
    return parse_command_line(words_of({**TINY_RUN, "mock_data": True, "vocab_size": 384, **changes}))


def usable(world_size: int, **changes: FlagValue) -> int:
    config = config_of(**changes)
    return usable_world_size(config, world_size, partial(check_batches, config))


TENSOR_AND_PIPELINE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 4, "global_batch_size": 32}
RAMP: Flags = {"rampup_batch_size": [4, 4, 100], "global_batch_size": 16}
STEPS: Flags = {"step_batch_size_schedule": "0:12 1K:24", "global_batch_size": None}


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        # Eight sequences in microbatches of two: four replicas at most.
        ({}, {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 100: 4}),
        ({"global_batch_size": 12}, {2: 2, 3: 3, 4: 3, 5: 3, 6: 6}),
        (TENSOR_AND_PIPELINE, {4: 4, 7: 4, 8: 8, 15: 8, 16: 16, 20: 16}),
        ({"context_parallel_size": 2}, {2: 2, 3: 2, 5: 4, 6: 4}),
        # Experts need whole groups of ranks, too.
        (EXPERTS, {4: 4, 6: 4, 7: 4, 8: 8, 15: 8, 16: 16}),
        # Every batch of a ramp and of a schedule.
        (RAMP, {2: 2, 3: 2, 4: 2, 8: 2}),
        (STEPS, {3: 3, 4: 3, 5: 3, 6: 6, 12: 6}),
        # The batch stays the same, although the flag allows a smaller one.
        ({"decrease_batch_size_if_needed": True}, {3: 2, 5: 4}),
        ({"eval_global_batch_size": 4}, {4: 2}),
        ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}, {2: 2, 3: 2, 4: 4}),
    ],
)
def test_the_largest_data_parallel_size_with_which_the_run_is_valid(flags: Flags, sizes: dict[int, int]) -> None:
    assert {world_size: usable(world_size, **flags) for world_size in sizes} == sizes


@pytest.mark.parametrize(
    ("world_size", "flags", "named"),
    [
        (3, TENSOR_AND_PIPELINE, "--nnodes"),
        (3, {"global_batch_size": 7}, "--global-batch-size"),
        (3, {"global_batch_size": None}, "--global-batch-size"),
        (2, {"lr": None}, "--lr"),
    ],
)
def test_where_no_size_is_valid(world_size: int, flags: Flags, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        usable(world_size, **flags)
    assert_helpful(str(caught.value), named)


# --- launchers on fewer nodes than planned -------------------------------------------------------------------

FLAGS = {**MODEL, "fp64": True, "save_interval": 2, "max_failed_attempts": 0}


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Launcher]]:
    """Launchers of a job with a batch that two ranks divide, one with two ranks and one with the third; the test's
    parameter is the number of its iterations."""
    places = {"save": tmp_path / "save", "load": tmp_path / "save", "metrics_jsonl": tmp_path / "metrics.jsonl"}
    words, port = words_of({**FLAGS, **places, "train_iters": request.param}), free_port()
    with ended() as started:
        for node in range(2):
            flags = ["--nnodes", "1:2", "--nproc-per-node", str(2 - node), *rendezvous("c10d", port)]
            flags += ["--rdzv-conf", f"is_host={'false' if node else 'true'},last_call_timeout={PATIENCE:.0f}"]
            started.append(Launcher([*flags, PRETRAIN, *words], tmp_path / f"{node}.log"))
        yield started


@pytest.mark.parametrize("nodes", [6], indirect=True)
def test_three_processes_for_a_batch_that_two_divide(tmp_path: Path, nodes: list[Launcher]) -> None:
    """The third waits, and ends with the others after the last iteration."""
    assert [node.exit_code() for node in nodes] == [0, 0], [node.text() for node in nodes]
    assert "1 of 3 ranks wait as spares: data-parallel size 2" in "".join(node.text() for node in nodes)
    alone = {**FLAGS, "train_iters": 6, "save_interval": None, "metrics_jsonl": tmp_path / "alone.jsonl"}
    assert call_training(words_of(alone)).exit_code == ExitCode.COMPLETE
    assert_close(losses(tmp_path / "metrics.jsonl"), losses(tmp_path / "alone.jsonl"), 1e-9)


@pytest.mark.slow(reason="starts two launchers")
@pytest.mark.parametrize("nodes", [100_000], indirect=True)
def test_a_signal_to_the_node_of_a_spare_stops_the_run(tmp_path: Path, nodes: list[Launcher]) -> None:
    def has_only_a_spare(node: Launcher) -> bool:
        return [beat.section for beat in node.heartbeats().values() if is_alive(beat.pid)] == [Section.SPARE]

    wait_until(lambda: len(losses(tmp_path / "metrics.jsonl")) > 2 and any(map(has_only_a_spare, nodes)), PATIENCE)
    next(filter(has_only_a_spare, nodes)).signal(signal.SIGTERM)
    assert [node.exit_code() for node in nodes] == [75, 75], [node.text() for node in nodes]


# --- nodes that were named twice -----------------------------------------------------------------------------


def be_host(name: str) -> None:
    """Let this process be on a machine of this name."""
    os.environ["NODE"] = name
    socket.gethostname = lambda: name


def ranks_of(directory: Path, nodes: str, hosts: str) -> set[str]:
    """Start a launcher with two ranks on each of the ``hosts``; "node.rank.number of ranks" of all of them."""
    body = "touch(f\"rank.{os.environ['NODE']}.{RANK}.{os.environ['WORLD_SIZE']}\"); time.sleep(1.0)"
    port, launchers = free_port(), []
    for host in hosts:
        flags = ["--nnodes", nodes, "--nproc-per-node", "2", *rendezvous("c10d", port)]
        flags += ["--rdzv-conf", f"is_host={'true' if host == hosts[0] else 'false'},last_call_timeout={PATIENCE:.0f}"]
        prepare = partial(be_host, host)
        launchers.append(
            start(directory, body, *flags, node=host, prepare=prepare, script_flags=["--run-dir", str(directory)])
        )
    codes = [launcher.exit_code() for launcher in launchers]
    logs = "".join(launcher.text() for launcher in launchers)
    assert codes == [0] * len(hosts), logs
    assert "Traceback" not in logs
    return {path.name.removeprefix("rank.") for path in directory.glob("rank.*.*.*")}


def test_a_node_that_was_named_twice_has_the_last_ranks(tmp_path: Path) -> None:
    for attempt in ("1", "2"):
        NamedNodes(tmp_path).name(Naming("a", "hang", attempt, 0.0))
    assert ranks_of(tmp_path, "1:2", "ab") == {"b.0.4", "b.1.4", "a.2.4", "a.3.4"}
    assert "Node a was named 2 times (hang, hang)" in "".join(path.read_text() for path in tmp_path.glob("*.log"))


@pytest.mark.slow(reason="waits for a place in the rendezvous")
def test_a_node_that_was_named_twice_leaves_its_place_to_one_that_waits(tmp_path: Path) -> None:
    for attempt in ("1", "2"):
        NamedNodes(tmp_path).name(Naming("b", "hang", attempt, 0.0))
    assert {name.partition(".")[0] for name in ranks_of(tmp_path, "2", "abc")} == {"a", "c"}


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--nnodes", "1:2"], "--nnodes 1:2, --rdzv-backend c10d"), (["--nnodes", "two"], "--nnodes two")],
)
def test_a_number_of_nodes_that_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([*words, "script.py"]) == ExitCode.ACTION_REQUIRED
    assert_helpful(capsys.readouterr().err.removeprefix("ERROR: ").strip(), named)


def test_how_long_further_nodes_are_waited_for() -> None:
    words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf"]
    ours, theirs = (parse([*words, value, "script.py"]) for value in ("read_timeout=9", "last_call_timeout=3"))
    assert prepare_elastic(ours) and prepare_elastic(theirs)
    assert ours.rdzv_conf == "read_timeout=9,last_call_timeout=15" and theirs.rdzv_conf == "last_call_timeout=3"
    assert not prepare_elastic(parse(["--nnodes", "2", "script.py"]))
