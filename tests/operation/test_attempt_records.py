"""What real runs record of their attempts and failures: under a launcher whose rank is killed, and without one."""

import os
import signal
import time
from pathlib import Path

import pytest

from megatron.config.operation import OperationConfig
from megatron.errors import ExitCode
from megatron.operation import attempts as failed_attempts
from megatron.operation.accounting import ATTEMPTS, CURRENT, Attempt, account, read_attempts, read_current, settle
from megatron.operation.failure import DIRECTORY, FILE, read_failure
from megatron.operation.run_settings import RunSettings
from tests.end_to_end.run_process import call_training, iterations, words_of
from tests.operation.jobs import MODEL, Job, ended


def check_sums(attempts: list[Attempt]) -> None:
    for attempt in attempts:
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.wall_s, rel=0.01)
        assert min(attempt.seconds.values()) >= 0.0
        assert attempt.second("start") > 0.0


def test_ranks_may_have_newer_code_than_their_launcher() -> None:
    settings = RunSettings(0, 2, "/run", OperationConfig(max_failed_attempts=7), hosts=("a",))
    written = settings.to_json()
    assert RunSettings.from_json(written) == settings
    written["operation"]["a_later_flag"] = 1
    written["a_later_setting"] = 2
    assert RunSettings.from_json(written) == settings


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
    noted, kept = first.committed_iteration, second.first_iteration
    assert kept in (noted, noted + 5)
    settled = settle(attempts)[0]
    if kept == noted:
        assert settled == first
    else:
        assert kept == first.last_iteration
        assert settled.second("step") == pytest.approx(first.second("step") + first.second("lost"))
    check_sums([settled])
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
    assert (run_dir / failed_attempts.FILE).exists() and not (save / failed_attempts.FILE).exists()
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


def test_without_a_run_directory_nothing_is_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = {**MODEL, "train_iters": 2, "metrics_jsonl": metrics}
    assert call_training(words_of(flags)).exit_code == ExitCode.COMPLETE
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert all("effective_time" not in record for record in iterations(metrics))
