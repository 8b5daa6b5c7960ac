"""Microbatches of tensors from datasets, read by this thread or ahead by threads of this process.

Reading hardly needs the interpreter: positional reads, copies and hashes release its lock. The wait for a thread has a
time limit, and a stop request ends it: a file system that does not answer blocks a thread for ever, also in the kernel.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from megatron.data.data_module import SampleStream
from megatron.data.gpt_dataset import Dataset, Sample, add_future_tokens
from megatron.errors import DataError, LoaderError

Microbatch = dict[str, torch.Tensor]
LOADER_STATE = "loader_state"
"""Key of the state of a user's loader after a microbatch; ``Lookahead`` of training takes it out."""

# The samples of one step, with 2 data-parallel ranks, microbatches of 2 samples and a global batch of 8:
#
#   rank 0   0 1   4 5
#   rank 1   2 3   6 7      a microbatch over all ranks is consecutive, so no layout changes what a step reads


def single_pass_microbatches(
    num_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, in order; an incomplete last one is dropped."""
    chunk = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, num_samples - chunk + 1, chunk):
        first = start + data_parallel_rank * micro_batch_size
        yield list(range(first, first + micro_batch_size))


def cyclic_microbatches(
    num_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, without end, shuffled in every epoch.

    As in Megatron-LM, each rank permutes a contiguous range of samples with a generator seeded by the epoch. The
    ranges, and so the order, depend on the data-parallel size.
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
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(bucket, generator=generator) + data_parallel_rank * bucket
        for first in range(start, bucket, micro_batch_size):
            yield order[first : first + micro_batch_size].tolist()
        epoch, start = epoch + 1, 0


# --- reading ahead ------------------------------------------------------------------------------------------

#   rank: __next__ --- samples and a Future ---> tasks ---> threads: read
#       ^--- the oldest Future <--- pending ---'                      '---> result or error
#
# The rank polls the oldest Future, and raises when the limits of its Patience are exceeded. The thread may be blocked
# in its read even then; it is a daemon, so the process ends without it.

POLL = 1.0  # seconds between two polls
GRACE = 10.0  # seconds to wait for a microbatch after a stop request; launchers kill a run about 30 s after it
AHEAD = 2  # microbatches that are read ahead for each thread
_JOIN = 1.0  # seconds to wait for the threads at the end


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for a microbatch."""

    limit: float = 0.0  # seconds (--dataloader-timeout); 0: no limit
    # Returns the name of the signal that requested a stop, if any.
    stop_signal: Callable[[], str | None] = lambda: None


UNLIMITED = Patience()


class Wait:
    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._began = clock()
        self._stop_requested_at: float | None = None

    def check(self) -> None:
        """Raise :class:`LoaderError` when the wait has exceeded its limit."""
        now, stop_signal = self._clock(), self._patience.stop_signal()
        seconds = now - self._began
        if stop_signal is not None:
            self._stop_requested_at = now if self._stop_requested_at is None else self._stop_requested_at
            # The iteration that is under way should end before the run saves and stops.
            if now - self._stop_requested_at >= GRACE:
                raise LoaderError(
                    f"{stop_signal} asked the run to stop, but the loader has delivered no microbatch for "
                    f"{seconds:.0f} s, so the iteration cannot be finished."
                )
        if 0 < self._patience.limit <= seconds:
            raise LoaderError(
                f"The loader has delivered no microbatch for {seconds:.0f} s (--dataloader-timeout "
                f"{self._patience.limit:.0f}): check the storage of the corpus; if reading can take that long, raise "
                "--dataloader-timeout."
            )


def read_ahead(
    batches: Iterator[list[int]], read: Callable[[list[int]], Microbatch], num_threads: int, patience: Patience
) -> Iterator[Microbatch]:
    """The result of ``read`` for each of ``batches``, in order; ``num_threads`` threads read.

    An error of a read is raised in its place. Raises :class:`LoaderError` where a read delivers nothing.
    """
    tasks: queue.SimpleQueue[tuple[list[int], Future[Microbatch]] | None] = queue.SimpleQueue()
    pending: deque[Future[Microbatch]] = deque()
    threads = [
        threading.Thread(target=_work, args=(tasks, read), name=f"loader {number}", daemon=True)
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    try:
        while True:
            for samples in islice(batches, AHEAD * num_threads - len(pending)):
                pending.append(Future())
                tasks.put((samples, pending[-1]))
            if not pending:
                return
            yield _result(pending.popleft(), Wait(patience))
    finally:
        for future in pending:
            future.cancel()  # unless it is being read
        for _ in threads:
            tasks.put(None)
        end = time.monotonic() + _JOIN
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def _work(
    tasks: "queue.SimpleQueue[tuple[list[int], Future[Microbatch]] | None]", read: Callable[[list[int]], Microbatch]
) -> None:
    while (task := tasks.get()) is not None:
        samples, future = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read(samples))
            except BaseException as error:
                future.set_exception(error)
        del task, future  # the microbatch, while this thread waits for another task


def _result(future: Future[Microbatch], limit: Wait) -> Microbatch:
    while not wait([future], POLL).done:
        limit.check()
    return future.result()


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
    pin_memory: bool = False,
    positions: npt.NDArray[np.int64] | None = None,
    num_future: int = 0,
    patience: Patience = UNLIMITED,
) -> Iterator[Microbatch]:
    """This rank's microbatches: ``tokens`` and ``labels`` [mbs, s] int64, ``loss_mask`` [mbs, s] float32.

    With ``positions`` they have only these positions of each sample, for context parallelism; ``document_starts``
    always describes the whole sample. With ``num_future`` depths of multi-token prediction they have ``future_labels``
    [mbs, depths, s] int64 and ``future_mask`` float32. ``num_workers`` threads read ahead; with 0 the caller reads, and
    ``patience`` has no effect. Raises :class:`DataError` after the last sample.
    """
    place = (len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
    batches = single_pass_microbatches(*place) if dataloader_type == "single" else cyclic_microbatches(*place)
    # The device of the thread that calls this: a thread of the loader would otherwise use the first one.
    device = torch.accelerator.current_device_index() if pin_memory else None

    def read(samples: list[int]) -> Microbatch:
        microbatch = read_microbatch(dataset, samples, vocab_size, positions, num_future, device)
        if isinstance(dataset, SampleStream) and (state := dataset.state()) is not None:
            microbatch[LOADER_STATE] = state
        return microbatch

    if num_workers:
        # The samples of a stream come in order only in one thread.
        yield from read_ahead(batches, read, 1 if isinstance(dataset, SampleStream) else num_workers, patience)
    else:
        yield from map(read, batches)
    raise DataError(
        f"All {len(dataset)} samples of the dataset have been consumed: train for fewer iterations, or let "
        "the run ask for more samples when it builds its datasets."
    )


def read_microbatch(
    dataset: Dataset,
    samples: list[int],
    vocab_size: int,
    positions: npt.NDArray[np.int64] | None,
    num_future: int,
    device: int | None,
) -> Microbatch:
    """``samples`` [mbs] as tensors [mbs, s], in memory that is pinned for ``device`` if it is given."""
    try:
        rows = [read_sample(dataset, index, vocab_size, positions, num_future) for index in samples]
    except OSError as error:
        raise LoaderError(f"The data cannot be read ({error}): check the storage of the corpus.") from error
    microbatch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}  # [mbs, s]
    if device is None:
        return microbatch
    torch.accelerator.set_device_index(device)
    return {key: tensor.pin_memory() for key, tensor in microbatch.items()}


def read_sample(
    dataset: Dataset, index: int, vocab_size: int, positions: npt.NDArray[np.int64] | None, num_future: int
) -> Sample:
    """A sample whose ids are in the vocabulary, with the tokens at ``positions``, or all."""
    sample = dataset[index]
    ids = sample["tokens"], sample["labels"]
    smallest, largest = min(int(part.min()) for part in ids), max(int(part.max()) for part in ids)
    if smallest < 0 or largest >= vocab_size:
        bad = smallest if smallest < 0 else largest
        raise DataError(
            f"Sample {index} has token id {bad}, but the largest id of the tokenizer is {vocab_size - 1}: "
            "set --tokenizer-type and --tokenizer-model to the tokenizer of the corpus."
        )
    if num_future:
        sample = add_future_tokens(sample, num_future)
    if positions is None:
        return sample
    return {name: array if name == "document_starts" else array[..., positions] for name, array in sample.items()}
