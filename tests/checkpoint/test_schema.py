"""A saved state of any version is read in today's form, or refused by the name of what is wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint import schema
from megatron.checkpoint.checkpointing import read_run_state
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.schema import (
    FORMAT_VERSION,
    MIGRATIONS,
    READABLE_VERSIONS,
    DataStage,
    Rollback,
    SavedState,
    upgrade,
)
from megatron.config.data import TokenizerConfig
from megatron.core.optimizer.learning_rate import LearningRateSchedule
from megatron.data.digests import seal
from megatron.errors import CheckpointError
from tests.checkpoint.frozen_checkpoints import CASES, FROZEN, LENGTH, SAVED_AT, flags_of_case
from tests.end_to_end.run_process import call_training, checkpoint_of, losses

CASE = "one_process_fp64"
OLD = FROZEN / "v2" / CASE


def saved_state() -> SavedState:
    architecture = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=4,
        vocab_size=10,
        padded_vocab_size=16,
        max_position_embeddings=32,
    )
    schedule = LearningRateSchedule(peak=1.0, minimum=0.0, initial=0.0, warmup=2, decay=9, style="cosine")
    return SavedState(
        iteration=3,
        consumed_samples=12,
        optimizer_steps=3,
        has_master_weights=True,
        architecture=architecture,
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


def test_every_readable_version_has_a_migration_to_the_next() -> None:
    assert tuple(range(READABLE_VERSIONS[0], FORMAT_VERSION + 1)) == READABLE_VERSIONS
    assert set(MIGRATIONS) == set(READABLE_VERSIONS[:-1])


@dataclass(frozen=True)
class WiderConfig(TransformerConfig):
    """The architecture of a later version."""

    qk_norm: bool = False


@dataclass(frozen=True)
class WiderSchedule(LearningRateSchedule):
    """The schedule of a later version."""

    new_knob: float = 0.5


def test_a_field_that_was_added_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "TransformerConfig", WiderConfig)
    monkeypatch.setattr(schema, "LearningRateSchedule", WiderSchedule)
    state = upgrade(as_json(saved_state()), FORMAT_VERSION)
    assert state.architecture == WiderConfig(**as_json(saved_state())["architecture"], qk_norm=False)
    assert state.lr_schedule == WiderSchedule(**as_json(saved_state())["lr_schedule"], new_knob=0.5)


def test_older_versions_have_no_rollbacks() -> None:
    document = as_json(saved_state())
    del document["rollbacks"], document["update_guard"]
    state = upgrade(document, 4)
    assert state.rollbacks == () and state.update_guard is None


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
    saved = read_checkpoint(OLD, SAVED_AT)
    assert saved.format_version == 2
    schedule = read_run_state(OLD, SAVED_AT).lr_schedule
    assert schedule is not None and schedule == LearningRateSchedule(**saved.state["schedule"])


def edited(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state in the manifest of the checkpoint in ``directory``, as another version would have written it."""
    path = directory / "manifest.json"
    document = json.loads(path.read_text())["manifest"]
    change(document["state"])
    path.write_text(seal("manifest", json.dumps(document)))


def without_later_fields(state: dict[str, Any]) -> None:
    del state["architecture"]["rope_scaling_factor"], state["schedule"]["wsd_style"], state["skipped_samples"]


def test_a_run_resumes_from_before_a_field_was_added(tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of(OLD, SAVED_AT), checkpoint_of(tmp_path / "save", SAVED_AT))
    edited(checkpoint_of(tmp_path / "save", SAVED_AT), without_later_fields)
    call_training(flags_of_case(CASES[CASE], tmp_path)).succeeded()
    expected = json.loads((OLD / "expected.json").read_text())["records"]
    assert losses(tmp_path / "metrics.jsonl") == pytest.approx([record["lm_loss"] for record in expected], rel=1e-12)


def test_a_run_names_what_was_removed(tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of(OLD, SAVED_AT), checkpoint_of(tmp_path / "save", SAVED_AT))
    edited(checkpoint_of(tmp_path / "save", SAVED_AT), lambda state: state["architecture"].update(old_knob=True))
    outcome = call_training(flags_of_case(CASES[CASE], tmp_path))
    assert outcome.exit_code != 0
    assert "old_knob True, which this version of the code does not have" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == [f"iter_{SAVED_AT:07d}"]
    assert LENGTH > SAVED_AT
