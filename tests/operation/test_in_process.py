"""Restarts in the same processes (``--inprocess-restart``), with nvidia-resiliency-ext where it is installed."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.config.command_line import parse_command_line
from megatron.errors import ConfigError, ExitCode, NotFiniteError
from megatron.features.faults.flags import VARIABLE
from megatron.operation.attempt_recorder import Beginning, LaunchedAttempts
from megatron.operation.attempts import read_attempts
from megatron.operation.elastic import ELASTIC
from megatron.operation.heartbeat import HEARTBEATS, Heartbeat, HeartbeatMemory, RunSettings, Section
from megatron.operation.processes import LAUNCHER
from megatron.training.in_process import PACKAGE, import_package, must_end
from tests.end_to_end.run_process import Flags, descendants, words_of
from tests.operation.jobs import MODEL, Job, ended, is_alive


@pytest.mark.parametrize(
    ("launcher", "elastic", "named"),
    [
        (None, None, "megatron.operation.launch"),
        ("1", "1", "--nnodes N"),
        ("1", None, r"--inprocess-restart needs .*: pip install nvidia-resiliency-ext, or remove"),
    ],
    ids=["no launcher", "elastic nodes", "no package"],
)
def test_the_refusals(monkeypatch: pytest.MonkeyPatch, launcher: str | None, elastic: str | None, named: str) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE.partition(".")[0], None)
    for variable, value in ((LAUNCHER, launcher), (ELASTIC, elastic)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=named):
        import_package()


def test_which_errors_end_the_process() -> None:
    heartbeat = Heartbeat()
    assert must_end(RuntimeError("no iteration is done"), heartbeat)
    with heartbeat.section(Section.OPTIMIZER):
        time.sleep(0.001)
    assert not must_end(RuntimeError("a collective failed"), heartbeat)
    for error in (MemoryError(), OSError(28, "No space left on device"), NotFiniteError("the loss is nan")):
        assert must_end(error, heartbeat)
    heartbeat.begin()
    assert must_end(RuntimeError("again, before an iteration is done"), heartbeat)


def test_the_launcher_records_each_attempt_of_a_process(tmp_path: Path) -> None:
    """The time of the second begins where the first has ended, also between two polls."""
    memory = HeartbeatMemory(1)
    config = parse_command_line(words_of({**MODEL, "save": tmp_path}))
    settings = RunSettings.of(config, 0, 1).to_json()
    attempts = LaunchedAttempts(memory, tmp_path, print)
    attempts.begin([0], 1, Beginning.now())
    heartbeat = Heartbeat.attach({HEARTBEATS: memory.path}, 0)
    heartbeat.write_settings({**settings, "hosts": ("a",)})
    attempts.poll()
    heartbeat.start_training(0)
    heartbeat.enter(Section.FORWARD_BACKWARD)
    time.sleep(0.02)
    heartbeat.enter(Section.GRADS_REDUCE)
    heartbeat.finish_iteration(1)
    attempts.poll()
    time.sleep(0.02)
    heartbeat.begin()
    assert heartbeat.settings == {**settings, "hosts": ("a",)}
    attempts.poll()
    heartbeat.start_training(1)
    attempts.poll()
    attempts.end("complete", 0)
    first, second = read_attempts(tmp_path)
    assert (first.attempt, first.outcome, first.exit_code) == (1, "failed", ExitCode.CRASH)
    assert (second.attempt, second.outcome, second.first_iteration) == (2, "complete", 1)
    assert first.second("lost") >= 0.04  # no checkpoint has them
    assert second.second("lost") == second.second("step") == 0.0
    assert second.start == pytest.approx(first.end, abs=0.01)
    for attempt in (first, second):
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.wall_s, abs=0.01)


@pytest.mark.processes
def test_exceptions_and_a_kill_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions restart the training in the same processes; a killed rank is left to the launcher."""
    pytest.importorskip(PACKAGE)
    monkeypatch.setenv(VARIABLE, "1")
    losses = {}
    model: Flags = {"fp64": True, "train_iters": 22, "save_interval": 5, "log_interval": 1}
    faults: Flags = {"inprocess_restart": True, "inject_fault": "exception@8:rank1,exception@14:rank0,kill@18:rank1"}
    for name, flags in (("undisturbed", model), ("faulty", {**model, **faults})):
        (place := tmp_path / name).mkdir()
        with ended() as jobs:
            launcher = ["--standalone", "--max-restarts", "1"]
            jobs.append(job := Job(place, launcher, forks=False, flags=flags, async_save=True))
            started = {job.pid}
            while job.process.exitcode is None:
                started |= set(descendants(job.pid))
                time.sleep(0.2)
            assert job.exit_code() == ExitCode.COMPLETE, job.text()
        losses[name] = {record["iteration"]: record["lm_loss"] for record in job.records()}
        time.sleep(2.0)
        assert not [pid for pid in started if is_alive(pid)]
    assert losses["faulty"] == losses["undisturbed"] and len(losses["faulty"]) == 22
    attempts = read_attempts(job.save)
    assert [(one.outcome, one.cause, one.rank) for one in attempts] == [
        ("failed", "exception", 1),
        ("failed", "exception", 0),
        ("failed", "killed", 1),
        ("complete", None, None),
    ]
    begins = [one.first_iteration for one in attempts]
    # After an exception a rank waits for its background writer; a kill may come before iteration 15 is written.
    assert begins[:3] == [0, 5, 10] and begins[3] in (10, 15)
    for one, after in pairwise(attempts):
        assert one.end <= after.start
        assert sum(one.seconds.values()) == pytest.approx(one.wall_s, rel=0.01)
    reports = [json.loads((job.save / "failures" / f"000{number}.json").read_text()) for number in (1, 2, 3)]
    assert [(one["rank"], one["iteration"], one["section"]) for one in reports[:2]] == [
        (1, 8, "forward-backward"),
        (0, 14, "forward-backward"),
    ]
    assert job.text().count("All ranks restart in process.") == 2
