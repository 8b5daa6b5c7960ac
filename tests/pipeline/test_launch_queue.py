"""No schedule deadlocks, and none loses much, where all streams of a GPU share one hardware queue."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress

import pytest

from megatron.schedules.catalog import SCHEDULES, build_schedule
from megatron.schedules.schedule import Kind, Schedule, ScheduleError
from megatron.schedules.simulator import (
    Durations,
    Launch,
    needs_receives_ahead,
    pipeline_launches,
    run_launches,
    simulate,
)

TIMES: dict[Kind, float] = {"F": 1.0, "B": 1.0, "W": 1.0}


def last_end(ranks: Sequence[Mapping[Hashable, float]]) -> float:
    return max(end for rank in ranks for end in rank.values())


def durations_of(schedule: Schedule) -> dict[Kind, float]:
    return TIMES if schedule.splits_backward else {**TIMES, "B": 2.0}


def run_pipeline(schedule: Schedule, send: float, overlap: bool, one_queue: bool) -> float:
    stages = range(schedule.placement.num_stages)
    programs = [list(pipeline_launches(schedule, stage, durations_of(schedule), send, overlap)) for stage in stages]
    return last_end(run_launches(programs, one_queue))


def schedules() -> list[Schedule]:
    found = []
    for name in SCHEDULES:
        for stages in (2, 4, 8):
            for count in (stages, 2 * stages + 1, 4 * stages):
                with suppress(ScheduleError):  # sizes that the schedule does not support
                    found.append(build_schedule(name, stages, count, num_chunks=2 if name == "interleaved" else None))
    return found


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.placement.num_stages}-{schedule.num_microbatches}"


@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_no_schedule_deadlocks_and_one_queue_costs_little(schedule: Schedule) -> None:
    for overlap in (True, False):
        receives_ahead = overlap or needs_receives_ahead(schedule)
        by_stream, by_queue = (run_pipeline(schedule, 0.02, receives_ahead, one_queue) for one_queue in (False, True))
        assert by_queue <= by_stream * (1.001 if overlap else 1.02)


@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_interleaved_groups_longer_than_the_pipeline_need_receives_ahead(schedule: Schedule) -> None:
    """Without it a stage sends twice before the next one receives: its queue is stuck behind the second send."""
    stages = schedule.placement.num_stages
    is_longer = schedule.name == "interleaved" and schedule.num_microbatches % stages > 0
    assert needs_receives_ahead(schedule) == is_longer
    if is_longer:
        run_pipeline(schedule, 0.02, overlap=False, one_queue=False)
        with pytest.raises(ScheduleError, match="the launches deadlock"):
            run_pipeline(schedule, 0.02, overlap=False, one_queue=True)


@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_with_a_queue_for_each_stream_times_are_the_simulators(schedule: Schedule) -> None:
    """With messages that take no time."""
    times = (1.0,) * schedule.placement.num_virtual_stages
    expected = simulate(schedule, Durations(times, times, times)).makespan
    assert run_pipeline(schedule, 0.0, overlap=True, one_queue=False) == pytest.approx(expected)


def test_two_ranks_that_send_before_they_receive_deadlock_in_one_queue_alone() -> None:
    """Each waits for its send, which the other takes only later in its queue."""
    programs = [
        [
            Launch("send", "out", 1.0, exchange=f"from {rank}"),
            Launch("after it", "compute", 1.0, after=("send",)),
            Launch("receive", "in", 1.0, exchange=f"from {1 - rank}"),
        ]
        for rank in range(2)
    ]
    assert last_end(run_launches(programs, one_queue=False)) == 2.0
    with pytest.raises(ScheduleError, match="rank 0 before after it, rank 1 before after it"):
        run_launches(programs, one_queue=True)


def test_a_launch_that_waits_holds_back_later_ones_of_other_streams() -> None:
    program = [
        Launch("gather 0", "gathers", 5.0),
        Launch("gather 1", "gathers", 5.0),
        Launch("layer 0", "compute", 7.0, after=("gather 0",)),
        Launch("layer 1", "compute", 7.0, after=("gather 1",)),
    ]
    (by_stream,), (by_queue,) = run_launches([program], False), run_launches([program], True)
    assert (by_stream["layer 0"], by_stream["layer 1"]) == (12.0, 19.0)
    assert (by_queue["layer 0"], by_queue["layer 1"]) == (12.0, 19.0)
    third = [Launch("gather 2", "gathers", 5.0), Launch("layer 2", "compute", 7.0, after=("gather 2",))]
    longer = [*program[:2], third[0], *program[2:], third[1]]
    (by_queue,) = run_launches([longer], True)
    assert by_queue["layer 0"] == 17.0  # not 12: gather 2 waits for gather 1 at the head of the queue
