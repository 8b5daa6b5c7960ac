"""Runs in fp16: their losses are those of fp32, their loss scale goes with the checkpoint, and overflows end no run
before the scale is at its floor."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.manifest import read_checkpoint
from megatron.commands import convert_checkpoint, generate_text, inspect_checkpoint
from tests.end_to_end.run_process import (
    Corpus,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    grad_norms,
    iterations,
    losses,
    tiny_corpus,
)

LENGTH, MIDDLE = 10, 5
RESTLESS: dict[str, Any] = {
    "fp16": True,
    "initial_loss_scale": 2**22,
    "loss_scale_window": 2,
    "train_iters": LENGTH,
    "lr_warmup_iters": 0,
}
"""A scale that goes up and down all the time."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run without a stop has left its metrics and its checkpoints."""
    directory = tmp_path_factory.mktemp("whole")
    flags = flags_of(corpus, **RESTLESS, save=directory, save_interval=MIDDLE, metrics_jsonl=directory / "metrics")
    call_training(flags).succeeded()
    return directory


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


def test_overflows_skip_steps_and_move_the_scale(whole: Path) -> None:
    records = iterations(whole / "metrics")
    for part in records[:MIDDLE], records[MIDDLE:]:
        assert {record["skipped"] for record in part} == {0, 1}
        assert len({record["loss_scale"] for record in part}) > 1
    for record in records:
        assert (record["lm_loss"] is None) == bool(record["skipped"])
    assert read_checkpoint(whole, LENGTH).state["loss_scaler"]["scale"] == records[-1]["loss_scale"]
    assert read_checkpoint(whole, LENGTH).state["optimizer_steps"] == LENGTH - sum(
        record["skipped"] for record in records
    )


def test_resumed_run_is_the_run_that_never_stopped(corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    """The scale falls at the first overflow after the stop, since those before it count."""
    metrics = tmp_path / "metrics"
    flags = flags_of(corpus, **RESTLESS, load=whole, ckpt_step=MIDDLE, save=tmp_path, metrics_jsonl=metrics)
    call_training(flags).succeeded()
    assert computed(metrics) == computed(whole / "metrics")[MIDDLE:]
    assert_same_tensors(checkpoint_of(tmp_path, LENGTH), checkpoint_of(whole, LENGTH))
    assert read_checkpoint(tmp_path, LENGTH).state["loss_scaler"] == read_checkpoint(whole, LENGTH).state["loss_scaler"]


def test_checkpoint_of_another_precision_starts_a_fresh_scale_from_the_master_weights(
    corpus: Corpus, tmp_path: Path
) -> None:
    """fp16 weights that were bf16 ones in between would be off by 1e-4 in the loss."""
    save = tmp_path / "bf16"
    call_training(flags_of(corpus, bf16=True, train_iters=3, lr=1e-1, save=save)).succeeded()
    found = {}
    for name, changes in {"fp16": {"fp16": True, "initial_loss_scale": 4096}, "fp32": {}}.items():
        metrics = tmp_path / f"{name}.jsonl"
        flags = flags_of(
            corpus,
            train_iters=4,
            lr=1e-1,
            override_opt_param_scheduler=True,
            load=save,
            metrics_jsonl=metrics,
            **changes,
        )
        call_training(flags).succeeded()
        (found[name],) = iterations(metrics)
    assert (found["fp16"]["loss_scale"], found["fp32"]["loss_scale"]) == (4096.0, 1.0)
    assert_close([found["fp16"]["lm_loss"]], [found["fp32"]["lm_loss"]], 5e-5)


@pytest.mark.slow(reason="products in fp16 on a CPU")
def test_other_precisions_take_up_an_fp16_checkpoint(corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    flags = flags_of(corpus, **{**RESTLESS, "fp16": None, "initial_loss_scale": None, "loss_scale_window": None})
    flags += ["--bf16", "--load", str(whole), "--ckpt-step", str(MIDDLE), "--metrics-jsonl", str(metrics)]
    call_training(flags).succeeded()
    assert [(record["loss_scale"], record["skipped"]) for record in iterations(metrics)] == [(1.0, 0)] * MIDDLE


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


@pytest.mark.slow(reason="products in fp16 on a CPU")
def test_tools_know_fp16(whole: Path, tmp_path: Path) -> None:
    """To Hugging Face's files and back without a change of format, and a text from the result."""
    hugging_face, back = tmp_path / "hf", tmp_path / "back"
    convert_checkpoint.convert(convert_checkpoint.ToHuggingFace(str(whole), str(hugging_face)))
    assert json.loads((hugging_face / "config.json").read_text())["torch_dtype"] == "float16"
    convert_checkpoint.convert(convert_checkpoint.FromHuggingFace(str(hugging_face), str(back)))
    assert read_checkpoint(back, 0).state["flags"]["precision"]["fp16"]
    for directory in whole, back:
        request = generate_text.GenerateConfig(load=str(directory), prompt="def ", max_new_tokens=2, temperature=0.0)
        assert "".join(generate_text.generate(request)).startswith("def ")
    assert "precision fp16" in inspect_checkpoint.written_by(read_checkpoint(whole, LENGTH).state["flags"])
