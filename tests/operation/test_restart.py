"""Ranks that are killed come back, ranks whose launcher is killed do not stay, and attempts without progress end."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpoint.directory import TRACKER
from megatron.checkpoint.lock import LOCK, acquire
from megatron.errors import ExitCode
from megatron.operation.attempts import FILE
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
    environment_of,
    is_alive,
    rendezvous,
)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """What a test has started, which must not outlive it."""
    with ended() as started:
        yield started


@pytest.mark.slow(reason="kills a rank under each rendezvous; our launcher is in test_attempt_records.py")
@pytest.mark.parametrize("kind", ["c10d", "static", "standalone"])
def test_a_rank_that_is_killed_comes_back_under_torchrun(
    tmp_path: Path, jobs: list[Job], request: pytest.FixtureRequest, chance: random.Random, kind: str
) -> None:
    """Each time at the first attempt: gloo must not connect to addresses of dead ranks, which the store still has."""
    kills = request.config.getoption("--kills")
    flags = [*rendezvous(kind), "--max-restarts", str(kills)]
    jobs.append(job := Job(tmp_path, flags, TORCHRUN, save_interval=5, max_failed_attempts=0))
    job.wait_for_training()
    for number in range(kills):
        before = job.ranks()
        time.sleep(chance.uniform(0.0, 2.0))  # at any moment of an iteration or a save
        started = time.monotonic()
        os.kill(before[chance.randrange(2)], signal.SIGKILL)
        job.wait_for_training(without=list(before.values()))
        print(f"{kind}: kill {number + 1} of {kills}: back after {time.monotonic() - started:.1f} s")
        restarts = {environment_of(pid)["TORCHELASTIC_RESTART_COUNT"] for pid in job.ranks().values()}
        assert restarts == {str(number + 1)}, job.text()


@pytest.mark.parametrize("module", [TORCHRUN, LAUNCH])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, jobs: list[Job], module: str) -> None:
    """Not the ranks, nor their loaders and background writers; another run may save there at once."""
    jobs.append(job := Job(tmp_path, module=module, num_workers=1, async_save=True, save_interval=2))
    job.wait_for_training()
    job.wait_for(lambda: (job.save / TRACKER).exists() and len(descendants(job.pid)) >= 6)
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
    (sentence,) = refused.errors
    assert "without a checkpoint" in sentence and f"remove {save / FILE}" in sentence
    # The limit is a flag, and a limit of 0 is none.
    assert call_training(words_of({**crash, "max_failed_attempts": 4})).exit_code == ExitCode.CRASH
    (save / FILE).unlink()
    assert call_training(words_of({**flags, "exit_interval": 3})).exit_code == ExitCode.STOPPED
    assert call_training(words_of({**crash, "override_opt_param_scheduler": True})).exit_code == ExitCode.CRASH
    other_schedule = {**flags, "train_iters": 7}
    assert call_training(words_of(other_schedule)).exit_code == ExitCode.ACTION_REQUIRED
    assert call_training(words_of({**flags, "skip_train": True, "eval_iters": 1})).exit_code == ExitCode.COMPLETE
    assert call_training(words_of(flags)).exit_code == ExitCode.COMPLETE
    assert not (save / FILE).exists()


@pytest.mark.slow(reason="starts a run four times")
def test_the_launcher_ends_a_run_without_progress(tmp_path: Path, jobs: list[Job]) -> None:
    """Three attempts, and a fourth start that is refused: not all the restarts that are allowed."""
    jobs.append(job := Job(tmp_path, ["--standalone", "--max-restarts", "20"], lr=1e38, save_interval=8))
    assert job.exit_code() == ExitCode.NO_PROGRESS, job.text()
    assert job.text().count("> layout: ") == 3
    assert "3 consecutive attempts started without a checkpoint" in job.text()
