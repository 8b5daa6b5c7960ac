"""Tokenize inputs to one set of outputs, with a pool of worker processes."""

import functools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import chain
from multiprocessing import get_context
from typing import NamedTuple

from megatron.commands.preprocess_work import Counts, EncodedBatch, EncodeTask, encode
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.text_inputs import Batch, SourceRange, divide_among_workers
from megatron.errors import DataError

_PARTS_PER_WORKER = 4  # in flight at a time; bounds memory


class Work(NamedTuple):
    """What to read, and where to write its tokens."""

    ranges: tuple[SourceRange, ...]
    task: EncodeTask
    output_prefix: str
    vocab_size: int
    workers: int
    may_be_empty: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes to read, as stored; 0 where nobody knows."""
        return sum(part.stop - part.start for part in self.ranges)

    def run(self, report: Callable[[Counts], None]) -> Counts:
        """Write the outputs, one per key, which appear only when complete; tells ``report`` of every batch."""
        total, start = Counts(), time.monotonic()
        parts = divide_among_workers(self.ranges, self.task.form)
        with ExitStack() as stack:
            writers = [
                stack.enter_context(IndexedDatasetWriter(output_of(self.output_prefix, key), self.vocab_size))
                for key in self.task.form.keys
            ]
            batches = map_in_order(functools.partial(encode, task=self.task), parts, self.workers)
            for encoded in chain.from_iterable(batches):
                for writer, key in zip(writers, encoded.keys, strict=True):
                    writer.add_documents(key.tokens, key.lengths)
                counts = Counts.of(encoded)
                total.add(counts)
                report(counts)
            total.seconds = time.monotonic() - start
            if not total.tokens and not self.may_be_empty:
                raise DataError("The inputs have no document with text: check --input and --json-keys.")
        return total


def output_of(prefix: str, key: str) -> str:
    """The prefix of the .bin/.idx of one key."""
    return f"{prefix}_{key}_document"


def map_in_order(
    encode: Callable[[Batch | SourceRange], list[EncodedBatch]], parts: Iterator[Batch | SourceRange], workers: int
) -> Iterator[list[EncodedBatch]]:
    """``map`` over worker processes: results in order, a bounded number of parts in flight."""
    if workers == 1:
        yield from map(encode, parts)
        return
    # Forked workers start at once and have the tokenizer already; a process with threads must not fork.
    method = "fork" if threading.active_count() == 1 else "spawn"
    pool = ProcessPoolExecutor(workers, get_context(method), initializer=_start_worker, initargs=(os.getpid(),))
    pending: deque[Future[list[EncodedBatch]]] = deque()
    try:
        pool.submit(int).result()  # all are there before reading starts threads
        for part in parts:
            pending.append(pool.submit(encode, part))
            if len(pending) >= workers * _PARTS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("A worker process died, perhaps for lack of memory: use fewer --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent has gone, even by kill -9: siblings keep the pipe open from which it reads."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
