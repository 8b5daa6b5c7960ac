"""Simulation by the clock and by small steps, and the verifier: every kind of broken schedule is refused, by name."""

import random
from dataclasses import replace
from typing import get_args

import pytest

from benchmarks.lib.shared_cores import makespan_on_cores
from megatron.schedules.catalog import ScheduleName, build_schedule
from megatron.schedules.catalog.one_f_one_b import interleaved
from megatron.schedules.schedule import Action, Schedule, ScheduleError, Shape
from megatron.schedules.simulator import Durations, Timeline, execution_order, peak_live_activations, simulate, verify
from tests.pipeline.token_game import TokenGame

NAMES = get_args(ScheduleName)
TOLERANCE = 1e-12

every_schedule = pytest.mark.parametrize("name", NAMES)


def run(
    name: ScheduleName,
    stages: int,
    microbatches: int,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    *,
    send: float = 0.0,
    chunks: int | None = None,
) -> Timeline:
    schedule = build_schedule(name, stages, microbatches, chunks)
    return simulate(schedule, Durations.uniform(schedule.placement, *times, send))


def idle_time(timeline: Timeline, microbatches: int, times: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> float:
    """What a batch costs beyond the work of a stage."""
    return timeline.makespan - microbatches * sum(times)


# Formulas


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_gpipe_and_1f1b_idle_for_p_minus_1_of_m_plus_p_minus_1(name: ScheduleName, stages: int) -> None:
    for microbatches in (1, 2, 3, 4, 7, 8, 16, 31, 64):
        expected = (stages - 1) / (microbatches + stages - 1)
        for times in ((1.0, 1.0, 1.0), (1.0, 2.0, 0.0), (18.522, 18.086, 9.337)):
            assert run(name, stages, microbatches, times).bubble_fraction == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_idle_time_by_the_chunks(stages: int, chunks: int) -> None:
    times = (1.0, 1.25, 0.75)
    for microbatches in (stages, stages + 1, 2 * stages, 5 * stages):
        plain = idle_time(run("1f1b", stages, microbatches, times), microbatches, times)
        interleaved = idle_time(run("interleaved", stages, microbatches, times, chunks=chunks), microbatches, times)
        assert interleaved == pytest.approx(plain / chunks, rel=TOLERANCE)


@pytest.mark.parametrize(
    "times", [(1.0, 1.0, 1.0), (3.0, 2.0, 1.0), (18.522, 18.086, 9.337), (1.0, 2.0, 3.0), (2.0, 1.0, 1.5)]
)
def test_zb_h1_idles_for_p_minus_1_times_f_plus_b_minus_w(times: tuple[float, float, float]) -> None:
    """Section 2.2 of the paper: a third of 1F1B if all passes are equal. It takes W to be no longer than F and B;
    otherwise the longer of these remains."""
    forward, backward, weight = times
    expected = max(forward + backward - weight, forward, backward)
    for stages, microbatches in ((2, 2), (4, 8), (8, 9), (16, 64)):
        idle = idle_time(run("zb-h1", stages, microbatches, times), microbatches, times)
        assert idle == pytest.approx((stages - 1) * expected, rel=TOLERANCE)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_zb_v_never_idles_between_its_first_and_last_pass_when_all_are_equal(stages: int) -> None:
    """The last stage cannot start earlier, nor be done sooner: no schedule of this placement takes less time."""
    for microbatches in (2 * stages - 1, 2 * stages, 5 * stages):
        timeline = run("zb-v", stages, microbatches)
        assert max(map(abs, timeline.stage_idle_fractions)) < TOLERANCE
        assert timeline.makespan == pytest.approx(3 * microbatches + (stages - 1) / 2, rel=TOLERANCE)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_dualpipe_v_takes_as_long_as_zb_v_when_all_passes_are_equal(stages: int) -> None:
    for microbatches in (2 * stages, 5 * stages):
        expected = run("zb-v", stages, microbatches).makespan
        assert run("dualpipe-v", stages, microbatches).makespan == pytest.approx(expected, rel=TOLERANCE)


# The table of Qi et al., arXiv 2401.10241


@pytest.mark.parametrize(
    ("stages", "microbatches", "times", "send", "plain", "interleaved", "chunks", "split"),
    [
        (8, 24, (18.522, 18.086, 9.337), 0.601, 0.2431, 0.1055, 3, 0.1585),
        (8, 64, (18.546, 18.097, 9.321), 0.762, 0.1240, 0.0443, 3, 0.0674),
        (8, 32, (29.802, 29.428, 19.530), 0.577, 0.1898, 0.0628, 4, 0.1045),
        (16, 48, (11.347, 11.248, 8.132), 0.377, 0.2552, 0.1104, 3, 0.1397),
    ],
)
def test_the_papers_bubbles(
    stages: int,
    microbatches: int,
    times: tuple[float, float, float],
    send: float,
    plain: float,
    interleaved: float,
    chunks: int,
    split: float,
) -> None:
    def bubble(name: ScheduleName, chunks: int | None = None) -> float:
        return run(name, stages, microbatches, times, send=send, chunks=chunks).bubble_fraction

    assert round(bubble("1f1b"), 4) == plain
    assert round(bubble("zb-h1"), 4) == split
    # The paper's interleaved schedule hides its messages a little better.
    assert bubble("interleaved", chunks) == pytest.approx(interleaved, abs=0.01)


# Against a game of tokens, tick after tick


def unequal(name: ScheduleName, stages: int, microbatches: int, generator: random.Random) -> tuple[Schedule, Durations]:
    """Times of one to five ticks, and of none to three for messages."""
    schedule = build_schedule(name, stages, microbatches)
    count = schedule.placement.num_virtual_stages
    forward, backward, weight = (tuple(float(generator.randint(1, 5)) for _ in range(count)) for _ in range(3))
    return schedule, Durations(forward, backward, weight, float(generator.randint(0, 3)))


@every_schedule
def test_unequal_stages_run_as_by_the_clock(name: ScheduleName) -> None:
    generator = random.Random(2)
    for _ in range(25):
        schedule, durations = unequal(name, generator.randint(1, 4), generator.randint(1, 6), generator)
        found = {(span.stage, str(span.action)): (span.start, span.end) for span in simulate(schedule, durations).spans}
        assert found == TokenGame(schedule, durations).play().spans


# Stages that share cores


@every_schedule
@pytest.mark.parametrize(("stages", "replicas", "cores"), [(3, 1, 2), (2, 2, 3), (4, 2, 3)])
def test_stages_share_cores_as_in_small_steps(name: ScheduleName, stages: int, replicas: int, cores: int) -> None:
    schedule, durations = unequal(name, stages, 5, random.Random(3))
    durations = replace(durations, send=0.0)
    game = TokenGame(schedule, durations, tick=0.01, cores=cores / replicas).play()
    expected = max(end for _, end in game.spans.values())
    assert makespan_on_cores(schedule, durations, replicas, cores) == pytest.approx(expected, rel=0.02)


@every_schedule
def test_with_a_core_for_each_stage_sharing_changes_nothing_and_one_core_does_all_the_work(name: ScheduleName) -> None:
    schedule, durations = unequal(name, 4, 6, random.Random(3))
    durations = replace(durations, send=0.0)
    timeline = simulate(schedule, durations)
    work = sum(span.end - span.start for span in timeline.spans)
    assert makespan_on_cores(schedule, durations, 2, 8) == pytest.approx(timeline.makespan)
    assert makespan_on_cores(schedule, durations, 2, 1) == pytest.approx(2 * work)
    assert makespan_on_cores(schedule, durations, 2, 3) > max(timeline.makespan, 2 * work / 3)


# Figures of a timeline


def test_the_bubble_is_the_idle_share_of_all_stages_and_not_of_their_spans() -> None:
    """1F1B on 2 stages with 1 microbatch: the last stage starts late, stage 0 waits; neither was slow."""
    timeline = run("1f1b", 2, 1)
    assert timeline.bubble_fraction == pytest.approx(0.5)
    assert timeline.stage_idle_fractions == pytest.approx((0.5, 0.0))
    assert [(str(span.action), span.start, span.end) for span in timeline.stage_spans(0)] == [
        ("F0.0", 0.0, 1.0),
        ("B0.0", 4.0, 6.0),
    ]


def test_a_schedule_that_locks_up_has_no_timeline() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    stuck = Schedule(
        "stuck", schedule.placement, 2, ("F", "B"), tuple(tuple(reversed(one)) for one in schedule.actions)
    )
    with pytest.raises(ScheduleError, match="stuck deadlocks: stage 0"):
        list(execution_order(stuck))
    with pytest.raises(ScheduleError, match="stuck deadlocks: stage 0"):
        simulate(stuck, Durations.uniform(schedule.placement, 1, 1, 1))


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
