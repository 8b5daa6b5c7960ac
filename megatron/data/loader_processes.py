"""Wait for loader processes with a time limit, and stop waiting on a stop request.

The ``timeout`` of a ``DataLoader`` does not cover a batch that was announced: it is read through a pipe and a thread of
the loader process, and a stopped process blocks its reader forever. Therefore a thread reads, and the rank waits for
the thread.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from megatron.errors import LoaderError
from megatron.torch_compat import forget_workers

T = TypeVar("T")

_logger = logging.getLogger(__name__)

#   loader processes --pipe, shared memory--> thread: next(batches) --replies--> rank: __next__
#                                                    ^---------- requests -----------'
#
# The rank polls the replies, and raises when the limits of its Patience are exceeded; the thread may then still be
# blocked in the pipe, and ends with the process.

POLL = 1.0  # seconds between two polls; also the ``timeout`` of the ``DataLoader``
GRACE = 10.0  # seconds to wait for a microbatch after a stop request; launchers kill a run about 30 s after it
_JOIN = 5.0  # seconds to wait for a killed process
_READING, _HAS_READ = 1, 2  # stages of a loader process; 0: started


class LoaderStalledError(LoaderError):
    """A loader process delivers no data."""


class LoaderNotStartedError(LoaderStalledError):
    """A loader process has delivered nothing since its start, and this is not because reading takes long."""


class Starts:
    """The stage of each loader process, in memory that they share with the rank."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._stages = torch.zeros(num_workers, dtype=torch.uint8).share_memory_()

    def record(self, has_microbatch: bool) -> None:
        """Record in a loader process that it begins to read, or has read a microbatch."""
        info = get_worker_info()
        if info is not None:
            self._stages[info.id] = _HAS_READ if has_microbatch else _READING

    def is_reading(self, worker: int) -> bool:
        """Whether a process reads its first microbatch: storage may be slow for as long as ``Patience`` allows."""
        return int(self._stages[worker]) == _READING


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for a microbatch."""

    limit: float = 0.0  # seconds (--dataloader-timeout); 0: no limit
    # Returns the name of the signal that requested a stop, if any.
    stop_signal: Callable[[], str | None] = lambda: None
    # Seconds after which loader processes are started again that have delivered nothing and are not reading.
    start_limit: float = 60.0


UNLIMITED = Patience()


class Wait:
    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._began = clock()
        self._stop_requested_at: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._began

    def check(self, process: int | None) -> None:
        """Raise :class:`LoaderStalledError` when the wait for ``process`` has exceeded its limit."""
        now, stop_signal = self._clock(), self._patience.stop_signal()
        seconds = self.seconds
        if stop_signal is not None:
            self._stop_requested_at = now if self._stop_requested_at is None else self._stop_requested_at
            # The iteration that is under way should end before the run saves and stops.
            if now - self._stop_requested_at >= GRACE:
                raise LoaderStalledError(
                    f"{stop_signal} asked the run to stop, but loader process {process} has delivered no microbatch "
                    f"for {seconds:.0f} s, so the iteration cannot be finished."
                )
        if 0 < self._patience.limit <= seconds:
            raise LoaderStalledError(
                f"Loader process {process} has delivered no microbatch for {seconds:.0f} s (--dataloader-timeout "
                f"{self._patience.limit:.0f}): check the storage of the corpus; if reading can take that long, raise "
                "--dataloader-timeout."
            )


class LoaderProcesses(Iterator[T]):
    """Iterates over ``batches``, the iterator of a ``DataLoader`` with processes and ``timeout`` :data:`POLL`.

    Raises :class:`LoaderStalledError` when a process delivers nothing for longer than ``patience`` allows; with
    ``starts``, :class:`LoaderNotStartedError` when the first one of a process does not come and it does not read.
    """

    def __init__(self, batches: Any, patience: Patience, starts: Starts | None = None) -> None:
        self._batches, self._patience, self._starts = batches, patience, starts
        self._requests = threading.Semaphore(0)
        self._replies: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()
        self._num_delivered = 0
        self._is_closed = False
        self._reader = threading.Thread(target=self._read, name="loader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        reply: T | BaseException | None = None
        while not isinstance(reply, BaseException):
            self._requests.acquire()
            reply = self._next()
            if reply is None:
                return
            self._replies.put(reply)

    def _next(self) -> T | BaseException | None:
        """The next batch or its error; None after :meth:`close`."""
        while not self._is_closed:
            try:
                batch: T = next(self._batches)
                return batch
            except (ConnectionError, EOFError) as error:
                # torch fetches the memory of a microbatch through a socket of the process, which has ended. An error of
                # the process itself, such as of remote storage, comes with torch's words.
                if str(error).startswith("Caught "):
                    return error
                return LoaderError(
                    f"A loader process ended while it delivered a microbatch ({error!r}): use fewer --num-workers if "
                    "memory ran out."
                )
            except BaseException as error:
                if not str(error).startswith("DataLoader timed out"):
                    return error
        return None

    def __next__(self) -> T:
        self._requests.release()
        wait = Wait(self._patience)
        while True:
            with suppress(queue.Empty):
                reply = self._replies.get(timeout=POLL)
                if isinstance(reply, BaseException):
                    raise reply
                self._num_delivered += 1
                return reply
            # The worker, an index, that delivers the next batch; torch numbers batches in the order of delivery.
            task = self._batches._task_info.get(self._batches._rcvd_idx)
            worker = None if task is None else int(task[0])
            process = None if worker is None else self._batches._workers[worker].pid
            wait.check(process)
            if worker is not None and self._is_lost(worker, wait.seconds):
                raise LoaderNotStartedError(
                    f"Loader process {process} was started {wait.seconds:.0f} s ago, and neither reads nor delivers a "
                    "microbatch."
                )

    def _is_lost(self, worker: int, seconds: float) -> bool:
        """Whether a worker that was started ``seconds`` ago or more neither reads nor has delivered."""
        # Workers deliver in turn, so each of them has its first microbatch among as many as there are workers.
        if self._starts is None or self._num_delivered >= self._starts.num_workers:
            return False
        return seconds >= self._patience.start_limit and not self._starts.is_reading(worker)

    def close(self) -> None:
        self._is_closed = True
        self._requests.release()
        self._reader.join(2 * POLL)
        if self._reader.is_alive():
            # torch's shutdown without its waits for the processes: a killed one may hold a lock forever.
            self._batches._shutdown = True
            if self._batches._worker_pids_set:
                # Else torch reports the death of a loader process as an error, in whatever the main thread does.
                forget_workers(self._batches)
                self._batches._worker_pids_set = False
            for indices in self._batches._index_queues:
                indices.cancel_join_thread()
        else:
            # Loader processes ignore the signal with which Python ends them at exit.
            self._batches._shutdown_workers()
        # A stopped process does not react to torch's SIGTERM.
        for process in self._batches._workers:
            if process.is_alive():
                process.kill()
        for process in self._batches._workers:
            process.join(_JOIN)


def started(start: Callable[[Starts], Any], num_workers: int, patience: Patience) -> Iterator[Any]:
    """The batches of loader processes. ``start`` returns the iterator of a new ``DataLoader``, whose processes report
    to the :class:`Starts`.

    A process that is forked beside other threads may wait for ever for a lock that one of them had; so may the thread
    with which it delivers. Therefore the first microbatch of every process is awaited before any is used, and all are
    started a second time if one does not come.
    """
    starts = Starts(num_workers)
    batches = LoaderProcesses[Any](start(starts), patience, starts)
    try:
        try:
            first = list(islice(batches, num_workers))
        except LoaderNotStartedError as error:
            _logger.warning("%s The loader processes are started again.", error)
            batches.close()
            starts = Starts(num_workers)
            batches = LoaderProcesses(start(starts), patience)
            first = []
        yield from first
        yield from batches
    finally:
        batches.close()
