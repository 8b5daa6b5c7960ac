"""Spikes are found where a curve has them, policies decide iteration by iteration, and rollbacks skip the range."""

import json
import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
from megatron.features.spikes.flags import (
    MAX_FACTOR,
    MAX_SCORE,
    MAX_SKIPPED,
    MAX_SKIPPED_IN_ROW,
    MIN_SCALE,
    RECENT,
    STEPS,
    Action,
    SpikeDetector,
    UpdateGuard,
    Verdict,
    robust_score,
)
from megatron.features.spikes.listener import RollbackRequested, in_order_of_preference, set_later_aside, skipped_after
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints import save_directories as pruning
from megatron.training.checkpoints.save_directories import Pruning
from megatron.training.checkpoints.saved_run import Progress

WINDOW = 20
RECORDED = Path(__file__).parent / "clean_run.json"
"""Losses and gradient norms of 2,000 iterations of the tiny run of the end-to-end tests, on mock data with 64 ids."""

POSITIVE = st.floats(1e-3, 1e3)
Curve = Sequence[tuple[float, float]]


def spikes_of(curve: Curve, window: int = WINDOW) -> list[int]:
    """The iterations that are spikes; all are applied, as with ``--spike-policy log``."""
    detector, found = SpikeDetector(window), []
    for iteration, (loss, norm) in enumerate(curve, 1):
        if detector.observe(iteration, loss, norm).is_spike:
            found.append(iteration)
        detector.add(loss, norm)
    return found


def noisy(length: int, seed: int, noise: float = 0.02) -> list[tuple[float, float]]:
    """A falling loss and a level gradient norm with normal noise of their logarithms."""
    dice = random.Random(seed)
    return [
        ((2 + 6 * math.exp(-step / 300)) * math.exp(dice.gauss(0, noise)), 0.8 * math.exp(dice.gauss(0, 6 * noise)))
        for step in range(length)
    ]


def recorded() -> list[tuple[float, float]]:
    content = json.loads(RECORDED.read_text())
    return list(zip(content["losses"], content["grad_norms"], strict=True))


@given(st.lists(POSITIVE, min_size=WINDOW, max_size=WINDOW), POSITIVE, st.floats(0.1, 10), st.randoms())
def test_the_score_depends_on_ratios_alone(
    earlier: list[float], value: float, factor: float, dice: random.Random
) -> None:
    score = robust_score(value, earlier)
    assert robust_score(value * factor, [one * factor for one in earlier]) == pytest.approx(score, rel=1e-6, abs=1e-6)
    shuffled = dice.sample(earlier, len(earlier))
    assert robust_score(value, shuffled) == score
    assert robust_score(value * 1.5, earlier) >= score >= 0
    assert robust_score(min(earlier), earlier) == 0


def test_the_score_counts_deviations_of_a_normal_curve() -> None:
    dice = random.Random(3)
    earlier = [math.exp(dice.gauss(1.0, 0.1)) for _ in range(20_001)]
    assert robust_score(math.exp(1.5), earlier) == pytest.approx(5, rel=0.05)
    flat = [2.0] * WINDOW
    assert robust_score(2.0 * math.exp(2 * MIN_SCALE), flat) == pytest.approx(2)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), max_size=WINDOW))
def test_nothing_is_a_spike_before_the_window_is_full(curve: list[tuple[float, float]]) -> None:
    assert not spikes_of(curve)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=WINDOW, max_size=WINDOW), st.booleans())
def test_one_value_far_above_the_largest_is_a_spike(curve: list[tuple[float, float]], is_loss: bool) -> None:
    far = tuple(1.01 * MAX_FACTOR * max(values) for values in zip(*curve, strict=True))
    last = curve[-1]
    assert WINDOW + 1 in spikes_of([*curve, (far[0], last[1]) if is_loss else (last[0], far[1])])


@pytest.mark.parametrize("place", [0, 1], ids=["loss", "gradient norm"])
def test_a_small_rise_is_a_spike_in_its_third_iteration(place: int) -> None:
    curve = noisy(300, seed=1)
    for length in (1, STEPS - 1, STEPS, 10):
        raised = [tuple(value * (4 if at == place else 1) for at, value in enumerate(pair)) for pair in curve]
        found = spikes_of([*curve[:200], *raised[200 : 200 + length], *curve[200 + length :]], window=100)  # type: ignore[list-item]
        assert found == list(range(200 + STEPS, 201 + length)), length


def test_an_outlier_names_the_first_of_its_row() -> None:
    detector = SpikeDetector(WINDOW)
    for iteration in range(1, WINDOW + 1):
        detector.observe(iteration, 2.0, 1.0)
        detector.add(2.0, 1.0)
    rows = [2.0, 3.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    seen = [detector.observe(30 + at, loss, 1.0) for at, loss in enumerate(rows)]
    assert [one.first_iteration for one in seen] == [30, 31, 31, 33, 34, 34, 34, 34]
    assert [one.is_outlier for one in seen] == [loss > 2 for loss in rows]
    assert [one.is_spike for one in seen] == [False] * 6 + [True] * 2
    assert seen[1].score > MAX_SCORE


def test_zero_and_a_flat_curve_are_no_spikes() -> None:
    assert not spikes_of([(2.0, 0.0)] * 50 + [(2.0, 1e-6)] * 50)
    assert not spikes_of([(2.0 + 1e-6 * (step % 7), 1.0) for step in range(200)])


def test_another_window_keeps_the_newest_values() -> None:
    wide, narrow = SpikeDetector(50), SpikeDetector(10)
    for step in range(1, 51):
        wide.add(step, step)
    narrow.restore(wide.to_json())
    assert narrow.to_json()["losses"] == list(range(41, 51))


@pytest.mark.parametrize("seed", range(3))
def test_normal_noise_has_no_spikes(seed: int) -> None:
    assert not spikes_of(noisy(2000, seed), window=100)


def test_a_recorded_run_has_no_spikes() -> None:
    assert len(recorded()) == 2000
    assert not spikes_of(recorded(), window=100)


@pytest.mark.parametrize(("at", "factor"), [(150, 10.0), (400, 4.0), (1000, 4.0), (1900, 4.0), (1900, 30.0)])
def test_a_spike_in_a_recorded_run_is_found_within_three_iterations(at: int, factor: float) -> None:
    """The loss rises by the factor, as after an update that was too large, and falls again over 30 iterations."""
    curve = recorded()
    falling = [1 + (factor - 1) * math.exp(-step / 10) for step in range(30)]
    raised = [(loss * factor, norm) for (loss, norm), factor in zip(curve[at : at + 30], falling, strict=True)]
    found = spikes_of([*curve[:at], *raised, *curve[at + 30 :]], window=100)
    assert found and found[0] <= at + STEPS


# --- policies --------------------------------------------------------------------------------------------------

SHORT_WINDOW = 10
GO, BACK, STOP = Action.CONTINUE, Action.ROLL_BACK, Action.STOP


def guard_with(stops_at_nan: bool = True, **flags: Any) -> UpdateGuard:
    return UpdateGuard(OperationConfig(spike_window=SHORT_WINDOW, **flags), stops_at_nan)


@dataclass(frozen=True)
class Step:
    """What one iteration came to."""

    is_applied: bool
    verdict: Verdict
    metrics: dict[str, float]


def run(guard: UpdateGuard, events: Iterable[str], first: int = 1) -> list[Step]:
    """Iterations by letter: n(ormal), s(pike), x (not finite), o(verflow that a lower loss scale corrects)."""
    steps = []
    for iteration, event in enumerate(events, first):
        is_finite = event in "ns"
        is_applied = is_finite and guard.accepts(iteration, 60.0 if event == "s" else 2.0, 1.0)
        verdict = guard.conclude(iteration, is_applied, is_fault=event == "x")
        steps.append(Step(is_applied, verdict, guard.metrics()))
    return steps


def actions(steps: Iterable[Step]) -> list[Action]:
    return [step.verdict.action for step in steps]


QUIET = "n" * SHORT_WINDOW


def test_a_quiet_run_is_applied_without_a_word() -> None:
    for policy in ("log", "skip", "rollback"):
        steps = run(guard_with(spike_policy=policy), "n" * 50)
        assert steps == [Step(True, Verdict(), {})] * 50


def test_a_spike_is_logged_once_and_applied() -> None:
    *before, first, second, after = run(guard_with(), QUIET + "ssn")
    assert all(step.is_applied for step in (*before, first, second, after))
    assert first.verdict.cause == "spike" and first.verdict.first_iteration == SHORT_WINDOW + 1
    assert first.verdict.message is not None and f"Iteration {SHORT_WINDOW + 1} begins a spike" in first.verdict.message
    assert second.verdict.message is None and first.metrics["spike"] > 6
    assert not after.metrics


def test_a_skipped_spike_is_counted_and_does_not_enter_the_window() -> None:
    steps = run(guard_with(spike_policy="skip"), QUIET + "snsns")
    assert [step.is_applied for step in steps[SHORT_WINDOW:]] == [False, True, False, True, False]
    assert actions(steps) == [GO] * len(steps)
    assert [step.metrics.get("skipped_updates") for step in steps[SHORT_WINDOW:]] == [1, 1, 2, 2, 3]
    message = steps[SHORT_WINDOW].verdict.message
    assert message is not None and message.endswith("its update is skipped (--spike-policy skip)")


@pytest.mark.parametrize(("policy", "end"), [("skip", STOP), ("rollback", BACK)])
def test_too_many_faults_in_a_row_or_in_a_thousand_iterations(policy: str, end: Action) -> None:
    steps = run(guard_with(nan_policy=policy), "nn" + "x" * MAX_SKIPPED_IN_ROW + "n" + "x" * (MAX_SKIPPED_IN_ROW + 1))
    assert actions(steps) == [GO] * (len(steps) - 1) + [end]
    last = steps[-1].verdict
    assert (last.cause, last.first_iteration) == ("not_finite", 3 + MAX_SKIPPED_IN_ROW + 1)
    assert last.message is not None and f"--nan-policy {policy}" in last.message
    pairs = "xn" * MAX_SKIPPED
    assert actions(run(guard_with(nan_policy=policy), pairs + "x"))[-1] is end
    # One iteration more than a thousand after the first.
    assert set(actions(run(guard_with(nan_policy=policy), pairs + "n" * (RECENT - len(pairs)) + "x"))) == {GO}


@pytest.mark.parametrize(
    ("flags", "events", "verdict"),
    [
        ({"spike_policy": "skip"}, QUIET + "s" * (MAX_SKIPPED_IN_ROW + 1), (STOP, "spike", SHORT_WINDOW + 1)),
        ({"spike_policy": "rollback"}, QUIET + "s", (BACK, "spike", SHORT_WINDOW + 1)),
        # Without a policy a fault stops the run, unless it is not checked.
        ({}, "nx", (STOP, "not_finite", 2)),
        ({"stops_at_nan": False}, "x" * 50, (GO, None, 0)),
        # An overflow under a loss scale is nothing.
        ({"nan_policy": "skip", "spike_policy": "rollback"}, QUIET + "o" * 30 + "n", (GO, None, 0)),
        # The two kinds of skipped updates share the limits.
        ({"nan_policy": "rollback", "spike_policy": "skip"}, QUIET + "sxsx", (BACK, "not_finite", SHORT_WINDOW + 1)),
    ],
)
def test_the_verdict_of_the_last_iteration(
    flags: dict[str, Any], events: str, verdict: tuple[Action, str | None, int]
) -> None:
    *before, step = run(guard_with(**flags), events)
    assert set(actions(before)) <= {GO}
    assert (step.verdict.action, step.verdict.cause, step.verdict.first_iteration) == verdict
    assert step.is_applied == (events[-1] == "n") and not (step.is_applied and step.metrics)


@pytest.mark.parametrize("at", range(1, 40))
def test_a_guard_that_was_saved_goes_on_as_if_it_had_not_been(at: int) -> None:
    events = "n" * 12 + "xnsnxxnnsssnnnnxnnxnnnxxx" + "n" * 10
    whole = run(guard_with(nan_policy="rollback", spike_policy="skip"), events)
    first, second = (guard_with(nan_policy="rollback", spike_policy="skip") for _ in range(2))
    steps = run(first, events[:at])
    second.restore(json.loads(json.dumps(first.to_json())))
    assert steps + run(second, events[at:], at + 1) == whole


def test_a_guard_that_forgets_finds_nothing_until_its_window_is_full() -> None:
    guard = guard_with(spike_policy="rollback")
    run(guard, QUIET)
    guard.forget()
    assert actions(run(guard, "s" * SHORT_WINDOW, SHORT_WINDOW + 1)) == [GO] * SHORT_WINDOW


# --- rollbacks -------------------------------------------------------------------------------------------------

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
    rollback = skipped_after(request(first, noticed, RAMP.total_samples(noticed)), progress, margin)
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
