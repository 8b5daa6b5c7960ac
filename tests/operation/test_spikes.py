"""Spikes are found where a curve has them, and nowhere else."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.features.spikes.flags import MAX_FACTOR, MAX_SCORE, MIN_SCALE, STEPS, SpikeDetector, robust_score

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


@given(st.integers(0, 2**32), st.integers(5, 120))
def test_a_detector_that_was_saved_goes_on_as_if_it_had_not_been(seed: int, at: int) -> None:
    curve = noisy(60, seed, noise=0.2) + [(9.0, 9.0)] * 5 + noisy(60, seed + 1, noise=0.2)
    one, other = SpikeDetector(WINDOW), SpikeDetector(WINDOW)
    for iteration, (loss, norm) in enumerate(curve, 1):
        if iteration == at:
            state = json.loads(json.dumps(one.to_json()))
            other = SpikeDetector(WINDOW)
            other.restore(state)
        seen = one.observe(iteration, loss, norm)
        if iteration >= at:
            assert other.observe(iteration, loss, norm) == seen
            other.add(loss, norm)
        one.add(loss, norm)


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
