"""Ranks that are killed come back, ranks whose launcher is killed do not stay, attempts without progress end; and what
runs record of their attempts and failures."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpoint.directory import TRACKER
from megatron.checkpoint.lock import LOCK
from megatron.errors import ExitCode
from megatron.operation.attempts import (
    ATTEMPTS,
    CURRENT,
    Attempt,
    account,
    failures_without_progress,
    read_attempts,
    read_current,
)
from megatron.operation.failure import DIRECTORY, FILE, read_failure
from tests.checkpoint.directories import acquire
from tests.end_to_end.run_process import (
    call_training,
    descendants,
    environment,
    iterations,
    latest_iteration,
    wait_until,
    words_of,
)
from tests.operation.jobs import (
    LAUNCH,
    MODEL,
    PATIENCE,
    PRETRAIN,
    TORCHRUN,
    Job,
    ended,
    is_alive,
)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """What a test has started, which must not outlive it."""
    with ended() as started:
        yield started


@pytest.mark.parametrize("module", [pytest.param(TORCHRUN, marks=pytest.mark.slow), LAUNCH])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, jobs: list[Job], module: str) -> None:
    """Not the ranks, nor their background writers; another run may save there at once."""
    jobs.append(job := Job(tmp_path, module=module, num_workers=1, async_save=True, save_interval=2))
    job.wait_for_training()
    job.wait_for(lambda: (job.save / TRACKER).exists() and len(descendants(job.pid)) >= 4)
    assert (job.save / LOCK).exists()
    family = descendants(job.pid)
    job.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, family)), 30.0)
    job.process.join()
    done = latest_iteration(job.save)
    flags = {**MODEL, "save": job.save, "load": job.save, "exit_interval": done + 1, "global_batch_size": 8}
    assert call_training(words_of(flags)).exit_code == ExitCode.STOPPED


def test_a_second_job_is_refused_and_writes_nothing(tmp_path: Path, jobs: list[Job]) -> None:
    """Nor does its launcher: the records of the directory are those of the run that has its lock."""
    lock = acquire(tmp_path / "save")
    jobs.append(job := Job(tmp_path, train_iters=2, metrics_jsonl=None))
    assert job.exit_code() == ExitCode.ACTION_REQUIRED
    assert "(in_use)" in job.text() and "use another --save" in job.text()
    assert os.listdir(job.save) == [LOCK]
    lock.release()


def test_a_process_that_no_agent_has_started_outlives_the_shell(tmp_path: Path) -> None:
    """As with nohup: the variables that torchrun sets may be there, for ranks started by hand."""
    metrics = tmp_path / "metrics.jsonl"
    words = [sys.executable, PRETRAIN, *words_of({**MODEL, "metrics_jsonl": metrics})]
    start = f"{subprocess.list2cmdline(words)} > {tmp_path}/log 2>&1 & echo $!"
    variables = {**environment(), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    shell = subprocess.run(["bash", "-c", start], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    pid = int(shell.stdout)
    try:
        wait_until(lambda: len(iterations(metrics)) > 2, PATIENCE)
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


# --- attempts of a run ---------------------------------------------------------------------------------------


def test_three_attempts_without_a_new_checkpoint_end_the_run(tmp_path: Path) -> None:
    """At the same iteration, before and after a first checkpoint; the fourth start does nothing and says why."""
    save = tmp_path / "save"
    flags = {**MODEL, "train_iters": 8, "save": save, "load": save, "save_interval": 8}
    crash = {**flags, "lr": 1e38}  # a loss that is not finite, after an iteration or two
    *crashed, refused = [call_training(words_of(crash)) for _ in range(4)]
    assert [one.exit_code for one in crashed] == [1, 1, 1] and refused.exit_code == ExitCode.NO_PROGRESS
    refused.refusal("without a checkpoint", "start once with a larger --max-failed-attempts")
    # The limit is a flag, and a limit of 0 is none.
    assert call_training(words_of({**crash, "max_failed_attempts": 4})).exit_code == ExitCode.CRASH
    assert call_training(words_of(flags)).exit_code == ExitCode.NO_PROGRESS
    stopped = call_training(words_of({**flags, "exit_interval": 3, "max_failed_attempts": 0}))
    assert stopped.exit_code == ExitCode.STOPPED
    assert call_training(words_of({**crash, "override_opt_param_scheduler": True})).exit_code == ExitCode.CRASH
    other_schedule = {**flags, "train_iters": 7}
    assert call_training(words_of(other_schedule)).exit_code == ExitCode.ACTION_REQUIRED
    assert call_training(words_of({**flags, "skip_train": True, "eval_iters": 1})).exit_code == ExitCode.COMPLETE
    assert call_training(words_of(flags)).exit_code == ExitCode.COMPLETE
    failed = [one.counts_from for one in read_attempts(save) if one.is_without_progress]
    assert failed == [0, 0, 0, 0, 3]


# --- records -------------------------------------------------------------------------------------------------


def check_sums(attempts: list[Attempt]) -> None:
    for attempt in attempts:
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.wall_s, rel=0.01)
        assert min(attempt.seconds.values()) >= 0.0
        assert attempt.second("start") > 0.0


def test_a_job_whose_rank_is_killed(tmp_path: Path) -> None:
    """Two attempts, the second from the newest checkpoint; nothing but the gap between them is in neither."""
    begun = time.time()
    with ended() as jobs:
        jobs.append(job := Job(tmp_path, ["--standalone", "--max-restarts", "1"], save_interval=5))
        job.wait_for_training()
        job.wait_for(lambda: (found := read_current(job.save)) is not None and found.saves > 0)
        current = read_current(job.save)
        assert current is not None
        assert (current.attempt, current.outcome, current.world_size) == (1, "running", 2)
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.wait_for(lambda: len(read_attempts(job.save)) == 1)
        job.wait_for_training()
        job.signal(signal.SIGTERM)
        assert job.exit_code() == ExitCode.STOPPED
    ends = time.time()
    attempts = read_attempts(job.save)
    assert [(attempt.attempt, attempt.outcome, attempt.exit_code) for attempt in attempts] == [
        (1, "failed", -signal.SIGKILL),
        (2, "stopped", ExitCode.STOPPED),
    ]
    check_sums(attempts)
    first, second = attempts
    assert first.first_iteration == 0
    assert first.committed_iteration is not None and first.committed_iteration % 5 == 0
    assert first.saves == first.committed_iteration // 5
    # The kill may come after a checkpoint is complete on disk and before rank 0 has noted that.
    assert second.first_iteration in (first.committed_iteration, first.committed_iteration + 5)
    assert second.committed_iteration == second.last_iteration
    assert second.second("step") > 0 and second.second("lost") == 0.0
    assert begun <= first.start <= first.end <= second.start <= second.end <= ends
    assert account(attempts).wall_s == pytest.approx(second.end - first.start, rel=0.01)
    assert not (job.save / CURRENT).exists()
    assert all(0.0 < record["effective_time"] < 1.0 for record in iterations(job.metrics))


def test_a_run_without_a_launcher_in_another_run_directory(tmp_path: Path) -> None:
    """The failure has a report, with the number of its attempt and where it was; an attempt that is stopped or complete
    has none."""
    save, run_dir, metrics = tmp_path / "save", tmp_path / "run", tmp_path / "metrics.jsonl"
    flags = {**MODEL, "save": save, "load": save, "run_dir": run_dir, "metrics_jsonl": metrics, "save_interval": 4}
    flags |= {"train_iters": 12}
    stopped = call_training(words_of({**flags, "exit_interval": 6, "hang_limit_s": 5}))
    assert stopped.exit_code == ExitCode.STOPPED and not (run_dir / FILE).exists()
    assert "--hang-limit-s has no effect" in stopped.stderr
    assert call_training(words_of({**flags, "lr": 1e38, "override_opt_param_scheduler": True})).exit_code == 1
    found = read_failure(run_dir / FILE)
    assert found is not None and found["iteration"] > 6 and found["section"] == "step"
    assert (found["cause"], found["rank"], found["attempt"]) == ("not_finite", None, 2)
    assert found == read_failure(run_dir / DIRECTORY / "0002.json")
    assert failures_without_progress(read_attempts(run_dir), 6) == 1
    assert call_training(words_of({**flags, "async_save": True})).exit_code == ExitCode.COMPLETE
    assert call_training(words_of({**flags, "skip_train": True, "eval_iters": 1})).exit_code == ExitCode.COMPLETE
    attempts = read_attempts(run_dir)
    assert [attempt.outcome for attempt in attempts] == ["stopped", "failed", "complete"]
    assert [attempt.first_iteration for attempt in attempts] == [0, 6, 6]
    assert [attempt.last_iteration for attempt in attempts] == [6, attempts[1].last_iteration, 12]
    assert [attempt.committed_iteration for attempt in attempts] == [6, None, 12]
    assert [attempt.saves for attempt in attempts] == [2, 0, 2]
    check_sums(attempts)
    assert attempts[1].second("step") == 0.0
    assert not (save / ATTEMPTS).exists() and len(list((run_dir / DIRECTORY).iterdir())) == 1
    assert all(0.0 < record["effective_time"] < 1.0 for record in iterations(metrics))
