"""A training on three hosts, each with its own network, processes and shared memory, when parts of them are lost."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ExitCode
from megatron.operation.causes import Cause
from tests.end_to_end.run_process import (
    ENVIRONMENT,
    REPOSITORY,
    Flags,
    FlagValue,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    iterations,
    latest_iteration,
    losses,
    wait_until,
    words_of,
)
from tests.operation.hosts import Host, hosts_in_a_network, reason_not_to_have_hosts
from tests.operation.jobs import LAUNCH, MODEL, children, environment_of, rendezvous
from tests.operation.scripted_ranks import WATCHED, waiting, write_script

REASON = reason_not_to_have_hosts()
pytestmark = [
    pytest.mark.slow(reason="starts launchers on three hosts, and waits for their limits"),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
PATIENCE = 150.0
NAMES = ("node1", "node2", "node3")
PORT = 29500
"""The store of the rendezvous is on the first host."""
LIMIT = 15
"""--hang-limit-s, and the least that a launcher waits for the store."""
ITERATIONS, SAVE_INTERVAL = 60, 5
TRAINS_STEADILY = 10
"""From this iteration on, the watchdog has the limit of a step."""
THREE = 12
"""A global batch of three replicas, and of two; the usual one has a third host for a spare."""
TRAINING: Flags = {**MODEL, "train_iters": ITERATIONS, "save_interval": SAVE_INTERVAL}
TRAINING |= {"eval_iters": 0, "hang_limit_s": LIMIT, "max_failed_attempts": 0}
# The test has time between two iterations.
TRAINING |= {"inject_fault": "delay@1+100000:0.1"}


class Training:
    """A launcher with one rank on each of the hosts."""

    def __init__(self, directory: Path, hosts: Sequence[Host], nodes: str, **changes: FlagValue) -> None:
        self.directory, self.hosts, self.nodes = directory, hosts, nodes
        self.save, self.metrics = directory / "save", directory / "metrics.jsonl"
        places = {"save": self.save, "load": self.save, "metrics_jsonl": self.metrics}
        self._words = words_of({**TRAINING, **places, **changes})
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *hosts: Host) -> None:
        """Start the launcher on these hosts."""
        for host in hosts:
            words = [sys.executable, "-m", LAUNCH, "--nnodes", self.nodes, "--nproc-per-node", "1"]
            words += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{NAMES[0]}:{PORT}"]
            words += ["--local-addr", host.name, "--max-restarts", "5", str(REPOSITORY / "pretrain_llama.py")]
            variables = {**os.environ, **ENVIRONMENT, "MEGATRON_FAULTS": "1", "PYTHONPATH": str(REPOSITORY)}
            log = self.directory / f"{host.name}.log"
            self.launchers[host.name] = host.start(*words, *self._words, log=log, environment=variables)

    def start_with_spare(self, *hosts: Host) -> None:
        """Start launchers, the last when the others have their places, and wait until it waits: it has a second
        connection then, with which it watches the store."""
        *first, host = hosts
        self.start(*first)
        self.wait(lambda: all(map(self.ranks, first)))
        self.start(host)
        self.wait(lambda: host.connections(PORT) >= 2)

    def log(self, host: Host) -> str:
        return (self.directory / f"{host.name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """The ends of all logs, without torch's frames in C++."""
        texts = [f"--- {host.name}\n{self.log(host)}" for host in self.hosts if host.name in self.launchers]
        return "\n".join(re.sub(r"(?m)^(frame #|<omitting).*\n", "", text)[-5000:] for text in texts)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, with the logs in the message if it does not come."""
        try:
            wait_until(lambda: condition() or self._has_ended(), PATIENCE)
            assert condition(), "all launchers have ended"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def _has_ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers.values())

    def saved(self) -> int:
        """The iteration of the newest committed checkpoint."""
        tracker = self.save / "latest_checkpointed_iteration.txt"
        return latest_iteration(self.save) if tracker.exists() else 0

    def wait_until_saved(self, iteration: int = TRAINS_STEADILY) -> int:
        """Wait for a checkpoint of this iteration or a later one, and return which it is."""
        self.wait(lambda: self.saved() >= iteration)
        return self.saved()

    def exit_codes(self, *hosts: Host) -> list[int]:
        """Exit codes of the launchers, after which no process of any host is left."""
        self.wait(lambda: all(self.launchers[host.name].poll() is not None for host in hosts))
        assert not [pid for host in self.hosts for pid in host.processes()], self.logs()
        return [self.launchers[host.name].wait() for host in hosts]

    def ranks(self, host: Host) -> list[int]:
        """The processes of the ranks on a host."""
        return [pid for pid in host.processes() if "LOCAL_RANK" in environment_of(pid)]

    def failure(self) -> dict[str, Any]:
        """The only report of a failure."""
        paths = sorted((self.save / "failures").glob("[0-9]*.json"))
        assert len(paths) == 1, f"{paths}\n{self.logs()}"
        found: dict[str, Any] = json.loads(paths[0].read_text())
        return found

    def assert_nothing_lost(self, since: int) -> None:
        """Every iteration was trained, and none again that the checkpoint ``since`` has."""
        numbers = [int(record["iteration"]) for record in iterations(self.metrics)]
        starts = [number for before, number in pairwise([0, *numbers]) if number != before + 1]
        assert all(number > since for number in starts), numbers
        assert set(numbers) == set(range(1, numbers[-1] + 1)), numbers


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts_in_a_network(tmp_path, NAMES) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The last checkpoint of so many hosts."""

    @functools.cache
    def train(count: int) -> Path:
        directory = tmp_path_factory.mktemp("undisturbed")
        with hosts_in_a_network(directory, NAMES[:count]) as started:
            training = Training(directory, started, str(count), global_batch_size=4 * count, inject_fault=None)
            training.start(*started)
            assert training.exit_codes(*started) == [ExitCode.COMPLETE] * count, training.logs()
        return checkpoint_of(training.save, ITERATIONS)

    return train


@pytest.mark.parametrize("nodes", ["2:3", "2"], ids=["spare_rank", "waiting_launcher"])
def test_a_spare_replaces_a_host(
    tmp_path: Path, hosts: list[Host], undisturbed: Callable[[int], Path], nodes: str
) -> None:
    training = Training(tmp_path, hosts, nodes)
    start = training.start if nodes == "2:3" else training.start_with_spare
    start(*hosts)
    saved = training.wait_until_saved()
    hosts[1].lose_power()
    assert training.exit_codes(hosts[0], hosts[2]) == [ExitCode.COMPLETE] * 2, training.logs()
    failure = training.failure()
    assert (failure["cause"], failure["host"], failure["rank"]) == (Cause.NODE_LOST, "node2", 1)
    training.assert_nothing_lost(saved)
    assert_same_tensors(checkpoint_of(training.save, ITERATIONS), undisturbed(2))


def test_a_link_is_cut_for_5_s(tmp_path: Path, hosts: list[Host], undisturbed: Callable[[int], Path]) -> None:
    """The ranks wait, and go on without a restart."""
    training = Training(tmp_path, hosts, "3", global_batch_size=THREE)
    training.start(*hosts)
    training.wait_until_saved()
    hosts[1].cut()
    time.sleep(1.0)
    trained = len(iterations(training.metrics))
    time.sleep(4.0)
    assert len(iterations(training.metrics)) == trained < ITERATIONS, "the link was not cut"
    hosts[1].mend()
    assert training.exit_codes(*hosts) == [ExitCode.COMPLETE] * 3, training.logs()
    assert not (training.save / "failures").exists(), training.logs()
    assert [record["iteration"] for record in iterations(training.metrics)] == list(range(1, ITERATIONS + 1))
    assert_same_tensors(checkpoint_of(training.save, ITERATIONS), undisturbed(3))


def test_a_link_is_cut_for_ever(tmp_path: Path, hosts: list[Host], undisturbed: Callable[[int], Path]) -> None:
    """The host beyond the cut ends by itself, and the others train on."""
    training = Training(tmp_path, hosts, "2:3")
    training.start(*hosts)
    saved = training.wait_until_saved()
    hosts[1].cut()
    began = time.monotonic()
    training.wait(lambda: training.launchers["node2"].poll() is not None)
    assert LIMIT - 3.0 < time.monotonic() - began < LIMIT + 10.0
    assert not hosts[1].processes()
    codes = training.exit_codes(*hosts)
    assert codes == [ExitCode.COMPLETE, ExitCode.CRASH, ExitCode.COMPLETE], training.logs()
    assert "(link_lost). The launcher on node2 cannot reach the rendezvous host node1" in training.log(hosts[1])
    failure = training.failure()
    assert (failure["cause"], failure["host"], failure["rank"]) == (Cause.NODE_LOST, "node2", 1)
    training.assert_nothing_lost(saved)
    assert_same_tensors(checkpoint_of(training.save, ITERATIONS), undisturbed(2))


WAITING = f"""{WATCHED.replace("hang_limit_s=1.0", f"hang_limit_s={LIMIT}.0")}
wait_in(Section.GRADS_REDUCE)
"""
"""Ranks that wait for each other without an error, as in a collective of NCCL."""


@pytest.mark.parametrize("kind", ["c10d", "static"])
def test_a_cut_link_is_told_as_a_lost_node_and_both_sides_end(tmp_path: Path, hosts: list[Host], kind: str) -> None:
    script, launchers = str(write_script(tmp_path, WAITING)), []
    for number, host in enumerate(hosts[:2]):
        place = {"c10d": ["--rdzv-endpoint", f"node1:{PORT}"], "static": ["--master-addr", "node1"]}[kind]
        flags = ["--nnodes", "2", *rendezvous(kind, PORT), *place, "--local-addr", host.name]
        flags += ["--node-rank", str(number)] if kind == "static" else []
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
        words = [sys.executable, "-m", LAUNCH, *flags, script]
        launchers.append(host.start(*words, log=tmp_path / f"{host.name}.log", environment=environment))
    wait_until(lambda: waiting(tmp_path) == 2, PATIENCE)
    hosts[1].cut()
    codes = [launcher.wait(PATIENCE) for launcher in launchers]
    logs = [(tmp_path / f"{host.name}.log").read_text() for host in hosts[:2]]
    assert codes == [ExitCode.CRASH] * 2, logs
    assert not [pid for host in hosts for pid in host.processes()], logs
    assert f"(link_lost). The launcher on node2 cannot reach the rendezvous host node1:{PORT}" in logs[1]
    found = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (found["cause"], found["host"]) == (Cause.NODE_LOST, "node2"), logs
    assert "the launcher of its node does not answer" in found["message"]


@pytest.mark.parametrize("power", [True, False], ids=["power", "processes"])
def test_the_rendezvous_host_is_lost(tmp_path: Path, hosts: list[Host], power: bool) -> None:
    """All others end, also one that waits for a place. Without a message from the host, its link may be cut."""
    training = Training(tmp_path, hosts, "2", train_iters=100_000)
    training.start_with_spare(*hosts)
    training.wait_until_saved()
    hosts[0].lose_power() if power else hosts[0].kill()
    assert training.exit_codes(*hosts[1:]) == [ExitCode.CRASH] * 2, training.logs()
    cause, sentence = (Cause.LINK_LOST, "cannot reach") if power else (Cause.NODE_LOST, "has lost")
    for host in hosts[1:]:
        assert f"({cause}). The launcher on {host.name} {sentence} the rendezvous host node1" in training.log(host)
    failure = training.failure()
    assert failure["cause"] == cause and f"{sentence} the rendezvous host node1" in failure["message"]
    assert failure["host"] == (None if power else "node1")


def test_a_host_comes_back(tmp_path: Path, hosts: list[Host]) -> None:
    """Three replicas, then two, then three; every loss is that of an undisturbed run."""
    changes: Flags = {"global_batch_size": THREE, "fp64": True, "lr_decay_iters": 1000}
    training = Training(
        tmp_path, hosts, "2:3", **changes, train_iters=100_000, inject_fault="delay@1+100000:0.1:always"
    )
    training.start(*hosts)
    saved = training.wait_until_saved()
    hosts[1].lose_power()
    training.wait_until_saved(saved + SAVE_INTERVAL)
    hosts[1].mend()
    training.start(hosts[1])
    # The ranks that train in each attempt.
    training.wait(lambda: re.findall(r"(?m)^> layout: (\d+)", training.log(hosts[0])) == ["3", "2", "3"])
    training.wait_until_saved(training.saved() + SAVE_INTERVAL)
    (launcher,) = children(training.launchers["node2"].pid)
    os.kill(launcher, signal.SIGTERM)
    assert training.exit_codes(*hosts) == [ExitCode.STOPPED] * 3, training.logs()
    failure = training.failure()
    assert (failure["cause"], failure["host"], failure["rank"]) == (Cause.NODE_LOST, "node2", 1)
    training.assert_nothing_lost(saved)
    last = {record["iteration"]: record["lm_loss"] for record in iterations(training.metrics)}
    alone = tmp_path / "alone.jsonl"
    flags = {**TRAINING, **changes, "train_iters": len(last), "save_interval": None, "metrics_jsonl": alone}
    assert call_training(words_of({**flags, "inject_fault": None})).exit_code == ExitCode.COMPLETE
    assert_close([last[number] for number in sorted(last)], losses(alone), 1e-9)
