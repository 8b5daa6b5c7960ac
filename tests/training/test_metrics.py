"""A record says the same thing to everybody who listens."""

import math
from typing import Any

import pytest

from megatron.metrics.plots import METRICS_WITH_SAMPLE_AXIS, IntervalGate, evaluation_scalars, iteration_scalars
from megatron.metrics.record import EvaluationRecord
from tests.training.reported_run import iteration_record


def evaluation_record(**changes: Any) -> EvaluationRecord:
    return EvaluationRecord(iteration=1, consumed_samples=2, time=1.8e9, elapsed_s=60.0, **changes)


def test_plots_carry_megatrons_keys_and_units() -> None:
    scalars = iteration_scalars(
        iteration_record(
            lm_loss=6.5,
            grad_norm=1.25,
            iteration_time_ms=250.0,
            tflops_per_gpu=0.5,
            num_zeros=3,
            params_norm=7.0,
            timers={"optimizer": (1.0, 4.0)},
        )
    )
    expected = {
        "learning-rate": 1e-4,
        "batch-size": 16,
        "lm loss": 6.5,
        "loss-scale": 1.0,
        "grad-norm": 1.25,
        "num-zeros": 3,
        "params-norm": 7.0,
        "world-size": 2,
        "iteration-time": 0.25,  # seconds
        "throughput": 0.5,
        "optimizer-time": 0.004,  # seconds of the slowest rank
    }
    assert {key: scalars[key] for key in expected} == expected


def test_plots_of_the_balance_of_experts_carry_megatrons_keys_and_what_was_not_measured_is_left_out() -> None:
    balance: dict[str, Any] = {"load_balancing_loss": 1.25, "z_loss": 4.5, "moe/z_loss_layer_3": 4.25}
    nothing = {"lm_loss": None, "grad_norm": None, "mfu": None, "num_zeros": None}
    scalars = iteration_scalars(iteration_record(**balance, expert_load_max=1.75, **nothing))
    assert {key: scalars[key] for key in balance} == balance
    assert scalars["expert-load-max"] == 1.75
    assert not {"lm loss", "grad-norm", "mfu", "num-zeros", "params-norm"} & set(scalars)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_split_has_its_own_curves_over_iterations_and_samples(split: Any) -> None:
    scalars = evaluation_scalars(evaluation_record(split=split, loss=2.0))
    assert scalars == {f"lm loss {split}": 2.0, f"lm loss {split} ppl": math.exp(2.0)}
    assert set(scalars) <= METRICS_WITH_SAMPLE_AXIS
    assert evaluation_record(split=split, loss=1e6).perplexity == math.exp(20), "no overflow"


@pytest.mark.parametrize(
    ("interval", "resumed_at", "offered", "passed"),
    [
        (1, 0, [1, 2, 3], [1, 2, 3]),
        (10, 0, [5, 10, 15, 20], [10, 20]),
        (7, 0, [100, 200], [100, 200]),  # coarser records than the interval all pass
        (10, 12, [15, 20], [20]),
        (10, 20, [20, 25, 30], [30]),
    ],
)
def test_an_interval_thins_out(interval: int, resumed_at: int, offered: list[int], passed: list[int]) -> None:
    gate = IntervalGate(interval, resumed_at)
    assert [iteration for iteration in offered if gate.passes(iteration)] == passed
