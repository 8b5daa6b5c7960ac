"""Every kind of broken schedule is refused, by name."""

import random
from dataclasses import replace

import pytest

from megatron.schedules.catalog.interleaved import interleaved
from megatron.schedules.registry import SCHEDULES, ScheduleName, build_schedule
from megatron.schedules.schedule import Action, Schedule, ScheduleError, Shape
from megatron.schedules.simulator import peak_live_activations, verify
from tests.pipeline.token_game import TokenGame

every_schedule = pytest.mark.parametrize("name", list(SCHEDULES))


def action(words: str) -> Action:
    """From, say, "F3.1"."""
    microbatch, chunk = words[1:].split(".")
    kind = words[0]
    assert kind in ("F", "B", "W")
    return Action(kind, int(microbatch), int(chunk))  # type: ignore[arg-type]


def with_actions(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    by_stage = list(schedule.actions)
    by_stage[stage] = tuple(actions)
    return replace(schedule, actions=tuple(by_stage))


def swapped(schedule: Schedule, stage: int, first: str, second: str) -> Schedule:
    """With two actions of ``stage`` in each other's place."""
    exchange = {action(first): action(second), action(second): action(first)}
    return with_actions(schedule, stage, [exchange.get(one, one) for one in schedule.actions[stage]])


def added(schedule: Schedule, stage: int, words: str) -> Schedule:
    return with_actions(schedule, stage, [*schedule.actions[stage], action(words)])


@every_schedule
def test_each_action_is_needed_once(name: ScheduleName) -> None:
    schedule = build_schedule(name, 3, 5)
    verify(schedule)
    for stage, actions in enumerate(schedule.actions):
        for number, one in enumerate(actions):
            rest = [*actions[:number], *actions[number + 1 :]]
            with pytest.raises(ScheduleError, match=f"stage {stage}: missing {one}; too many nothing"):
                verify(with_actions(schedule, stage, rest))
            with pytest.raises(ScheduleError, match=f"stage {stage}: missing nothing; too many {one}"):
                verify(with_actions(schedule, stage, [*actions[:number], one, *actions[number:]]))


@pytest.mark.parametrize(
    ("name", "foreign"),
    [("1f1b", "F8.0"), ("1f1b", "B0.1"), ("1f1b", "W0.0"), ("interleaved", "F0.2"), ("zb-v", "W8.1")],
)
def test_actions_of_no_microbatch_chunk_or_kind_of_the_schedule_are_refused(name: ScheduleName, foreign: str) -> None:
    with pytest.raises(ScheduleError, match=f"stage 2: missing nothing; too many {foreign}"):
        verify(added(build_schedule(name, 4, 8), 2, foreign))


@pytest.mark.parametrize(
    ("name", "stage", "first", "second", "message"),
    [
        # B before its F, W before its B.
        ("1f1b", 3, "F0.0", "B0.0", "1f1b deadlocks: .*stage 3 before "),
        ("gpipe", 0, "F7.0", "B7.0", "gpipe deadlocks: .*stage 0 before "),
        ("interleaved", 3, "F0.1", "B0.1", "interleaved deadlocks: .*stage 3 before "),
        ("zb-h1", 0, "F3.0", "B3.0", "zb-h1 deadlocks: .*stage 0 before "),
        ("zb-h1", 0, "B0.0", "W0.0", "zb-h1 deadlocks: .*stage 0 before "),
        ("zb-v", 2, "B3.1", "W3.1", "zb-v deadlocks: .*stage 2 before "),
        ("dualpipe-v", 1, "B5.0", "W5.0", "dualpipe-v deadlocks: .*stage 1 before "),
        # GPipe's stage can run its passes in any order, but a channel delivers in the order of sending.
        ("gpipe", 3, "F0.0", "F1.0", "stage 3 does not receive the F messages of stage 2 in the order"),
        ("gpipe", 0, "B0.0", "B1.0", "stage 0 does not receive the B messages of stage 1 in the order"),
    ],
)
def test_passes_before_their_inputs_and_messages_in_another_order_are_refused(
    name: ScheduleName, stage: int, first: str, second: str, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(swapped(build_schedule(name, 4, 8), stage, first, second))


def test_stages_that_wait_for_each_other_are_refused() -> None:
    """Each stage's own order is fine; but without its warm-up stage 0 waits for a gradient that waits for stage 0."""
    schedule = build_schedule("1f1b", 4, 8)
    no_warm_up = [Action(kind, microbatch, 0) for microbatch in range(8) for kind in ("F", "B")]
    with pytest.raises(ScheduleError, match=r"1f1b deadlocks: stage 0 before B0\.0, stage 1 before F1\.0"):
        verify(with_actions(schedule, 0, no_warm_up))


@pytest.mark.parametrize(("stages", "group_size", "microbatches"), [(3, 1, 4), (4, 2, 6), (8, 4, 16)])
def test_groups_much_shorter_than_the_pipeline_lock_up(stages: int, group_size: int, microbatches: int) -> None:
    """The second chunk would start before the pipeline delivers its input; hence a least size of groups."""
    schedule = build_schedule("interleaved", stages, microbatches, 2)
    shape = Shape(stages, microbatches, 2, group_size)
    actions = tuple(tuple(interleaved(stage, shape)) for stage in range(stages))
    with pytest.raises(ScheduleError, match="deadlocks"):
        verify(replace(schedule, actions=actions))


@every_schedule
def test_more_activations_than_allowed_are_refused(name: ScheduleName) -> None:
    schedule = build_schedule(name, 4, 12)
    peaks = peak_live_activations(schedule)
    verify(schedule, peaks)
    for stage in range(4):
        bound = tuple(peak - (one == stage) for one, peak in enumerate(peaks))
        with pytest.raises(ScheduleError, match=f"stage {stage}: holds activations of {peaks[stage]} passes, not"):
            verify(schedule, bound)


def test_activations_live_until_their_weight_gradients() -> None:
    schedule = build_schedule("zb-h1", 4, 12)
    late = sorted(schedule.actions[1], key=lambda one: one.kind == "W")
    with pytest.raises(ScheduleError, match="stage 1: holds activations of 12 passes, not 4"):
        verify(with_actions(schedule, 1, late), (4, 4, 4, 4))


def changed(schedule: Schedule, generator: random.Random) -> Schedule:
    """One action of a stage at another place, half of the time the next."""
    stage = generator.randrange(schedule.placement.num_stages)
    actions = list(schedule.actions[stage])
    place = generator.randrange(len(actions))
    target = generator.choice([max(place - 1, 0), generator.randrange(len(actions))])
    actions.insert(target, actions.pop(place))
    return with_actions(schedule, stage, actions)


@every_schedule
def test_the_verdict_is_that_of_playing_the_schedule(name: ScheduleName) -> None:
    """Over schedules drawn at random around a good one: accepted if and only if tokens play it to the end."""
    generator = random.Random(1)
    verdicts = set()
    for _ in range(120):
        schedule = build_schedule(name, generator.randint(2, 4), generator.randint(2, 6))
        for _ in range(generator.randint(1, 3)):
            schedule = changed(schedule, generator)
        runs = TokenGame(schedule).play().is_won()
        assert is_accepted(schedule) == runs, schedule
        verdicts.add(runs)
    assert verdicts == {True, False}


def is_accepted(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True
