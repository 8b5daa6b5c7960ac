"""Microbatches of tensors from datasets, read by this process or by loader processes.

The wait for loader processes has a time limit, and a stop request ends it. The ``timeout`` of a ``DataLoader`` does not
cover a batch that was announced: it is read through a pipe and a thread of the loader process, and a stopped process
blocks its reader forever. Therefore a thread reads, and the rank waits for the thread.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, get_worker_info

from megatron.data.gpt_dataset import Dataset, Sample
from megatron.errors import DataError, LoaderError
from megatron.operation.processes import die_with_parent
from megatron.torch_compat import forget_workers

T = TypeVar("T")
Microbatch = dict[str, torch.Tensor]

_logger = logging.getLogger(__name__)

# The samples of one step, with 2 data-parallel ranks, microbatches of 2 samples and a global batch of 8:
#
#   rank 0   0 1   4 5
#   rank 1   2 3   6 7      a microbatch over all ranks is consecutive, so no layout changes what a step reads


def microbatch_sample_indices(
    start_sample: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> list[int]:
    """The samples of one rank in the microbatch that begins with ``start_sample`` over all ranks."""
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
    first = start_sample + data_parallel_rank * micro_batch_size
    return list(range(first, first + micro_batch_size))


def single_pass_microbatches(
    num_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, in order; an incomplete last one is dropped."""
    chunk = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, num_samples - chunk + 1, chunk):
        yield microbatch_sample_indices(start, micro_batch_size, data_parallel_rank, data_parallel_size)


def cyclic_microbatches(
    num_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, without end, shuffled in every epoch.

    Each rank permutes a contiguous range of samples with a generator seeded by ``seed`` + epoch; seed 0 gives
    Megatron-LM's order. The ranges, and so the order, depend on the data-parallel size.
    """
    chunk = micro_batch_size * data_parallel_size
    epoch_samples = num_samples - num_samples % chunk
    if not epoch_samples:
        raise DataError(
            f"The dataset has {num_samples} samples, fewer than the {chunk} of one microbatch on all "
            "data-parallel ranks: use a smaller --micro-batch-size or more data."
        )
    if consumed_samples % epoch_samples % chunk:
        raise DataError(
            f"--dataloader-type cyclic cannot resume at sample {consumed_samples} with microbatches of "
            f"{chunk} samples over all data-parallel ranks: keep the --micro-batch-size and the "
            "data-parallel size of the saved run."
        )
    bucket = epoch_samples // data_parallel_size
    epoch, consumed_in_epoch = divmod(consumed_samples, epoch_samples)
    start = consumed_in_epoch // data_parallel_size
    while True:
        # Bucket r, the samples [r * bucket, (r + 1) * bucket), is what rank r reads in every epoch.
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(bucket, generator=generator) + data_parallel_rank * bucket
        for first in range(start, bucket, micro_batch_size):
            yield order[first : first + micro_batch_size].tolist()
        epoch, start = epoch + 1, 0


# --- loader processes ---------------------------------------------------------------------------------------

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
        self.stages = torch.zeros(num_workers, dtype=torch.uint8).share_memory_()

    def record(self, has_microbatch: bool) -> None:
        """Record in a loader process that it begins to read, or has read a microbatch."""
        info = get_worker_info()
        if info is not None:
            self.stages[info.id] = _HAS_READ if has_microbatch else _READING


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
        # A process may read its first microbatch for as long as ``limit`` allows: storage may be slow.
        return seconds >= self._patience.start_limit and int(self._starts.stages[worker]) != _READING

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


# --- microbatches ------------------------------------------------------------------------------------------


def build_loader(
    dataset: Dataset,
    *,
    vocab_size: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    dataloader_type: Literal["single", "cyclic"] = "single",
    seed: int = 0,
    pin_memory: bool = False,
    positions: npt.NDArray[np.int64] | None = None,
    patience: Patience = UNLIMITED,
) -> Iterator[Microbatch]:
    """This rank's microbatches: ``tokens`` and ``labels`` [mbs, s] int64, ``loss_mask`` [mbs, s] float32.

    With ``positions`` they have only these positions of each sample, for context parallelism; ``document_starts``
    always describes the whole sample. With ``num_workers`` 0 this process reads, and ``patience`` has no effect.
    ``seed`` is for the cyclic order. Raises :class:`DataError` after the last sample.
    """
    place = (len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)

    def start(starts: Starts | None = None) -> Iterator[Any]:
        cyclic = dataloader_type == "cyclic"
        sampler = cyclic_microbatches(*place, seed) if cyclic else single_pass_microbatches(*place)
        loader: DataLoader[Any] = DataLoader(
            cast(Any, _CheckedSamples(dataset, vocab_size, positions)),
            batch_sampler=cast(Any, sampler),
            collate_fn=partial(_stack, starts=starts),
            num_workers=num_workers,
            worker_init_fn=partial(_prepare_worker, starts=starts),
            pin_memory=pin_memory,
            timeout=POLL if num_workers else 0,
            # Its own generator, so that torch's global generator is not used.
            generator=torch.Generator(),
        )
        return iter(loader)

    return _raise_when_exhausted(
        (lambda: started(start, num_workers, patience)) if num_workers else start, len(dataset)
    )


class _CheckedSamples:
    """Samples whose ids are in the vocabulary, with the tokens at ``positions``, or all.

    Errors are values: torch would wrap an error that is raised in a loader process in a traceback.
    """

    def __init__(self, dataset: Dataset, vocab_size: int, positions: npt.NDArray[np.int64] | None = None) -> None:
        self._dataset, self._vocab_size, self._positions = dataset, vocab_size, positions

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample | DataError:
        try:
            sample = self._dataset[index]
        except DataError as error:
            return error
        ids = sample["tokens"], sample["labels"]
        smallest, largest = min(int(part.min()) for part in ids), max(int(part.max()) for part in ids)
        if smallest < 0 or largest >= self._vocab_size:
            bad = smallest if smallest < 0 else largest
            return DataError(
                f"Sample {index} has token id {bad}, but the largest id of the tokenizer is {self._vocab_size - 1}: "
                "set --tokenizer-type and --tokenizer-model to the tokenizer of the corpus."
            )
        if self._positions is None:
            return sample
        return {name: array if name == "document_starts" else array[self._positions] for name, array in sample.items()}


def _raise_when_exhausted(start: Callable[[], Iterator[Any]], num_samples: int) -> Iterator[Microbatch]:
    batches = start()
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise LoaderError(f"A loader process ended ({error}): use fewer --num-workers if memory ran out.") from error
    finally:
        if isinstance(batches, Generator):
            batches.close()
    raise DataError(
        f"All {num_samples} samples of the dataset have been consumed: train for fewer iterations, or let "
        "the run ask for more samples when it builds its datasets."
    )


def _stack(samples: list[Sample | DataError], starts: Starts | None = None) -> Microbatch | DataError:
    """Samples [s] to a microbatch [mbs, s], or the first error among them."""
    if starts is not None:
        starts.record(has_microbatch=True)
    good: list[Sample] = []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        good.append(sample)
    return {key: torch.from_numpy(np.stack([sample[key] for sample in good])) for key in good[0]}  # [mbs, s]


def _prepare_worker(worker: int, starts: Starts | None = None) -> None:
    torch.set_num_threads(1)
    die_with_parent()
    # Ctrl-C and schedulers signal all processes of a run, but a graceful stop still needs microbatches. Loader
    # processes end when the loader is closed, or with the training process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if starts is not None:
        starts.record(has_microbatch=False)
