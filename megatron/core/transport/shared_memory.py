"""The ranks of one host, on CPUs: messages and all-reduces through memory that they share, instead of gloo's sockets.

Starting an operation writes this rank's part into its arena; the wait for it reads the other ranks' parts. So no
operation needs a thread, or that another rank waits for it too. Nothing is left on the host when a process ends: the
memory belongs to file descriptors (``memfd_create``), which the other ranks open through ``/proc``. The counters need
stores that other cores see in order, which x86 guarantees.
"""

import hashlib
import mmap
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transport.torch_distributed import Message, Reduction, Transport

LARGEST_BYTES = 64 * 2**20
"""Larger all-reduces and exchanges use gloo: messages stay in memory until all ranks have read them."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's, of gloo's collectives

# The arena of a rank, into which only this rank writes and from which the others read:
#
#     header, int64 numbers                                                            slots for messages
#     | token | has left | channel 0: all-reduces with peer 0 | ... | channel of ... |  | 4096 | 4096 | 16384 | ... |
#                         /                                    \
#     | messages sent to the peer | messages of the peer that are read | start, size of each unread message sent: ring |
#
# A sender writes a slot, then start and size, then increments the number of sent messages; the receiver copies the slot
# and increments its number of read messages, after which the sender uses the slot again.
_TOKEN, _HAS_LEFT, _FIRST_CHANNEL = 0, 1, 2
_SENT, _READ, _RING = 0, 1, 2
_RING_SIZE = 1024
"""Messages from one rank to another that may be unread."""
_CHANNEL_SIZE = _RING + 2 * _RING_SIZE
_REDUCE, _MESSAGE, _NUM_KINDS = 0, 1, 2
_SMALLEST = 4096
"""Bytes of the smallest slot for a message."""

_SPINS = 200
"""Looks at a counter before the rank offers its core to others, some 20 microseconds."""
_YIELD_SECONDS, _SLEEP_SECONDS = 2e-3, 1e-4
"""The time for which it offers its core between two looks, and its sleep between two looks after that."""
_CROWDED_SLEEP, _LONGEST_SLEEP = 0.25, 4e-3
"""Where ranks outnumber cores: a sleep as part of the time waited so far, and its most seconds. Thirty ranks that look
every 0.1 ms take a third of two cores from those that compute."""
_LOOK_SECONDS = 0.05
"""Seconds between two looks at whether the process of the other rank is alive."""


class _Arena:
    """The memory of one rank: its own, or another's that this process has opened."""

    def __init__(self, descriptor: int, header_bytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, header_bytes)
        self.numbers = memoryview(self._map)[:header_bytes].cast("q")
        weakref.finalize(self, os.close, descriptor)

    def bytes_at(self, start: int, size: int) -> Tensor:
        """A view of the memory ``[size]``."""
        if start + size > len(self._map):
            # The owner has enlarged its arena.
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)


class _Slots:
    """Memory for messages in this rank's arena: powers of two, used again once every receiver has read the message."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._end = descriptor, start
        self._free: dict[int, list[int]] = {}
        self._used: list[tuple[int, int, list[tuple[int, int, int]]]] = []

    def take(self, size: int, readers: list[tuple[int, int, int]], is_read: Callable[[int, int, int], bool]) -> int:
        """The start of a slot of ``size`` bytes or more; ``readers`` are (kind, peer, number) of the messages in it."""
        size = _SMALLEST << max(0, (size - 1) // _SMALLEST).bit_length()
        if not self._free.get(size):
            self._collect(is_read)
        slots = self._free.setdefault(size, [])
        if not slots:
            slots.append(self._end)
            self._end += size
            length = os.fstat(self._descriptor).st_size
            if self._end > length:
                # Seldom, because every rank then maps the arena again. Memory is used only once it is written.
                os.ftruncate(self._descriptor, max(self._end, 2 * length))
        start = slots.pop()
        self._used.append((start, size, readers))
        return start

    def _collect(self, is_read: Callable[[int, int, int], bool]) -> None:
        used = []
        for slot in self._used:
            start, size, readers = slot
            if all(is_read(*reader) for reader in readers):
                self._free.setdefault(size, []).append(start)
            else:
                used.append(slot)
        self._used = used


class _Sent:
    """A message that is written, so that its tensor may change."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Received:
    """A message from ``peer`` that :meth:`wait` copies into ``target``."""

    def __init__(self, transport: "SharedMemoryTransport", peer: int, target: Tensor) -> None:
        self._transport, self._peer, self._target = transport, peer, target.detach()
        self._number = transport.next_number(_MESSAGE, peer)
        self._is_done = False

    def is_completed(self) -> bool:
        return self._is_done or self._transport.is_there(_MESSAGE, self._peer, self._number)

    def wait(self) -> None:
        if not self._is_done:
            message = _MESSAGE, self._peer, self._number
            self._target.copy_(self._transport.read(*message, self._target))
            self._transport.release(*message)
            self._is_done = True


class _Reduced:
    """An all-reduce: :meth:`wait` combines the parts of all ranks in rank order, so that all have the same bits."""

    def __init__(self, transport: "SharedMemoryTransport", tensor: Tensor, reduction: Reduction) -> None:
        self._transport, self._tensor = transport, tensor.detach()
        self._combine: Any = torch.add if reduction == "sum" else torch.maximum
        self._numbers = {peer: transport.next_number(_REDUCE, peer) for peer in transport.peers}
        self._is_done = False

    def is_completed(self) -> bool:
        there = self._transport.is_there
        return self._is_done or all(there(_REDUCE, peer, number) for peer, number in self._numbers.items())

    def wait(self) -> None:
        if self._is_done:
            return
        transport, tensor = self._transport, self._tensor
        parts = {peer: transport.read(_REDUCE, peer, number, tensor) for peer, number in self._numbers.items()}
        parts[transport.rank] = tensor
        first, second, *rest = (parts[rank] for rank in sorted(parts))
        if rest:
            total = self._combine(first, second)
            for part in rest:
                self._combine(total, part, out=total)
            tensor.copy_(total)
        else:
            self._combine(first, second, out=tensor)
        for peer, number in self._numbers.items():
            transport.release(_REDUCE, peer, number)
        self._is_done = True


class SharedMemoryTransport(Transport):
    """All-reduces and messages of a gloo group whose ranks share memory; everything else is gloo's."""

    def __init__(self, process_group: Any, ranks: Sequence[int], rank: int, timeout: timedelta | None) -> None:
        """``rank`` is this process's rank in the group. Raises :class:`OSError` on all ranks if some of them cannot
        share memory. Collective."""
        super().__init__(process_group)
        self.hides_completion = False
        self.rank = rank
        self.peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._timeout = (timeout or _DEFAULT_TIMEOUT).total_seconds()
        self._group_rank = {global_rank: peer for peer, global_rank in enumerate(ranks)}
        size = len(ranks)
        header = mmap.PAGESIZE * -(-8 * (_FIRST_CHANNEL + _NUM_KINDS * size * _CHANNEL_SIZE) // mmap.PAGESIZE)
        own, descriptor, token = _new_arena(header)
        gathered = _gather([_host_number(), os.getpid(), descriptor, token], process_group, size)
        self._arenas: list[_Arena] = []
        self._processes: list[int] = []
        if own is not None and gathered[:, 0].eq(gathered[rank, 0]).all() and gathered[:, 2].ge(0).all():
            with suppress(OSError, ValueError, AttributeError):
                self._arenas = [
                    own if peer == rank else self._open(process, other, its_token, header)
                    for peer, (_, process, other, its_token) in enumerate(gathered.tolist())
                ]
        if not _gather([len(self._arenas)], process_group, size).eq(size).all():
            raise OSError("the ranks of this group cannot share memory")
        self._is_crowded = dist.get_world_size() > len(os.sched_getaffinity(0))
        numbers = self._numbers = self._arenas[rank].numbers
        self._slots = _Slots(descriptor, header)
        self._next = {(kind, peer): 0 for kind in range(_NUM_KINDS) for peer in self.peers}
        self._early: dict[tuple[int, int], set[int]] = {key: set() for key in self._next}
        weakref.finalize(self, numbers.__setitem__, _HAS_LEFT, 1)

    def _open(self, process: int, descriptor: int, token: int, header: int) -> _Arena:
        """The arena of another rank, whose process is watched from now on."""
        arena = _Arena(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), header)
        if arena.numbers[_TOKEN] != token:
            raise OSError(f"process {process} is another one")
        watched = os.pidfd_open(process)
        weakref.finalize(self, os.close, watched)
        self._processes.append(watched)
        return arena

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        if tensor.nbytes > LARGEST_BYTES:
            return super().all_reduce(tensor, reduction)
        self._write(_REDUCE, tensor, self.peers)
        return _Reduced(self, tensor, reduction)

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        small = [message for message in messages if message[1].nbytes <= LARGEST_BYTES]
        large = [message for message in messages if message[1].nbytes > LARGEST_BYTES]
        works = list(super().exchange(large)) if large else []
        written: list[tuple[Tensor, list[int]]] = []
        for kind, tensor, global_rank in small:
            peer = self._group_rank[global_rank]
            if kind == "receive":
                works.append(_Received(self, peer, tensor))
            elif written and written[-1][0] is tensor and peer not in written[-1][1]:
                # A tensor that goes to several ranks is written once.
                written[-1][1].append(peer)
            else:
                written.append((tensor, [peer]))
        for tensor, peers in written:
            self._write(_MESSAGE, tensor, peers)
        return works

    def send(self, tensor: Tensor, target: int) -> Any:
        self._write(_MESSAGE, tensor, [self._group_rank[target]])
        return _Sent()

    def receive(self, tensor: Tensor, source: int) -> Any:
        return _Received(self, self._group_rank[source], tensor)

    def _write(self, kind: int, tensor: Tensor, peers: Sequence[int]) -> None:
        numbers, size = self._numbers, tensor.nbytes
        channels = [_channel(kind, peer, len(self._arenas)) for peer in peers]
        readers = [(kind, peer, numbers[channel + _SENT]) for peer, channel in zip(peers, channels)]
        # The ring of each peer must have a place.
        for _, peer, number in readers:
            self._wait_until(partial(self._is_read, kind, peer, number - _RING_SIZE), peer)
        start = self._slots.take(size, readers, self._is_read)
        if size:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._arenas[self.rank].bytes_at(start, size).copy_(flat)
        for (_, _, number), channel in zip(readers, channels):
            entry = channel + _RING + number % _RING_SIZE * 2
            numbers[entry], numbers[entry + 1] = start, size
            numbers[channel + _SENT] = number + 1

    def _is_read(self, kind: int, peer: int, number: int) -> bool:
        return self._arenas[peer].numbers[_channel(kind, self.rank, len(self._arenas)) + _READ] > number

    def next_number(self, kind: int, peer: int) -> int:
        number = self._next[kind, peer]
        self._next[kind, peer] = number + 1
        return number

    def is_there(self, kind: int, peer: int, number: int) -> bool:
        return self._arenas[peer].numbers[_channel(kind, self.rank, len(self._arenas)) + _SENT] > number

    def read(self, kind: int, peer: int, number: int, like: Tensor) -> Tensor:
        """Wait for a message from ``peer`` of the shape and dtype of ``like``; a view, until :meth:`release`."""
        self._wait_until(partial(self.is_there, kind, peer, number), peer)
        arena = self._arenas[peer]
        entry = _channel(kind, self.rank, len(self._arenas)) + _RING + number % _RING_SIZE * 2
        start, size = arena.numbers[entry], arena.numbers[entry + 1]
        if size != like.nbytes:
            raise RuntimeError(
                f"The ranks call different collectives: one has sent {size} bytes where {like.nbytes} are expected."
            )
        if not size:
            return like
        return arena.bytes_at(start, size).view(like.dtype).view(like.shape)

    def release(self, kind: int, peer: int, number: int) -> None:
        """Let ``peer`` use the memory of the message again."""
        read_count = _channel(kind, peer, len(self._arenas)) + _READ
        early = self._early[kind, peer]
        early.add(number)
        read = self._numbers[read_count]
        # Messages may be read in another order than they were sent.
        while read in early:
            early.remove(read)
            read += 1
        self._numbers[read_count] = read

    def _wait_until(self, is_ready: Callable[[], bool], peer: int) -> None:
        """Wait until ``is_ready``; raises RuntimeError if ``peer`` has ended, or after the timeout."""
        for _ in range(_SPINS):
            if is_ready():
                return
        start = looked = time.monotonic()
        while not is_ready():
            now = time.monotonic()
            if now - start < _YIELD_SECONDS:
                time.sleep(0)  # offers the interpreter's lock to other threads
                os.sched_yield()
            else:
                crowded = min((now - start) * _CROWDED_SLEEP, _LONGEST_SLEEP) if self._is_crowded else 0.0
                time.sleep(max(_SLEEP_SECONDS, crowded))
            if now - looked < _LOOK_SECONDS:
                continue
            looked = now
            if self._has_left(peer) and not is_ready():
                raise RuntimeError("Connection closed by peer: a rank that shares memory with this one has ended.")
            if now - start > self._timeout:
                raise RuntimeError(
                    f"Timed out waiting {self._timeout:.0f} s for a message of another rank in shared memory."
                )

    def _has_left(self, peer: int) -> bool:
        if self._arenas[peer].numbers[_HAS_LEFT]:
            return True
        poll = select.poll()
        poll.register(self._processes[peer - (peer > self.rank)], select.POLLIN)
        return bool(poll.poll(0))


def _new_arena(header: int) -> tuple[_Arena | None, int, int]:
    """An arena of this process, its descriptor and its token; None and -1 where there are none (not Linux, or
    forbidden)."""
    token = secrets.randbits(62)
    try:
        descriptor = os.memfd_create("megatron ranks")
        os.ftruncate(descriptor, header)
        arena = _Arena(descriptor, header)
    except (OSError, AttributeError):
        return None, -1, token
    arena.numbers[_TOKEN] = token
    return arena, descriptor, token


def _channel(kind: int, peer: int, size: int) -> int:
    """Begin of the numbers of ``kind`` and ``peer`` in the arena of a group of ``size`` ranks."""
    return _FIRST_CHANNEL + (kind * size + peer) * _CHANNEL_SIZE


def _host_number() -> int:
    """A number that only processes have in common that see the same ``/proc``."""
    with suppress(OSError):
        host = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        return int.from_bytes(hashlib.sha256(host.encode()).digest()[:7], "big")
    return -1


def _gather(numbers: Sequence[int], process_group: Any, size: int) -> Tensor:
    own = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=process_group)
    return torch.stack(gathered)
