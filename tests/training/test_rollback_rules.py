"""Where a run goes back to, and which samples it leaves out."""

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
from megatron.training.checkpoints import pruning
from megatron.training.checkpoints.pruning import Pruning
from megatron.training.checkpoints.rollback import RollbackRequested, in_order_of_preference, left_out, set_later_aside
from megatron.training.checkpoints.saved_run import Progress
from megatron.training.loop.batch_schedule import BatchSchedule

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


def test_the_range_that_is_left_out_begins_at_the_margin_in_samples() -> None:
    """The batch grows within the part that is trained again: 4 to iteration 5, then 8."""
    rollback = left_out(request(11, 12, RAMP.total_samples(12)), Progress(2, RAMP.total_samples(2)), margin=3)
    assert (rollback.first_iteration, rollback.first_sample) == (8, RAMP.total_samples(7)) == (8, 36)
    assert (rollback.iteration, rollback.end_sample) == (12, RAMP.total_samples(12))
    assert rollback.loaded_iteration == 2


def test_the_range_begins_after_the_checkpoint_if_that_is_within_the_margin() -> None:
    rollback = left_out(request(11, 12, 100), Progress(9, RAMP.total_samples(9)), margin=50)
    assert (rollback.first_iteration, rollback.first_sample) == (10, RAMP.total_samples(9))


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
    assert len({rollback.first_iteration, max(loaded + 1, first - margin)}) == 1
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
