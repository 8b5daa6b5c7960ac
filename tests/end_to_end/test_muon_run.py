"""Runs with Muon: skipped steps, checkpoints in the background, another layout afterwards, another optimizer."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.manifest import read_checkpoint
from tests.end_to_end.run_process import (
    Corpus,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    fork_training,
    iterations,
    losses,
    tiny_corpus,
)

pytestmark = pytest.mark.slow(reason="five runs in fp16; tests/parallel proves Muon in every layout in process")

LENGTH, MIDDLE = 8, 4
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_extra_scale_factor": 0.2,
    "muon_nesterov": True,
    "lr": 1e-2,
    "decoupled_lr": 2e-2,
    "fp16": True,
    "initial_loss_scale": 2**22,
    "loss_scale_window": 2,
    "train_iters": LENGTH,
    "lr_warmup_iters": 0,
    "log_num_zeros_in_grad": True,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics and checkpoints of a run without a stop, saved in the background."""
    directory = tmp_path_factory.mktemp("whole")
    flags = flags_of(corpus, **MUON, save=directory, save_interval=MIDDLE, metrics_jsonl=directory / "metrics")
    call_training([*flags, "--async-save"]).succeeded()
    return directory


def test_the_run_trains_and_skips_steps_that_overflow(whole: Path) -> None:
    records = iterations(whole / "metrics")
    skipped = sum(record["skipped"] for record in records)
    assert 0 < skipped < LENGTH
    assert read_checkpoint(whole, LENGTH).state["optimizer_steps"] == LENGTH - skipped
    found = [record["lm_loss"] for record in records if not record["skipped"]]
    assert found[-1] < found[0] - 0.2


def test_the_state_is_a_momentum_for_matrices_and_moments_for_the_rest(whole: Path) -> None:
    kinds: dict[str, set[str]] = {}
    for tensor in read_checkpoint(whole, LENGTH).tensors:
        if tensor.startswith("optimizer/"):
            _, kind, name = tensor.split("/")
            kinds.setdefault(name, set()).add(kind)
    for name, found in kinds.items():
        is_matrix = name.split(".")[-2] in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
        assert found == {"master", *(["momentum_buffer"] if is_matrix else ["exp_avg", "exp_avg_sq"])}, name
    assert len(kinds) > 8


def test_a_resumed_run_is_the_run_that_never_stopped(corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    flags = flags_of(corpus, **MUON, load=whole, ckpt_step=MIDDLE, save=tmp_path, metrics_jsonl=metrics)
    call_training(flags).succeeded()
    assert computed(metrics) == computed(whole / "metrics")[MIDDLE:]
    assert_same_tensors(checkpoint_of(tmp_path, LENGTH), checkpoint_of(whole, LENGTH))


def test_it_goes_on_with_sharded_weights_on_two_ranks(corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    flags = flags_of(corpus, **MUON, load=whole, ckpt_step=MIDDLE, use_torch_fsdp2=True, metrics_jsonl=metrics)
    fork_training(flags, 2).succeeded()
    assert_close(
        [loss for loss in losses(metrics) if loss is not None],
        [loss for loss in losses(whole / "metrics")[MIDDLE:] if loss is not None],
        5e-3,
    )


def test_a_checkpoint_of_muon_is_refused_by_adam_unless_it_starts_afresh(corpus: Corpus, whole: Path) -> None:
    adam = {name: value for name, value in MUON.items() if "muon" not in name and name != "optimizer"}
    flags = flags_of(corpus, **adam, load=whole, ckpt_step=MIDDLE)
    (error,) = call_training(flags).errors
    assert "--optimizer muon, not adam" in error and "--no-load-optim" in error
    call_training([*flags, "--no-load-optim"]).succeeded()
