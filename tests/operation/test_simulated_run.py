"""The simulator of runs: against closed forms, in its accounts, and against the records of a disturbed run."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.features.faults.flags import parse_faults
from megatron.operation.attempts import account, settle
from megatron.operation.recorded_run import estimate, lost_gpu_seconds
from megatron.operation.run_summary import Costs, RecordedRun, daly_interval_s, read_run, summarize
from megatron.operation.simulated_run import (
    LLAMA_3,
    Event,
    FailureCause,
    FailureTable,
    RunModel,
    of_costs,
    random_events,
    read_table,
    simulate,
)
from tests.operation.campaign import DisturbedJob, Plan

CRASH, HANG = FailureCause("crash"), FailureCause("hang", kind="hang")
LOST_NODE = FailureCause("node", loses_node=True)
SMALL = RunModel(
    gpus=32, steps=1000, save_interval_s=1000.0, save_s=10.0, commit_s=0.0, notice_s=5.0, hang_s=70.0, decide_s=20.0,
    start_s=100.0, load_s=50.0, warm_up_s=30.0, spares=0, repair_s=1e5,
)  # fmt: skip
"""Four nodes, 10,000 s of steps."""
NEVER = Event(1e12, CRASH)


def event(seconds: float, cause: FailureCause, nodes: int = 0, gpus: int = 32) -> Event:
    return Event(seconds * gpus, cause, nodes)


def test_the_best_interval_is_dalys() -> None:
    """The same failures at other intervals: none is better than the formula's by more than their noise."""
    costs = Costs(3.1 * 3600.0, 300.0, 20.0)
    best, shares = daly_interval_s(costs), {}
    for factor in (0.5, 0.8, 1.0, 1.25, 2.0):
        model, table = of_costs(costs, factor * best, 3000 * costs.mtbf_s / 86400)
        found = simulate(model, random_events(model, table, seed=3))
        shares[factor] = account(found.attempts).effective_time or 0.0
    assert shares[1.0] > max(shares.values()) - 5e-4
    assert shares[1.0] > shares[0.5] + 0.005 and shares[1.0] > shares[2.0] + 0.005


def test_every_second_of_a_crash_a_hang_and_a_planned_stop() -> None:
    planned = FailureCause("planned", kind="planned")
    events = [event(2500.0, CRASH), event(1500.0, HANG), event(700.0, planned), NEVER]
    found = simulate(SMALL, events)
    crash, hang, stop, last = found.attempts
    spent = [{name: seconds for name, seconds in one.seconds.items() if seconds} for one in found.attempts]
    # 180 s to the first full step, then 1,000 s of steps and 10 s of a save: two are committed after 2,200 s.
    assert spent[0] == {"start": 100, "load": 50, "step": 2030, "lost": 300, "save": 20, "idle": 5}
    assert (crash.first_iteration, crash.last_iteration, crash.committed_iteration) == (0, 230, 200)
    assert spent[1] == {"start": 100, "load": 50, "step": 1030, "lost": 310, "save": 10, "hang": 70}
    assert hang.start == crash.end + 20.0
    # What a planned stop has trained is saved.
    assert spent[2] == {"start": 100, "load": 50, "step": 550, "save": 10, "idle": 5}
    assert (stop.first_iteration, stop.last_iteration, stop.outcome, stop.exit_code) == (300, 352, "stopped", 75)
    assert (last.outcome, last.last_iteration, last.seconds["save"]) == ("complete", 1000, 7 * 10)
    assert summarize(RecordedRun(settle(found.attempts), {})).interruptions == 2
    losses = lost_gpu_seconds(found.attempts, 32)
    assert losses["crash", "start"] == 100 * 32 and losses["crash", "between attempts"] == 20 * 32
    assert losses["hang", "hang"] == 70 * 32 and losses["first start", "load"] == 50 * 32


def test_a_failure_before_the_commit_loses_the_save() -> None:
    late = simulate(replace(SMALL, commit_s=400.0), [event(2500.0, CRASH), NEVER]).attempts[0]
    assert (late.committed_iteration, late.saves, late.seconds["save"]) == (100, 1, 20.0)
    assert late.commits == ((100.0 + 50.0 + 30.0 + 1010.0 + 400.0, 100),)


def test_local_copies_save_what_a_lost_rack_does_not() -> None:
    run = replace(SMALL, local_interval_s=100.0, local_save_s=1.0, local_load_s=4.0, spares=9)
    # 150 + 30 s, then 100 s of steps and 1 s of a copy: eight copies after 1,000 s, none of them remote.
    one, other, after = simulate(run, [event(1000.0, LOST_NODE, 1), event(500.0, LOST_NODE, 2), NEVER]).attempts[:3]
    assert (one.committed_iteration, other.first_iteration, other.seconds["load"]) == (80, 80, 4.0)
    assert (after.first_iteration, after.seconds["load"]) == (0, 50.0)
    assert account([one, other, after]).seconds["step"] == pytest.approx(10_030.0)
    # Nine copies before each remote save: two cycles of 1,019 s, and half an interval of a third.
    later = simulate(run, [event(180.0 + 2 * 1019.0 + 50.0, CRASH), NEVER]).attempts[0]
    assert (later.last_iteration, later.committed_iteration, later.seconds["save"]) == (205, 200, 2 * 19.0)


def test_a_run_on_one_node_has_no_copy_on_another() -> None:
    run = replace(SMALL, gpus=4, local_interval_s=100.0, spares=9)
    for cause, nodes, resumed in ((CRASH, 0, 80), (LOST_NODE, 1, 0)):
        _, after = simulate(run, [event(1000.0, cause, nodes, gpus=4), event(1e9, CRASH)]).attempts
        assert after.first_iteration == resumed


@pytest.mark.parametrize(("spares", "least", "expected"), [(1, None, "spare"), (0, None, "waits"), (0, 3, "smaller")])
def test_a_lost_node_is_replaced_or_waited_for_or_missing(spares: int, least: int | None, expected: str) -> None:
    run = replace(SMALL, spares=spares, elastic_min_nodes=least, repair_s=5000.0)
    found = simulate(run, [event(100.0, LOST_NODE, 1), NEVER, NEVER])
    first, second, *more = found.attempts
    gap = second.start - first.end
    assert gap == (5000.0 if expected == "waits" else 20.0)
    assert found.hidden["node", "waiting"] == (4980.0 * 32 if expected == "waits" else 0.0)
    if expected == "smaller":
        # With three of four nodes a step takes 4/3 as long; then the node is back, and the run restarts after a save.
        assert (second.world_size, more[0].world_size, second.cause) == (24, 32, "node returned")
        assert second.end - second.seconds["idle"] - 10.0 == pytest.approx(first.end + 5000.0)
        assert second.last_iteration == int((second.seconds["step"] - 30.0) * 3 / 4 / 10)
        assert lost_gpu_seconds(found.attempts, 32)["fewer GPUs", "fewer GPUs"] == pytest.approx(
            second.seconds["step"] * 8
        )


def test_two_lost_nodes_need_two_spares() -> None:
    for spares, gap in ((1, 5000.0), (2, 20.0)):
        run = replace(SMALL, spares=spares, repair_s=5000.0)
        first, second = simulate(run, [event(100.0, LOST_NODE, 2), NEVER]).attempts
        assert second.start - first.end == gap


def test_a_slow_node_is_found_and_replaced() -> None:
    run = replace(SMALL, straggler_factor=2.0, straggler_s=600.0, spares=1)
    found = simulate(run, [event(480.0, FailureCause("slow node", kind="slow"), 1), NEVER, NEVER])
    slow = found.attempts[0]
    assert slow.seconds["start"] + slow.seconds["load"] + slow.seconds["step"] == 480.0 + 600.0
    assert slow.last_iteration == (300 + 300) // 10  # and 300 s of 600 were lost
    assert found.hidden["slow node", "slow steps"] == 300.0 * 32
    (never,) = simulate(
        replace(run, straggler_s=1e9), [event(480.0, FailureCause("slow", kind="slow")), NEVER]
    ).attempts
    assert (never.outcome, never.last_iteration) == ("complete", 1000)
    assert never.seconds["step"] > 30.0 + 2 * (10_000.0 - 300.0)


def test_a_slow_node_that_is_not_found_is_in_the_next_attempt_too() -> None:
    slow = FailureCause("slow node", kind="slow", loses_node=True)
    run = replace(SMALL, straggler_factor=2.0, straggler_s=3000.0, spares=9)
    events = [event(480.0, slow, 1), event(1000.0, CRASH), NEVER, NEVER]
    first, second, last = simulate(run, events).attempts
    assert (first.cause, second.cause, last.outcome) == ("crash", "slow node", "complete")
    # It was slow for 1,000 s of the first, and for the 2,000 s that are left of the second, 150 of them without a step.
    assert second.wall_s - second.second("idle") - second.second("save") == pytest.approx(2000.0)
    # A slow node that is not found slows steps, not the start: there are not more of them than were to be done.
    late = simulate(replace(run, straggler_s=1e9), [event(10.0, slow), NEVER]).attempts[-1]
    assert (late.outcome, late.last_iteration) == ("complete", 1000)


def test_a_run_of_days_ends_when_they_are_over() -> None:
    """In a hang, and in the wait for a decision."""
    run = replace(SMALL, steps=None, days=0.1, decide_s=9000.0)
    for cause, hang_s in ((CRASH, 0.0), (HANG, 9000.0)):
        found = simulate(replace(run, hang_s=hang_s), [event(1000.0, cause), NEVER, NEVER]).attempts
        assert account(found).wall_s == pytest.approx(8640.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"elastic_min_nodes": 40, "repair_s": 2e5},
        {"local_interval_s": 300.0, "save_interval_s": 9e3, "correlated_share": 0.3},
    ],
)
def test_every_gpu_second_is_work_or_has_a_cause(changes: dict[str, float]) -> None:
    """What is not lost is the work that was done, at full size and speed."""
    table = read_table(LLAMA_3).changed(30.0, 100.0)
    run = RunModel(**{"gpus": 512, "steps": 50_000, "spares": 2, "correlated_share": 0.0, **changes})  # type: ignore[arg-type]
    run = run.with_interval(table)
    found = simulate(run, random_events(run, table, seed=1))
    losses = lost_gpu_seconds(found.attempts, run.gpus)
    for (cause, part), gpu_s in found.hidden.items():
        losses[cause, part] += gpu_s * (part != "waiting")
    wall_s = account(found.attempts).wall_s
    assert wall_s - sum(losses.values()) / run.gpus == pytest.approx(500_000.0, rel=2e-3)
    assert math.isclose(wall_s, found.attempts[-1].end)
    assert len(found.attempts) > 30 and min(losses.values()) > -1e-6


def test_llama_3s_table_and_how_often_its_causes_come() -> None:
    table = read_table(LLAMA_3)
    failures = [cause for cause in table.causes if cause.is_failure]
    assert sum(cause.count for cause in failures) == 419 and len(failures) == 18
    assert table.mtbf_s(1) / 3600 == pytest.approx(50_700, rel=1e-3)
    events = random_events(RunModel(), table, seed=0)
    found = Counter(next(events).cause.name for _ in range(20_000))
    together = random_events(RunModel(correlated_share=0.25, correlated_nodes=3), table, seed=0)
    nodes = Counter(one.nodes for one, _ in zip(together, range(5000)) if one.cause.loses_node)
    assert nodes.keys() == {1, 3} and nodes[3] / nodes.total() == pytest.approx(0.25, abs=0.03)
    assert found["faulty GPU"] / 20_000 == pytest.approx(148 / 466, abs=0.01)


def test_equal_seeds_meet_equal_events_whatever_the_rate() -> None:
    table = read_table(LLAMA_3)
    slower = replace(table, gpu_hours=2 * table.gpu_hours)
    pairs = zip(random_events(RunModel(), table, 5), random_events(RunModel(), slower, 5))
    for _, (one, other) in zip(range(50), pairs):
        assert (one.cause, one.nodes) == (other.cause, other.nodes) and other.gpu_s == pytest.approx(2 * one.gpu_s)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("interruptions = 466", "interruptions = 419"), "its causes have 466 interruptions, and it states 419"),
        (('kind = "hang"', 'kind = "hung"'), "no table .kind or count of network switch or cable"),
        (("count = 148", "counts = 148"), "is no table"),
        (("gpu_hours = 21_233_664", ""), "is no table"),
        (("gpu_hours = 21_233_664", f"gpu_hours = 1{'0' * 400}"), "is no table"),
        (("gpu_hours = 21_233_664", f"gpu_hours = {'[' * 5000}"), "is no table"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "causes.toml"
    path.write_text(LLAMA_3.read_text().replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_table(path)


def test_a_run_that_never_ends_is_refused() -> None:
    table = FailureTable((FailureCause("always", 1.0),), 1.0, "")
    with pytest.raises(ConfigError, match="not over after 100,000 interruptions"):
        simulate(SMALL, random_events(SMALL, table, seed=0))


# --- records -------------------------------------------------------------------------------------------------


def test_the_model_of_simulated_records_is_the_one_that_was_simulated() -> None:
    table = FailureTable((CRASH, HANG), 2.0, "")
    table = replace(
        table, causes=tuple(replace(one, count=1.0) for one in table.causes), gpu_hours=2 * 32 * 4000 / 3600
    )
    found = simulate(replace(SMALL, data_share=0.1), random_events(SMALL, table, seed=4))
    known = estimate(RecordedRun(settle(found.attempts), {}))
    # A part of a step comes to what precedes the end of the processes.
    for name in ("step_s", "save_interval_s", "save_s", "notice_s", "hang_s", "decide_s", "data_share"):
        assert getattr(known.run, name) == pytest.approx(getattr(SMALL, name) or 0.1, rel=0.02, abs=3.0), name
    assert {cause.name for cause in known.table.causes} == {"crash", "hang"}
    again = simulate(known.run, known.events)
    assert account(again.attempts).effective_time == pytest.approx(account(found.attempts).effective_time, abs=3e-3)


def test_the_replay_of_a_disturbed_run_has_its_effective_time(tmp_path: Path) -> None:
    """A kill, an exception and a hang in a job of two ranks, with steps that take longer than the noise of a start."""
    faults = parse_faults("kill@7:rank1,exception@14,stop@21:rank0,delay@1+24:rank0:0.15:times9")
    job = DisturbedJob(Plan(0, "data", tuple(faults)), tmp_path)
    job.run()
    assert not job.violations
    records = read_run(job.save)
    recorded, known = account(records.attempts), estimate(records)
    replayed = simulate(known.run, known.events).attempts
    assert [one.cause for one in replayed] == ["killed", "exception", "stopped_process", None]
    assert [one.last_iteration for one in replayed] == [one.last_iteration for one in records.attempts]
    assert [one.committed_iteration for one in replayed] == [one.committed_iteration for one in records.attempts]
    assert 0.1 < (recorded.effective_time or 0.0) < 0.9
    assert account(replayed).effective_time == pytest.approx(recorded.effective_time, abs=0.01)
    assert account(replayed).wall_s == pytest.approx(recorded.wall_s, rel=0.01)
