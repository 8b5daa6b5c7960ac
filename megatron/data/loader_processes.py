"""Wait for loader processes with a time limit, and stop waiting on a stop request.

The ``timeout`` of a ``DataLoader`` does not cover a batch that was announced: it is read through a pipe and a thread of
the loader process, and a stopped process blocks its reader forever. Therefore a thread reads, and the rank waits for
the thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import LoaderError
from megatron.torch_compat import forget_workers

T = TypeVar("T")

POLL = 1.0
"""Seconds between two polls; also the ``timeout`` of the ``DataLoader``."""
GRACE = 10.0
"""Seconds to wait for a microbatch after a stop request; launchers kill a run about 30 s after it."""
_JOIN = 5.0  # seconds to wait for a killed process


class LoaderStalledError(LoaderError):
    """A loader process delivers no data."""


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for a microbatch."""

    limit: float = 0.0
    """Seconds (``--dataloader-timeout``); 0: no limit."""
    stop_signal: Callable[[], str | None] = lambda: None
    """Returns the name of the signal that requested a stop, if any."""


UNLIMITED = Patience()


class Wait:
    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._began = clock()
        self._stop_requested_at: float | None = None

    def check(self, process: int | None) -> None:
        """Raise :class:`LoaderStalledError` when the wait for ``process`` has exceeded its limit."""
        now, stop_signal = self._clock(), self._patience.stop_signal()
        seconds = now - self._began
        if stop_signal is not None:
            self._stop_requested_at = now if self._stop_requested_at is None else self._stop_requested_at
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

    Raises :class:`LoaderStalledError` when a process delivers nothing for longer than ``patience`` allows.
    """

    def __init__(self, batches: Any, patience: Patience) -> None:
        self._batches, self._patience = batches, patience
        self._requests = threading.Semaphore(0)
        self._replies: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()
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
                return reply
            wait.check(self._awaited_process())

    def _awaited_process(self) -> int | None:
        """Number of the process that delivers the next batch."""
        task = self._batches._task_info.get(self._batches._rcvd_idx)
        return None if task is None else self._batches._workers[task[0]].pid

    def close(self) -> None:
        self._is_closed = True
        self._requests.release()
        self._reader.join(2 * POLL)
        if self._reader.is_alive():
            self._give_up()
        else:
            # Loader processes ignore the signal with which Python ends them at exit.
            self._batches._shutdown_workers()
        # A stopped process does not react to torch's SIGTERM.
        for process in self._batches._workers:
            if process.is_alive():
                process.kill()
        for process in self._batches._workers:
            process.join(_JOIN)

    def _give_up(self) -> None:
        """torch's shutdown without its waits for the processes: a killed one may hold a lock forever."""
        batches, self._batches._shutdown = self._batches, True
        if batches._worker_pids_set:
            # Else torch reports the death of a loader process as an error, in whatever the main thread does.
            forget_workers(batches)
            batches._worker_pids_set = False
        for indices in batches._index_queues:
            indices.cancel_join_thread()
