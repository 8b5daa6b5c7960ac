"""All collectives of tensors, in one layer in which they can be counted, timed and faked.

Objects, and waits for long work of one rank, use :mod:`megatron.core.control`.

A :class:`Communicator` of one rank communicates nothing and needs no ``torch.distributed``. ``start_`` methods return a
:class:`Work`, so that computation can overlap.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transport import open_transport
from megatron.core.transport.torch_distributed import Message, Reduction, Transport
from megatron.torch_compat import storage_id

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective for an observer."""

    kind: str
    axes: str
    group_size: int
    num_bytes: int
    """Bytes of the largest tensor: the input of a reduce-scatter, the output of an all-gather."""
    peer: int | None = field(default=None, compare=False)
    """The global rank of the peer of a message, for a shift the next rank of the ring."""


Observer = Callable[[CollectiveRecord], None]


class Work(Generic[T_co]):
    """The result of a collective that has started."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T_co]) -> None:
        self._works = works
        self._finish = finish

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`wait` would return immediately."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T_co:
        """Block (or make the current stream wait) until the collective is complete; returns the result."""
        for work in self._works:
            work.wait()
        return self._finish()

    def then(self, change: Callable[[T_co], T]) -> "Work[T]":
        """Apply ``change`` to the result."""
        return Work(self._works, lambda: change(self._finish()))

    @staticmethod
    def all_of(parts: Sequence["Work[T]"], combine: Callable[[list[T]], R]) -> "Work[R]":
        """Apply ``combine`` to the results of ``parts``."""
        works = [work for part in parts for work in part._works]
        return Work(works, lambda: combine([part._finish() for part in parts]))


def add_in_order(parts: Sequence[Tensor], output: Tensor | None = None) -> Tensor:
    """The sum of two or more ``parts`` from first to last, in ``output`` if given, which may be one of them."""
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=output)
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total if output is None else output.copy_(total)


class Communicator:
    """Collectives over ``ranks``; ``rank`` is this process's global rank.

    ``twin`` is a communicator of the same ranks with which this one shares its process group. With ``exclusive`` the
    process group is not shared, so that its messages are ordered independently. ``timeout`` applies to each collective.
    With ``shares_memory`` the ranks of one host exchange through shared memory where gloo would use sockets.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        name: str = "",
        twin: "Communicator | None" = None,
        exclusive: bool = False,
        timeout: timedelta | None = None,
        shares_memory: bool = True,
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank)
        self.name = name
        self._twin = twin
        self._exclusive = exclusive
        self._timeout = timeout
        self._shares_memory = shares_memory
        assert twin is None or twin.ranks == self.ranks, (twin, ranks)
        self.observer: Observer | None = None

    @cached_property
    def stride(self) -> int | None:
        """The distance between neighbouring ranks; None for a single rank, and where the distances differ."""
        strides = {following - rank for rank, following in pairwise(self.ranks)}
        return strides.pop() if len(strides) == 1 else None

    def own_part(self, tensor: Tensor) -> Tensor:
        """This rank's part of ``tensor`` along dim 0, of which every rank has an equal part; a view."""
        rows = tensor.shape[0] // self.size
        return tensor.narrow(0, self.rank * rows, rows)

    @cached_property
    def process_group(self) -> Any:
        """The ``torch.distributed`` group, created on first use by its members alone.

        torch names such a group by its ranks and the number of groups that the process created before, so all ranks
        must use their communicators for the first time in the same order.
        """
        if self._twin is not None:
            return self._twin.process_group
        assert dist.is_initialized(), "a communicator of several ranks needs torch.distributed"
        if self.ranks == tuple(range(dist.get_world_size())) and not self._exclusive:
            return dist.group.WORLD
        return dist.new_group(self.ranks, use_local_synchronization=True, group_desc=self.name, timeout=self._timeout)

    def device_mesh(self, device_type: str, name: str) -> Any:
        """The group as a ``DeviceMesh`` of one axis, for FSDP2."""
        # Imported here because it imports torch's distributed tensors.
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.process_group, device_type, mesh_dim_names=(name,))

    def open(self) -> None:
        if self.size > 1:
            _ = self.transport

    @cached_property
    def transport(self) -> Transport:
        return self.group_transport

    @cached_property
    def group_transport(self) -> Transport:
        """The operations of the process group, which twins share. Opened on first use, in one order on all ranks."""
        if self._twin is not None:
            return self._twin.group_transport
        return open_transport(self.process_group, self.ranks, self.rank, self._timeout, self._shares_memory)

    @cached_property
    def _gloo_sends(self) -> "queue.SimpleQueue[GlooSend | None]":
        """Sends for which a thread waits. It is a daemon: a send without a receiver must not keep the process alive."""
        sends: queue.SimpleQueue[GlooSend | None] = queue.SimpleQueue()

        def run() -> None:
            while (send := sends.get()) is not None:
                send.run()

        threading.Thread(target=run, daemon=True, name=f"sends {self.name}").start()
        weakref.finalize(self, sends.put, None)
        return sends

    def record(self, kind: str, num_bytes: int, peer: int | None = None) -> None:
        """Call the observer. Operators that contain a collective call this themselves."""
        if self.observer is not None:
            self.observer(CollectiveRecord(kind, self.name, self.size, num_bytes, peer))

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Work[Tensor]:
        """Reduce ``tensor`` over the group, in place."""
        if self.size == 1:
            return Work((), lambda: tensor)
        self.record("all_reduce", tensor.nbytes)
        return Work((self.transport.all_reduce(tensor, reduction),), lambda: tensor)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        return self.start_all_reduce(tensor, reduction).wait()

    def start_all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """Concatenate every rank's ``tensor`` along dim 0, into ``output`` if given.

        ``tensor`` may be the rank's own part of ``output``.
        """
        if self.size == 1:
            return Work((), lambda: tensor if output is None else output.copy_(tensor))
        if sendable(tensor) is not tensor:
            assert output is None
            dtype = tensor.dtype  # the function must not keep the tensor
            return self.start_all_gather(sendable(tensor)).then(lambda gathered: gathered.view(dtype))
        if output is None:
            output = tensor.new_empty((tensor.shape[0] * self.size, *tensor.shape[1:]))
        self.record("all_gather", output.nbytes)
        tensor = tensor.contiguous()
        if not self.transport.prefers_messages:
            return Work((self.transport.all_gather(output, tensor),), lambda: output)
        # Measured several times faster than gloo's all-gather.
        parts = output.chunk(self.size)
        works = self._start_pairwise([tensor] * self.size, parts)
        if not _is_same_memory(parts[self.rank], tensor):
            parts[self.rank].copy_(tensor)
        return Work(works, lambda: output)

    def all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Tensor:
        return self.start_all_gather(tensor, output).wait()

    def start_reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """Sum ``tensor`` over the group and return this rank's part along dim 0, in ``output`` if given.

        ``output`` may be the rank's own part of ``tensor``.
        """
        if self.size == 1:
            return Work((), lambda: tensor if output is None else output.copy_(tensor))
        self.record("reduce_scatter", tensor.nbytes)
        tensor = tensor.contiguous()
        if output is None:
            output = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        if not self.transport.prefers_messages:
            return Work((self.transport.reduce_scatter(output, tensor),), lambda: output)
        # Each rank adds the parts that it receives in rank order; gloo's reduce-scatter reduces the whole tensor on
        # every rank.
        parts = tensor.chunk(self.size)
        own = parts[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        return Work(self._start_pairwise(parts, received), lambda: add_in_order(received, output))

    def reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Tensor:
        return self.start_reduce_scatter(tensor, output).wait()

    def _start_pairwise(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Sequence[Any]:
        """Send ``sent[i]`` to every other rank i and receive from it into ``received[i]``; empty parts are not sent."""
        messages: list[Message] = []
        for step in range(1, self.size):
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            if sent[target].numel():
                messages.append(("send", sent[target], self.ranks[target]))
            if received[source].numel():
                messages.append(("receive", received[source], self.ranks[source]))
        return self.transport.exchange(messages) if messages else ()

    def start_shift(self, tensor: Tensor) -> Work[Tensor]:
        """Send ``tensor`` to the next rank of the ring and receive from the previous one. ``tensor`` must not change
        until then."""
        return self.start_shifts([tensor]).then(lambda received: received[0])

    def start_shifts(self, tensors: Sequence[Tensor]) -> Work[Sequence[Tensor]]:
        """Shift several tensors in one launch."""
        if self.size == 1:
            return Work((), lambda: tensors)
        target, source = self.ranks[(self.rank + 1) % self.size], self.ranks[(self.rank - 1) % self.size]
        received = [torch.empty_like(tensor) for tensor in tensors]
        messages: list[Message] = []
        for tensor, place in zip(tensors, received):
            self.record("shift", tensor.nbytes, target)
            messages += [("send", sendable(tensor), target), ("receive", sendable(place), source)]
        return Work(self.transport.exchange(messages), lambda: received)

    def start_exchange(self, tensor: Tensor, target: int, received: Tensor, source: int) -> Work[Tensor]:
        """Send ``tensor`` to the group's rank ``target`` and receive into ``received`` from the rank ``source``. All
        ranks exchange in the same order; ``tensor`` must not change until then."""
        self.record("exchange", tensor.nbytes, self.ranks[target])
        sent: Message = "send", sendable(tensor), self.ranks[target]
        works = self.transport.exchange([sent, ("receive", sendable(received), self.ranks[source])])
        return Work(works, lambda: received)

    def start_all_to_all(self, tensor: Tensor) -> Work[Tensor]:
        """Send part i of ``tensor`` along dim 0 to rank i; returns the received parts in rank order."""
        if self.size == 1:
            return Work((), lambda: tensor)
        self.record("all_to_all", tensor.nbytes)
        tensor = tensor.contiguous()
        output = torch.empty_like(tensor)
        if not self.transport.prefers_messages:
            return Work((self.transport.all_to_all(output, tensor),), lambda: output)
        sent, received = tensor.chunk(self.size), output.chunk(self.size)
        works = self._start_pairwise(sent, received)
        received[self.rank].copy_(sent[self.rank])
        return Work(works, lambda: output)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self.start_all_to_all(tensor).wait()

    def start_exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work[Tensor]:
        """Send ``sent[i]`` of ``rows`` along dim 0, in order, to rank i; returns the ``received[i]`` rows of rank i, in
        rank order. Ranks may send and receive any numbers of rows."""
        if self.size == 1:
            return Work((), lambda: rows)
        rows = rows.contiguous()
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        parts = rows.split(list(sent))
        if self.transport.prefers_messages:
            return self.start_exchange_parts(parts, output.split(list(received))).then(lambda _: output)
        self.record("exchange", sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank))
        work = self.transport.exchange_rows(sendable(output), sendable(rows), received, sent)
        return Work((work,), lambda: output)

    def start_exchange_parts(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Work[Sequence[Tensor]]:
        """Send ``sent[i]`` to rank i and receive from it into ``received[i]``. Sizes may differ between pairs of ranks;
        empty parts are not sent."""
        self.record("exchange", sum(part.nbytes for rank, part in enumerate(sent) if rank != self.rank))
        works = self._start_pairwise([sendable(part) for part in sent], [sendable(part) for part in received])
        if not _is_same_memory(sent[self.rank], received[self.rank]):
            received[self.rank].copy_(sent[self.rank])
        return Work(works, lambda: received)

    def exchange_parts(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self.start_exchange_parts(sent, received).wait()

    def start_send(self, tensor: Tensor, target: int) -> Work[Tensor]:
        """Send ``tensor``, which must not change until then, to the group's rank ``target``."""
        self.record("send", tensor.nbytes, self.ranks[target])
        work = self.transport.send(tensor, self.ranks[target])
        if self.transport.hides_completion:
            work = GlooSend(work)
            self._gloo_sends.put(work)
        return Work((work,), lambda: tensor)

    def start_receive(self, tensor: Tensor, source: int) -> Work[Tensor]:
        """Receive into ``tensor`` from the group's rank ``source``; messages arrive in the order of sending."""
        self.record("receive", tensor.nbytes, self.ranks[source])
        return Work((self.transport.receive(tensor, self.ranks[source]),), lambda: tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy ``tensor`` of the group's rank ``source`` to all ranks, in place."""
        if self.size > 1:
            self.record("broadcast", tensor.nbytes)
            self.transport.broadcast(tensor, self.ranks[source])
        return tensor


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape begin at the same address."""
    is_same_storage = storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())
    return is_same_storage and one.storage_offset() == other.storage_offset()


class GlooSend:
    """A send that a thread waits for, because gloo does not report whether it is complete."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._work = None  # frees the tensor
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def sendable(tensor: Tensor) -> Tensor:
    """``tensor`` in a dtype that every backend supports: FP8 is sent as bytes."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
