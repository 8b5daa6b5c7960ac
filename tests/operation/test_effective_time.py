"""Effective time and save intervals: the published figures, the simulator against the closed form, bounds."""

import math

import pytest

from megatron.operation.accounting import account
from megatron.operation.effective_time import (
    Costs,
    SimulatedJob,
    approximate_effective_time,
    daly_interval_s,
    effective_time,
    job_mtbf_s,
    mean_bounds,
    nvidia_interval_s,
    simulate,
    young_interval_s,
)

SETTINGS = ((60.0, 900.0), (5.0, 900.0), (5.0, 300.0), (2.0, 120.0))
"""Seconds for which a save blocks, and of a restart."""
TABLE = {
    1024: (49.5, (77.0, 0.969), (22.0, 0.988), (22.0, 0.991), (14.0, 0.995)),
    4096: (12.4, (39.0, 0.930), (11.0, 0.965), (11.0, 0.978), (7.0, 0.988)),
    16384: (3.1, (19.0, 0.830), (5.6, 0.895), (5.6, 0.945), (3.5, 0.971)),
}
"""GPUs: hours between failures, then (minutes between saves, effective time) for each of the settings."""
CASES = [
    (num_gpus, hours, Costs(job_mtbf_s(num_gpus), restart, save), minutes, share)
    for num_gpus, (hours, *cells) in TABLE.items()
    for (save, restart), (minutes, share) in zip(SETTINGS, cells)
]


@pytest.mark.parametrize(("num_gpus", "hours", "costs", "minutes", "share"), CASES)
def test_the_table_of_jobs(num_gpus: int, hours: float, costs: Costs, minutes: float, share: float) -> None:
    assert costs.mtbf_s / 3600.0 == pytest.approx(hours, rel=0.005)
    interval = young_interval_s(costs)
    assert interval / 60.0 == pytest.approx(minutes, abs=0.5 if minutes > 6.0 else 0.05)
    assert effective_time(interval, costs) == pytest.approx(share, rel=0.005)


def test_a_fixed_interval_of_half_an_hour_by_the_approximate_form() -> None:
    costs = Costs(job_mtbf_s(16384), 300.0, 5.0)
    assert approximate_effective_time(1800.0, costs) == pytest.approx(0.889, rel=0.005)
    assert 0.889 < effective_time(1800.0, costs) < 0.895


@pytest.mark.parametrize(("num_gpus", "hours", "costs", "minutes", "share"), CASES)
def test_the_simulator_agrees_with_the_closed_form(
    num_gpus: int, hours: float, costs: Costs, minutes: float, share: float
) -> None:
    interval = young_interval_s(costs)
    attempts = simulate(SimulatedJob(costs, interval, step_s=10.0), 5000 * costs.mtbf_s, seed=num_gpus)
    time = account(attempts)
    assert sum(attempt.wall_s for attempt in attempts) == pytest.approx(5000 * costs.mtbf_s)
    assert time.wall_s == pytest.approx(5000 * costs.mtbf_s)
    assert time.effective_time == pytest.approx(effective_time(interval, costs), rel=0.005)


def test_a_save_that_is_committed_later_loses_more() -> None:
    costs = Costs(job_mtbf_s(16384), 300.0, 5.0)
    interval, duration = young_interval_s(costs), 3000 * costs.mtbf_s
    shares = [
        account(simulate(SimulatedJob(costs, interval, 10.0, commit_s=commit), duration, seed=3)).effective_time
        for commit in (0.0, 120.0)
    ]
    assert shares[0] is not None and shares[1] is not None
    assert shares[0] - shares[1] == pytest.approx(120.0 / costs.mtbf_s, rel=0.1)


@pytest.mark.parametrize("save", [0.5, 5.0, 60.0, 600.0])
def test_dalys_interval_is_the_best_one(save: float) -> None:
    costs = Costs(3.1 * 3600.0, 300.0, save)
    best = daly_interval_s(costs)
    for factor in (0.5, 0.98, 1.02, 2.0):
        assert effective_time(factor * best, costs) < effective_time(best, costs)
    assert best < young_interval_s(costs) < nvidia_interval_s(costs)
    if save < 10.0:
        assert best == pytest.approx(young_interval_s(costs), rel=0.03)


def test_extremes_do_not_overflow() -> None:
    assert effective_time(1e9, Costs(3600.0, 60.0, 5.0)) == 0.0
    assert 0.0 < daly_interval_s(Costs(3600.0, 60.0, 36000.0)) < 3600.0


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.391), (419, 379.8, 461.1)]
)
def test_bounds_of_the_mean_time_between_failures(count: int, low: float, high: float) -> None:
    # Exact limits of the expected number of events (Garwood's table), and for many events the normal ones.
    least, most = mean_bounds(1.0, count)
    assert least == pytest.approx(1.0 / high, rel=2e-3)
    assert most == (math.inf if count == 0 else pytest.approx(1.0 / low, rel=2e-3))
