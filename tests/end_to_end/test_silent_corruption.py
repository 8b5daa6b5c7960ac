"""A run in which a bit flips, a product is wrong or a weight overflows ends in a sentence, before it saves anything."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.faults import VARIABLE
from megatron.core.optimizer.optimizer import Optimizer, StepResult
from megatron.errors import ExitCode
from megatron.operation.known_product import KnownProduct
from megatron.training.train_module import TrainModule
from tests.end_to_end.run_process import TINY_RUN, call_training, computed, fork_training, latest_iteration, words_of

RUN: dict[str, Any] = {
    **TINY_RUN,
    "split": None,
    "mock_data": True,
    "vocab_size": 120,
    "save_interval": 4,
    "log_interval": 4,
    "check_replicas_interval": 3,
    "known_answer_interval_s": 0,
}


def flags(directory: Path, **changes: Any) -> list[str]:
    return words_of({**RUN, "save": directory, **changes})


def test_a_flipped_bit_of_one_replica_ends_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 7 is not checked on its own account, but the checkpoint after iteration 8 is."""
    monkeypatch.setenv(VARIABLE, "1")
    outcome = fork_training(flags(tmp_path, inject_fault="flip@7:rank1:weight:29"), processes=2)
    assert outcome.exit_code == ExitCode.CRASH
    assert re.search(
        r"Silent data corruption, found before the update of iteration 8: .*the weight of \S+.* differs between ranks "
        r"0 and 1 \(host \S+\), any of which may be wrong\.",
        outcome.stderr,
    )
    assert latest_iteration(tmp_path) == 4


def test_a_flipped_bit_of_the_only_rank_is_found_between_two_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    outcome = call_training(flags(tmp_path, inject_fault="flip@6:rank0:moment:3"))
    assert outcome.exit_code == ExitCode.CRASH
    assert "changed since the last update on rank 0" in outcome.stderr
    assert latest_iteration(tmp_path) == 4


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """Also without the comparison of replicas."""
    original = Optimizer.step

    def overflow(optimizer: Optimizer, *arguments: Any) -> StepResult:
        result = original(optimizer, *arguments)
        if optimizer.num_steps == 8:
            next(iter(optimizer.state())).tensor[0] = torch.inf
        return result

    with mock.patch.object(Optimizer, "step", overflow):
        outcome = call_training(flags(tmp_path, check_replicas_interval=0))
    assert outcome.exit_code == ExitCode.CRASH
    expected = r"The training state is not finite after iteration 8, .*: the exp_avg of \S+ on rank 0 \(host \S+\)"
    assert re.search(expected, outcome.stderr)
    assert latest_iteration(tmp_path) == 4


def test_a_device_that_computes_a_wrong_product_is_named_before_training(tmp_path: Path) -> None:
    def wrong(product: KnownProduct, result: Tensor) -> int:
        result.view(-1)[7] += 1
        return original(product, result)

    original = KnownProduct.count_wrong
    with mock.patch.object(KnownProduct, "count_wrong", wrong):
        outcome = call_training(flags(tmp_path, known_answer_interval_s=3600))
    assert outcome.exit_code == ExitCode.CRASH
    assert re.search(r"1 elements of a known product in float32 are wrong on rank 0 \(host \S+\)", outcome.stderr)
    assert not list(tmp_path.glob("iter_*"))


def test_a_loss_that_is_not_finite_is_replayed(tmp_path: Path) -> None:
    """And the message says whether the hardware is the cause."""
    outcome = call_training(flags(tmp_path, lr=1e38, clip_grad=0.0, optimizer="sgd", save=None, save_interval=None))
    assert outcome.exit_code == ExitCode.CRASH
    assert "A replay gave the same bits twice: the cause is the data or the model, not the hardware." in outcome.stderr


def test_a_replay_of_finite_numbers_says_so(tmp_path: Path) -> None:
    """The loss of the iteration was spoiled after the forward pass."""
    original = TrainModule.start_sum

    def spoiled(module: TrainModule, losses: Tensor, stops: Any = ()) -> Any:
        return original(module, losses * torch.nan, stops)

    with mock.patch.object(TrainModule, "start_sum", spoiled):
        outcome = call_training(flags(tmp_path, save=None, save_interval=None))
    assert outcome.exit_code == ExitCode.CRASH
    assert "A replay gave the same finite numbers twice" in outcome.stderr


def test_the_checks_change_nothing_and_say_nothing(tmp_path: Path) -> None:
    everything: dict[str, Any] = {"check_replicas_interval": 1, "replay_interval": 1, "known_answer_interval_s": 1e-9}
    nothing = dict.fromkeys(everything, 0)
    outputs = []
    for name, changes in (("with", everything), ("without", nothing)):
        run = flags(tmp_path / name, metrics_jsonl=tmp_path / f"{name}.jsonl", log_interval=1, **changes)
        outputs.append(call_training(run).succeeded())
    assert computed(tmp_path / "with.jsonl") == computed(tmp_path / "without.jsonl")
    lines = [outcome.stdout.count("\n") + outcome.stderr.count("\n") for outcome in outputs]
    assert lines[0] == lines[1]
