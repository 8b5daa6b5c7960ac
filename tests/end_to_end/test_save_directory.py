"""What a run keeps in its save directory, and that it has it to itself."""

import os
from pathlib import Path

import pytest

from megatron.checkpoint.lock import LOCK, RunLock
from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    RunningTraining,
    call_training,
    flags_of,
    iterations,
    run_training,
    tiny_corpus,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


def kept(root: Path) -> list[int]:
    assert not [name for name in os.listdir(root) if name.startswith(".")]
    return sorted(int(name.removeprefix("iter_")) for name in os.listdir(root) if name.startswith("iter_"))


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


def test_two_ranks_agree_on_what_goes(corpus: Corpus, tmp_path: Path) -> None:
    flags = flags_of(
        corpus,
        tensor_model_parallel_size=2,
        train_iters=4,
        lr_decay_iters=4,
        save=tmp_path,
        save_interval=1,
        save_retain_last=1,
    )
    run_training(flags, processes=2).succeeded()
    assert kept(tmp_path) == [4]


def test_after_a_return_to_an_older_checkpoint_the_abandoned_ones_cost_no_new_one(
    corpus: Corpus, tmp_path: Path
) -> None:
    def flags(**changes: FlagValue | Path) -> list[str]:
        return flags_of(corpus, lr_decay_iters=8, save=tmp_path, save_interval=2, **changes)

    call_training(flags(train_iters=8)).succeeded()
    call_training(flags(train_iters=5, load=tmp_path, ckpt_step=2, save_retain_last=1)).succeeded()
    assert kept(tmp_path) == [5, 6, 8]
    outcome = call_training(flags(train_iters=5, load=tmp_path)).succeeded()
    assert "continuing after iteration 5" in outcome.stdout


def test_a_second_run_is_refused_and_harms_nothing(corpus: Corpus, tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    outcome = call_training(flags_of(corpus, save=tmp_path))
    assert outcome.exit_code != 0
    (sentence,) = outcome.errors
    assert f"in use by process {os.getpid()}" in sentence and "choose another --save" in sentence
    assert os.listdir(tmp_path) == [LOCK]
    lock.release()


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
