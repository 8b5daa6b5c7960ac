"""Slow ranks: named with the section that is slow, and only they."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.features.stragglers.flags import INTERVALS, SECONDS, StragglerDetector, excess_section, ratios
from megatron.features.stragglers.listener import Stragglers
from tests.end_to_end.run_process import TINY_RUN, fork_training, iterations, words_of

FOUR = [(0, 1, 2, 3)]
TWO_STAGES = [(0, 1, 2), (3, 4, 5)]
SLOW, GOOD = [1, 1, 1.25, 1], [1, 1, 1, 1]
LONG = 60.0
"""Seconds of an interval in a large run."""


def observe(detector: StragglerDetector, *intervals: Sequence[float], seconds: float = LONG) -> list[int]:
    return [straggler.rank for busy in intervals for straggler in detector.observe(busy, seconds)]


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4), st.floats(0.01, 100))
def test_ratios_do_not_depend_on_the_unit(busy: list[float], unit: float) -> None:
    scaled = ratios([seconds * unit for seconds in busy], FOUR)
    assert all(abs(one - other) < 1e-9 * one for one, other in zip(ratios(busy, FOUR), scaled))
    assert sum(ratio <= 1 for ratio in scaled) >= 2


def test_one_of_two_ranks_can_be_slow() -> None:
    assert ratios([1.3, 1.0], [(0, 1)]) == [1.3, 1.0]


def test_ranks_are_compared_with_ranks_of_their_stage_alone() -> None:
    assert observe(StragglerDetector(1.2, TWO_STAGES), *[[1, 1, 1, 5, 5, 5]] * 9) == []
    assert observe(StragglerDetector(1.2, TWO_STAGES), *[[1, 1.3, 1, 5, 5, 5]] * 9) == [1]
    assert ratios([1, 5], [(0,), (1,)]) == [1, 1]


def test_a_rank_is_named_once_at_its_fifth_slow_interval() -> None:
    detector = StragglerDetector(1.2, FOUR)
    assert observe(detector, SLOW, SLOW, SLOW, SLOW, GOOD, SLOW, SLOW, SLOW, SLOW) == []
    assert observe(detector, SLOW) == [2]
    assert observe(detector, *[SLOW] * 9) == []


def test_short_intervals_are_judged_over_a_minute() -> None:
    needed = round(SECONDS / 0.1)
    detector = StragglerDetector(1.2, FOUR)
    assert observe(detector, *[SLOW] * (needed - 1), seconds=0.1) == []
    assert observe(detector, *[SLOW] * 2, seconds=0.1) == [2]
    detector = StragglerDetector(1.2, FOUR)
    assert observe(detector, *([SLOW] * 8 + [GOOD]) * needed, seconds=0.1) == []


def test_a_rank_that_recovered_is_named_again() -> None:
    detector = StragglerDetector(1.2, FOUR)
    # One interval is still remembered after four good ones.
    assert observe(detector, *[SLOW] * INTERVALS, *[GOOD] * 4, *[SLOW] * INTERVALS) == [2]
    assert observe(detector, *[GOOD] * 5, *[SLOW] * INTERVALS) == [2]


def test_noise_names_nobody_and_a_rank_30_percent_slower_is_named_in_ten_intervals() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        detector = StragglerDetector(1.2, [tuple(range(16))])
        # Five per cent of noise, and a hiccup of one rank in one of ten intervals.
        for interval in range(1000):
            busy = [chance.gauss(1, 0.05) for _ in range(16)]
            if interval % 10 == 0:
                busy[chance.randrange(16)] *= 2
            assert detector.observe(busy, LONG) == [], (seed, interval)
        slow = [[chance.gauss(1.3 if rank == 5 else 1, 0.05) for rank in range(16)] for _ in range(10)]
        assert observe(detector, *slow) == [5], seed


def test_ranks_that_are_slow_by_turns_are_not_named() -> None:
    """On a machine where other processes take a core from one of two ranks, for up to ten seconds at a time."""
    for seed in range(3):
        chance = random.Random(seed)
        detector = StragglerDetector(1.2, [(0, 1)])
        for _ in range(500):
            busy = [1.0, 1.0]
            busy[chance.randrange(2)] = chance.uniform(1.0, 2.0)
            steps = max(1, round(chance.expovariate(1 / 20.0)))
            assert observe(detector, *[busy] * min(steps, 100), seconds=0.1) == []


def test_the_section_with_most_of_the_difference_is_named() -> None:
    own = {"data": 1.0, "forward-backward": 5.0, "optimizer": 2.5}
    peers = [own, {"data": 0.9, "forward-backward": 4.9, "optimizer": 1.0}, {**own, "optimizer": 1.1}]
    assert excess_section(own, peers) == "optimizer"


# --- real runs -----------------------------------------------------------------------------------------------

RUN = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "eval_iters": 0, "log_interval": 20}
RUN |= {"hidden_size": 128, "ffn_hidden_size": 384, "seq_length": 128}
"""Iterations of tens of milliseconds: much longer than a time slice of the scheduler. Intervals of a second: other
processes and the host take a core for tenths of one."""


@pytest.mark.alone
@pytest.mark.slow(reason="compares the times of ranks, which needs a quiet machine")
def test_a_rank_that_takes_30_percent_longer_is_named_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FAULTS", "1")
    flags = {**RUN, "train_iters": 10**6, "exit_duration_in_mins": 1.5, "run_dir": tmp_path}
    outcome = fork_training(words_of({**flags, "inject_fault": "slow@21+1000000:rank1:1.3"}), 2)
    named = re.findall(r"Rank (\d) on \S+ is slow", outcome.stdout + outcome.stderr)
    assert named == ["1"], outcome.stdout


@pytest.mark.alone
@pytest.mark.slow(reason="compares the times of ranks, which needs a quiet machine")
def test_ranks_of_1000_clean_steps_are_not_named(tmp_path: Path) -> None:
    flags = {**RUN, "train_iters": 1000, "metrics_jsonl": tmp_path / "metrics.jsonl"}
    outcome = fork_training(words_of(flags), 2).succeeded()
    assert "is slow" not in outcome.stdout + outcome.stderr
    ratios = [record["operation/slowest_rank_ratio"] for record in iterations(tmp_path / "metrics.jsonl")[2:]]
    assert len(ratios) > 40
    print(f"largest ratio of an interval {max(ratios):.2f}, above the threshold: {sum(one >= 1.2 for one in ratios)}")


def test_a_gpu_is_measured_in_the_last_iteration_of_an_interval_alone() -> None:
    """The stopwatch makes the host wait for the device."""
    stopwatch: Any = SimpleNamespace(is_on=False, collect=lambda: None)
    listener = Stragglers(StragglerDetector(1.3, [(0, 1)]), stopwatch, interval=4)
    progress = SimpleNamespace(iteration=4)
    heartbeat = SimpleNamespace(busy_ns=dict)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(progress=progress), context=SimpleNamespace(heartbeat=heartbeat)
    )
    listener.on_iteration(trainer, Any)  # type: ignore[arg-type]
    measured = []
    for progress.iteration in range(4, 8):
        listener.on_iteration_start(trainer)
        measured.append(stopwatch.is_on)
    assert measured == [False, False, False, True]
