"""A saved state of any version is read in today's form, or refused by the name of what is wrong."""

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron.checkpoint.finding import read_run_state
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.schema import FORMAT_VERSION, DataStage, Rollback, SavedState, upgrade
from megatron.config.data import TokenizerConfig
from megatron.core.hyperparameters import LearningRateSchedule
from megatron.errors import CheckpointError
from tests.checkpoint.frozen_checkpoints import FROZEN, SAVED_AT
from tests.checkpoint.models import LLAMA


def saved_state() -> SavedState:
    schedule = LearningRateSchedule(peak=1.0, minimum=0.0, initial=0.0, warmup=2, decay=9, style="cosine")
    return SavedState(
        iteration=3,
        consumed_samples=12,
        optimizer_steps=3,
        has_master_weights=True,
        architecture=LLAMA,
        flags={"tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 9}},
        loss_scaler={"scale": 4.0, "good_steps": 1, "overflows": 0},
        lr_schedule=schedule,
        data_stages=(DataStage("first", 0, 0, {"seed": 1}), DataStage("long", 2, 8, {"corpora": [{"path": "a"}]})),
        rollbacks=(Rollback("spike", 40, 20, 30, 240, 320),),
        update_guard={"losses": [2.1, 1.9999999999999998], "skipped": [3]},
    )


def as_json(state: SavedState) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(state.to_json()))
    return document


def test_todays_state_comes_back() -> None:
    state = saved_state()
    assert upgrade(as_json(state), FORMAT_VERSION) == state
    weights_alone = replace(state, lr_schedule=None, loss_scaler=None)
    assert upgrade(as_json(weights_alone), FORMAT_VERSION) == weights_alone


def test_a_field_that_was_added_has_its_default() -> None:
    """And older versions have no rollbacks; ``test_frozen_checkpoints.py`` goes on from their checkpoints."""
    document = as_json(saved_state())
    del document["architecture"]["rope_scaling_factor"], document["lr_schedule"]["wsd_style"]
    del document["rollbacks"], document["update_guard"], document["skipped_samples"]
    assert upgrade(document, 4) == replace(saved_state(), rollbacks=(), update_guard=None)


@pytest.mark.parametrize("content", ["text", 3, {"a": 1}, ["text"], [3], [None]])
@pytest.mark.parametrize("name", ["rollbacks", "data_stages"])
def test_a_list_of_something_else_is_refused_by_name(name: str, content: Any) -> None:
    with pytest.raises(CheckpointError, match=name[:-1].replace("_", ".")):
        upgrade({**as_json(saved_state()), name: content}, FORMAT_VERSION)


@pytest.mark.parametrize("where", ["architecture", "lr_schedule"])
def test_a_field_that_was_removed_is_refused_by_name(where: str) -> None:
    document = as_json(saved_state())
    document[where]["old_knob"] = 7
    with pytest.raises(CheckpointError, match=f"checkpoint's {where} has old_knob 7, which this version .* not have"):
        upgrade(document, FORMAT_VERSION)


def test_a_field_without_a_default_that_is_missing_is_named() -> None:
    document = as_json(saved_state())
    del document["architecture"]["hidden_size"]
    with pytest.raises(CheckpointError, match="checkpoint's architecture lacks hidden_size"):
        upgrade(document, FORMAT_VERSION)
    with pytest.raises(CheckpointError, match="checkpoint's state lacks"):
        upgrade({"iteration": 5}, FORMAT_VERSION)


def test_flags_of_a_group_have_the_defaults_of_what_did_not_exist_yet() -> None:
    flags = saved_state().flag_group("tokenizer", TokenizerConfig)
    assert flags == TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    assert saved_state().flag_group("another", TokenizerConfig) == TokenizerConfig()


def test_the_schedule_of_version_2_is_the_lr_schedule() -> None:
    old = FROZEN / "v2" / "one_process_fp64"
    saved = read_checkpoint(old, SAVED_AT)
    assert saved.format_version == 2
    schedule = read_run_state(old, SAVED_AT).lr_schedule
    assert schedule is not None and schedule == LearningRateSchedule(**saved.state["schedule"])
