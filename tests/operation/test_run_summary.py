"""Effective time and save intervals: the published figures, the simulator against the closed form, bounds; and the
figures of a run from its records."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.operation.attempts import Attempt, account, append_attempt, settle, write_current
from megatron.operation.run_summary import (
    Costs,
    RecordedRun,
    cause_of,
    daly_interval_s,
    effective_time,
    host_of,
    job_mtbf_s,
    mean_bounds,
    nvidia_interval_s,
    read_run,
    summarize,
    to_json,
    young_interval_s,
)
from megatron.operation.simulated_run import of_costs, random_events, simulate

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


@pytest.mark.parametrize(("num_gpus", "hours", "costs", "minutes", "share"), CASES)
def test_the_formula_is_simulated(num_gpus: int, hours: float, costs: Costs, minutes: float, share: float) -> None:
    interval = young_interval_s(costs)
    run, table = of_costs(costs, interval, 5000 * costs.mtbf_s / 86400)
    attempts = simulate(run, random_events(run, table, seed=num_gpus)).attempts
    time = account(attempts)
    assert sum(attempt.wall_s for attempt in attempts) == pytest.approx(5000 * costs.mtbf_s)
    assert time.wall_s == pytest.approx(5000 * costs.mtbf_s)
    assert time.effective_time == pytest.approx(effective_time(interval, costs), rel=0.005)


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


# --- figures of a run ----------------------------------------------------------------------------------------


def attempt(number: int, start: float, end: float, **facts: object) -> Attempt:
    facts = {"outcome": "failed", "world_size": 8, "hosts": ("a", "b")} | facts
    return Attempt(attempt=number, start=start, end=end, **facts)  # type: ignore[arg-type]


RUN = [
    attempt(
        1, 0.0, 1000.0, seconds={"start": 20, "load": 10, "step": 700, "save": 20, "lost": 200, "hang": 50}, saves=7,
        first_iteration=0, last_iteration=90, committed_iteration=70, cause="hang", rank=3, host="a",
    ),
    attempt(2, 1040.0, 1100.0, seconds={"start": 60}, exit_code=-9, cause="killed", host="a"),
    attempt(
        3, 1120.0, 2120.0, seconds={"start": 30, "load": 20, "step": 900, "save": 30, "lost": 10, "idle": 10}, saves=9,
        first_iteration=70, last_iteration=161, committed_iteration=160, outcome="lost",
    ),
    attempt(4, 2200.0, 2300.0, seconds={"start": 40, "load": 10, "step": 50}, outcome="running", first_iteration=160),
]  # fmt: skip


def test_figures_of_four_attempts() -> None:
    summary = summarize(RecordedRun(RUN, {}))
    assert summary.time.wall_s == pytest.approx(2300.0)
    assert summary.time.seconds["idle"] == pytest.approx(10 + 40 + 20 + 80)
    assert summary.time.effective_time == pytest.approx((700 + 900 + 50) / 2300)
    assert (summary.num_attempts, summary.interruptions, summary.saves) == (4, 3, 16)
    assert summary.mtbf_s == pytest.approx(720.0)
    least, most = summary.mtbf_bounds_s
    assert least < 720.0 < most
    assert summary.gpu_hours == pytest.approx(2160.0 * 8 / 3600)
    # hang 50 + gap 40 + start 60; gap 20 + start and load 50; idle 10 + gap 80 + start and load 50
    assert summary.restart_s == pytest.approx((150 + 70 + 140) / 3)
    assert summary.save_s == pytest.approx(50 / 16)
    assert (summary.iterations, summary.lost_iterations) == (161, 21)
    assert summary.iteration_s == pytest.approx((1650 + 210) / 181)
    assert [(record.host, record.failures, record.causes) for record in summary.hosts] == [
        ("a", 2, {"hang": 1, "killed": 1})
    ]
    assert summary.causes == {"hang": 1, "killed": 1, "node_lost": 1}
    assert summary.intervals is not None and not summary.has_assumed_mtbf
    assert summary.intervals.young_s == pytest.approx((2 * 50 / 16 * 720) ** 0.5)
    assert summary.intervals.own_s == pytest.approx(1860 / 16)
    figures = to_json(summary)
    assert figures["save_interval"]["young"]["iterations"] == round(summary.intervals.young_s / (1860 / 181))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_a_wrong_flag_is_no_interruption() -> None:
    run = [replace(RUN[1], exit_code=2, cause="user_error"), RUN[3]]
    summary = summarize(RecordedRun(run, {}))
    assert (summary.interruptions, summary.mtbf_s) == (0, None)
    assert summary.mtbf_bounds_s[1] == float("inf")
    assert to_json(summary)["mtbf_bounds_s"][1] is None


def test_without_a_failure_the_rate_of_llama_3_is_assumed() -> None:
    seconds = {"start": 30.0, "load": 10.0, "step": 900.0, "save": 10.0}
    only = attempt(
        1,
        0.0,
        950.0,
        seconds=seconds,
        saves=5,
        outcome="complete",
        first_iteration=0,
        last_iteration=90,
        world_size=512,
    )
    summary = summarize(RecordedRun([only], {}))
    assert summary.has_assumed_mtbf and summary.intervals is not None
    assert summary.intervals.costs == Costs(job_mtbf_s(512), 40.0, 2.0)
    assert summary.lost_iterations == 0


def test_a_run_without_saves_has_no_interval() -> None:
    only = attempt(1, 0.0, 10.0, seconds={"start": 10.0}, outcome="failed", exit_code=1)
    summary = summarize(RecordedRun([only], {}))
    assert summary.intervals is None and summary.save_s is None and summary.iteration_s is None
    assert to_json(summary)["save_interval"] is None


def test_the_summary_of_a_simulated_run_has_the_costs_that_were_simulated() -> None:
    costs = Costs(3.0 * 3600, 300.0, 5.0)
    interval = young_interval_s(costs)
    run, table = of_costs(costs, interval, 1500 * costs.mtbf_s / 86400)
    attempts = simulate(run, random_events(run, table, seed=1)).attempts
    summary = summarize(RecordedRun(settle(attempts), {}))
    assert summary.mtbf_s == pytest.approx(costs.mtbf_s, rel=0.08)
    least, most = summary.mtbf_bounds_s
    assert least < costs.mtbf_s < most
    # Failures during a restart shorten it.
    assert summary.restart_s == pytest.approx(costs.restart_s, rel=0.03)
    assert summary.save_s == pytest.approx(costs.save_s, rel=0.02)
    assert summary.intervals is not None
    assert summary.intervals.young_s == pytest.approx(interval, rel=0.05)
    assert summary.time.effective_time == pytest.approx(effective_time(interval, costs), rel=0.01)


def test_reports_of_failures_belong_to_attempts_by_their_time(tmp_path: Path) -> None:
    for one in RUN[:3]:
        append_attempt(tmp_path, replace(one, cause=None, host=None))
    write_current(tmp_path, RUN[3])
    reports = tmp_path / "failures"
    reports.mkdir()
    # The launcher of another node counted its own attempts.
    (reports / "0001.json").write_text(json.dumps({"time": 999.0, "attempt": 1, "cause": "hang", "host": "b"}))
    (reports / "0002.json").write_text(json.dumps({"time": 2121.0, "attempt": 2, "cause": "disk", "host": "c"}))
    (reports / "0003.json").write_text("{")
    (reports / "0005.json").write_text(json.dumps({"time": 500.0, "attempt": 1, "cause": "user_error"}))
    (reports / "0004.json").write_text("[]")
    run = read_run(tmp_path)
    assert [one.attempt for one in run.attempts] == [1, 2, 3, 4]
    assert [cause_of(one, run) for one in run.attempts[:3]] == ["hang", "unknown", "disk"]
    assert [host_of(one, run) for one in run.attempts[:3]] == ["b", None, "c"]
    with pytest.raises(DataError, match="missing has no record of an attempt"):
        read_run(tmp_path / "missing")
