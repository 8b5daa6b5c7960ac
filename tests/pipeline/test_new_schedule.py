"""A new schedule is one module: one that is defined here alone is verified, simulated, a flag's value, and executed."""

from collections.abc import Iterator

import pytest

from megatron.config.parallel import PipelineConfig
from megatron.config.training import OptimizerConfig
from megatron.schedules.catalog import SCHEDULES, build_schedule
from megatron.schedules.schedule import Action, ScheduleSpec, Shape, alternate
from megatron.schedules.simulator import Durations, peak_live_activations, simulate, verify
from tests.parallel.comparison import compare_with_one_process
from tests.parallel.layout_run import DEEP_MODEL, Layout, Task, Trace, train
from tests.rank_pool import RankPool


def eager_1f1b(stage: int, shape: Shape) -> Iterator[Action]:
    """1F1B with twice as many forward passes ahead, which hides messages (Alpa, arXiv 2211.05322, section 5.1)."""
    order = [(0, microbatch) for microbatch in range(shape.microbatches)]
    yield from alternate(order, order, ahead=2 * (shape.stages - stage - 1))


EAGER = ScheduleSpec(
    "eager-1f1b",
    "1f1b with twice as many forward passes ahead",
    eager_1f1b,
    live_activations=lambda stage, shape: min(2 * (shape.stages - stage) - 1, shape.microbatches),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, EAGER.name, EAGER)


def train_eagerly(task: Task, layout: Layout) -> Trace:
    """Train on a rank of the pool, which has its own registry."""
    SCHEDULES[EAGER.name] = EAGER
    try:
        return train(task, layout)
    finally:
        del SCHEDULES[EAGER.name]


def test_it_is_verified_within_the_memory_that_it_claims() -> None:
    schedule = build_schedule(EAGER.name, 4, 8)
    verify(schedule, (7, 5, 3, 1))
    assert peak_live_activations(schedule) == (7, 5, 3, 1)


def test_it_is_simulated_and_hides_messages() -> None:
    def makespan(name: str) -> float:
        schedule = build_schedule(name, 4, 8)
        return simulate(schedule, Durations.uniform(schedule.placement, 1.0, 1.0, 1.0, send=0.5)).makespan

    assert makespan(EAGER.name) < makespan("1f1b")


def test_its_flag_is_honoured() -> None:
    flags = PipelineConfig(pipeline_schedule=EAGER.name)
    flags.check()
    flags.check_stages(num_layers=8, num_stages=4)
    assert flags.schedule(num_layers=8, num_stages=4) == EAGER.name


def test_it_trains_like_one_process(four_ranks: RankPool) -> None:
    task = Task(OptimizerConfig(optimizer="sgd"), model=DEEP_MODEL, steps=2)
    layout = Layout(pp=2, schedule=EAGER.name, microbatches=8)
    compare_with_one_process(four_ranks, task, layout, train_eagerly)
