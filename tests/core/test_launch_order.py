"""Communication overlaps with computation on GPUs with one hardware queue, by the order in which the code launches it.

The launches of our own code are recorded by communicators that send nothing, and timed by the model of GPU queues.
"""

from collections.abc import Callable, Hashable, Sequence
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
from megatron.schedules.simulator import Launch, run_launches
from tests.core.buckets import NUMBERS, Unit, build_buckets

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

    def backward(
        self, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Gradients | None = None
    ) -> Gradients:
        self.log.compute(LAYER)
        return super().backward(grad, inputs, attended, out)


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
    attention.backward(attended.output, inputs, attended)
    log.compute(0.0)
    assert sum(launch.stream == "collectives" for launch in log.launches) == 5
    # The gradients of keys and values arrive after the last step.
    assert log.duration(one_queue) == log.computation + COLLECTIVE
