"""Averages of weights: the moving average of a run, its evaluation and export, and the average of checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.commands import average_checkpoints, convert_checkpoint
from megatron.commands.average_checkpoints import Average
from megatron.commands.convert_checkpoint import ToHuggingFace
from megatron.commands.weight_checkpoints import progress_bar
from megatron.errors import CheckpointError, ConfigError
from tests.end_to_end.converted import DENSE_RUN
from tests.end_to_end.converted import tensors_of as saved_tensors
from tests.end_to_end.run_process import Outcome, call_training, iterations, records, words_of

DECAY = 0.6


def run_of(directory: Path, **changes: Any) -> Outcome:
    flags = {
        **DENSE_RUN,
        "train_iters": 4,
        "lr_decay_iters": 4,
        "save_interval": 1,
        "bf16": True,
        "eval_iters": 2,
        "log_interval": 1,
        "save": directory,
        "load": directory,
        "metrics_jsonl": directory / "metrics.jsonl",
        **changes,
    }
    return call_training(words_of(flags))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations without a moving average until the first, saved after each, that evaluate the average."""
    directory = tmp_path_factory.mktemp("averaged")
    run_of(directory, train_iters=1).succeeded()
    run_of(directory, ema_decay=DECAY, eval_ema=True, eval_interval=2).succeeded()
    return directory


def tensors_of(root: Path, iteration: int, prefix: str) -> dict[str, Tensor]:
    """The global tensors of a checkpoint with ``prefix``, in fp64."""
    return {name: tensor.double() for name, tensor in saved_tensors(root, prefix, iteration).items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys() and found
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_a_resumed_run_begins_and_continues_its_moving_average(averaged: Path) -> None:
    """From the checkpoint of a run that had none, and then over its own updates."""
    assert tensors_of(averaged, 1, "optimizer/ema/") == {}
    expected = tensors_of(averaged, 1, "optimizer/master/")
    for iteration in (2, 3, 4):
        masters = tensors_of(averaged, iteration, "optimizer/master/")
        expected = {name: DECAY * value + (1 - DECAY) * masters[name] for name, value in expected.items()}
        assert_equal(tensors_of(averaged, iteration, "optimizer/ema/"), expected, 1e-6)


def test_the_moving_average_is_evaluated_and_changes_no_update(averaged: Path, tmp_path: Path) -> None:
    run_of(tmp_path, eval_interval=2).succeeded()
    found, plain = ([row["lm_loss"] for row in iterations(root / "metrics.jsonl")] for root in (averaged, tmp_path))
    assert found == plain
    assert_equal(tensors_of(averaged, 4, "optimizer/master/"), tensors_of(tmp_path, 4, "optimizer/master/"), 0.0)
    of_average = validation_loss(averaged)
    assert of_average != validation_loss(tmp_path)
    outcome = run_of(averaged, skip_train=True, eval_ema=True, metrics_jsonl=tmp_path / "other.jsonl")
    outcome.succeeded()
    # The samples of an evaluation without training are those after all earlier evaluations, so only its kind is known.
    assert validation_loss(averaged, tmp_path / "other.jsonl") != of_average


def validation_loss(root: Path, metrics: Path | None = None) -> float:
    rows = records(metrics or root / "metrics.jsonl")
    return float([row["validation_loss"] for row in rows if "validation_loss" in row][-1])


def test_a_moving_average_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path, train_iters=1).succeeded()
    outcome = run_of(tmp_path, skip_train=True, eval_ema=True)
    assert outcome.errors and "has no moving average of the weights: remove --eval-ema" in outcome.errors[0]
    with pytest.raises(CheckpointError, match=r"no moving average.*--ema.*--ema-decay"):
        convert_checkpoint.convert(ToHuggingFace(str(tmp_path), str(tmp_path / "hf"), ema=True, tokenizer=False))


@pytest.mark.parametrize("weights", [(), (1.0, 3.0, 0.5)])
def test_checkpoints_are_averaged(averaged: Path, tmp_path: Path, weights: tuple[float, ...]) -> None:
    """From their master weights; the result is evaluated."""
    message = average(Average(str(averaged), (2, 3, 4), str(tmp_path / "average"), weights))
    assert "without optimizer state" in message
    shares = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)
    parts = [tensors_of(averaged, iteration, "optimizer/master/") for iteration in (2, 3, 4)]
    expected = {
        name: sum((share * part[name] for share, part in zip(shares / shares.sum(), parts)), torch.zeros(()))
        for name in parts[0]
    }
    assert_equal(tensors_of(tmp_path / "average", 4, "model/"), expected, 1e-7)
    evaluated = run_of(
        tmp_path / "average",
        skip_train=True,
        save=None,
        save_interval=None,
        finetune=True,
        metrics_jsonl=tmp_path / "metrics.jsonl",
    )
    evaluated.succeeded()
    assert validation_loss(tmp_path, tmp_path / "metrics.jsonl") < 5.0
    convert_checkpoint.convert(ToHuggingFace(str(tmp_path / "average"), str(tmp_path / "hf"), tokenizer=False))


def average(config: Average) -> str:
    config.check()
    with progress_bar() as progress:
        return average_checkpoints.average(config, progress)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": (2,)}, "--iterations 2 must be at least two"),
        ({"iterations": (2, 2)}, "--iterations 2 2 must be at least two different"),
        ({"weights": (1.0,)}, "--weights has 1 values for 2 iterations"),
        ({"weights": (1.0, -1.0)}, "--weights -1.0 must be positive"),
    ],
)
def test_an_average_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        average(Average(**{"load": "a", "iterations": (1, 2), "save": "b", **changes}))


def test_other_models_and_other_directories_are_refused(averaged: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="9"):
        average(Average(str(averaged), (2, 9), str(tmp_path / "average")))
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        average(Average(str(averaged), (2, 3), str(averaged)))
    other = tmp_path / "other"
    run_of(other, train_iters=1, ffn_hidden_size=32).succeeded()
    (averaged / "iter_0000002").rename(other / "iter_0000002")
    try:
        with pytest.raises(CheckpointError, match=r"another architecture.*--ffn-hidden-size.*average checkpoints of"):
            average(Average(str(other), (1, 2), str(tmp_path / "average")))
    finally:
        (other / "iter_0000002").rename(averaged / "iter_0000002")
    assert not (tmp_path / "average").exists()
