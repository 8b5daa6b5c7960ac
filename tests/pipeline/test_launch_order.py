"""Where all streams of a GPU share one hardware queue, no schedule deadlocks and none loses much, and communication
overlaps with computation, by the order in which the code launches it.

The launches of our own code are recorded by communicators that send nothing, and timed by the model of GPU queues.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from megatron.core.communication import Communicator, Work
from megatron.core.context_parallel import RingAttention
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.gradient import accumulate_main_grad
from megatron.core.ops.attention import AttentionInputs, AttentionOutput, Gradients
from megatron.core.ops.attention_kernels import ReferenceAttention
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import P2POverlap
from megatron.core.topology import RankGrid
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
from tests.core.buckets import NUMBERS, Unit, build_buckets

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


# The launches of our own code

T = TypeVar("T")

NUM_LAYERS, COLLECTIVE, LAYER = 32, 5.0, 7.0


class LaunchLog:
    """What the host of a rank launches, as NCCL and torch order it."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._computed: tuple[Hashable, ...] = ()
        self._awaited: list[Hashable] = []

    def clear(self) -> None:
        """Drop all launches."""
        self.launches.clear()
        self._awaited.clear()
        self._computed = ()

    def compute(self, duration: float) -> None:
        """A kernel on the compute stream, which has waited for some collectives."""
        self.launches.append(Launch(len(self.launches), "compute", duration, tuple(self._awaited)))
        self._computed = (self.launches[-1].name,)
        self._awaited.clear()

    def collective(self, finish: Callable[[], T]) -> Work[T]:
        """A collective on its group's stream, which waits for what the compute stream has been given so far."""
        name = len(self.launches)
        self.launches.append(Launch(name, "collectives", COLLECTIVE, (*self._computed, *self._awaited)))

        def end() -> T:
            self._awaited.append(name)
            return finish()

        return Work((), end)

    @property
    def computation(self) -> float:
        """The duration of all kernels on the compute stream."""
        return sum(launch.duration for launch in self.launches if launch.stream == "compute")

    def duration(self, one_queue: bool) -> float:
        (ended,) = run_launches([self.launches], one_queue)
        return max(ended.values())


class Recording(Communicator):
    """A rank of a group that sends nothing."""

    def __init__(self, size: int, log: LaunchLog) -> None:
        super().__init__(tuple(range(size)), 0)
        self.log = log

    def start_all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        assert output is not None
        return self.log.collective(lambda: output)

    def start_reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        part = tensor.chunk(self.size)[0]
        return self.log.collective(lambda: part if output is None else output.copy_(part))

    def start_exchange(self, tensor: Tensor, target: int, received: Tensor, source: int) -> Work[Tensor]:
        return self.log.collective(lambda: received.copy_(tensor))

    def start_shifts(self, tensors: Sequence[Tensor]) -> Work[Sequence[Tensor]]:
        return self.log.collective(lambda: tensors)


class LoggedAttention(ReferenceAttention):
    def __init__(self, log: LaunchLog) -> None:
        self.log = log

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        self.log.compute(LAYER)
        return super().forward(inputs)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        self.log.compute(LAYER)
        return super().backward(grad, attended, out)


def build(log: LaunchLog, overlap: bool) -> tuple[BufferedDataParallel, Sequence[Unit]]:
    layers = [Unit(f"{number}", lambda _: log.compute(LAYER)) for number in range(NUM_LAYERS)]
    grid = RankGrid(dp=2, dp_replicas=1)
    return build_buckets("optim", overlap, layers, grid, dense=Recording(2, log)), layers


@pytest.mark.parametrize("one_queue", [True, False])
def test_all_gathers_of_weights_overlap_with_the_forward_pass(one_queue: bool) -> None:
    durations = {}
    for overlap in (True, False):
        log = LaunchLog()
        data_parallel, layers = build(log, overlap)
        data_parallel.start_param_all_gather()
        for layer in layers:
            layer()
        durations[overlap] = log.duration(one_queue)
    assert durations[False] == NUM_LAYERS * (COLLECTIVE + LAYER)
    # Only the first one is not hidden.
    assert durations[True] == COLLECTIVE + NUM_LAYERS * LAYER


@pytest.mark.parametrize("one_queue", [True, False])
def test_reductions_of_gradients_overlap_with_the_backward_pass(one_queue: bool) -> None:
    durations = {}
    for overlap in (True, False):
        log = LaunchLog()
        data_parallel, layers = build(log, overlap)
        data_parallel.start_grad_accumulation(1)
        for layer in reversed(layers):
            log.compute(LAYER)
            accumulate_main_grad(layer.weight, torch.ones(NUMBERS))
        data_parallel.finish_grad_sync()
        log.compute(0.0)
        durations[overlap] = log.duration(one_queue)
    assert durations[False] == NUM_LAYERS * (COLLECTIVE + LAYER)
    # Only the last one is not hidden.
    assert durations[True] == NUM_LAYERS * LAYER + COLLECTIVE


@pytest.mark.parametrize("one_queue", [True, False])
def test_gemms_at_tensor_parallel_edges_overlap_with_their_exchanges(one_queue: bool) -> None:
    size = 8
    log = LaunchLog()

    def gemm(rows: QuantizedTensor) -> Tensor:
        log.compute(LAYER)
        return rows.data

    overlap = P2POverlap(Recording(size, log))
    overlap.gather_gemm(QuantizedTensor(torch.ones(2, 1, 4)), gemm, None)
    assert log.duration(one_queue) == size * LAYER
    log.clear()
    overlap.gemm_reduce(QuantizedTensor(torch.ones(2 * size, 1, 4)), gemm, None).wait()
    assert log.duration(one_queue) == size * LAYER


@pytest.mark.parametrize("one_queue", [True, False])
def test_the_ring_of_keys_and_values_overlaps_with_attention(one_queue: bool) -> None:
    log = LaunchLog()
    attention = RingAttention(LoggedAttention(log), Recording(4, log))
    inputs = AttentionInputs(*torch.ones(3, 1, 1, 8, 2))  # [b, heads, s, d] each
    attended = attention.forward(inputs)
    assert sum(launch.stream == "collectives" for launch in log.launches) == 3
    assert log.duration(one_queue) == log.computation
    log.clear()
    attention.backward(attended.output, attended)
    log.compute(0.0)
    assert sum(launch.stream == "collectives" for launch in log.launches) == 5
    # The gradients of keys and values arrive after the last step.
    assert log.duration(one_queue) == log.computation + COLLECTIVE
