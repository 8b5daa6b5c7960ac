"""Runs that save in the background and to a second directory."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpoint.background_main import OUTCOMES
from megatron.checkpoint.directory import new_saving_directory
from megatron.training.checkpoints.saver import Saver
from megatron.training.checkpoints.state import RunState
from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    RunningTraining,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    descendants,
    flags_of,
    fork_training,
    iterations,
    kept,
    latest_iteration,
)


def command(corpus: Corpus, run: Path, **changes: FlagValue | Path) -> list[str]:
    """A run of four iterations that saves after each."""
    settings: dict[str, FlagValue | Path] = {
        "bf16": True,
        "global_batch_size": 4,
        "train_iters": 4,
        "lr_decay_iters": 4,
        "save": run / "first",
        "load": run / "first",
        "save_interval": 1,
        "metrics_jsonl": run / "metrics.jsonl",
    }
    return flags_of(corpus, **{**settings, **changes})


def test_two_ranks_save_behind_the_training_what_they_would_have_saved_and_mirror_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    layout: dict[str, FlagValue | Path] = {
        "tensor_model_parallel_size": 1,
        "use_distributed_optimizer": True,
        "save_retain_last": 2,
    }
    direct, behind = tmp_path / "direct", tmp_path / "behind"
    fork_training(command(corpus, direct, **layout), 2).succeeded()
    outcome = fork_training(
        command(corpus, behind, async_save=True, redundant_save=behind / "second", **layout), 2
    ).succeeded()
    assert computed(behind / "metrics.jsonl") == computed(direct / "metrics.jsonl")
    assert outcome.stdout.count("> saved checkpoint") == 4
    assert kept(behind / "first") == kept(direct / "first") == [3, 4]
    # A copy may be left out while the one before is under way, but not the last.
    assert kept(behind / "second")[-1] == 4 and len(kept(behind / "second")) <= 2
    for copy in ("first", "second"):
        assert_same_tensors(checkpoint_of(behind / copy, 4), checkpoint_of(direct / "first", 4), ("model/", "opt", "r"))
    shutil.rmtree(behind / "first")
    outcome = fork_training(
        command(corpus, behind, async_save=True, redundant_save=behind / "second", train_iters=5, **layout), 2
    ).succeeded()
    assert f"loaded checkpoint {behind / 'second'}" in outcome.stdout and "after iteration 4" in outcome.stdout
    assert kept(behind / "first") == [5]


def test_copies_stand_in_for_a_damaged_original_and_for_lost_directories(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    both: dict[str, FlagValue | Path] = {"save_interval": 4, "redundant_save": [str(second), str(third)]}
    call_training(command(corpus, tmp_path, **both)).succeeded()
    for copy in second, third:
        assert_same_tensors(checkpoint_of(copy, 4), checkpoint_of(first, 4), ("model/", "opt", "r"))
    shard = checkpoint_of(first, 4) / "rank_00000.safetensors"
    os.truncate(shard, 1000)
    refused = call_training(command(corpus, tmp_path, train_iters=5, checkpoint_fallback=False, **both))
    assert refused.exit_code != 0 and "has 1,000 bytes" in refused.stderr
    # A run that loads from elsewhere does not look at the copies of what it saves.
    elsewhere = call_training(command(corpus, tmp_path, load=tmp_path / "nowhere", train_iters=1, **both))
    assert "nowhere has no checkpoint" in elsewhere.stderr
    outcome = call_training(command(corpus, tmp_path, train_iters=5, **both)).succeeded()
    assert "continuing after iteration 4" in outcome.stdout and "has 1,000 bytes" in caplog.text
    assert shard.stat().st_size == 1000
    shutil.rmtree(first)
    shutil.rmtree(second)
    outcome = call_training(command(corpus, tmp_path, train_iters=6, **both)).succeeded()
    assert f"loaded checkpoint {third}" in outcome.stdout and "after iteration 5" in outcome.stdout
    assert [kept(root)[-1] for root in (first, second, third)] == [6, 6, 6]


def test_a_copy_that_cannot_be_made_is_a_warning(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "second").mkdir()

    def full(root: Path, iteration: int) -> Path:
        directory = new_saving_directory(root, iteration)
        (directory / "rank_00000.safetensors").mkdir()
        return directory

    monkeypatch.setattr("megatron.checkpoint.background.new_saving_directory", full)
    call_training(command(corpus, tmp_path, redundant_save=tmp_path / "second")).succeeded()
    assert kept(tmp_path / "first") == [1, 2, 3, 4]
    assert kept(tmp_path / "second") == []
    assert f"iteration 4 is not mirrored to {tmp_path / 'second'}: rank 0: Cannot copy" in caplog.text


def test_writers_and_copiers_that_die_between_saves_cost_nothing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save, killed = Saver.save, set[int]()

    def kill_idle(self: Saver, state: RunState) -> None:
        assert self._background is not None
        self.settle()
        for process in (self._background._process, *(mirror._process for mirror in self._mirrors)):
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                killed.add(process.pid)
        save(self, state)

    monkeypatch.setattr(Saver, "save", kill_idle)
    call_training(command(corpus, tmp_path, async_save=True, redundant_save=tmp_path / "second")).succeeded()
    assert len(killed) == 6
    assert kept(tmp_path / "first") == kept(tmp_path / "second") == [1, 2, 3, 4]
    assert "not saved" not in caplog.text and "not mirrored" not in caplog.text


@pytest.mark.slow(reason="a kill at a random moment")
def test_a_killed_run_leaves_no_process_and_goes_on_from_what_was_complete(corpus: Corpus, tmp_path: Path) -> None:
    def flags(**changes: FlagValue | Path) -> list[str]:
        both: dict[str, FlagValue | Path] = {"redundant_save": tmp_path / "second", "async_save": True}
        return command(corpus, tmp_path, **{**both, "lr_decay_iters": 10, **changes})

    run = RunningTraining(flags(train_iters=1000))
    run.wait_for_records(tmp_path / "metrics.jsonl", 5)
    helpers = descendants(run.process.pid)
    assert len(helpers) == 2, "a writer and a copier"
    # The writer does not run when its rank dies: it cannot notice by itself.
    os.kill(helpers[0], signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in helpers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    complete = max(int(path.name[5:]) for path in (tmp_path / "first").glob("iter_*"))
    assert complete >= 3
    last = len(iterations(tmp_path / "metrics.jsonl"))
    outcome = call_training(flags(train_iters=last + 2)).succeeded()
    assert f"continuing after iteration {complete}" in outcome.stdout
    assert latest_iteration(tmp_path / "first") == last + 2
    assert kept(tmp_path / "first")[-1] == kept(tmp_path / "second")[-1] == last + 2
    assert not list((tmp_path / "first").rglob(OUTCOMES))
