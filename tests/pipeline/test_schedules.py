"""Every schedule of every shape runs to its end, within the memory that it claims."""

import itertools
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.parallel import PipelineConfig
from megatron.schedules.catalog import SCHEDULES, ScheduleName, build_schedule
from megatron.schedules.catalog.one_f_one_b import microbatch_groups
from megatron.schedules.schedule import Action, Placement, Schedule, ScheduleError, Shape
from megatron.schedules.simulator import execution_order, peak_live_activations, verify
from tests.pipeline.token_game import TokenGame, places_in_layer_order

NAMES = get_args(ScheduleName)
VARIANTS = [(name, chunks) for name in NAMES for chunks in ((2, 3, 4) if name == "interleaved" else (None,))]
MICROBATCHES = range(1, 34)
MICROBATCHES_OF_16 = (1, 2, 7, 15, 16, 17, 24, 31, 32, 33)

every_variant = pytest.mark.parametrize(("name", "chunks"), VARIANTS)


def claim(schedule: Schedule, name: ScheduleName, group_size: int | None = None) -> tuple[int, ...]:
    placement = schedule.placement
    stages = placement.num_stages
    shape = Shape(stages, schedule.num_microbatches, placement.num_chunks, group_size or stages)
    return tuple(SCHEDULES[name].live_activations(stage, shape) for stage in range(stages))


def assert_runs(schedule: Schedule, name: ScheduleName, group_size: int | None = None) -> None:
    """By the verifier, and by a game of tokens that shares no code with it; forward passes alone run too."""
    bound = claim(schedule, name, group_size)
    verify(schedule, bound)
    game = TokenGame(schedule).play()
    assert game.is_won(), game.left
    assert tuple(game.peaks) == peak_live_activations(schedule)
    # With as many microbatches as fill the pipeline twice, a stage holds what is claimed.
    stages, count = schedule.placement.num_stages, schedule.num_microbatches
    assert bound == tuple(game.peaks) or count < 2 * max(stages, group_size or 1)
    forward = schedule.forward_only()
    assert not any(TokenGame(forward).play().left)
    ran = sorted(execution_order(forward))
    assert ran == sorted(
        (stage, Action("F", microbatch, chunk))
        for stage, chunk in places_in_layer_order(schedule.placement.num_stages, schedule.placement.num_chunks, "loop")
        for microbatch in range(schedule.num_microbatches)
    )


@every_variant
@pytest.mark.parametrize("stages", [*range(1, 9), pytest.param(16, marks=pytest.mark.slow(reason="large shapes"))])
def test_every_shape_runs_within_the_claimed_memory(name: ScheduleName, chunks: int | None, stages: int) -> None:
    for microbatches in MICROBATCHES if stages <= 8 else MICROBATCHES_OF_16:
        assert_runs(build_schedule(name, stages, microbatches, chunks), name)


@settings(max_examples=100)
@given(stages=st.integers(1, 8), surplus=st.integers(0, 9), microbatches=st.integers(1, 40), chunks=st.integers(2, 4))
def test_larger_groups_of_microbatches_run_too(stages: int, surplus: int, microbatches: int, chunks: int) -> None:
    group_size = stages + surplus
    schedule = build_schedule("interleaved", stages, microbatches, chunks, group_size)
    assert_runs(schedule, "interleaved", group_size)


# Groups of microbatches


@given(stages=st.integers(1, 20), surplus=st.integers(0, 20), microbatches=st.integers(1, 100))
def test_groups_cover_the_batch_and_are_neither_too_short_for_the_pipeline_nor_too_long_for_memory(
    stages: int, surplus: int, microbatches: int
) -> None:
    groups = microbatch_groups(Shape(stages, microbatches, 2, stages + surplus))
    numbers = list(itertools.chain(*groups))
    assert numbers == list(range(len(numbers)))
    # The last group may be filled up with microbatches that are not there, and never by as many as the pipeline's.
    assert microbatches <= len(numbers) < microbatches + stages
    assert all(min(stages, microbatches) <= len(group) <= stages + surplus + 1 for group in groups)


@pytest.mark.parametrize(
    ("stages", "group_size", "microbatches", "sizes"),
    [
        (4, 4, 8, [4, 4]),
        (4, 4, 10, [5, 5]),
        (4, 4, 5, [5]),
        (4, 4, 11, [4, 4, 4]),
        (4, 4, 15, [5, 5, 5]),
        (4, 6, 10, [6, 4]),
        (4, 6, 9, [6, 4]),
        (4, 4, 3, [3]),
        (4, 8, 6, [6]),
    ],
)
def test_what_is_left_over_lengthens_groups_by_one_or_is_a_group_of_its_own(
    stages: int, group_size: int, microbatches: int, sizes: list[int]
) -> None:
    groups = microbatch_groups(Shape(stages, microbatches, 2, group_size))
    assert [len(group) for group in groups] == sizes


# Orders


@pytest.mark.parametrize(
    ("name", "microbatches", "orders"),
    [
        ("gpipe", 2, ["F0 F1 B0 B1", "F0 F1 B0 B1"]),
        ("1f1b", 3, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        ("zb-h1", 3, ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
        (
            "interleaved",
            4,
            ["F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3", "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3"],
        ),
        (
            "zb-v",
            3,
            [
                "F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2",
                "F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2",
            ],
        ),
        (
            "dualpipe-v",
            4,
            [
                "F0 F1 F2 f0 b0 w0 f1 F3 b1 w1 f2 B0 W0 b2 w2 f3 B1 W1 b3 w3 B2 W2 B3 W3",
                "F0 f0 F1 f1 F2 b0 w0 f2 B0 W0 F3 b1 w1 f3 B1 W1 b2 w2 B2 W2 b3 B3 w3 W3",
            ],
        ),
    ],
)
def test_the_orders_of_two_stages(name: ScheduleName, microbatches: int, orders: list[str]) -> None:
    """Lower case is the second chunk."""
    schedule = build_schedule(name, 2, microbatches)
    assert [" ".join(map(in_short, actions)) for actions in schedule.actions] == orders


def in_short(action: Action) -> str:
    return f"{action.kind.lower() if action.chunk else action.kind}{action.microbatch}"


# Chunks


@pytest.mark.parametrize(("chunks", "shape"), [(1, "loop"), (2, "loop"), (3, "loop"), (2, "v")])
def test_the_chunks_lie_in_the_order_of_the_layers(chunks: int, shape: str) -> None:
    placement = Placement(4, chunks, "v" if shape == "v" else "loop")
    expected = places_in_layer_order(4, chunks, shape)
    assert [placement.location(number) for number in range(placement.num_virtual_stages)] == expected
    assert [placement.virtual_stage(*place) for place in expected] == list(range(4 * chunks))


# What is refused


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks", "group_size", "message"),
    [
        ("1f1b", 4, 8, 2, None, "1f1b needs one chunk per stage, not 2"),
        ("gpipe", 4, 8, 2, None, "gpipe needs one chunk"),
        ("zb-h1", 4, 8, 2, None, "zb-h1 needs one chunk"),
        ("interleaved", 4, 8, 1, None, "interleaved needs several chunks"),
        ("zb-v", 4, 8, 3, None, "zb-v needs two chunks per stage, not 3"),
        ("dualpipe-v", 4, 8, 1, None, "dualpipe-v needs two chunks"),
        ("1f1b", 0, 8, None, None, "at least one stage and one microbatch"),
        ("1f1b", 4, 0, None, None, "at least one stage and one microbatch"),
        ("interleaved", 4, 8, 2, 3, "3 microbatches per group on 4 stages: use 4 or more"),
    ],
)
def test_what_cannot_be_is_refused(
    name: ScheduleName, stages: int, microbatches: int, chunks: int | None, group_size: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, stages, microbatches, chunks, group_size)


def test_every_schedule_is_a_choice_of_the_flag() -> None:
    choices, none = get_args(get_type_hints(PipelineConfig)["pipeline_schedule"])
    assert none is type(None)
    assert get_args(choices) == tuple(SCHEDULES) == NAMES
