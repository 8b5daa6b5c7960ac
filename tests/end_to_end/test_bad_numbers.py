"""A run survives spikes and numbers that are not finite, as its policies say; one in which a bit flips or a weight
overflows ends in a sentence, before it saves anything.

``--inject-fault`` makes them: a learning rate that is far too large for some iterations, NaN in a gradient, a bit.
"""

import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.errors import ExitCode
from megatron.features.faults.flags import VARIABLE
from megatron.features.known_product.listener import KnownProduct
from megatron.training import pretrain
from megatron.training.build.run import build_trainer
from tests.end_to_end.run_process import (
    MOCK_RUN,
    FlagValue,
    Outcome,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    fork_training,
    iterations,
    latest_iteration,
    losses,
    saving_in,
    words_of,
)

pytestmark = pytest.mark.processes

Flags = dict[str, Any]

LENGTH, AT, MARGIN = 140, 61, 4
SPIKE = f"spike@{AT}+5:30"
"""The first of these updates is noticed three iterations later, and the last one after a rollback."""
LOADED, FIRST_LEFT_OUT, LAST_LEFT_OUT = 50, 58, 68

RUN: Flags = {
    **MOCK_RUN,
    "vocab_size": 16,
    "num_layers": 1,
    "fp64": True,
    "seq_length": 64,
    "micro_batch_size": 16,
    "global_batch_size": 32,
    "lr": 2e-2,
    "train_iters": LENGTH,
    "save_interval": 10,
}


@pytest.fixture(scope="module", autouse=True)
def faults_allowed() -> Iterator[None]:
    with mock.patch.dict(os.environ, {VARIABLE: "1"}):
        yield


def train(directory: Path, processes: int = 1, /, **changes: FlagValue) -> Outcome:
    """Train in ``directory``, and resume from what is there."""
    words = words_of({**RUN, **saving_in(directory), **changes})
    return call_training(words) if processes == 1 else fork_training(words, processes)


def going_back(**changes: FlagValue) -> Flags:
    return {"spike_policy": "rollback", "spike_window": 30, "rollback_margin": MARGIN, **changes}


def final_loss(directory: Path) -> float:
    return sum(losses(directory / "metrics.jsonl")[-10:]) / 10


def rollbacks_of(directory: Path, iteration: int) -> list[dict[str, Any]]:
    """The rollbacks in the manifest of a checkpoint."""
    text = (checkpoint_of(directory, iteration) / "manifest.json").read_text()
    rollbacks: list[dict[str, Any]] = json.loads(text)["manifest"]["state"]["rollbacks"]
    return rollbacks


def left_out(directory: Path) -> list[int]:
    """Iterations without a record, which were not trained on."""
    seen = {record["iteration"] for record in iterations(directory / "metrics.jsonl")}
    return [iteration for iteration in range(1, max(seen) + 1) if iteration not in seen]


def resume_from(checkpoint: Path, directory: Path, processes: int = 1, **changes: FlagValue) -> None:
    """Continue in ``directory`` from this checkpoint alone, without faults."""
    shutil.copytree(checkpoint, directory / checkpoint.name)
    train(directory, processes, **changes).succeeded()


ON_TWO_RANKS: Flags = {"use_distributed_optimizer": True, "async_save": True}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with a spike, with sharded state, saves in the background and copies."""
    directory = tmp_path_factory.mktemp("spoilt")
    mirror = directory / "mirror"
    outcome = train(directory, 2, **going_back(inject_fault=SPIKE, redundant_save=mirror), **ON_TWO_RANKS).succeeded()
    assert outcome.stderr.count("returning to an earlier checkpoint") == 2, outcome.stderr
    return directory


def test_a_spike_is_survived(spoilt: Path, tmp_path: Path) -> None:
    """The loss at the end is that of the run without it, within 1 %."""
    train(tmp_path, save_interval=None).succeeded()
    assert final_loss(spoilt) == pytest.approx(final_loss(tmp_path), rel=0.01)


def test_a_rollback_is_in_every_later_checkpoint_and_leaves_nothing_of_the_spike(spoilt: Path) -> None:
    assert left_out(spoilt) == list(range(FIRST_LEFT_OUT, LAST_LEFT_OUT + 1))
    first, second = rollbacks_of(spoilt, LENGTH)
    assert (first["cause"], first["loaded_iteration"], second["loaded_iteration"]) == ("spike", LOADED, LOADED)
    assert (first["first_sample"], second["end_sample"]) == (32 * (FIRST_LEFT_OUT - 1), 32 * LAST_LEFT_OUT)
    assert rollbacks_of(spoilt, LOADED) == rollbacks_of(spoilt, 70) == [first, second]
    assert iterations(spoilt / "metrics.jsonl")[-1]["rollbacks"] == 2
    # Iteration 60 was saved before the spike was noticed, and is not trained on again.
    assert checkpoint_of(spoilt, 60).with_suffix(".rolled_back").exists()
    # Its copy may have been left out while the one before was under way.
    assert not any(checkpoint_of(place, 60).exists() for place in (spoilt, spoilt / "mirror"))
    assert rollbacks_of(spoilt / "mirror", LENGTH) == [first, second]


def test_a_resumed_run_leaves_out_the_same_samples(spoilt: Path, tmp_path: Path) -> None:
    """As after a crash right after the rollback: to the bit in the same layout, and with as many samples in another."""
    wanted = [record for record in computed(spoilt / "metrics.jsonl") if record["iteration"] > LOADED]
    resume_from(checkpoint_of(spoilt, LOADED), tmp_path / "same", 2, **going_back(), **ON_TWO_RANKS)
    found = computed(tmp_path / "same/metrics.jsonl")
    assert found == wanted and found[0]["iteration"] == LOADED + 1
    assert_same_tensors(checkpoint_of(tmp_path / "same", LENGTH), checkpoint_of(spoilt, LENGTH))
    # Without a policy: the record alone decides.
    resume_from(checkpoint_of(spoilt, LOADED), tmp_path / "other", train_iters=LENGTH, exit_interval=80)
    alone = computed(tmp_path / "other/metrics.jsonl")
    assert [record["iteration"] for record in alone] == [one["iteration"] for one in wanted if one["iteration"] <= 80]
    assert_close([one["lm_loss"] for one in alone], [one["lm_loss"] for one in wanted[: len(alone)]], 1e-9)


SHORT: Flags = {"train_iters": 40, "micro_batch_size": 4, "global_batch_size": 8, "seq_length": 16}


def test_memory_of_the_trainer_is_freed_before_the_next_one_is_built(tmp_path: Path) -> None:
    optimizers: list[weakref.ref[Any]] = []

    def watched(*arguments: Any) -> Any:
        assert all(optimizer() is None for optimizer in optimizers)
        trainer = build_trainer(*arguments)
        optimizers.append(weakref.ref(trainer.module.optimizer))
        return trainer

    with mock.patch.object(pretrain, "build_trainer", watched):
        train(tmp_path, **SHORT, **going_back(nan_policy="rollback", inject_fault="nan@25+5")).succeeded()
    assert len(optimizers) == 2
    assert rollbacks_of(tmp_path, 40)[0]["cause"] == "not_finite"
    assert left_out(tmp_path) == [21, 22, 23, 24, 25, 26, 27, 28]


def test_all_ranks_skip_an_update_that_one_rank_cannot_make(tmp_path: Path) -> None:
    changes: Flags = {**SHORT, "train_iters": 12, "save_interval": None, "nan_policy": "skip"}
    train(tmp_path / "one", **changes, inject_fault="nan@5").succeeded()
    train(tmp_path / "two", 2, **changes, inject_fault="nan@5:rank1").succeeded()
    for record in iterations(tmp_path / "two/metrics.jsonl"):
        assert record["skipped"] == (record["iteration"] == 5)
        assert record.get("skipped_updates") == (1 if record["iteration"] >= 5 else None)
    alone, both = (
        [loss for loss in losses(tmp_path / name / "metrics.jsonl") if loss is not None] for name in ("one", "two")
    )
    assert len(both) == 11
    assert_close(both, alone, 1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nan_policy": "skip", "inject_fault": "nan@5+4"}, ["4 updates in a row", "--nan-policy skip"]),
        (
            {"nan_policy": "rollback", "inject_fault": "nan@5+4", "rollback_margin": 4},
            ["no checkpoint from before", "--save-interval"],
        ),
        (
            {"spike_policy": "skip", "spike_window": 20, "inject_fault": "spike@25+3:1000"},
            ["is a spike", "--spike-policy skip"],
        ),
    ],
    ids=["skipped too often", "nothing to return to", "spikes skipped too often"],
)
def test_a_run_that_cannot_be_saved_ends_with_93(tmp_path: Path, changes: Flags, words: list[str]) -> None:
    outcome = train(tmp_path, **SHORT, **changes)
    assert outcome.exit_code == 93
    outcome.refusal(*words)


def test_after_three_rollbacks_every_start_ends_with_93(tmp_path: Path) -> None:
    flags = going_back(nan_policy="rollback", inject_fault="nan@25+99:always")
    for _ in range(2):
        outcome = train(tmp_path, **SHORT, **flags)
        assert outcome.exit_code == 93
        assert "after 3 rollbacks (--max-rollbacks 3)" in outcome.errors[0]
    assert len(rollbacks_of(tmp_path, 20)) == 3
    assert not checkpoint_of(tmp_path, 30).exists()


@pytest.mark.slow(reason="two ranks, several runs of each layout")
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "overlap_grad_reduce": False},
        {"pipeline_model_parallel_size": 2, "num_layers": 2, "rampup_batch_size": (16, 16, 1000)},
        {"data_parallel_sharding_strategy": "optim_grads", "save_retain_last": 1},
        {"use_torch_fsdp2": True, "async_save": True},
        {"bf16": True, "fp64": False, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
         "overlap_param_gather": True},
    ],
    ids=["tensor", "pipeline and ramp", "ZeRO-2 and retention", "FSDP2", "bf16 and overlap"],
)  # fmt: skip
def test_every_layout_goes_back_and_resumes_alike(layout: Flags, tmp_path: Path) -> None:
    changes = {**layout, **going_back(eval_interval=15, eval_iters=1)}
    train(tmp_path / "whole", 2, **changes, inject_fault=SPIKE).succeeded()
    assert rollbacks_of(tmp_path / "whole", LENGTH)
    assert set(range(AT, AT + 3)) <= set(left_out(tmp_path / "whole"))
    train(tmp_path / "parts", 2, **changes, inject_fault=SPIKE, exit_interval=75).succeeded()
    train(tmp_path / "parts", 2, **changes, inject_fault=SPIKE).succeeded()
    assert computed(tmp_path / "parts/metrics.jsonl") == computed(tmp_path / "whole/metrics.jsonl")
    assert_same_tensors(checkpoint_of(tmp_path / "parts", LENGTH), checkpoint_of(tmp_path / "whole", LENGTH))


# --- silent corruption ----------------------------------------------------------------------------------------

CHECKED: dict[str, Any] = {
    **MOCK_RUN,
    "save_interval": 4,
    "log_interval": 4,
    "check_replicas_interval": 3,
    "known_answer_interval_s": 0,
}


def checked(directory: Path, **changes: Any) -> list[str]:
    return words_of({**CHECKED, "save": directory, **changes})


def test_a_device_with_wrong_products_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownProduct, "count_errors", lambda product: 1)
    outcome = call_training(checked(tmp_path, known_answer_interval_s=3600))
    assert outcome.exit_code == ExitCode.CRASH and not list(tmp_path.glob("iter_*"))
    assert "1 elements of a known product in float32 are wrong on rank 0" in outcome.stderr


def test_a_flipped_bit_of_one_replica_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    """Iteration 7 is not checked on its own account, but the checkpoint after iteration 8 is."""
    outcome = fork_training(checked(tmp_path, inject_fault="flip@7:rank1:weight:29"), processes=2)
    assert outcome.exit_code == ExitCode.CRASH
    assert re.search(
        r"Silent data corruption, found before the update of iteration 8: .*the weight of \S+.* differs between ranks "
        r"0 and 1 \(host \S+\), any of which may be wrong\.",
        outcome.stderr,
    )
    assert latest_iteration(tmp_path) == 4


OVERFLOW: dict[str, Any] = {"lr": 1e39, "lr_warmup_iters": 0, "check_replicas_interval": 0, "save_interval": 1}
TOO_FAST: dict[str, Any] = {"lr": 1e38, "clip_grad": 0.0, "optimizer": "sgd", "save": None, "save_interval": None}
ENDS: list[tuple[dict[str, Any], str, int | None]] = [
    ({"inject_fault": "flip@6:rank0:moment:3"}, "changed since the last update on rank 0", 4),
    # Also without the comparison of replicas.
    (OVERFLOW, r"The training state is not finite after iteration 1, .*: the \S+ of .* on rank 0 \(host \S+\)", None),
    # The message says whether the hardware is the cause; NaN came into the gradient after the backward pass.
    (TOO_FAST, "A replay gave the same bits twice: the cause is the data or the model, not the hardware.", None),
    ({"inject_fault": "nan@6"}, "A replay gave the same finite numbers twice", 4),
]
"""Flags, what the run says, and the checkpoint that it leaves."""


@pytest.mark.parametrize(("changes", "words", "saved"), ENDS, ids=["flip", "overflow", "loss", "spoiled gradient"])
def test_one_process_ends_before_a_save(tmp_path: Path, changes: dict[str, Any], words: str, saved: int | None) -> None:
    outcome = call_training(checked(tmp_path, **changes))
    assert outcome.exit_code == ExitCode.CRASH
    assert re.search(words, outcome.stderr), outcome.stderr
    assert [int(path.name[5:]) for path in tmp_path.glob("iter_*")] == ([] if saved is None else [saved])


def test_the_checks_change_nothing_and_say_nothing(tmp_path: Path) -> None:
    everything: dict[str, Any] = {"check_replicas_interval": 1, "replay_interval": 1, "known_answer_interval_s": 1e-9}
    nothing = dict.fromkeys(everything, 0)
    outputs = []
    for name, changes in (("with", everything), ("without", nothing)):
        run = checked(tmp_path / name, metrics_jsonl=tmp_path / f"{name}.jsonl", log_interval=1, **changes)
        outputs.append(call_training(run).succeeded())
    assert computed(tmp_path / "with.jsonl") == computed(tmp_path / "without.jsonl")
    with_checks, without = (outcome.stdout.count("\n") + outcome.stderr.count("\n") for outcome in outputs)
    assert with_checks == without
