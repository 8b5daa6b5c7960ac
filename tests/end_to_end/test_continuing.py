"""A checkpoint goes on under other flags: another batch, another precision, evaluation alone, collected garbage."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    assert_close,
    call_training,
    checkpoint_of,
    flags_of,
    iterations,
    latest_iteration,
    losses,
    records,
)


def test_evaluation_alone_needs_no_learning_rate_and_sees_the_trained_weights(corpus: Corpus, tmp_path: Path) -> None:
    evaluated = {"eval_interval": 4, "eval_iters": 2}
    trained = flags_of(corpus, save=tmp_path, train_iters=4, metrics_jsonl=tmp_path / "a.jsonl", **evaluated)
    call_training(trained).succeeded()
    alone = {"lr": None, "lr_warmup_iters": None, "skip_train": True, "eval_iters": 2, "train_iters": 4}
    call_training(flags_of(corpus, load=tmp_path, metrics_jsonl=tmp_path / "b.jsonl", **alone)).succeeded()
    wanted = [record["validation_loss"] for record in records(tmp_path / "a.jsonl") if "validation_loss" in record]
    found = [record["validation_loss"] for record in records(tmp_path / "b.jsonl") if "validation_loss" in record]
    # Training evaluated the first validation samples at iteration 4; the evaluation goes on behind them.
    assert len(wanted) == len(found) == 1
    assert abs(found[0] - wanted[0]) < 0.5


def test_a_run_past_its_ramp_goes_on_where_the_small_batches_would_not_divide(corpus: Corpus, tmp_path: Path) -> None:
    """Sizes that lie in the past need not fit the new micro-batch size."""
    ramp: dict[str, FlagValue] = {"rampup_batch_size": (2, 2, 12), "override_opt_param_scheduler": True}
    call_training(flags_of(corpus, save=tmp_path, exit_interval=5, train_iters=7, **ramp)).succeeded()
    metrics = tmp_path / "metrics.jsonl"
    call_training(
        flags_of(corpus, load=tmp_path, train_iters=7, micro_batch_size=8, metrics_jsonl=metrics, **ramp)
    ).succeeded()
    assert [record["global_batch_size"] for record in iterations(metrics)] == [8, 8]


def test_a_smaller_batch_after_a_resume_does_not_run_out_of_samples(corpus: Corpus, tmp_path: Path) -> None:
    call_training(flags_of(corpus, save=tmp_path, exit_interval=4, global_batch_size=16)).succeeded()
    metrics = tmp_path / "metrics.jsonl"
    changes = {"global_batch_size": 4, "override_opt_param_scheduler": True}
    call_training(flags_of(corpus, load=tmp_path, metrics_jsonl=metrics, **changes)).succeeded()
    assert [record["consumed_samples"] for record in iterations(metrics)] == [68, 72, 76, 80]


def test_the_learning_rate_of_a_ramp_ends_at_its_minimum(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    changes: dict[str, FlagValue] = {
        "rampup_batch_size": (2, 2, 12),
        "lr_decay_style": "cosine",
        "min_lr": 1e-4,
        "train_iters": 20,
    }
    call_training(flags_of(corpus, metrics_jsonl=metrics, **changes)).succeeded()
    assert iterations(metrics)[-1]["learning_rate"] < 3e-4


def test_a_change_of_precision_keeps_the_wider_weights(corpus: Corpus, tmp_path: Path) -> None:
    """Going on in another precision gives the losses of a run that never left fp32, nearly; fp16 starts a fresh loss
    scale."""
    precisions: dict[str, dict[str, FlagValue]] = {
        "fp32": {},
        "bf16": {"bf16": True},
        "fp16": {"fp16": True, "initial_loss_scale": 4096},
    }
    straight = tmp_path / "straight.jsonl"
    call_training(flags_of(corpus, metrics_jsonl=straight)).succeeded()
    for first, then in (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")):
        save, metrics = tmp_path / f"{first} {then}", tmp_path / f"{first} {then}.jsonl"
        call_training(flags_of(corpus, save=save, exit_interval=4, **precisions[first])).succeeded()
        call_training(flags_of(corpus, load=save, metrics_jsonl=metrics, **precisions[then])).succeeded()
        assert_close(losses(metrics), losses(straight)[4:], 0.02)
        assert iterations(metrics)[0]["loss_scale"] == precisions[then].get("initial_loss_scale", 1)


def test_collecting_garbage_by_hand_ends_with_the_run(corpus: Corpus) -> None:
    call_training(flags_of(corpus, manual_gc=True, manual_gc_interval=3, train_iters=3)).succeeded()
    assert gc.isenabled()


@pytest.mark.parametrize("how", ["finetune", "no_load_optim"])
def test_master_weights_start_from_the_widest_that_a_checkpoint_has(corpus: Corpus, tmp_path: Path, how: str) -> None:
    """Also where the optimizer's state is left out: in bf16 the model alone would have lost bits."""
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    call_training(flags_of(corpus, save=wide, train_iters=2, save_optim=how != "finetune")).succeeded()
    changes: dict[str, FlagValue] = {"lr": 0.0, "bf16": True, "lr_decay_iters": 8, "override_opt_param_scheduler": True}
    changes |= {"finetune": True, "train_iters": 1} if how == "finetune" else {"load_optim": False, "train_iters": 3}
    call_training(flags_of(corpus, load=wide, save=narrow, **changes)).succeeded()
    before, after = (
        load_file(checkpoint_of(root, latest_iteration(root)) / "rank_00000.safetensors") for root in (wide, narrow)
    )
    weights = {key.removeprefix("model/"): tensor for key, tensor in before.items() if key.startswith("model/")}
    assert weights
    for key, tensor in weights.items():
        assert torch.equal(after[f"optimizer/master/{key}"], tensor), key
        assert torch.equal(after[f"model/{key}"], tensor.bfloat16()), key
