"""Runs in fp16: losses close to fp32, and an overflow ends a run only at the minimum loss scale."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.run_process import Corpus, assert_close, call_training, flags_of, grad_norms, iterations, losses


@pytest.mark.slow(reason="products in fp16 on a CPU")
def test_fp16_stays_by_fp32(corpus: Corpus, tmp_path: Path) -> None:
    """Within 5e-5 of the loss over 30 iterations, where bf16 is off by 1e-4, and 2e-3 of the gradient norm (6e-3)."""
    runs: dict[str, dict[str, Any]] = {"fp16": {"fp16": True, "initial_loss_scale": 65536}, "fp32": {}}
    for name, changes in runs.items():
        metrics = tmp_path / name
        flags = flags_of(corpus, train_iters=30, micro_batch_size=8, lr=1e-3, metrics_jsonl=metrics, **changes)
        call_training(flags).succeeded()
    assert_close(losses(tmp_path / "fp16"), losses(tmp_path / "fp32"), 5e-5)
    assert_close(grad_norms(tmp_path / "fp16"), grad_norms(tmp_path / "fp32"), 2e-3)
    assert losses(tmp_path / "fp16")[-1] < losses(tmp_path / "fp16")[0] - 0.3
    assert {record["loss_scale"] for record in iterations(tmp_path / "fp16")} == {65536.0}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "floor": (
        {"initial_loss_scale": 2**31, "min_loss_scale": 2**30, "hysteresis": 1},
        "Iteration 2 has loss 5. ... the loss scale is at --min-loss-scale 1073741824.0: lower that or --lr",
    ),
    "constant": (
        {"loss_scale": 2.0**40},
        "Iteration 1 has loss 5. ... with --loss-scale 1099511627776.0: lower that or --lr",
    ),
    # Not for the scale to mend, which has no part in the loss.
    "loss": (
        {"initial_loss_scale": 1024, "lr": 1e38},
        "has loss nan and gradient norm nan: lower --lr or check the data",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_lower_scale_mends_stops_the_run_in_a_sentence_or_is_skipped(
    corpus: Corpus, tmp_path: Path, fault: str
) -> None:
    changes, words = FAULTS[fault]
    outcome = call_training(flags_of(corpus, fp16=True, **changes))
    assert outcome.exit_code == 1
    (sentence,) = outcome.errors
    assert re.search(".*".join(re.escape(part) for part in words.split(" ... ")), sentence), sentence
    assert "; --no-check-for-nan-in-loss-and-grad skips such iterations." in sentence
    metrics = tmp_path / "metrics"
    flags = flags_of(corpus, fp16=True, check_for_nan_in_loss_and_grad=False, metrics_jsonl=metrics, **changes)
    call_training(flags).succeeded()
    last = iterations(metrics)[-1]
    assert (last["skipped"], last["lm_loss"]) == (1, None)
    assert last["loss_scale"] == changes.get("min_loss_scale", changes.get("loss_scale", 1024))
