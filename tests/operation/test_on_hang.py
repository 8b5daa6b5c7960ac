"""``--on-hang report``: a hang is named with its evidence and nothing is ended, under any launcher."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from megatron.errors import ExitCode
from megatron.operation import side_watch
from megatron.operation.causes import Cause
from megatron.operation.heartbeat import Heartbeat
from tests.end_to_end.run_process import REPOSITORY, FlagValue, descendants, free_port, wait_until
from tests.operation.jobs import LAUNCH, PATIENCE, TORCHRUN, Job, cmdline, ended, is_alive

FT_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
NOTHING_IS_ENDED = "A hang was found, and nothing is ended"
REPORT: dict[str, FlagValue | Path] = {"on_hang": "report", "hang_limit_s": 2.0, "hang_limit_data_s": 2.0}
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
        (TORCHRUN, []),
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


@pytest.mark.slow(reason="two launchers, started as usual")
def test_nodes_under_torchrun_report_once(tmp_path: Path, jobs: list[Job]) -> None:
    """The watches of both nodes exchange what they know through the store of the ranks."""
    places = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        flags = ["--node-rank", str(node), *places, "--nproc-per-node", "1"]
        run: dict[str, FlagValue | Path] = {"save": tmp_path / "0/save", "load": tmp_path / "0/save"}
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
