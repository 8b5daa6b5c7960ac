"""A run whose latest checkpoint is damaged goes on from the newest good one, says why, and deletes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    call_training,
    checkpoint_of,
    flags_of,
    iterations,
    latest_iteration,
    losses,
    run_training,
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


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def garble_the_manifest(path: Path) -> None:
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace("1", "2", 1))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip_a_bit, "rank_00000.safetensors is damaged (the digest of bytes"),
    "a byte too few": (shorten, "rank_00000.safetensors has"),
    "a missing file": (lose, "rank_00000.safetensors"),
    "a garbled manifest": (garble_the_manifest, "manifest.json is damaged"),
}


@pytest.mark.slow(reason="three runs for each damage; tests/checkpoint/test_damage.py has each")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_good_one(
    corpus: Corpus, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    call_training(command(corpus, tmp_path / "good")).succeeded()
    expected = losses(tmp_path / "good" / "metrics.jsonl")
    run = tmp_path / "run"
    call_training(command(corpus, run, train_iters=4)).succeeded()
    spoil, words = DAMAGES[damage]
    spoil(shard_of(run, 4))
    refused = call_training(command(corpus, run, checkpoint_fallback=False))
    assert refused.exit_code != 0 and words in refused.stderr
    before = {path: path.read_bytes() for path in checkpoint_of(run, 4).iterdir()}
    caplog.clear()
    outcome = call_training(command(corpus, run, train_iters=3, save=None, save_interval=None)).succeeded()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "checkpoint of iteration 4" in warning and words in warning
    assert "continuing after iteration 2" in outcome.stdout
    assert {path: path.read_bytes() for path in checkpoint_of(run, 4).iterdir()} == before
    call_training(command(corpus, run)).succeeded()
    assert latest_iteration(run) == 6
    assert losses(run / "metrics.jsonl") == expected


@pytest.mark.slow(reason="two ranks")
def test_two_ranks_share_the_reading_and_learn_of_the_damage_together(corpus: Corpus, tmp_path: Path) -> None:
    flags = {"tensor_model_parallel_size": 2}
    run_training(command(corpus, tmp_path, train_iters=4, **flags), processes=2).succeeded()
    flip_a_bit(checkpoint_of(tmp_path, 4) / "rank_00001.safetensors")
    outcome = run_training(command(corpus, tmp_path, **flags), processes=2)
    outcome.succeeded()
    assert "Skipping the checkpoint of iteration 4" in outcome.stderr
    assert "rank_00001.safetensors is damaged" in outcome.stderr
    assert [record["iteration"] for record in iterations(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_where_all_are_damaged_the_latest_is_named(corpus: Corpus, tmp_path: Path) -> None:
    call_training(command(corpus, tmp_path, train_iters=4)).succeeded()
    for iteration in (2, 4):
        flip_a_bit(shard_of(tmp_path, iteration))
    outcome = call_training(command(corpus, tmp_path))
    assert outcome.exit_code != 0
    assert any("iter_0000004/rank_00000.safetensors is damaged" in error for error in outcome.errors)
