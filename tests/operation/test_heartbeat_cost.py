"""The heartbeat is cheap: cost of a call, times the calls of a step."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron.operation.heartbeat import Heartbeat, Section
from tests.end_to_end.run_process import TINY_RUN, call_training, words_of

STEP_SECONDS = 0.03
"""Processor time of a short step."""
CALLS: dict[str, Callable[[Heartbeat], object]] = {
    "enter": lambda heartbeat: heartbeat.enter(Section.STEP),
    "start_iteration": lambda heartbeat: heartbeat.start_iteration(7),
    "finish_iteration": lambda heartbeat: heartbeat.finish_iteration(7),
    "count_microbatch": Heartbeat.count_microbatch,
    "count_collective": Heartbeat.count_collective,
    "add_waited": lambda heartbeat: heartbeat.add_waited(1),
}


def seconds_per_call(call: Callable[[Heartbeat], object]) -> float:
    """Processor time of a call; the least of several measurements, since others use the processor's caches."""
    heartbeat, count, least = Heartbeat(), 5000, float("inf")
    for _ in range(10):
        started = time.process_time()
        for _ in range(count):
            call(heartbeat)
        least = min(least, (time.process_time() - started) / count)
    return least


def calls_of_a_run(iterations: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    made: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for name in CALLS:
            original = getattr(Heartbeat, name)

            def counted(self: Heartbeat, *values: Any, name: str = name, original: Any = original) -> Any:
                made[name] += 1
                return original(self, *values)

            patch.setattr(Heartbeat, name, counted)
        flags = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": iterations, "eval_iters": 0}
        assert call_training(words_of(flags)).exit_code == 0
    return made


def test_the_heartbeat_costs_less_than_a_thousandth_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (calls_of_a_run(iterations, monkeypatch) for iterations in (2, 6))
    per_step = {name: (long[name] - short[name]) / 4 for name in CALLS}
    # 4 microbatches, each with a section of its own for its data.
    assert per_step["enter"] >= 2 * (4 + 3) and per_step["count_microbatch"] == 4
    # One process has no collectives: as many as a step of a small data-parallel model.
    per_step["count_collective"] = per_step["add_waited"] = 10.0
    cost = {name: seconds_per_call(call) * per_step[name] for name, call in CALLS.items()}
    assert sum(cost.values()) <= 1e-3 * STEP_SECONDS, cost
    print(f"{sum(cost.values()) * 1e6:.1f} us per step: {cost}")
