"""``--on-hang report``: a hang is named with its evidence and nothing is ended, under any launcher."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from megatron.errors import ExitCode
from megatron.operation import side_watch
from megatron.operation.causes import Cause
from megatron.operation.heartbeat import Heartbeat
from tests.end_to_end.run_process import REPOSITORY, FlagValue, free_port, wait_until
from tests.operation.jobs import LAUNCH, PATIENCE, TORCHRUN, Job, is_alive

FT_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
NOTHING_IS_ENDED = "A hang was found, and nothing is ended"
LIMIT = 2.0


def start(directory: Path, module: str, *flags: str) -> Job:
    """A job whose ranks have pids in ``pid.0`` and ``pid.1``."""
    return Job(directory, module, flags, on_hang="report", hang_limit_s=LIMIT, save_interval=10**6)


def ranks_of(job: Job, count: int = 2) -> dict[int, int]:
    """Processes by rank, once they train."""
    job.wait_for(lambda: len(job.records()) > 20)
    ranks = job.ranks()
    assert len(ranks) == count
    return ranks


def reported(job: Job, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The report for which ``is_it`` holds, once it is there."""
    path = job.save / "failure.json"
    job.wait_for(lambda: path.exists() and is_it(json.loads(path.read_text())))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def side_processes(directory: Path) -> list[int]:
    """Those that watch the ranks of a job in ``directory``."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"megatron.operation.side_watch" in words and str(directory).encode() in words:
            found.append(int(pid))
    return found


def stop_and_let_go_on(job: Job) -> None:
    """One rank, and then the other: each is named, and no process ends."""
    ranks = ranks_of(job)
    for number, rank in enumerate((1, 0), start=1):
        done = len(job.records())
        os.kill(ranks[rank], signal.SIGSTOP)
        report = reported(job, lambda one, rank=rank: one["rank"] == rank)  # type: ignore[misc]
        assert (report["cause"], report["rank"]) == (Cause.STOPPED_PROCESS, rank)
        waiting = next(group for group in report["groups"] if group["ranks"] == [1 - rank])
        assert waiting["stack"], "the other rank shows where it waits"
        assert all(is_alive(pid) for pid in ranks.values())
        assert job.log.read_text().count(NOTHING_IS_ENDED) == number
        os.kill(ranks[rank], signal.SIGCONT)
        job.wait_for(lambda done=done: len(job.records()) > done + 20)  # type: ignore[misc]
        job.wait_for(lambda number=number: job.log.read_text().count("The ranks go on, ") == number)  # type: ignore[misc]
    assert job.ranks() == ranks


def test_our_launcher_reports_and_ends_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, LAUNCH, "--standalone")
    try:
        stop_and_let_go_on(job)
        assert side_processes(tmp_path) == []
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.process.wait(PATIENCE) == ExitCode.STOPPED
    finally:
        job.end()


def other_launcher_reports(tmp_path: Path, module: str, *flags: str) -> None:
    job = start(tmp_path, module, "--standalone", *flags)
    try:
        stop_and_let_go_on(job)
        assert len(side_processes(tmp_path)) == 1
        os.kill(job.process.pid, signal.SIGTERM)
        job.process.wait(PATIENCE)
        wait_until(lambda: side_processes(tmp_path) == [], PATIENCE)
    finally:
        job.end()


def test_plain_torchrun_reports_and_ends_nothing(tmp_path: Path) -> None:
    other_launcher_reports(tmp_path, TORCHRUN)


def test_the_watching_process_finds_a_clone_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From whatever directory the ranks were started. One that does not start costs a warning."""
    started: list[dict[str, str]] = []
    right = subprocess.Popen

    def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        started.append(options["env"])
        return right([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    heartbeat = Heartbeat()
    side_watch.join(heartbeat, 0, 0, 1, 1, HashStore(), ["pretrain_llama.py"])
    assert started[0]["PYTHONPATH"].split(os.pathsep)[0] == str(REPOSITORY)
    assert not heartbeat.is_watched and "WARNING: a hang of rank 0 will not be reported" in capsys.readouterr().err


@pytest.mark.slow(reason="needs the package nvidia-resiliency-ext")
def test_nvrx_reports_and_ends_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        pytest.skip("pip install nvidia-resiliency-ext")
    other_launcher_reports(tmp_path, FT_LAUNCHER, "--ignore-missing-fault-tol-cfg")


@pytest.mark.slow(reason="two launchers, started as usual")
def test_nodes_under_torchrun_report_once(tmp_path: Path) -> None:
    """The watches of both nodes exchange what they know through the store of the ranks."""
    places = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    jobs = []
    try:
        for node in range(2):
            (tmp_path / str(node)).mkdir()
            flags = ["--node-rank", str(node), *places]
            changes: dict[str, FlagValue] = {"on_hang": "report", "hang_limit_s": LIMIT, "save_interval": 10**6}
            changes |= {"save": str(tmp_path / "save"), "load": str(tmp_path / "save")}
            changes |= {"metrics_jsonl": str(tmp_path / "0/metrics.jsonl")}
            jobs.append(Job(tmp_path / str(node), TORCHRUN, [*flags, "--nproc-per-node", "1"], **changes))
        first, second = jobs
        first.save = tmp_path / "save"
        pids = [ranks_of(first, 1)[0], second.ranks()[0]]
        os.kill(pids[1], signal.SIGSTOP)
        report = reported(first, lambda one: one["rank"] == 1)
        assert report["cause"] == Cause.STOPPED_PROCESS
        logs = [job.log.read_text() for job in jobs]
        assert sum(log.count(NOTHING_IS_ENDED) for log in logs) == 1
        assert all(map(is_alive, pids))
        os.kill(pids[1], signal.SIGCONT)
        first.wait_for(lambda: any("The ranks go on" in job.log.read_text() for job in jobs))
    finally:
        for job in jobs:
            job.end()
