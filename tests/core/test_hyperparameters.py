"""Learning rate and weight decay at every knot of every style, against formulas written out here."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.training import LearningRateConfig, OptimizerConfig
from megatron.core.hyperparameters import (
    LearningRateSchedule,
    build_learning_rate_schedule,
    build_weight_decay_schedule,
)
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.saved_run import resolve_lr_schedule

PEAK, MINIMUM, INITIAL = 1e-3, 1e-4, 1e-5
WARMUP, DECAY, ANNEALING = 100, 1000, 300
STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSD_STYLES = ["exponential", "linear", "cosine", "minus_sqrt"]


def schedule(style: str, wsd_style: str = "exponential", **changes: Any) -> LearningRateSchedule:
    base = LearningRateSchedule(PEAK, MINIMUM, INITIAL, WARMUP, DECAY, style, ANNEALING, wsd_style)
    return replace(base, **changes)


def between(share: float) -> float:
    return MINIMUM + share * (PEAK - MINIMUM)


def build(*, train_iters: int | None = 100, train_samples: int | None = None, **flags: Any) -> LearningRateSchedule:
    config = LearningRateConfig(**{"lr": PEAK} | flags)
    return build_learning_rate_schedule(
        config, train_iters=train_iters, train_samples=train_samples, global_batch_size=8
    )


ALL = [(style, "exponential") for style in STYLES[:-1]] + [("WSD", wsd_style) for wsd_style in WSD_STYLES]
every_style = pytest.mark.parametrize(("style", "wsd_style"), ALL)


@every_style
def test_the_warm_up_is_linear_to_the_peak_and_the_end_stays_at_the_minimum(style: str, wsd_style: str) -> None:
    rate = schedule(style, wsd_style)
    expected = [INITIAL, INITIAL + 0.25 * (PEAK - INITIAL), PEAK]
    assert [rate(samples) for samples in (0, 25, WARMUP)] == pytest.approx(expected)
    assert schedule(style, wsd_style, warmup=0)(0) == pytest.approx(PEAK)
    assert rate(DECAY + 1) == rate(10**12) == (PEAK if style == "constant" else MINIMUM)


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 101, PEAK),
        ("constant", 1000, PEAK),
        ("constant", 10**9, PEAK),
        ("linear", 101, between(899 / 900)),
        ("linear", 550, between(0.5)),
        ("linear", 1000, MINIMUM),
        ("cosine", 325, between(0.5 * (1 + math.sqrt(0.5)))),
        ("cosine", 550, between(0.5)),
        ("cosine", 775, between(0.5 * (1 - math.sqrt(0.5)))),
        ("cosine", 1000, MINIMUM),
        ("inverse-square-root", 101, PEAK * math.sqrt(100 / 101)),
        ("inverse-square-root", 400, PEAK / 2),
        ("inverse-square-root", 900, PEAK / 3),
        ("inverse-square-root", 1000, PEAK / math.sqrt(10)),
        ("WSD", 101, PEAK),
        ("WSD", 400, PEAK),
        ("WSD", 700, PEAK),
    ],
)
def test_the_decay_at_its_knots(style: str, samples: int, expected: float) -> None:
    assert schedule(style)(samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("wsd_style", "share_at_a_quarter", "share_at_half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", 0.5 * (1 + math.sqrt(0.5)), 0.5),
        ("exponential", 2 * 2**-0.25 - 1, math.sqrt(2) - 1),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_the_annealing_at_its_knots(wsd_style: str, share_at_a_quarter: float, share_at_half: float) -> None:
    rate = schedule("WSD", wsd_style)
    assert rate(DECAY - ANNEALING) == pytest.approx(PEAK)
    assert rate(775) == pytest.approx(between(share_at_a_quarter))
    assert rate(850) == pytest.approx(between(share_at_half))
    assert rate(DECAY) == pytest.approx(MINIMUM)


def test_the_inverse_square_root_never_falls_below_the_minimum() -> None:
    rate = schedule("inverse-square-root", decay=10**9)
    assert rate(100 * WARMUP) == pytest.approx(MINIMUM)
    assert rate(10**8) == MINIMUM


@given(
    style=st.sampled_from(ALL),
    warmup=st.integers(0, 50),
    stable=st.integers(0, 50),
    annealing=st.integers(0, 50),
    rates=st.tuples(*[st.floats(1e-8, 1.0)] * 3).map(sorted),
)
def test_the_rate_rises_in_the_warm_up_and_never_after(
    style: tuple[str, str], warmup: int, stable: int, annealing: int, rates: list[float]
) -> None:
    initial, minimum, peak = rates
    decay = warmup + stable + annealing
    rate = LearningRateSchedule(peak, minimum, initial, warmup, decay, style[0], annealing, style[1])
    values = [rate(samples) for samples in range(decay + 3)]
    slack = 1e-12 * peak
    assert all(0 <= value <= peak + slack for value in values)
    assert all(later >= earlier - slack for earlier, later in pairwise(values[: warmup + 1]))
    assert all(later <= earlier + slack for earlier, later in pairwise(values[warmup:]))
    assert all(value >= minimum - slack for value in values[warmup:])


# From the flags


def test_iterations_count_as_full_global_batches() -> None:
    built = build(lr_warmup_iters=10, lr_decay_iters=50, lr_decay_style="WSD", lr_wsd_decay_iters=20, min_lr=1e-5)
    assert (built.warmup, built.decay, built.wsd_decay) == (80, 400, 160)
    assert (built.peak, built.minimum, built.initial) == (PEAK, 1e-5, 0.0)
    assert (built.style, built.wsd_style) == ("WSD", "exponential")


def test_the_decay_lasts_for_the_whole_run_by_default() -> None:
    assert build().decay == 800
    assert build(train_iters=None, train_samples=12345).decay == 12345


def test_samples_are_taken_as_they_are() -> None:
    built = build(
        train_iters=None,
        train_samples=1000,
        lr_warmup_samples=11,
        lr_decay_samples=900,
        lr_decay_style="WSD",
        lr_wsd_decay_samples=55,
        lr_wsd_decay_style="cosine",
        lr_warmup_init=1e-6,
    )
    assert (built.warmup, built.decay, built.wsd_decay) == (11, 900, 55)
    assert (built.wsd_style, built.initial) == ("cosine", 1e-6)


def test_the_warm_up_can_be_a_fraction_of_the_decay() -> None:
    assert build(lr_warmup_fraction=0.01).warmup == 8
    assert build(lr_warmup_fraction=0.1, lr_decay_iters=50).warmup == 40
    # Of a sample, too, as in Megatron-LM.
    assert build(train_iters=None, train_samples=999, lr_warmup_fraction=0.1).warmup == pytest.approx(99.9, rel=1e-12)
    assert build(lr_warmup_fraction=0.0).warmup == 0


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ({"lr_warmup_iters": 101}, "iters"),
        ({"lr_warmup_iters": 60, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 41}, "iters"),
        ({"lr_warmup_iters": 11, "lr_decay_iters": 10}, "iters"),
        ({"train_iters": None, "train_samples": 10, "lr_warmup_samples": 11}, "samples"),
    ],
)
def test_parts_longer_than_the_whole_are_refused(flags: dict[str, Any], unit: str) -> None:
    with pytest.raises(ConfigError, match=rf"exceed the decay length .* lower --lr-warmup-{unit}") as raised:
        build(**flags)
    assert unit == "iters" or "-iters" not in str(raised.value)


def test_parts_as_long_as_the_whole_are_fine() -> None:
    built = build(lr_warmup_iters=60, lr_decay_style="WSD", lr_wsd_decay_iters=40, lr_wsd_decay_style="linear")
    assert [built(samples) for samples in (480, 640, 800)] == pytest.approx([PEAK, PEAK / 2, 0.0])


def test_a_run_whose_warm_up_ended_at_a_whole_sample_goes_on_with_it() -> None:
    """Checkpoints of earlier versions."""
    wanted = build(train_iters=None, train_samples=999, lr_warmup_fraction=0.1)
    config = LearningRateConfig(lr=PEAK, lr_warmup_fraction=0.1)
    saved = replace(wanted, warmup=99)
    assert resolve_lr_schedule(wanted, saved, config) == saved
    with pytest.raises(CheckpointError, match=r"warmup 99\.9"):
        resolve_lr_schedule(wanted, replace(wanted, warmup=98), config)


@pytest.mark.parametrize(
    ("style", "expected"),
    [("linear", [0.02, 0.04, 0.06, 0.1, 0.1]), ("cosine", [0.02, 0.02 + 0.04 * (1 - math.sqrt(0.5)), 0.06, 0.1, 0.1])],
)
def test_weight_decay_goes_from_its_start_to_its_end_and_stays_there(style: str, expected: list[float]) -> None:
    config = OptimizerConfig(start_weight_decay=0.02, end_weight_decay=0.1, weight_decay_incr_style=style)  # type: ignore[arg-type]
    schedule = build_weight_decay_schedule(config, planned_samples=1000)
    assert schedule is not None
    assert [schedule(samples) for samples in (0, 250, 500, 1000, 1500)] == pytest.approx(expected)


def test_a_constant_weight_decay_needs_no_schedule() -> None:
    assert build_weight_decay_schedule(OptimizerConfig(), planned_samples=1000) is None
