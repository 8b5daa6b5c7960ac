"""The waits of a rank for other ranks: at the start of an attempt, until all use one namespace of the store, and later
what a rank adds to its heartbeat while it trains (sections of an iteration, collectives, and waits in them).

On a CPU a wait blocks the host. On a GPU it blocks a stream: two events around it measure for how long, and the host
reads them later. The times of a GPU are measured only in some iterations, because a step of a large model has thousands
of waits.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron.core.communication import Communicator
from megatron.core.topology import RankGrid, Topology
from megatron.core.transport import Message, Reduction, Transport
from megatron.metrics.timers import Timers
from megatron.operation.heartbeat import Heartbeat, Section, Span

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between two checks for new ranks
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two reads of a key
# Ranks of a world with the longest waits; in a smaller one they are shorter, with the same load of the store.
_LARGE_WORLD = 10_000


class Stopwatch(Protocol):
    """Measures waits."""

    is_on: bool
    """Whether waits are measured."""

    def collect(self) -> None:
        """Add to the heartbeat what was measured since the last call."""

    def measure(self, wait: Callable[[], object]) -> None:
        """Call ``wait`` and add its time."""


class HostStopwatch:
    """Adds the time for which the host is blocked to the heartbeat, always and immediately."""

    is_on = True

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def collect(self) -> None:
        pass

    def measure(self, wait: Callable[[], object]) -> None:
        started = time.perf_counter_ns()
        wait()
        self._heartbeat.add_waited(time.perf_counter_ns() - started)


class StreamStopwatch:
    """Measures for how long the current stream is blocked, while :attr:`is_on`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
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
    def __init__(
        self,
        heartbeat: Heartbeat,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        shares_memory: bool = True,
    ) -> None:
        super().__init__(grid, rank, device, timeout, shares_memory)
        self._heartbeat = heartbeat
        self.stopwatch: Stopwatch = HostStopwatch(heartbeat) if device.type == "cpu" else StreamStopwatch(heartbeat)

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
        return timer if section is None else _TimedSpan(self._heartbeat, section, timer)


class _TimedSpan(Span):
    __slots__ = ("_timer",)

    def __init__(self, heartbeat: Heartbeat, section: Section, timer: AbstractContextManager[None]) -> None:
        super().__init__(heartbeat, section)
        self._timer = timer

    def __enter__(self) -> None:
        super().__enter__()
        self._timer.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)


# --- the first wait ------------------------------------------------------------------------------------------
#
# torchrun's agent keeps its store when it restarts the ranks. The store then still holds the addresses that the ranks
# of the attempt before have written, and gloo would connect to those ("connectFullMesh failed ... Connection refused").


def fresh_namespace(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """An empty part of ``store`` for all ranks of this attempt; a collective.

    No key of an earlier attempt can be mistaken for one of this attempt, because every key after the first contains a
    token that a live rank has drawn at random:

    1. Every rank writes its token to ``join/RANK``. Rank 0 may read the token of a dead rank there, until the new one
       replaces it.
    2. Rank 0 answers each token that it finds: ``answer/TOKEN`` holds the name of the namespace, which is its own
       token. A rank reads only the answer to its own token.
    3. A rank that has an answer writes ``ready/NAME/RANK``. Only a live rank can.
    4. When all ranks are ready, rank 0 writes ``start/NAME``.

    Raises :class:`TimeoutError`, with the ranks that are missing, after ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    lead_or_follow = _lead if rank == 0 else _follow
    return PrefixStore(f"attempt/{lead_or_follow(store, rank, world_size, deadline)}", store)


def _lead(store: Store, rank: int, world_size: int, deadline: float) -> str:
    name, others = secrets.token_hex(8), range(1, world_size)
    joined = [f"join/{other}" for other in others]
    ready = [f"ready/{name}/{other}" for other in others]
    longest = _longest(_FIRST_WAIT, _LONGEST_WAIT, world_size)
    wait = _FIRST_WAIT
    while not _wait(store, joined, wait, world_size):
        _check_deadline(store, joined, others, deadline)
        wait = min(2 * wait, longest)
    wait = _FIRST_WAIT
    answered: set[bytes] = set()
    while True:
        for token in store.multi_get(joined) if joined else []:
            if token not in answered:
                store.set(f"answer/{token.decode()}", name)
                answered.add(token)
        if _wait(store, ready, wait, world_size):
            break
        _check_deadline(store, ready, others, deadline)
        wait = min(2 * wait, longest)
    store.set(f"start/{name}", "")
    return name


def _follow(store: Store, rank: int, world_size: int, deadline: float) -> str:
    token = secrets.token_hex(8)
    store.set(f"join/{rank}", token)
    while time.monotonic() < deadline:
        if not _wait(store, [f"answer/{token}"], _LONGEST_WAIT, world_size):
            continue
        # Read again: a new rank 0 may have replaced a dead one.
        name = store.get(f"answer/{token}").decode()
        store.set(f"ready/{name}/{rank}", "")
        if _wait(store, [f"start/{name}"], _LONGEST_WAIT, world_size):
            return name
    raise TimeoutError(
        "Rank 0 has not answered within --distributed-timeout-minutes: it is missing, or waits for other ranks, which "
        "it reports."
    )


def _longest(least: float, most: float, world_size: int) -> float:
    """The longest wait: ``most`` in a large world, where all ranks together must not overload the store."""
    return min(most, least + most * world_size / _LARGE_WORLD)


def _wait(store: Store, keys: Sequence[str], seconds: float, world_size: int) -> bool:
    """Whether all ``keys`` exist within ``seconds``. ``store.wait`` is not used: torch 2.13 prints two warnings at each
    timeout."""
    deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    longest = _longest(_SHORTEST_PAUSE, _LONGEST_PAUSE, world_size)
    while not (found := store.check(list(keys))) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return found


def _check_deadline(store: Store, keys: Sequence[str], ranks: Sequence[int], deadline: float) -> None:
    if time.monotonic() < deadline:
        return
    missing = [str(rank) for key, rank in zip(keys, ranks) if not store.check([key])]
    raise TimeoutError(
        f"{len(missing)} of {len(ranks) + 1} ranks are missing after --distributed-timeout-minutes, the first are rank "
        f"{', '.join(missing[:8])}: start WORLD_SIZE processes, and check which have ended."
    )
