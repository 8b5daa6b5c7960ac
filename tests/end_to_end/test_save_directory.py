"""What a run keeps in its save directory, and that it has it to itself."""

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.checkpoint import lock as lock_module
from megatron.checkpoint.lock import LEASE, LOCK, acquire
from megatron.commands import pretrain_llama
from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    RunningTraining,
    call_training,
    flags_of,
    fork_training,
    iterations,
    kept,
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
    def flags(**changes: FlagValue | Path) -> list[str]:
        return flags_of(corpus, lr_decay_iters=8, save=tmp_path, save_interval=2, **changes)

    call_training(flags(train_iters=8)).succeeded()
    outcome = call_training(flags(train_iters=5, load=tmp_path, ckpt_step=2, save_retain_last=1)).succeeded()
    assert "continuing after iteration 2" in outcome.stdout
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert kept(tmp_path) == [5, 6, 8]
    outcome = call_training(flags(train_iters=5, load=tmp_path)).succeeded()
    assert "continuing after iteration 5" in outcome.stdout


def test_a_second_run_is_refused_and_harms_nothing(corpus: Corpus, tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    outcome = call_training(flags_of(corpus, save=tmp_path))
    assert outcome.exit_code != 0
    (sentence,) = outcome.errors
    assert f"in use by process {os.getpid()}" in sentence and "use another --save" in sentence
    assert os.listdir(tmp_path) == [LOCK]
    lock.release()


def lock_of_a_dead_host(root: Path) -> None:
    """The lock of a run on a host that nobody can look at, which is not renewed any more."""
    root.mkdir(exist_ok=True)
    lock = acquire(root)
    fields = json.loads((root / LOCK).read_text()) | {"host": "elsewhere", "pid": 7, "process": "another boot/1"}
    lock.release()
    (root / LOCK).write_text(json.dumps(fields))


def test_a_restart_waits_for_the_lease_of_a_dead_host(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "LEASE", 0.6)
    monkeypatch.setattr(lock_module, "RENEWAL", 0.1)
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


def test_a_run_that_was_killed_leaves_a_lock_that_the_next_takes_over(corpus: Corpus, tmp_path: Path) -> None:
    save, metrics = tmp_path / "run", tmp_path / "metrics.jsonl"

    def flags(**changes: FlagValue | Path) -> list[str]:
        common: dict[str, FlagValue | Path] = {"lr_decay_iters": 10, "save": save, "save_interval": 1}
        return flags_of(corpus, **common | {"save_retain_last": 2, "metrics_jsonl": metrics} | changes)

    run = RunningTraining(flags(train_iters=1000))
    run.wait_for_records(metrics, 5)
    run.kill()
    assert LOCK in os.listdir(save)
    last = len(iterations(metrics))
    call_training(flags(train_iters=last + 2, load=save)).succeeded()
    assert kept(save) == [last + 1, last + 2]


# --- nothing is abandoned by mistake -------------------------------------------------------------------------------


def refusal(flags: list[str]) -> str:
    outcome = call_training(flags)
    assert outcome.exit_code != 0
    assert "Traceback" not in outcome.stderr
    return outcome.stderr


def test_a_directory_that_holds_checkpoints_is_not_started_over(corpus: Corpus, tmp_path: Path) -> None:
    flags: dict[str, FlagValue | Path] = {
        "train_iters": 4,
        "lr_decay_iters": 4,
        "save": tmp_path / "run",
        "save_interval": 2,
    }
    call_training(flags_of(corpus, **flags)).succeeded()
    message = refusal(flags_of(corpus, **flags))
    for words in (f"--save {tmp_path / 'run'} has checkpoints up to iteration 4", "--load", "another directory"):
        assert words in message
    # Nor by weights from elsewhere.
    assert "would start at iteration 0" in refusal(flags_of(corpus, **flags, load=tmp_path / "run", finetune=True))
    assert kept(tmp_path / "run") == [2, 4]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
