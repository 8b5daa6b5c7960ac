"""The batch size follows the samples consumed, however it was scheduled and wherever the run resumed."""

from typing import Any

import pytest

from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError
from megatron.training.batch_schedule import BatchSchedule, build_batches, parse_step_schedule
from megatron.training.checkpoints.saved_run import Progress


def _build(replicas: int = 2, consumed_samples: int = 0, seq_length: int = 1, **flags: Any) -> BatchSchedule:
    training = TrainingConfig(**{"micro_batch_size": 1, **flags})
    return build_batches(
        RunConfig(data=DataConfig(seq_length=seq_length), training=training), replicas, consumed_samples
    )


def _walk(schedule: BatchSchedule, iterations: int) -> list[int]:
    """Consumed samples before each iteration and after the last, one batch at a time."""
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + schedule.global_batch_size(consumed[-1]))
    return consumed


DECREASE = "decrease_batch_size_if_needed"
RAMP: dict[str, Any] = {"global_batch_size": 8, "rampup_batch_size": (2, 2, 30)}


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        # One microbatch for each copy of the model.
        ({"micro_batch_size": 4}, {0: 8, 10**12: 8}),
        # From 2 to 8 by 2 over 30 samples: three increments, one every 10 samples.
        (RAMP, {0: 2, 9: 2, 10: 4, 19: 4, 20: 6, 29: 6, 30: 8, 31: 8, 1000: 8}),
        # Steps that fall between samples wait for the whole sample: 3.33, 6.67 and 10.
        ({**RAMP, "rampup_batch_size": (2, 2, 10)}, {3: 2, 4: 4, 6: 4, 7: 6, 9: 6, 10: 8}),
        # A ramp without length or growth is a constant batch.
        ({**RAMP, "rampup_batch_size": (8, 2, 100)}, {0: 8}),
        ({**RAMP, "rampup_batch_size": (2, 2, 0)}, {0: 8}),
        # Steps count tokens.
        ({"step_batch_size_schedule": "0:2 1K:4, 0.01M:8", "seq_length": 100}, {0: 2, 9: 2, 10: 4, 99: 4, 100: 8}),
    ],
)
def test_the_batch_has_the_size_of_the_samples_consumed(flags: dict[str, Any], sizes: dict[int, int]) -> None:
    schedule = _build(**flags)
    assert {consumed: schedule.global_batch_size(consumed) for consumed in sizes} == sizes


def test_microbatches_and_large_numbers_of_tokens() -> None:
    assert [_build(micro_batch_size=4, global_batch_size=size).num_microbatches(0) for size in (8, 32)] == [1, 4]
    found = parse_step_schedule("0:768 250B:1536 1T:3K", 8192)
    assert found == ((0, 768), (30517578, 1536), (122070312, 3000))


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"global_batch_size": 6},
    "ramp": {"global_batch_size": 12, "rampup_batch_size": (2, 2, 100)},
    "steep ramp": {"global_batch_size": 40, "rampup_batch_size": (2, 2, 7)},
    "steps": {"step_batch_size_schedule": "0:2 50:4 60:8 200:4"},
    "steps jumped over": {"step_batch_size_schedule": "0:40 10:2 20:4"},
    "rounded": {"global_batch_size": 13, "rampup_batch_size": (3, 2, 60), DECREASE: True},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_samples_and_iterations_agree_with_a_walk_from_batch_to_batch(name: str) -> None:
    """Also in a run that resumes, which counts on from where it is."""
    schedule = _build(**SCHEDULES[name])
    consumed = _walk(schedule, 60)
    assert [schedule.total_samples(iterations) for iterations in range(61)] == consumed
    for train_samples in range(consumed[-1]):
        expected = sum(after <= train_samples for after in consumed[1:])
        assert schedule.iterations_for_samples(train_samples) == expected
    for done in (0, 1, 7, 30):
        assert schedule.total_samples(60 - done, consumed[done]) == consumed[60]
        assert schedule.iterations_for_samples(consumed[60], consumed[done]) == 60 - done


def test_a_long_run_is_counted_at_once() -> None:
    schedule = _build(global_batch_size=2048, rampup_batch_size=(16, 16, 10**9))
    iterations = schedule.iterations_for_samples(10**13)
    assert schedule.total_samples(iterations) <= 10**13 < schedule.total_samples(iterations + 1)


def test_rounding_down_tells_how_many_samples_it_leaves_out() -> None:
    schedule = _build(3, micro_batch_size=2, global_batch_size=20, decrease_batch_size_if_needed=True)
    assert (schedule.global_batch_size(0), schedule.skipped_samples(0)) == (18, 2)
    assert schedule.num_microbatches(0) == 3


def test_an_iteration_counts_its_samples_at_the_size_that_it_has() -> None:
    """The next iteration has another size, which is rounded by another number."""
    ramp: dict[str, Any] = {"global_batch_size": 20, "rampup_batch_size": (7, 13, 1), DECREASE: True}
    schedule = _build(3, micro_batch_size=2, **ramp)
    progress = Progress()
    progress.count_iteration(schedule)
    assert (progress.iteration, progress.consumed_samples, progress.skipped_samples) == (1, 6, 1)
    progress.count_iteration(schedule)
    assert (progress.iteration, progress.consumed_samples, progress.skipped_samples) == (2, 6 + 18, 1 + 2)


def test_a_size_of_the_past_need_not_fit_the_devices_of_today() -> None:
    with pytest.raises(ConfigError, match="global batch size of 2"):
        _build(4, **RAMP)
    assert _build(4, consumed_samples=30, **RAMP).num_microbatches(30) == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"global_batch_size": 7}, "--global-batch-size gives .* 7, .*: use multiples of 2"),
        ({"global_batch_size": 1, DECREASE: True}, "use sizes of at least 2"),
        ({"global_batch_size": 8, "rampup_batch_size": (2, 3, 9)}, "--rampup-batch-size gives .* of 5"),
        ({"global_batch_size": 8, "rampup_batch_size": (2, 4, 9)}, "divides 6"),
        ({"global_batch_size": 8, "rampup_batch_size": (10, 2, 9)}, "starts above --global-batch-size 8"),
        ({"global_batch_size": 8, "rampup_batch_size": (0, 2, 9)}, "at least 1"),
        ({"step_batch_size_schedule": "0:2", "global_batch_size": 2}, "--global-batch-size exclude"),
        ({"step_batch_size_schedule": "0:2", "rampup_batch_size": (2, 2, 9)}, "--rampup-batch-size exclude"),
        ({"step_batch_size_schedule": "0:2 5:3"}, "--step-batch-size-schedule gives .* of 3"),
        ({"step_batch_size_schedule": "5:2"}, "first threshold must be 0"),
        ({"step_batch_size_schedule": "0:2 0:4"}, "must differ"),
        ({"step_batch_size_schedule": ""}, "first threshold must be 0"),
        ({"step_batch_size_schedule": "0:2 5X:4"}, "'5X:4' is not TOKENS:BATCH_SIZE"),
        ({"step_batch_size_schedule": "0"}, "'0' is not TOKENS:BATCH_SIZE"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _build(**flags)
