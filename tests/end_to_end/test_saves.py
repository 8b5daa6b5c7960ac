"""What a run keeps in its save directory, which it has to itself; saves in the background, copies, failed saves."""

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.checkpoint import checkpointing
from megatron.checkpoint.directory import new_saving_directory
from megatron.checkpoint.lock import LEASE, LOCK
from megatron.checkpoint.safetensors_file import write_safetensors
from megatron.commands import pretrain_llama
from megatron.operation.lease import Claim
from megatron.training.checkpoints import saver as saver_module
from megatron.training.checkpoints.saver import Saver
from megatron.training.checkpoints.state import RunState
from tests.checkpoint.directories import acquire
from tests.checkpoint.file_faults import raise_error
from tests.end_to_end.run_process import (
    Corpus,
    Flags,
    FlagValue,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    fork_training,
    kept,
    saving_run,
    wait_until,
)


def test_saves_are_dense_early_and_old_ones_go_but_milestones(corpus: Corpus, tmp_path: Path) -> None:
    flags = flags_of(
        corpus,
        train_iters=13,
        lr_decay_iters=13,
        save=tmp_path,
        save_interval="1@0,3@4",
        save_retain_last=2,
        save_retain_interval=3,
    )
    outcome = call_training(flags).succeeded()
    saved = [line.split("iter_")[1] for line in outcome.stdout.splitlines() if "> saved checkpoint" in line]
    assert [int(number) for number in saved] == [1, 2, 3, 4, 6, 9, 12, 13]
    assert kept(tmp_path) == [3, 6, 9, 12, 13]


def test_after_a_return_to_an_older_checkpoint_the_abandoned_ones_cost_no_new_one(
    corpus: Corpus, tmp_path: Path
) -> None:
    def flags(**changes: FlagValue) -> list[str]:
        return flags_of(corpus, lr_decay_iters=8, save=tmp_path, save_interval=2, **changes)

    call_training(flags(train_iters=8)).succeeded()
    outcome = call_training(flags(train_iters=5, load=tmp_path, ckpt_step=2, save_retain_last=1)).succeeded()
    assert "continuing after iteration 2" in outcome.stdout
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert kept(tmp_path) == [5, 6, 8]
    outcome = call_training(flags(train_iters=5, load=tmp_path)).succeeded()
    assert "continuing after iteration 5" in outcome.stdout


def lock_of_a_dead_host(root: Path) -> None:
    """The lock of a run on a host that nobody can look at, which is not renewed any more."""
    root.mkdir(exist_ok=True)
    lock = acquire(root)
    fields = json.loads((root / LOCK).read_text()) | {"host": "elsewhere", "pid": 7, "process": "another boot/1"}
    lock.release()
    (root / LOCK).write_text(json.dumps(fields))


def test_a_start_waits_for_a_dead_hosts_lease(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Claim, "patience", 0.7)
    lock_of_a_dead_host(tmp_path)
    outcome = call_training(flags_of(corpus, save=tmp_path, train_iters=2)).succeeded()
    (line,) = [line for line in outcome.stdout.splitlines() if "is locked by" in line]
    assert f"{tmp_path} is locked by process 7 on elsewhere" in line and "waiting at most 1 s" in line
    assert kept(tmp_path) == [2]


@pytest.mark.slow(reason="two ranks that wait")
def test_a_signal_ends_the_wait_for_a_lock_on_all_ranks(corpus: Corpus, tmp_path: Path) -> None:
    lock_of_a_dead_host(tmp_path / "run")
    before = (tmp_path / "run" / LOCK).read_bytes()
    outcome = fork_training(flags_of(corpus, save=tmp_path / "run"), 2, main_with_signal).succeeded()
    assert "> stopped: signal SIGTERM before training began" in outcome.stdout
    assert "iteration" not in outcome.stdout
    assert outcome.seconds < LEASE
    assert (tmp_path / "run" / LOCK).read_bytes() == before


def main_with_signal(flags: Sequence[str]) -> int:
    """The entry point; rank 1 gets a signal when rank 0 says that it waits."""
    if os.environ["RANK"] == "1":
        when = (Path("0.out"), "is locked by", signal.SIGTERM)
        threading.Thread(target=send_when, args=when, daemon=True).start()
    return pretrain_llama.main(flags)


def send_when(log: Path, words: str, number: signal.Signals) -> None:
    """Send a signal to this process as soon as a log holds ``words``."""
    wait_until(lambda: log.exists() and words in log.read_text(), LEASE)
    os.kill(os.getpid(), number)


# --- nothing is abandoned by mistake -------------------------------------------------------------------------------


def test_a_directory_that_holds_checkpoints_is_not_started_over(corpus: Corpus, tmp_path: Path) -> None:
    flags: Flags = {"train_iters": 4, "lr_decay_iters": 4, "save": tmp_path / "run", "save_interval": 2}
    call_training(flags_of(corpus, **flags)).succeeded()
    words = (f"--save {tmp_path / 'run'} has checkpoints up to iteration 4", "--load", "another directory")
    call_training(flags_of(corpus, **flags)).refusal(*words)
    # Nor by weights from elsewhere.
    elsewhere = flags_of(corpus, **flags, load=tmp_path / "run", finetune=True)
    call_training(elsewhere).refusal("would start at iteration 0")
    assert kept(tmp_path / "run") == [2, 4]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"


# --- saves in the background, and copies ----------------------------------------------------------------------


def test_two_ranks_save_and_mirror_behind_the_training_the_same(corpus: Corpus, tmp_path: Path) -> None:
    layout: Flags = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True, "save_retain_last": 2}
    direct, behind = tmp_path / "direct", tmp_path / "behind"
    fork_training(saving_run(corpus, direct, **layout), 2).succeeded()
    outcome = fork_training(
        saving_run(corpus, behind, async_save=True, redundant_save=behind / "second", **layout), 2
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
        saving_run(corpus, behind, async_save=True, redundant_save=behind / "second", train_iters=5, **layout), 2
    ).succeeded()
    assert f"loaded checkpoint {behind / 'second'}" in outcome.stdout and "after iteration 4" in outcome.stdout
    assert kept(behind / "first") == [5]


def test_copies_stand_in_for_a_damaged_original_and_for_lost_directories(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    both: Flags = {"save_interval": 4, "redundant_save": [str(second), str(third)]}
    call_training(saving_run(corpus, tmp_path, **both)).succeeded()
    for copy in second, third:
        assert_same_tensors(checkpoint_of(copy, 4), checkpoint_of(first, 4), ("model/", "opt", "r"))
    shard = checkpoint_of(first, 4) / "rank_00000.safetensors"
    os.truncate(shard, 1000)
    refused = call_training(saving_run(corpus, tmp_path, train_iters=5, checkpoint_fallback=False, **both))
    assert refused.exit_code != 0 and "has 1,000 bytes" in refused.stderr
    # A run that loads from elsewhere does not look at the copies of what it saves.
    elsewhere = call_training(saving_run(corpus, tmp_path, load=tmp_path / "nowhere", train_iters=1, **both))
    assert "nowhere has no checkpoint" in elsewhere.stderr
    outcome = call_training(saving_run(corpus, tmp_path, train_iters=5, **both)).succeeded()
    assert "continuing after iteration 4" in outcome.stdout and "has 1,000 bytes" in caplog.text
    assert shard.stat().st_size == 1000
    shutil.rmtree(first)
    shutil.rmtree(second)
    outcome = call_training(saving_run(corpus, tmp_path, train_iters=6, **both)).succeeded()
    assert f"loaded checkpoint {third}" in outcome.stdout and "after iteration 5" in outcome.stdout
    assert [kept(root)[-1] for root in (first, second, third)] == [6, 6, 6]


def spoil(monkeypatch: pytest.MonkeyPatch, iterations: range, *modules: str) -> None:
    """In the new directory of a checkpoint of these iterations there is a folder where its file shall be."""

    def spoiled(root: Path, iteration: int) -> Path:
        directory = new_saving_directory(root, iteration)
        if iteration in iterations:
            (directory / "rank_00000.safetensors").mkdir()
        return directory

    for module in modules:
        monkeypatch.setattr(f"megatron.checkpoint.{module}.new_saving_directory", spoiled)


def test_a_copy_that_cannot_be_made_is_a_warning(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "second").mkdir()

    spoil(monkeypatch, range(1, 5), "background")
    call_training(saving_run(corpus, tmp_path, redundant_save=tmp_path / "second")).succeeded()
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
    call_training(saving_run(corpus, tmp_path, async_save=True, redundant_save=tmp_path / "second")).succeeded()
    assert len(killed) == 6
    assert kept(tmp_path / "first") == kept(tmp_path / "second") == [1, 2, 3, 4]
    assert "not saved" not in caplog.text and "not mirrored" not in caplog.text


# --- saves that fail: the run goes on, and ends when too many have failed in a row ----------------------------


def saving_each(corpus: Corpus, save: Path, **changes: FlagValue) -> list[str]:
    """A run of six iterations that saves after each."""
    common: Flags = {"train_iters": 6, "lr_decay_iters": 6, "save": save, "save_interval": 1}
    return flags_of(corpus, **common | {"global_batch_size": 4} | changes)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failure_is_a_warning_until_more_than_one_in_a_row(
    corpus: Corpus, tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The last attempt before the end is not made in the background.
    spoil(monkeypatch, range(2, 2 + failures), "background", "checkpointing")
    changes: Flags = {"train_iters": 5, "lr_decay_iters": 5, "max_failed_saves": 1}
    outcome = call_training(saving_each(corpus, tmp_path, async_save=True, bf16=True, **changes))
    assert "Iteration 2 is not saved: rank 0: Cannot write" in caplog.text
    assert "Training continues; the next attempt is now, after iteration 3." in caplog.text
    if failures == 1:
        outcome.succeeded()
        assert kept(tmp_path) == [1, 3, 4, 5]
    else:
        too_many = f"The last {failures} saves failed, more than --max-failed-saves 1 allows: "
        outcome.refusal(too_many, "Cannot write", "The newest checkpoint is of iteration 1.")
        assert kept(tmp_path) == [1]


@pytest.mark.parametrize("failures", [2, 3])
def test_the_last_save_is_tried_three_times(
    corpus: Corpus, tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver_module, "LAST_SAVE_PAUSE", 0.0)
    write, count = write_safetensors, iter(range(1, 100))

    def at_first_not(*arguments: object) -> object:
        # The first save is that of iteration 4.
        is_failure = 1 < next(count) <= 1 + failures
        return raise_error(errno.EDQUOT) if is_failure else write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpointing, "write_safetensors", at_first_not)
    outcome = call_training(saving_each(corpus, tmp_path, save_interval=4))
    assert caplog.text.count("Iteration 6 is not saved") == 2
    if failures == 2:
        outcome.succeeded()
        assert kept(tmp_path) == [4, 6]
    else:
        outcome.refusal(
            "Iteration 6, the last of this run, is not saved, after 3 attempts: ",
            "Disk quota exceeded): free some space",
            "The newest checkpoint is of iteration 4.",
        )
        assert kept(tmp_path) == [4]


def test_a_run_whose_directory_is_taken_ends(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Saver.save

    def taken_over(self: Saver, state: RunState) -> None:
        if state.progress.iteration == 2:
            lock = tmp_path / ".run.lock"
            lock.write_text(lock.read_text().replace(self._locks[0].token, "another"))
        save(self, state)

    monkeypatch.setattr(Saver, "save", taken_over)
    call_training(saving_each(corpus, tmp_path)).refusal("was taken over by process")
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]
