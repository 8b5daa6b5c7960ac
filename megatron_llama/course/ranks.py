"""Ranks as threads of one process: the project's :class:`Communicator` on a network in memory, in which a deadlock is a
sentence.

Collectives are messages between all pairs of ranks, as over gloo. A message is copied when it is sent, and what is
received is NaN until its wait, so that a result does not depend on which thread runs first.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron.core.communication import CollectiveRecord, Communicator, add_in_order
from megatron.core.transport.torch_distributed import Message, Reduction, Transport
from megatron_llama.course.lesson import Wrong

T = TypeVar("T")
MESSAGES = {"send", "receive", "shift", "exchange"}
"""Kinds of records that are messages to one rank; others are collectives."""


class Network:
    """The messages under way between ``size`` ranks, and which rank waits for what."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: defaultdict[tuple[int, int], deque[tuple[str, Tensor]]] = defaultdict(deque)
        """What was sent from one rank to another and not received: the kind of collective, and the tensor."""
        self.unfinished: list[Sent | Received] = []
        """Messages that were not waited for."""
        self._awaited: dict[int, int] = {}  # a rank that waits, and the rank whose message it waits for
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self.deadlock = ""

    def send(self, source: int, target: int, kind: str, tensor: Tensor) -> "Sent":
        with self._changed:
            sent = Sent(self, source, tensor.detach())
            self.mail[source, target].append((kind, sent.copy))
            self.unfinished.append(sent)
            self._changed.notify_all()
        return sent

    def receive(self, source: int, target: int, kind: str, like: Tensor) -> Tensor:
        """The next message from ``source`` to ``target``; raises :class:`Wrong` if none can come, or another one."""
        with self._changed:
            box = self.mail[source, target]
            self._awaited[target] = source
            while not box:
                self._find_deadlock()
                if self.deadlock:
                    raise Wrong(self.deadlock)
                self._changed.wait()
            del self._awaited[target]
            kind_sent, message = box.popleft()
        if kind_sent != kind:
            raise Wrong(
                f"Rank {source} is in {kind_sent} while rank {target} is in {kind}: all ranks must call the same "
                "collectives in the same order."
            )
        if message.numel() != like.numel():
            raise Wrong(
                f"Rank {source} has sent {message.numel()} numbers to rank {target}, which expects {like.numel()}: the "
                "part that one rank sends must be the part for which the other has made room."
            )
        return message.view(like.shape)

    def end(self, rank: int) -> None:
        """``rank`` sends nothing more."""
        with self._changed:
            self._ended.add(rank)
            self._find_deadlock()

    def _find_deadlock(self) -> None:
        """Under the lock: say so if every rank that has not ended waits for a message that was not sent."""
        alive = self._awaited.keys() - self._ended
        if self.deadlock or not alive or len(alive) + len(self._ended) < self.size:
            return
        if any(self.mail[self._awaited[rank], rank] for rank in alive):
            return
        waits = ", ".join(f"rank {rank} waits for rank {self._awaited[rank]}" for rank in sorted(alive))
        self.deadlock = f"Deadlock: {waits}, and no message is under way: each rank must send before it waits."
        if self._ended:
            self.deadlock = (
                f"Deadlock: {waits}, but the other ranks have returned: every message that a rank waits for must be "
                "sent, and all ranks must call the same collectives."
            )
        self._changed.notify_all()


class Sent:
    """A message that is sent; its tensor must not change before :meth:`wait`."""

    def __init__(self, network: Network, source: int, tensor: Tensor) -> None:
        self._network, self.source, self._tensor, self.copy = network, source, tensor, tensor.clone()

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        if self not in self._network.unfinished:
            return
        self._network.unfinished.remove(self)
        now, then = (one.flatten().view(torch.uint8) for one in (self._tensor, self.copy))  # NaN equals itself
        if not torch.equal(now, then):
            raise Wrong(
                f"Rank {self.source} has changed a tensor between the start of its send and the wait: on a GPU the "
                "other rank may receive either value; wait for the send first."
            )


class Received:
    """A message that :meth:`wait` copies into ``target``, which is NaN until then."""

    def __init__(self, network: Network, receive: Callable[[], Tensor], target: Tensor) -> None:
        self._network, self._receive, self._target = network, receive, target.detach()
        network.unfinished.append(self)
        if target.is_floating_point():
            self._target.fill_(torch.nan)

    def is_completed(self) -> bool:
        return self not in self._network.unfinished

    def wait(self) -> None:
        if self in self._network.unfinished:
            self._target.copy_(self._receive())
            self._network.unfinished.remove(self)


class MemoryTransport(Transport):
    """Messages and all-reduces of one rank; the communicator makes its other collectives of messages."""

    def __init__(self, communicator: "ThreadCommunicator", network: Network) -> None:
        self.prefers_messages, self.hides_completion = True, False
        self._communicator, self._network = communicator, network

    def send(self, tensor: Tensor, target: int) -> Sent:
        return self._network.send(self._communicator.rank, target, self._communicator.kind, tensor)

    def receive(self, tensor: Tensor, source: int) -> Received:
        rank, kind = self._communicator.rank, self._communicator.kind
        return Received(self._network, lambda: self._network.receive(source, rank, kind, tensor), tensor)

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        return [(self.send if kind == "send" else self.receive)(tensor, peer) for kind, tensor, peer in messages]

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        size, rank = self._communicator.size, self._communicator.rank
        parts = [tensor.detach().clone() if peer == rank else torch.empty_like(tensor) for peer in range(size)]
        works = self._communicator._start_pairwise([parts[rank]] * size, parts)
        for work in works:
            work.wait()
        tensor.detach().copy_(add_in_order(parts) if reduction == "sum" else torch.stack(parts).amax(0))
        return works[0]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        size, rank = self._communicator.size, self._communicator.rank
        if rank == source:
            for peer in set(range(size)) - {rank}:
                self.send(tensor, peer).wait()
        else:
            self.receive(tensor, source).wait()


class ThreadCommunicator(Communicator):
    """A communicator of all ranks of ``network``, which records what it starts."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(range(network.size), rank)
        self.records: list[CollectiveRecord] = []
        self._network = network

    @cached_property
    def transport(self) -> Transport:
        return MemoryTransport(self, self._network)

    @property
    def kind(self) -> str:
        """What the rank has called last."""
        return "a message" if self.records[-1].kind in MESSAGES else f"an {self.records[-1].kind}"

    def record(self, kind: str, num_bytes: int, peer: int | None = None) -> None:
        self.records.append(CollectiveRecord(kind, "", self.size, num_bytes, peer))


@dataclass(frozen=True)
class Ran(Generic[T]):
    """What the ranks returned and called, in rank order."""

    results: list[T]
    records: list[list[CollectiveRecord]]
    network: Network


def run_ranks(size: int, work: Callable[[ThreadCommunicator], T]) -> Ran[T]:
    """Call ``work`` on ``size`` ranks, each a thread. Raises the exception of the rank that failed first, or
    :class:`Wrong` with the deadlock of all."""
    network = Network(size)
    communicators = [ThreadCommunicator(network, rank) for rank in range(size)]
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(communicators[rank])
        except BaseException as error:
            errors.append(error)
        finally:
            network.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Where a rank has failed, the others wait for it in vain.
    for error in sorted(errors, key=lambda error: str(error) == network.deadlock):
        raise error
    return Ran([results[rank] for rank in range(size)], [one.records for one in communicators], network)
