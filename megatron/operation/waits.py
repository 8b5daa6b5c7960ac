"""What a rank adds to its heartbeat while it trains: sections of an iteration, collectives, and waits in them.

On a CPU a wait blocks the host. On a GPU it blocks a stream: two events around it measure for how long, and the host
reads them later. The times of a GPU are measured only in some iterations, because a step of a large model has thousands
of waits.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.topology import Topology
from megatron.core.transport.torch_distributed import Message, Reduction, Transport
from megatron.metrics.timers import Timers
from megatron.operation.heartbeat import Heartbeat, Section


class Stopwatch:
    """Adds the time for which the host is blocked to the heartbeat, always and immediately."""

    is_on = True
    """Whether waits are measured."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def collect(self) -> None:
        """Add to the heartbeat what was measured since the last call."""

    def measure(self, wait: Callable[[], object]) -> None:
        """Call ``wait`` and add its time."""
        started = time.perf_counter_ns()
        wait()
        self._heartbeat.add_waited(time.perf_counter_ns() - started)


class StreamStopwatch(Stopwatch):
    """Measures for how long the current stream is blocked, while :attr:`is_on`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(heartbeat)
        self._spans: list[tuple[Section, Any, Any]] = []
        self.is_on = False

    def measure(self, wait: Callable[[], object]) -> None:
        if not self.is_on:
            wait()
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        wait()
        after.record()
        self._spans.append((self._heartbeat.current, before, after))

    def collect(self) -> None:
        """Add the measured times to the heartbeat; waits for the device."""
        for section, before, after in self._spans:
            after.synchronize()
            self._heartbeat.add_waited(round(before.elapsed_time(after) * 1e6), section)
        self._spans = []


class _MeteredWork:
    """A collective under way, whose wait is measured."""

    __slots__ = ("_stopwatch", "_work", "is_completed")

    def __init__(self, work: Any, stopwatch: Stopwatch) -> None:
        self._work, self._stopwatch = work, stopwatch
        self.is_completed = work.is_completed

    def wait(self) -> None:
        self._stopwatch.measure(self._work.wait)


class MeteredTransport(Transport):
    """Counts the collectives of ``transport`` in the heartbeat and measures waits."""

    def __init__(self, transport: Transport, heartbeat: Heartbeat, stopwatch: Stopwatch) -> None:
        self._transport, self._heartbeat, self._stopwatch = transport, heartbeat, stopwatch
        self.prefers_messages, self.hides_completion = transport.prefers_messages, transport.hides_completion

    def _started(self, work: Any) -> Any:
        self._heartbeat.count_collective()
        return _MeteredWork(work, self._stopwatch)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        return self._started(self._transport.all_reduce(tensor, reduction))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        return self._started(self._transport.all_gather(output, tensor))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Any:
        return self._started(self._transport.reduce_scatter(output, tensor))

    def all_to_all(self, output: Tensor, tensor: Tensor) -> Any:
        return self._started(self._transport.all_to_all(output, tensor))

    def exchange_rows(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Any:
        return self._started(self._transport.exchange_rows(output, tensor, received, sent))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._heartbeat.count_collective()
        self._transport.broadcast(tensor, source)

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        self._heartbeat.count_collective()
        return [_MeteredWork(work, self._stopwatch) for work in self._transport.exchange(messages)]

    def send(self, tensor: Tensor, target: int) -> Any:
        # Not measured: a thread may wait for it, and the receiver's answer is waited for anyway.
        self._heartbeat.count_collective()
        return self._transport.send(tensor, target)

    def receive(self, tensor: Tensor, source: int) -> Any:
        return self._started(self._transport.receive(tensor, source))


class MeteredCommunicator(Communicator):
    """A communicator over a :class:`MeteredTransport`; the other arguments are those of :class:`Communicator`."""

    def __init__(self, heartbeat: Heartbeat, stopwatch: Stopwatch, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._heartbeat, self._stopwatch = heartbeat, stopwatch

    @cached_property
    def transport(self) -> Transport:
        return MeteredTransport(self.group_transport, self._heartbeat, self._stopwatch)


class MeteredTopology(Topology):
    """A topology of :class:`MeteredCommunicator`; the other arguments are those of :class:`Topology`."""

    def __init__(self, heartbeat: Heartbeat, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._heartbeat = heartbeat
        self.stopwatch = (Stopwatch if self.device.type == "cpu" else StreamStopwatch)(heartbeat)

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        place = ranks, self.rank, name, twin, exclusive, self._timeout, self._shares_memory
        return MeteredCommunicator(self._heartbeat, self.stopwatch, *place)


SECTION_OF_TIMER = {
    "batch-generator": Section.DATA,
    "evaluation-data": Section.DATA,
    "forward-backward": Section.FORWARD_BACKWARD,
    "grads-reduce": Section.GRADS_REDUCE,
    "optimizer": Section.OPTIMIZER,
    "evaluation": Section.EVALUATION,
    "save-checkpoint": Section.SAVE,
}


class Sections(Timers):
    """Timers that also write the section to the heartbeat, whatever the timers' level."""

    def __init__(self, heartbeat: Heartbeat, level: int, synchronize: Callable[[], None] | None = None) -> None:
        super().__init__(level, synchronize)
        self._heartbeat = heartbeat

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager[None]:
        timer = super().__call__(name, level)
        section = SECTION_OF_TIMER.get(name)
        return timer if section is None else self._timed(section, timer)

    @contextmanager
    def _timed(self, section: Section, timer: AbstractContextManager[None]) -> Iterator[None]:
        previous = self._heartbeat.enter(section)
        with timer:
            yield
        self._heartbeat.enter(previous)  # as after Heartbeat.section
