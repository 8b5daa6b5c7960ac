"""Where a run goes back to, which samples it leaves out, and in which data stage it resumes."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.directory import MANIFEST, iteration_directory, saved_iterations
from megatron.checkpoint.schema import DataStage, Rollback
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.operation import OperationConfig
from megatron.core.control import ControlGroup
from megatron.data.data_record import DataRecord
from megatron.errors import CheckpointError
from megatron.features.spikes.listener import (
    RollbackRequested,
    in_order_of_preference,
    left_out,
    set_later_aside,
)
from megatron.training.batch_schedule import BatchSchedule, build_batch_schedule, samples_of_tokens
from megatron.training.checkpoints import save_directories as pruning
from megatron.training.checkpoints.data_stages import ResolvedStages, earlier_lengths, first_stage, resolve_data_stages
from megatron.training.checkpoints.save_directories import Pruning
from megatron.training.checkpoints.saved_run import Progress

RAMP = BatchSchedule(((0, 4), (20, 8), (60, 16)), micro_batch_size=2, data_parallel_size=2)


@pytest.mark.parametrize(
    ("there", "first", "margin", "expected"),
    [
        ([10, 20, 30, 40, 50], 45, 4, [40, 30, 20, 10]),
        ([10, 20, 30, 40, 50], 44, 4, [30, 20, 10, 40]),
        ([10, 20, 30, 40, 50], 41, 0, [40, 30, 20, 10]),
        # None is far enough: the farthest one comes first.
        ([20, 30, 40], 41, 50, [20, 30, 40]),
        # The state after iteration 40 has been changed by iteration 40.
        ([40, 50], 40, 0, []),
        ([], 40, 0, []),
    ],
)
def test_the_newest_checkpoint_well_before_the_spike_comes_first(
    there: list[int], first: int, margin: int, expected: list[int]
) -> None:
    assert in_order_of_preference(there, first, margin) == expected


def request(first_iteration: int, noticed_at: int, consumed: int, batches: BatchSchedule = RAMP) -> RollbackRequested:
    return RollbackRequested(
        cause="spike",
        message="Iteration 9 begins a spike",
        first_iteration=first_iteration,
        progress=Progress(noticed_at, consumed),
        batches=batches,
        stage=DataStage("first", 0, 0, {}),
        earlier=(),
    )


def skipped_samples(rollback: Rollback, batches: BatchSchedule, loaded: Progress) -> set[int]:
    """The samples that a run leaves out which continues from ``loaded``."""
    consumed, skipped = loaded.consumed_samples, set[int]()
    while consumed < rollback.end_sample + 100:
        size = batches.global_batch_size(consumed)
        if rollback.leaves_out(consumed, size):
            skipped.update(range(consumed, consumed + size))
        consumed += size
    return skipped


@given(st.integers(0, 20), st.integers(1, 30), st.integers(0, 10), st.integers(0, 10))
def test_every_layout_leaves_out_the_range_and_at_most_a_batch_around_it(
    loaded: int, distance: int, delay: int, margin: int
) -> None:
    first = loaded + distance
    noticed = first + delay
    progress = Progress(loaded, RAMP.total_samples(loaded))
    rollback = left_out(request(first, noticed, RAMP.total_samples(noticed)), progress, margin)
    same = skipped_samples(rollback, RAMP, progress)
    assert same == set(range(rollback.first_sample, rollback.end_sample))
    assert rollback.first_iteration == max(loaded + 1, first - margin)
    assert rollback.first_sample == RAMP.total_samples(rollback.first_iteration - 1)
    assert (rollback.iteration, rollback.end_sample) == (noticed, RAMP.total_samples(noticed))
    assert rollback.loaded_iteration == loaded
    other = BatchSchedule(((0, 12),), micro_batch_size=1, data_parallel_size=3)
    skipped = skipped_samples(rollback, other, progress)
    assert same <= skipped and len(skipped) <= len(same) + 2 * 11


def test_a_new_data_stage_has_other_samples_at_these_positions() -> None:
    rollback = Rollback("spike", 30, 10, 15, first_sample=100, end_sample=200)
    assert rollback.before(150) == replace(rollback, end_sample=150)
    assert not rollback.before(100).leaves_out(100, 8)
    assert not rollback.before(50).leaves_out(50, 1000)
    assert rollback.before(500) == rollback


def make_checkpoints(root: Path, iterations: Collection[int]) -> None:
    for iteration in iterations:
        iteration_directory(root, iteration).mkdir(parents=True)
        (iteration_directory(root, iteration) / MANIFEST).write_text(f"{iteration}")


def context(save: Path, **places: Any) -> Any:
    checkpoint = CheckpointConfig(save=str(save), **places)
    operation = OperationConfig(spike_policy="rollback", rollback_margin=20)
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint, operation=operation),
        control=ControlGroup([0], 0),
        log_rank0=lambda text: None,
    )


def test_later_checkpoints_are_set_aside_wherever_they_are(tmp_path: Path) -> None:
    """Also a second time, and at a URL."""
    save, mirror, store = tmp_path / "save", tmp_path / "mirror", tmp_path / "store"
    for _ in range(2):
        for root in (save, mirror, store):
            make_checkpoints(
                root, [iteration for iteration in (10, 20, 25, 30) if iteration not in saved_iterations(root)]
            )
        set_later_aside(context(save, redundant_save=(str(mirror), f"file://{store}")), 20)
        assert saved_iterations(save) == saved_iterations(mirror) == [10, 20]
        assert (save / "iter_0000025.rolled_back" / MANIFEST).read_text() == "25"
        assert not (store / "iter_0000030" / MANIFEST).exists()
        for directory in (store / "iter_0000025", store / "iter_0000030"):
            directory.rmdir()


def test_retention_keeps_one_checkpoint_to_go_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoints(tmp_path, range(10, 110, 10))
    monkeypatch.setattr(pruning, "list_checkpoints", saved_iterations)
    monkeypatch.setattr(pruning, "verify_share", lambda *place: None)
    Pruning(context(tmp_path, save_retain_last=1), tmp_path).prune(100, safe_before=75)
    assert saved_iterations(tmp_path) == [70, 100]
    Pruning(context(tmp_path, save_retain_last=1), tmp_path).prune(100)
    assert saved_iterations(tmp_path) == [100]


# --- data stages, as a function of the checkpoint and the flags -----------------------------------------------

SHORT: DataRecord = {"sequence_length": 8, "seed": 1}
OTHER: DataRecord = {"sequence_length": 8, "seed": 2}
LONG: DataRecord = {"sequence_length": 64, "seed": 1}

MAIN = DataStage("main", 0, 0, SHORT)
TWO = (MAIN, DataStage("long", 10, 160, LONG))


def settle(saved: tuple[DataStage, ...], name: str | None, now: DataRecord, iteration: int = 20) -> ResolvedStages:
    return resolve_data_stages(saved, name, now, iteration, 16 * iteration, "the checkpoint")


def test_a_fresh_run_is_in_its_first_stage() -> None:
    assert first_stage(None, SHORT).stages == (DataStage("first", 0, 0, SHORT),)
    assert first_stage("main", SHORT).stages == (MAIN,)


@pytest.mark.parametrize("name", [None, "main"])
def test_the_same_data_continue_with_and_without_the_name(name: str | None) -> None:
    assert settle((MAIN,), name, SHORT).stages == (MAIN,)


@pytest.mark.parametrize("now", [OTHER, SHORT])
def test_a_new_name_begins_a_stage_where_the_run_is(now: DataRecord) -> None:
    """Also on the same data, which then come from the beginning again."""
    settled = settle((MAIN,), "next", now)
    assert settled.stages == (MAIN, DataStage("next", 20, 320, now))
    assert settled.current == settled.stages[-1]
    assert "data stage next begins after iteration 20" in settled.notices[0]


@pytest.mark.parametrize("name", [None, "long"])
def test_the_command_that_began_a_stage_continues_in_it(name: str | None) -> None:
    settled = settle(TWO, name, LONG)
    assert settled.stages == TWO
    assert settled.notices == ("data stage long continues after 160 of its samples",)


@pytest.mark.parametrize(
    ("name", "saved", "stage"), [(None, (MAIN,), "main"), ("main", (MAIN,), "main"), ("long", TWO, "long")]
)
def test_other_data_in_a_stage_are_refused(name: str | None, saved: tuple[DataStage, ...], stage: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        settle(saved, name, {"sequence_length": saved[-1].seq_length, "seed": 2})
    sentence = str(refusal.value)
    assert f"of stage {stage} of the checkpoint (--seed: 1 in the checkpoint, 2 now): use the same flags" in sentence
    assert "--new-data-stage and a new name" in sentence and "--finetune" in sentence


def test_a_stage_that_is_over_does_not_come_back() -> None:
    with pytest.raises(CheckpointError, match="--new-data-stage main is over: the checkpoint is in data stage long"):
        settle(TWO, "main", SHORT)


def test_an_older_checkpoint_of_a_run_begins_the_stage_again_where_it_is() -> None:
    """After a fallback behind the beginning of the stage."""
    assert settle((MAIN,), "long", LONG, iteration=5).stages == (MAIN, DataStage("long", 5, 80, LONG))


def test_a_checkpoint_without_a_record_is_taken_at_its_word_once() -> None:
    unknown = DataStage("first", 0, 0, {"sequence_length": 8})
    settled = settle((unknown,), None, SHORT)
    assert "has no record" in settled.notices[1]
    assert settled.stages == (replace(unknown, data=SHORT),)
    assert len(settle(settled.stages, None, SHORT).notices) == 1
    assert settle((unknown,), "long", LONG).stages == (unknown, DataStage("long", 20, 320, LONG))


def test_what_is_saved_are_the_paths_of_now() -> None:
    corpus = {"index_bytes": 1, "index_xxh3_128": "", "token_bytes": 2, "block_xxh3_128": [], "all_blocks": None}

    def at(path: str) -> DataRecord:
        entries = [{"corpus": 0, "weight": None}]
        return {**SHORT, "corpora": [{**corpus, "path": path}], "blends": {"train": entries, "valid": entries}}

    saved = DataStage("main", 0, 0, at("old"))
    assert settle((saved,), None, at("new")).stages == (replace(saved, data=at("new")),)


def test_a_change_of_length_is_said() -> None:
    notice = settle((MAIN,), "long", LONG).notices[1]
    assert "samples have 64 tokens from now on, and had 8" in notice and "8 times the tokens" in notice


def test_many_differences_are_cut() -> None:
    corpora = [
        {"path": f"c{n}", "index_bytes": n, "index_xxh3_128": "", "token_bytes": 2, "block_xxh3_128": []}
        for n in range(30)
    ]
    blend = [{"corpus": n, "weight": 1.0} for n in range(30)]
    now = [{**entry, "weight": entry["corpus"] + 1.0} for entry in blend]
    saved, other = ({**SHORT, "corpora": corpora, "blends": {"train": part}} for part in (blend, now))
    with pytest.raises(CheckpointError) as refusal:
        settle((DataStage("main", 0, 0, saved),), None, other)
    assert str(refusal.value).count(" in the checkpoint, ") == 20
    assert "; and 9 more): use" in str(refusal.value)


# --- tokens ---------------------------------------------------------------------------------------------------


def tokens_one_by_one(samples: int, stages: tuple[DataStage, ...]) -> int:
    """Tokens in the first ``samples`` samples of a run."""
    total = 0
    for sample in range(samples):
        total += [stage.seq_length for stage in stages if stage.first_sample <= sample][-1]
    return total


def test_tokens_of_earlier_stages_count_with_their_own_length() -> None:
    stages = (MAIN, DataStage("long", 10, 16, LONG), DataStage("short", 12, 20, SHORT))
    assert earlier_lengths(stages) == [(16, 8), (4, 64)]
    for tokens in range(700):
        samples = samples_of_tokens(tokens, stages[-1].seq_length, earlier_lengths(stages))
        assert tokens_one_by_one(samples, stages) <= tokens < tokens_one_by_one(samples + 1, stages)


def test_a_step_schedule_counts_the_tokens_of_every_stage() -> None:
    stages = (MAIN, DataStage("long", 10, 16, LONG))
    arguments: dict[str, Any] = {"micro_batch_size": 1, "data_parallel_size": 1, "seq_length": 64}
    steps = "0:2 64:4 192:8"
    schedule = build_batch_schedule(
        **arguments, step_batch_size_schedule=steps, earlier_lengths=earlier_lengths(stages)
    )
    assert schedule.steps == ((0, 2), (8, 4), (17, 8))
    for samples in range(40):
        tokens = tokens_one_by_one(samples, stages)
        assert schedule.global_batch_size(samples) == (2 if tokens < 64 else 4 if tokens < 192 else 8)
