"""Tools that make weights of weights: a dense model with experts, averages of a run and of checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.streaming import SavedTensors
from megatron.commands import checkpoints, convert_checkpoint
from megatron.commands.checkpoints import Average, Progress
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, Upcycle
from megatron.config.model import ModelConfig
from megatron.core.parameter import normal, parameter_key
from megatron.errors import CheckpointError, ConfigError
from tests.end_to_end.converted import DENSE_RUN, our_model, tensors_of
from tests.end_to_end.run_process import Outcome, bytes_under, call_training, iterations, records, saving_in, words_of
from tests.model.reference import relative_error
from tests.whole_model import logits_of

# --- convert_checkpoint.py upcycle ----------------------------------------------------------------------------

EXPERTS = 4


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a dense model in bf16, with fp32 master weights."""
    directory = tmp_path_factory.mktemp("dense")
    call_training(words_of({**DENSE_RUN, "bf16": True, "save": directory})).succeeded()
    return directory


def upcycle(load: Path, save: Path, **flags: Any) -> str:
    return convert_checkpoint.convert(Upcycle(str(load), str(save), num_experts=EXPERTS, **flags))


def test_every_expert_is_the_mlp_and_all_else_is_as_it_was(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path, moe_layer_freq="[1,0,1]")
    before, after = tensors_of(dense, "optimizer/master/"), tensors_of(tmp_path)
    added = set()
    for number in (0, 2):
        for linear in ("linear_fc1", "linear_fc2"):
            mlp = before.pop(f"layers.{number}.mlp.{linear}.weight")
            experts = after.pop(f"layers.{number}.mlp.experts.{linear}.weight")
            assert experts.dtype == torch.float32  # master weights, not the weights rounded to bf16
            assert torch.equal(experts.view(EXPERTS, *mlp.shape), mlp.expand(EXPERTS, *mlp.shape))
        added.add(f"layers.{number}.mlp.router.weight")
    assert after.keys() - before.keys() == added
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_the_new_model_computes_what_the_dense_model_computes(dense: Path, tmp_path: Path) -> None:
    """Whatever the routers choose, because the weights of the chosen experts sum to one."""
    weights = tmp_path / "dense"
    convert_checkpoint.convert(ToHuggingFace(str(dense), str(tmp_path / "hf"), dtype="fp32", tokenizer=False))
    convert_checkpoint.convert(FromHuggingFace(str(tmp_path / "hf"), str(weights)))
    upcycle(weights, tmp_path / "experts", moe_layer_freq="[1,0,1]", moe_router_topk=3)
    tokens = torch.arange(48).remainder(61).view(2, 24)
    with torch.no_grad():
        before, after = (logits_of(our_model(root), tokens) for root in (weights, tmp_path / "experts"))
    assert relative_error(after, before) < 1e-12


def test_a_router_starts_as_in_a_new_run_with_the_seed(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path, seed=7)
    for number in range(3):
        name = f"layers.{number}.mlp.router.weight"
        numbers = normal(0.02)(parameter_key(7, name), torch.arange(EXPERTS * 32)).view(EXPERTS, 32)
        assert torch.equal(tensors_of(tmp_path)[name], numbers.float())


def test_the_flags_of_the_new_model_are_saved_and_advised(dense: Path, tmp_path: Path) -> None:
    advice = upcycle(dense, tmp_path, moe_router_topk=3, moe_layer_freq="[0]*1+[1]*2", iteration=5)
    state = read_checkpoint(tmp_path, 5).state
    flags = ModelConfig(**state["flags"]["model"])
    assert (flags.num_experts, flags.moe_router_topk, flags.moe_ffn_hidden_size) == (EXPERTS, 3, 48)
    assert state["architecture"]["moe_layer_freq"] == "[0,1,1]"
    assert f"--load {tmp_path} --finetune" in advice and "--num-experts 4" in advice and "[0,1,1]" in advice


def test_one_chunk_of_an_expert_is_in_memory(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upcycle(dense, tmp_path / "whole")
    monkeypatch.setattr("megatron.checkpoint.streaming.BLOCK_BYTES", 1024)
    upcycle(dense, tmp_path / "blocks")
    whole, blocks = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "blocks")
    assert whole.keys() == blocks.keys() and all(torch.equal(blocks[name], whole[name]) for name in whole)
    chunks = SavedTensors(tmp_path / "blocks", 0).manifest.tensors["model/layers.0.mlp.experts.linear_fc1.weight"]
    assert chunks.shapes.prod(axis=1).max() * 4 <= 1024


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"moe_upcycling_granularity": 2}, "--moe-upcycling-granularity 2 .* use 1"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1 must"),
        ({"moe_router_topk": 5}, "--moe-router-topk"),
        ({"moe_layer_freq": "[0,1]"}, "--moe-layer-freq"),
    ],
)
def test_bad_flags_are_refused(dense: Path, tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        upcycle(dense, tmp_path, **flags)
    assert list(tmp_path.iterdir()) == []


def test_experts_are_not_upcycled_again_and_nothing_is_overwritten(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "experts")
    with pytest.raises(CheckpointError, match="has 4 experts already: upcycle the checkpoint of a dense model"):
        upcycle(tmp_path / "experts", tmp_path / "again")
    before = bytes_under(tmp_path)
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        upcycle(dense, tmp_path / "experts")
    assert bytes_under(tmp_path) == before


# --- averages: the moving average of a run, and the average of checkpoints ------------------------------------

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
        **saving_in(directory),
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


def wide_tensors_of(root: Path, iteration: int, prefix: str) -> dict[str, Tensor]:
    """The global tensors of a checkpoint with ``prefix``, in fp64."""
    return {name: tensor.double() for name, tensor in tensors_of(root, prefix, iteration).items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys() and found
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_a_resumed_run_begins_and_continues_its_moving_average(averaged: Path) -> None:
    """From the checkpoint of a run that had none, and then over its own updates."""
    assert wide_tensors_of(averaged, 1, "optimizer/ema/") == {}
    expected = wide_tensors_of(averaged, 1, "optimizer/master/")
    for iteration in (2, 3, 4):
        masters = wide_tensors_of(averaged, iteration, "optimizer/master/")
        expected = {name: DECAY * value + (1 - DECAY) * masters[name] for name, value in expected.items()}
        assert_equal(wide_tensors_of(averaged, iteration, "optimizer/ema/"), expected, 1e-6)


def test_the_moving_average_is_evaluated_and_changes_no_update(averaged: Path, tmp_path: Path) -> None:
    run_of(tmp_path, eval_interval=2).succeeded()
    found, plain = ([row["lm_loss"] for row in iterations(root / "metrics.jsonl")] for root in (averaged, tmp_path))
    assert found == plain
    assert_equal(
        wide_tensors_of(averaged, 4, "optimizer/master/"), wide_tensors_of(tmp_path, 4, "optimizer/master/"), 0.0
    )
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
    parts = [wide_tensors_of(averaged, iteration, "optimizer/master/") for iteration in (2, 3, 4)]
    expected = {
        name: sum((share * part[name] for share, part in zip(shares / shares.sum(), parts)), torch.zeros(()))
        for name in parts[0]
    }
    assert_equal(wide_tensors_of(tmp_path / "average", 4, "model/"), expected, 1e-7)
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
    with Progress() as progress:
        return checkpoints.average(config, progress)


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
