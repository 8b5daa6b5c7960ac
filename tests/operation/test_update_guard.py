"""The policies for spikes and for numbers that are not finite, iteration by iteration."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from megatron.config.operation import OperationConfig
from megatron.features.spikes.flags import MAX_SKIPPED, MAX_SKIPPED_IN_ROW, RECENT, Action, UpdateGuard, Verdict

WINDOW = 10
GO, BACK, STOP = Action.CONTINUE, Action.ROLL_BACK, Action.STOP


def guard_with(stops_at_nan: bool = True, **flags: Any) -> UpdateGuard:
    return UpdateGuard(OperationConfig(spike_window=WINDOW, **flags), stops_at_nan)


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


QUIET = "n" * WINDOW


def test_a_quiet_run_is_applied_without_a_word() -> None:
    for policy in ("log", "skip", "rollback"):
        steps = run(guard_with(spike_policy=policy), "n" * 50)
        assert steps == [Step(True, Verdict(), {})] * 50


def test_a_spike_is_logged_once_and_applied() -> None:
    *before, first, second, after = run(guard_with(), QUIET + "ssn")
    assert all(step.is_applied for step in (*before, first, second, after))
    assert first.verdict.cause == "spike" and first.verdict.first_iteration == WINDOW + 1
    assert first.verdict.message is not None and f"Iteration {WINDOW + 1} begins a spike" in first.verdict.message
    assert second.verdict.message is None and first.metrics["spike"] > 6
    assert not after.metrics


def test_a_skipped_spike_is_counted_and_does_not_enter_the_window() -> None:
    steps = run(guard_with(spike_policy="skip"), QUIET + "snsns")
    assert [step.is_applied for step in steps[WINDOW:]] == [False, True, False, True, False]
    assert actions(steps) == [GO] * len(steps)
    assert [step.metrics.get("skipped_updates") for step in steps[WINDOW:]] == [1, 1, 2, 2, 3]
    message = steps[WINDOW].verdict.message
    assert message is not None and message.endswith("its update is skipped (--spike-policy skip)")


@pytest.mark.parametrize(("policy", "end"), [("skip", STOP), ("rollback", BACK)])
def test_too_many_faults_in_a_row(policy: str, end: Action) -> None:
    steps = run(guard_with(nan_policy=policy), "nn" + "x" * MAX_SKIPPED_IN_ROW + "n" + "x" * (MAX_SKIPPED_IN_ROW + 1))
    assert actions(steps) == [GO] * (len(steps) - 1) + [end]
    last = steps[-1].verdict
    assert (last.cause, last.first_iteration) == ("not_finite", 3 + MAX_SKIPPED_IN_ROW + 1)
    assert last.message is not None and f"--nan-policy {policy}" in last.message


@pytest.mark.parametrize(("policy", "end"), [("skip", STOP), ("rollback", BACK)])
def test_too_many_faults_in_a_thousand_iterations(policy: str, end: Action) -> None:
    pairs = "xn" * MAX_SKIPPED
    assert actions(run(guard_with(nan_policy=policy), pairs + "x"))[-1] is end
    # One iteration more than a thousand after the first.
    assert set(actions(run(guard_with(nan_policy=policy), pairs + "n" * (RECENT - len(pairs)) + "x"))) == {GO}


@pytest.mark.parametrize(
    ("flags", "events", "verdict"),
    [
        ({"spike_policy": "skip"}, QUIET + "s" * (MAX_SKIPPED_IN_ROW + 1), (STOP, "spike", WINDOW + 1)),
        ({"spike_policy": "rollback"}, QUIET + "s", (BACK, "spike", WINDOW + 1)),
        # Without a policy a fault stops the run, unless it is not checked.
        ({}, "nx", (STOP, "not_finite", 2)),
        ({"stops_at_nan": False}, "x" * 50, (GO, None, 0)),
        # An overflow under a loss scale is nothing.
        ({"nan_policy": "skip", "spike_policy": "rollback"}, QUIET + "o" * 30 + "n", (GO, None, 0)),
        # The two kinds of skipped updates share the limits.
        ({"nan_policy": "rollback", "spike_policy": "skip"}, QUIET + "sxsx", (BACK, "not_finite", WINDOW + 1)),
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
    assert actions(run(guard, "s" * WINDOW, WINDOW + 1)) == [GO] * WINDOW
