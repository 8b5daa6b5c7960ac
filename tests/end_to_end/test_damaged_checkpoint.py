"""A run whose latest checkpoint is damaged goes on from the newest good one, says why, and deletes nothing."""

from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    bytes_under,
    call_training,
    checkpoint_of,
    flags_of,
    latest_iteration,
    losses,
)


def command(corpus: Corpus, run: Path, **changes: FlagValue | Path) -> list[str]:
    """A run of six iterations that saves after each second one."""
    settings: dict[str, FlagValue | Path] = {
        "fp64": True,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 6,
        "lr_decay_iters": 6,
        "save": run,
        "load": run,
        "save_interval": 2,
        "metrics_jsonl": run / "metrics.jsonl",
        "log_interval": 1,
    }
    return flags_of(corpus, **{**settings, **changes})


def shard_of(run: Path, iteration: int) -> Path:
    return checkpoint_of(run, iteration) / "rank_00000.safetensors"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_for_the_newest_good_one(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``tests/checkpoint/test_damage.py`` has other damages."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    call_training(command(corpus, whole)).succeeded()
    call_training(command(corpus, run, train_iters=4)).succeeded()
    flip_a_bit(shard_of(run, 4))
    words = "rank_00000.safetensors is damaged (the digest of bytes"
    refused = call_training(command(corpus, run, checkpoint_fallback=False))
    assert refused.exit_code != 0 and words in refused.stderr
    before = bytes_under(checkpoint_of(run, 4))
    caplog.clear()
    outcome = call_training(command(corpus, run, train_iters=3, save=None, save_interval=None)).succeeded()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "checkpoint of iteration 4" in warning and words in warning
    assert "continuing after iteration 2" in outcome.stdout
    assert bytes_under(checkpoint_of(run, 4)) == before
    call_training(command(corpus, run)).succeeded()
    assert latest_iteration(run) == 6
    assert losses(run / "metrics.jsonl") == losses(whole / "metrics.jsonl")


def test_where_all_are_damaged_the_latest_is_named(corpus: Corpus, tmp_path: Path) -> None:
    call_training(command(corpus, tmp_path, train_iters=4)).succeeded()
    for iteration in (2, 4):
        flip_a_bit(shard_of(tmp_path, iteration))
    outcome = call_training(command(corpus, tmp_path))
    assert outcome.exit_code != 0
    assert any("iter_0000004/rank_00000.safetensors is damaged" in error for error in outcome.errors)
