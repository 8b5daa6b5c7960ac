"""A run in which a bit flips, a product is wrong or a weight overflows ends in a sentence, before it saves anything."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config.faults import VARIABLE
from megatron.errors import ExitCode
from tests.end_to_end.run_process import MOCK_RUN, call_training, computed, fork_training, latest_iteration, words_of

RUN: dict[str, Any] = {
    **MOCK_RUN,
    "save_interval": 4,
    "log_interval": 4,
    "check_replicas_interval": 3,
    "known_answer_interval_s": 0,
}


@pytest.fixture(autouse=True)
def faults_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


def flags(directory: Path, **changes: Any) -> list[str]:
    return words_of({**RUN, "save": directory, **changes})


def test_a_flipped_bit_of_one_replica_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    """Iteration 7 is not checked on its own account, but the checkpoint after iteration 8 is."""
    outcome = fork_training(flags(tmp_path, inject_fault="flip@7:rank1:weight:29"), processes=2)
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
def test_one_process_ends_in_a_sentence_before_it_saves_anything(
    tmp_path: Path, changes: dict[str, Any], words: str, saved: int | None
) -> None:
    outcome = call_training(flags(tmp_path, **changes))
    assert outcome.exit_code == ExitCode.CRASH
    assert re.search(words, outcome.stderr), outcome.stderr
    assert [int(path.name[5:]) for path in tmp_path.glob("iter_*")] == ([] if saved is None else [saved])


def test_the_checks_change_nothing_and_say_nothing(tmp_path: Path) -> None:
    everything: dict[str, Any] = {"check_replicas_interval": 1, "replay_interval": 1, "known_answer_interval_s": 1e-9}
    nothing = dict.fromkeys(everything, 0)
    outputs = []
    for name, changes in (("with", everything), ("without", nothing)):
        run = flags(tmp_path / name, metrics_jsonl=tmp_path / f"{name}.jsonl", log_interval=1, **changes)
        outputs.append(call_training(run).succeeded())
    assert computed(tmp_path / "with.jsonl") == computed(tmp_path / "without.jsonl")
    with_checks, without = (outcome.stdout.count("\n") + outcome.stderr.count("\n") for outcome in outputs)
    assert with_checks == without
