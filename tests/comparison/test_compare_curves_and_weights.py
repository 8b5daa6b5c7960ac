"""Curves beside the spread of rounding, and weights tensor by tensor."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import megatron_llama as ml
from megatron.comparison.curves import compare_curves, expected_spread
from megatron.comparison.side import Side, open_side
from megatron.comparison.weights import compare_weights
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.metrics.jsonl import History

FP32 = RunConfig()
FLAGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
    "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0, "device": "cpu",
    "mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 30, "lr": 1e-3, "train_iters": 2,
    "eval_iters": 0,
}  # fmt: skip
Label = Literal["A", "B"]


def curve(label: Label, losses: Mapping[int, float | None], config: RunConfig = FP32, **more: int) -> Side:
    records = [{"iteration": iteration, "lm_loss": loss, **more} for iteration, loss in losses.items()]
    return Side(label, Path(label), "run", config=config, curve=History(records, [], None))


def test_rounding_is_no_difference_and_more_is() -> None:
    losses = {iteration: 4.0 - iteration / 100 for iteration in range(1, 50)}
    spread = expected_spread("fp32", 30)
    a = curve("A", losses)
    assert not compare_curves(a, curve("B", {**losses, 30: losses[30] * (1 + spread / 2)})).differences
    (found,) = compare_curves(a, curve("B", {**losses, 30: losses[30] * (1 + 2 * spread)})).differences
    assert found.remark.startswith("iteration 30")
    bf16 = RunConfig(precision=PrecisionConfig(bf16=True))
    assert not compare_curves(a, curve("B", {**losses, 30: losses[30] * (1 + 2 * spread)}, bf16)).differences


def test_records_of_other_iterations_are_not_compared() -> None:
    a = curve("A", {iteration: 4.0 - iteration for iteration in range(1, 5)})
    result = compare_curves(a, curve("B", {2: 9.0, 4: 9.0}))
    assert not result.is_complete and "same iterations" in result.compared


def test_losses_that_are_missing_on_both_sides_agree() -> None:
    assert not compare_curves(curve("A", {1: 2.0, 2: None}), curve("B", {1: 2.0, 2: None})).differences
    assert compare_curves(curve("A", {1: 2.0, 2: None}), curve("B", {1: 2.0, 2: 2.0})).differences
    assert math.isfinite(expected_spread("fp64", 10**6))


def test_curves_in_fp16_end_where_one_side_skips_an_update() -> None:
    fp16 = RunConfig(precision=PrecisionConfig(fp16=True))
    a, losses = curve("A", {1: 2.0, 2: 1.5, 3: 1.0}, fp16), {1: 2.0, 2: None, 3: 1.5}
    assert [one.remark[:11] for one in compare_curves(a, curve("B", losses, fp16)).differences] == ["iteration 2"]
    records = [{"iteration": one, "lm_loss": loss, "skipped": int(loss is None)} for one, loss in losses.items()]
    result = compare_curves(a, Side("B", Path("B"), "run", config=fp16, curve=History(records, [], None)))
    assert not result.differences and "1 iterations, up to iteration 2, which one side alone skipped" in result.compared


def test_other_batches_are_said() -> None:
    (found,) = compare_curves(
        curve("A", {1: 2.0}, consumed_samples=4), curve("B", {1: 2.0}, consumed_samples=8)
    ).differences
    assert (found.what, found.a, found.b) == ("consumed samples", "4", "8")


def saved(directory: Path, change: bool = False, **flags: Any) -> Side:
    """The checkpoint of iteration 0, in which one row of the embedding may be a tenth larger."""
    with ml.Run(**FLAGS | flags) as run, torch.no_grad():
        if change:
            optimizer = run._trainer.module.optimizer
            for shard in optimizer.shards:
                if shard.info.name == "embedding.word_embeddings.weight":
                    shard.weight.view(-1, 32)[7] *= 1.1
        run.save(directory)
    return open_side("A", directory)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_row_of_initial_weights_is_found(tmp_path: Path, precision: dict[str, Any]) -> None:
    a, same = saved(tmp_path / "a"), saved(tmp_path / "same", **precision)
    assert not compare_weights(a, same).differences
    (found,) = compare_weights(a, saved(tmp_path / "b", change=True, **precision)).differences
    assert found.what == "embedding.word_embeddings.weight" and found.changes_loss
    assert "rows 7," in found.remark


def test_other_seeds_and_shapes_are_found(tmp_path: Path) -> None:
    a, seed = saved(tmp_path / "a"), saved(tmp_path / "seed", seed=7)
    names = {one.what for one in compare_weights(a, seed).differences}
    assert "layers.1.mlp.linear_fc2.weight" in names and "final_layernorm.weight" not in names
    other = compare_weights(a, saved(tmp_path / "wide", ffn_hidden_size=96)).differences
    assert {one.remark.partition(": ")[2] for one in other if "linear_fc" in one.what} == {"other shapes"}


def test_without_a_common_iteration_that_is_said(tmp_path: Path) -> None:
    result = compare_weights(saved(tmp_path / "a"), Side("B", tmp_path, "run"))
    assert not result.is_complete and result.compared == "No common iteration: A has 0, B has no checkpoint."
