"""The one thin layer through which every collective goes, so that it can be counted, timed and faked.

A :class:`Communicator` of one rank communicates nothing and needs no ``torch.distributed``. Every collective
has a ``start_`` form that returns a :class:`Work` result, so that computation can go on meanwhile.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.torch_compat import all_gather_single, reduce_scatter_single, storage_id

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

Reduction = Literal["sum", "max"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

Message = tuple[Literal["send", "receive"], Tensor, int]
"""What is sent or received, and the global rank at the other end."""


@dataclass(frozen=True)
class CollectiveRecord:
    """What an observer is told of a collective: its kind, the axes, the ranks in the group, the bytes of its
    largest tensor (input of a reduce-scatter, output of an all-gather)."""

    kind: str
    axes: str
    group_size: int
    num_bytes: int
    peer: int | None = field(default=None, compare=False)
    """Of a message: the global rank at the other end; of a shift: the next one of the ring."""


Observer = Callable[[CollectiveRecord], None]


class Work(Generic[T_co]):
    """The result of a collective under way."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], T_co]) -> None:
        self._works = works
        self._finish = finish

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T_co:
        """Block (or make the current stream wait) until the result is there, and return it."""
        for work in self._works:
            work.wait()
        return self._finish()

    def then(self, change: Callable[[T_co], T]) -> "Work[T]":
        """The result after ``change``."""
        return Work(self._works, lambda: change(self._finish()))

    @staticmethod
    def all_of(parts: Sequence["Work[T]"], combine: Callable[[list[T]], R]) -> "Work[R]":
        """What ``combine`` makes of the results of ``parts``."""
        works = [work for part in parts for work in part._works]
        return Work(works, lambda: combine([part._finish() for part in parts]))


class _Awaited:
    """A send that a thread waits for, because gloo does not report whether it is complete."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Wait for the work, in the thread."""
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        # It holds the tensor that was sent.
        self._work = None
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1


def _sendable(tensor: Tensor) -> Tensor:
    """``tensor`` in a format that every backend knows; to send FP8 is to copy bytes."""
    return tensor.view(torch.uint8) if _is_fp8(tensor) else tensor


def _run_in_turn(works: "queue.SimpleQueue[_Awaited | None]") -> None:
    while (work := works.get()) is not None:
        work.run()


def add_in_order(parts: Sequence[Tensor], output: Tensor | None = None) -> Tensor:
    """The sum of two or more ``parts`` from first to last, in ``output``, which may be one of them, if given."""
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=output)
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total if output is None else output.copy_(total)


class Transport:
    """What :class:`Communicator` needs of the network: the operations of one process group. All return at once what is
    to be waited for; ranks are global."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        is_gloo = bool(dist.get_backend(process_group) == "gloo")
        self.prefers_messages = is_gloo
        """Whether collectives are best made of messages between all pairs."""
        self.hides_completion = is_gloo
        """Whether ``is_completed`` of a send is unreliable."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        """Reduce in place."""
        return dist.all_reduce(tensor, _REDUCTIONS[reduction], group=self._group, async_op=True)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        """Concatenate into ``output``."""
        return all_gather_single(output, tensor, group=self._group, async_op=True)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Any:
        """Sum this rank's part into ``output``."""
        return reduce_scatter_single(output, tensor, group=self._group, async_op=True)

    def all_to_all(self, output: Tensor, tensor: Tensor) -> Any:
        """Exchange equal parts."""
        return dist.all_to_all_single(output, tensor, group=self._group, async_op=True)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy in place; waits."""
        dist.broadcast(tensor, source, group=self._group)

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Messages that belong together, sent and received at once."""
        operations = {"send": dist.isend, "receive": dist.irecv}
        return dist.batch_isend_irecv(
            [dist.P2POp(operations[kind], tensor, peer, self._group) for kind, tensor, peer in messages]
        )

    def send(self, tensor: Tensor, target: int) -> Any:
        """One message."""
        return dist.isend(tensor, target, self._group)

    def receive(self, tensor: Tensor, source: int) -> Any:
        """One message."""
        return dist.irecv(tensor, source, self._group)

    def all_gather_object(self, values: list[Any], value: Any) -> None:
        """Fill ``values``; waits."""
        dist.all_gather_object(values, value, group=self._group)

    def broadcast_object(self, values: list[Any], source: int) -> None:
        """Replace ``values`` by those of ``source``; waits."""
        dist.broadcast_object_list(values, source, group=self._group)


class Communicator:
    """Collectives among ``ranks``; ``rank`` is this process's global rank.

    ``twin`` is a communicator of the same ranks whose process group this one shares; an ``exclusive`` one shares its
    group with nobody, so that its messages keep an order of their own. ``timeout`` is that of a collective.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        name: str = "",
        twin: "Communicator | None" = None,
        exclusive: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank)
        self.name = name
        self._twin = twin
        self._exclusive = exclusive
        self._timeout = timeout
        assert twin is None or twin.ranks == self.ranks, (twin, ranks)
        self.observer: Observer | None = None

    @cached_property
    def process_group(self) -> Any:
        """The ``torch.distributed`` group; made by its members alone, on first use.

        torch names such a group after its ranks and the number of groups that the process has made before, so
        every rank must first use its communicators in the same order, which one program on all ranks does.
        """
        if self._twin is not None:
            return self._twin.process_group
        assert dist.is_initialized(), "a communicator of several ranks needs torch.distributed"
        if self.ranks == tuple(range(dist.get_world_size())) and not self._exclusive:
            return dist.group.WORLD
        return dist.new_group(self.ranks, use_local_synchronization=True, group_desc=self.name, timeout=self._timeout)

    def device_mesh(self, device_type: str, name: str) -> Any:
        """The group as a ``DeviceMesh`` of one axis, which FSDP2 wants."""
        # Only now: it is torch's distributed tensors that need it.
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.process_group, device_type, mesh_dim_names=(name,))

    def open(self) -> None:
        """Make the process group now; all members call it."""
        if self.size > 1:
            _ = self.transport

    @cached_property
    def transport(self) -> Transport:
        """The network; made with the process group."""
        return Transport(self.process_group)

    @cached_property
    def _sends(self) -> "queue.SimpleQueue[_Awaited | None]":
        """Sends that a thread waits for. A daemon: a send that nobody takes must not keep the process alive."""
        works: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
        threading.Thread(target=_run_in_turn, args=(works,), daemon=True, name=f"sends {self.name}").start()
        weakref.finalize(self, works.put, None)
        return works

    def _watched(self, work: Any) -> _Awaited:
        awaited = _Awaited(work)
        self._sends.put(awaited)
        return awaited

    def record(self, kind: str, num_bytes: int, peer: int | None = None) -> None:
        """Tell the observer of a collective; called from elsewhere for those that are part of an operator."""
        if self.observer is not None:
            self.observer(CollectiveRecord(kind, self.name, self.size, num_bytes, peer))

    def _record(self, kind: str, tensor: Tensor, peer: int | None = None) -> None:
        self.record(kind, tensor.numel() * tensor.element_size(), peer)

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Work[Tensor]:
        """Reduce ``tensor`` over the group, in place."""
        if self.size == 1:
            return Work((), lambda: tensor)
        self._record("all_reduce", tensor)
        return Work((self.transport.all_reduce(tensor, reduction),), lambda: tensor)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Reduce ``tensor`` over the group, in place, and return it."""
        return self.start_all_reduce(tensor, reduction).wait()

    def start_all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """Concatenate every rank's ``tensor`` along dim 0, into ``output`` if given.

        ``tensor`` may be the rank's own part of ``output``.
        """
        if self.size == 1:
            return Work((), lambda: tensor if output is None else output.copy_(tensor))
        if _is_fp8(tensor):
            assert output is None
            dtype = tensor.dtype
            return self.start_all_gather(_sendable(tensor)).then(lambda gathered: gathered.view(dtype))
        if output is None:
            output = tensor.new_empty((tensor.shape[0] * self.size, *tensor.shape[1:]))
        self._record("all_gather", output)
        tensor = tensor.contiguous()
        if self.transport.prefers_messages:
            return self._start_direct_all_gather(tensor, output)
        return Work((self.transport.all_gather(output, tensor),), lambda: output)

    def all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Tensor:
        """Concatenate every rank's ``tensor`` along dim 0."""
        return self.start_all_gather(tensor, output).wait()

    def _start_direct_all_gather(self, tensor: Tensor, output: Tensor) -> Work[Tensor]:
        """Every rank sends its part to every other: measured several times faster than gloo's own all-gather."""
        parts = output.chunk(self.size)
        works = self._start_pairwise([tensor] * self.size, parts)
        if not _is_same_memory(parts[self.rank], tensor):
            parts[self.rank].copy_(tensor)
        return Work(works, lambda: output)

    def start_reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """Sum ``tensor`` over the group and keep this rank's part along dim 0, in ``output`` if given.

        ``output`` may be the rank's own part of ``tensor``.
        """
        if self.size == 1:
            return Work((), lambda: tensor if output is None else output.copy_(tensor))
        self._record("reduce_scatter", tensor)
        tensor = tensor.contiguous()
        if output is None:
            output = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        if self.transport.prefers_messages:
            return self._start_direct_reduce_scatter(tensor, output)
        return Work((self.transport.reduce_scatter(output, tensor),), lambda: output)

    def reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Tensor:
        """Sum ``tensor`` over the group and keep this rank's part along dim 0."""
        return self.start_reduce_scatter(tensor, output).wait()

    def _start_direct_reduce_scatter(self, tensor: Tensor, output: Tensor) -> Work[Tensor]:
        """Every rank receives its part from every other and adds them up in rank order, so that the sum does not
        depend on arrival; gloo's own reduce-scatter reduces the whole tensor everywhere."""
        parts = tensor.chunk(self.size)
        own = parts[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        works = self._start_pairwise(parts, received)
        return Work(works, lambda: add_in_order(received, output))

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
        """Send ``tensor``, which must stay as it is until then, to the next rank of the ring, and receive the like from
        the one before."""
        if self.size == 1:
            return Work((), lambda: tensor)
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._record("shift", tensor, self.ranks[following])
        return self._start_exchange(tensor, following, torch.empty_like(tensor), before)

    def start_exchange(self, tensor: Tensor, target: int, received: Tensor, source: int) -> Work[Tensor]:
        """Send ``tensor``, which must stay as it is until then, to the group's rank ``target``, and receive into
        ``received`` from the rank ``source``. All ranks exchange at once, in the same order."""
        self._record("exchange", tensor, self.ranks[target])
        return self._start_exchange(tensor, target, received, source)

    def _start_exchange(self, tensor: Tensor, target: int, received: Tensor, source: int) -> Work[Tensor]:
        works = self.transport.exchange(
            [
                ("send", _sendable(tensor), self.ranks[target]),
                ("receive", _sendable(received), self.ranks[source]),
            ]
        )
        return Work(works, lambda: received)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send part i of ``tensor`` along dim 0 to rank i; the parts received, in rank order."""
        if self.size == 1:
            return tensor
        self._record("all_to_all", tensor)
        tensor = tensor.contiguous()
        output = torch.empty_like(tensor)
        if not self.transport.prefers_messages:
            self.transport.all_to_all(output, tensor).wait()
            return output
        sent, received = tensor.chunk(self.size), output.chunk(self.size)
        works = self._start_pairwise(sent, received)
        received[self.rank].copy_(sent[self.rank])
        for work in works:
            work.wait()
        return output

    def exchange_parts(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send ``sent[i]`` to rank i and receive its part for this rank into ``received[i]``; parts differ in size, and
        both ends of an empty one know that it is empty."""
        received[self.rank].copy_(sent[self.rank])
        self.record("exchange", sum(part.nbytes for rank, part in enumerate(sent) if rank != self.rank))
        for work in self._start_pairwise(sent, received):
            work.wait()

    def start_send(self, tensor: Tensor, target: int) -> Work[Tensor]:
        """Send ``tensor``, which must stay as it is until then, to the group's rank ``target``."""
        self._record("send", tensor, self.ranks[target])
        work = self.transport.send(tensor, self.ranks[target])
        return Work((self._watched(work) if self.transport.hides_completion else work,), lambda: tensor)

    def start_receive(self, tensor: Tensor, source: int) -> Work[Tensor]:
        """Receive into ``tensor`` what the group's rank ``source`` sends; messages arrive in the order of sending."""
        self._record("receive", tensor, self.ranks[source])
        return Work((self.transport.receive(tensor, self.ranks[source]),), lambda: tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy ``tensor`` of the group's rank ``source`` to all, in place."""
        if self.size > 1:
            self._record("broadcast", tensor)
            self.transport.broadcast(tensor, self.ranks[source])
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order; for small control data."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self.transport.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The ``value`` of the group's rank ``source``, on all; for small control data."""
        if self.size == 1:
            return value
        values = [value]
        self.transport.broadcast_object(values, self.ranks[source])
        return values[0]


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape begin at the same place."""
    is_same_storage = storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())
    return is_same_storage and one.storage_offset() == other.storage_offset()
