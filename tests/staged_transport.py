"""A transport by which ranks share one GPU: gloo between host buffers, to and from which the tensors are copied.

NCCL refuses two ranks on one device. Here every collective copies its inputs to pinned memory, runs over gloo, and
copies the result back on a stream of its own, for which the current stream waits with the collective's wait. So the
layouts of tests/parallel run on CUDA tensors, kernels and streams. On a CPU the copies are plain. Collectives take the
branch that NCCL takes, and an output has its result only after its wait.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron.core.activations import HostCopies, TensorPair
from megatron.core.communication import Communicator
from megatron.core.topology import Topology
from megatron.core.transport.torch_distributed import Message, Reduction, Transport


class StagedWork:
    """gloo's operations on host buffers, and the copies of their results."""

    def __init__(self, works: Sequence[Any], copies: HostCopies, arriving: Sequence[TensorPair] = ()) -> None:
        self._works, self._copies, self._arriving = works, copies, arriving
        self._is_over = False

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        """Wait for gloo; make the current stream wait for the copies."""
        if self._is_over:
            return
        self._is_over = True
        for work in self._works:
            work.wait()
        copied = self._copies.back.copy(self._arriving)
        if copied is not None:
            copied.wait()


class StagedTransport(Transport):
    """Collectives of device tensors over a gloo group."""

    def __init__(self, process_group: Any, copies: HostCopies) -> None:
        super().__init__(process_group)
        self.prefers_messages = self.hides_completion = False
        self._copies = copies

    def _buffer(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=self._copies.device.type == "cuda")

    def _staged(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the host. The host waits for the copy, which follows the current stream's work so far."""
        buffer = self._buffer(tensor)
        copied = self._copies.out.copy([(buffer, tensor)])
        if copied is not None:
            assert isinstance(copied, torch.cuda.Event)
            copied.synchronize()
        return buffer

    def _start(self, work: Any, output: Tensor, buffer: Tensor) -> StagedWork:
        return StagedWork([work], self._copies, [(output, buffer)])

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> StagedWork:
        buffer = self._staged(tensor)
        return self._start(super().all_reduce(buffer, reduction), tensor, buffer)

    def all_gather(self, output: Tensor, tensor: Tensor) -> StagedWork:
        buffer = self._buffer(output)
        return self._start(super().all_gather(buffer, self._staged(tensor)), output, buffer)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> StagedWork:
        buffer = self._buffer(output)
        return self._start(super().reduce_scatter(buffer, self._staged(tensor)), output, buffer)

    def all_to_all(self, output: Tensor, tensor: Tensor) -> StagedWork:
        buffer = self._buffer(output)
        return self._start(super().all_to_all(buffer, self._staged(tensor)), output, buffer)

    def exchange_rows(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> StagedWork:
        buffer = self._buffer(output)
        work = super().exchange_rows(buffer, self._staged(tensor), received, sent)
        return self._start(work, output, buffer)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        buffer = self._staged(tensor)
        super().broadcast(buffer, source)
        StagedWork([], self._copies, [(tensor, buffer)]).wait()

    def exchange(self, messages: Sequence[Message]) -> Sequence[StagedWork]:
        staged: list[Message] = []
        arriving: list[TensorPair] = []
        for kind, tensor, peer in messages:
            buffer = self._staged(tensor) if kind == "send" else self._buffer(tensor)
            staged.append((kind, buffer, peer))
            if kind == "receive":
                arriving.append((tensor, buffer))
        return [StagedWork(super().exchange(staged), self._copies, arriving)]

    def send(self, tensor: Tensor, target: int) -> StagedWork:
        return StagedWork([super().send(self._staged(tensor), target)], self._copies)

    def receive(self, tensor: Tensor, source: int) -> StagedWork:
        buffer = self._buffer(tensor)
        return self._start(super().receive(buffer, source), tensor, buffer)


class StagedCommunicator(Communicator):
    """A communicator over the staged transport."""

    copies: HostCopies

    @cached_property
    def transport(self) -> Transport:
        return StagedTransport(self.process_group, self.copies)


class StagedTopology(Topology):
    """All communicators are staged. FSDP2 is not: torch communicates itself there."""

    @cached_property
    def copies(self) -> HostCopies:
        """The streams of all copies."""
        return HostCopies.of(self.device)

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        staged = StagedCommunicator(ranks, self.rank, name, twin, exclusive, self._timeout)
        staged.copies = self.copies
        return staged
