"""Tokenize inputs to one set of outputs, in this process or a pool of workers, and count and show what is done."""

import functools
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megatron.commands.tool import HeldSignals
from megatron.config.data import TokenizerConfig
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.indexed_dataset import token_dtype
from megatron.data.text_inputs import (
    BadDocument,
    Batch,
    InputFormat,
    SourceRange,
    divide_among_workers,
    parse_documents,
    place_of,
    read_batches,
    text_bytes,
)
from megatron.data.tokenizers import Tokenizer, shared_tokenizer
from megatron.data.verified_encoder import TokenizedTexts
from megatron.errors import DataError

#   this process                                 workers
#   divide_among_workers: ranges, batches  --->  encode: read, parse, tokenize, append EOD
#   IndexedDatasetWriter, in order         <---  EncodedBatch: the tokens in the dtype of the file
#
# At most four parts per worker are in flight.

_NAMED_BAD_DOCUMENTS = 10  # per batch; all are counted


class EncodedKey(NamedTuple):
    """The tokens of a batch for one key."""

    # [tokens] all documents, concatenated, in the dtype of the file unless an id is outside of the vocabulary
    tokens: npt.NDArray[np.integer[Any]]
    # [documents] tokens of each document that is not empty
    lengths: npt.NDArray[np.int32]
    empty: int  # documents without tokens, which are dropped


class EncodedBatch(NamedTuple):
    """The result of a worker."""

    documents: int
    text_bytes: int
    stored_bytes: int
    keys: list[EncodedKey]
    num_bad: int
    bad: list[BadDocument]  # the first skipped documents


class EncodeTask(NamedTuple):
    tokenizer: TokenizerConfig
    form: InputFormat
    append_eod: bool
    skip_bad_documents: bool


def encode(part: Batch | SourceRange, task: EncodeTask) -> list[EncodedBatch]:
    """Tokenize a batch, or the documents of a range of a file. Raises :class:`DataError` as :func:`encode_batch`."""
    batches = read_batches([part], task.form) if isinstance(part, SourceRange) else [part]
    return [encode_batch(batch, task) for batch in batches]


def encode_batch(batch: Batch, task: EncodeTask, tokenizer: Tokenizer | None = None) -> EncodedBatch:
    """Tokenize a batch. Raises :class:`DataError` with the place of a bad document, unless they are skipped."""
    tokenizer = tokenizer or shared_tokenizer(task.tokenizer)
    good: list[tuple[int, list[str]]] = []
    bad: list[tuple[int, str]] = []
    for number, texts in parse_documents(batch, task.form.keys, "--json-keys"):
        if isinstance(texts, str):
            bad.append((number, texts))
            if not task.skip_bad_documents:
                break
        else:
            good.append((number, texts))
    encoded = _tokenize(good, len(task.form.keys), tokenizer)
    if encoded is None:
        # The tokenizer refuses a text of the batch: tokenize one by one to find which.
        documents, good = good, []
        for number, texts in documents:
            try:
                tokenizer.tokenize_batch(texts)
                good.append((number, texts))
            except DataError as error:
                bad.append((number, f"cannot be tokenized: {str(error).rstrip('.')}"))
        bad.sort()
        encoded = _tokenize(good, len(task.form.keys), tokenizer) or []
    named = [BadDocument(place_of(batch, number), reason) for number, reason in bad[:_NAMED_BAD_DOCUMENTS]]
    if bad and not task.skip_bad_documents:
        raise DataError(f"{named[0].place} {named[0].reason}, or skip such documents with --skip-bad-documents.")
    eod = tokenizer.eod if task.append_eod else None
    keys = [_join_documents(texts, eod, tokenizer.vocab_size) for texts in encoded]
    return EncodedBatch(len(good), text_bytes(batch), batch.stored_bytes, keys, len(bad), named)


def _tokenize(
    documents: list[tuple[int, list[str]]], num_keys: int, tokenizer: Tokenizer
) -> list[TokenizedTexts] | None:
    """The tokens of every key; None if the tokenizer refuses a text."""
    try:
        return [tokenizer.tokenize_to_arrays([texts[key] for _, texts in documents]) for key in range(num_keys)]
    except DataError:
        return None


def _join_documents(texts: TokenizedTexts, eod: int | None, vocab_size: int) -> EncodedKey:
    lengths = texts.lengths[texts.lengths > 0]
    empty = texts.lengths.size - lengths.size
    # In the dtype of the file here, so that less goes to the process that writes; it refuses other ids.
    fits = not texts.tokens.size or 0 <= int(texts.tokens.min()) <= int(texts.tokens.max()) < vocab_size
    dtype = token_dtype(vocab_size) if fits else texts.tokens.dtype
    if eod is None:
        return EncodedKey(texts.tokens.astype(dtype, copy=False), lengths, empty)
    tokens = np.empty(texts.tokens.size + lengths.size, dtype)
    start = 0
    for number, end in enumerate(np.cumsum(lengths, dtype=np.int64).tolist()):
        tokens[start + number : end + number] = texts.tokens[start:end]
        tokens[end + number] = eod
        start = end
    return EncodedKey(tokens, lengths + 1, empty)


@dataclass
class Counts:
    """Counts of what has been written."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0  # documents without a token, which are dropped
    text_bytes: int = 0
    stored_bytes: int = 0  # bytes of the inputs read, as stored
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)  # the first documents that were skipped, with the reason
    seconds: float = 0.0

    def add(self, other: "Counts") -> None:
        """Add the counts of others; time is not added."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.empty += other.empty
        self.text_bytes += other.text_bytes
        self.stored_bytes += other.stored_bytes
        self.num_bad += other.num_bad
        self.bad = (self.bad + other.bad)[:_NAMED_BAD_DOCUMENTS]

    @classmethod
    def of(cls, batch: EncodedBatch) -> "Counts":
        tokens, empty = (sum(values) for values in zip(*((key.tokens.size, key.empty) for key in batch.keys)))
        bad = [f"{place} {reason}" for place, reason in batch.bad]
        return cls(batch.documents, tokens, empty, batch.text_bytes, batch.stored_bytes, batch.num_bad, bad)

    def speed(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.documents / seconds:,.0f} documents/s, {self.text_bytes / seconds / 1e6:.2f} MB/s, "
            f"{self.tokens / seconds:,.0f} tokens/s"
        )

    def summary(self) -> str:
        """All counts and speeds in one line, and a line for each of the first bad documents."""
        line = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.empty:,} empty documents skipped"
        if not self.num_bad:
            return f"{line}; {self.speed()}"
        more = [f"  and {self.num_bad - len(self.bad):,} more"] if self.num_bad > len(self.bad) else []
        bad = [f"{self.num_bad:,} bad documents skipped:", *(f"  {reason}" for reason in self.bad), *more]
        return "\n".join([f"{line}, {self.num_bad:,} bad documents skipped; {self.speed()}", *bad])


class Progress:
    """Adds counts up and shows them: a bar on a terminal, else a line now and then."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self.counts = Counts()
        self._total = total_bytes
        self._log_interval = log_interval
        self._next_log = log_interval
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # a thread, which would keep workers from being forked
            self._bar = tqdm(total=total_bytes or None, unit="B", unit_scale=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, counts: Counts) -> None:
        """Add the ``counts`` of what has been written."""
        self.counts.add(counts)
        self.counts.seconds = time.monotonic() - self._start
        if self._bar is not None:
            self._bar.update(counts.stored_bytes)
            self._bar.set_postfix_str(self.counts.speed())
        elif self.counts.documents >= self._next_log:
            done, left = self.counts, ""
            self._next_log = (done.documents // self._log_interval + 1) * self._log_interval
            if self._total and done.stored_bytes:
                share = min(done.stored_bytes / self._total, 1.0)
                seconds = round(done.seconds * (1 - share) / share)
                left = f"; {share:.1%}, {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
            bad = f", {done.num_bad:,} bad documents skipped" if done.num_bad else ""
            line = f"{done.documents:,} documents, {done.tokens:,} tokens{bad}; {done.speed()}{left}"
            print(line, file=sys.stderr, flush=True)


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
        """Bytes to read, as stored; 0 for a dataset, whose size is unknown."""
        return sum(part.stop - part.start for part in self.ranges)

    def run(self, report: Callable[[Counts], None]) -> Counts:
        """Write the outputs, one per key, which appear only when complete; ``report`` receives counts by batch."""
        total, start = Counts(), time.monotonic()
        parts = divide_among_workers(self.ranges, self.task.form)
        with HeldSignals() as signals, ExitStack() as stack:
            writers = [
                stack.enter_context(IndexedDatasetWriter(output_of(self.output_prefix, key), self.vocab_size))
                for key in self.task.form.keys
            ]
            batches = map_in_order(functools.partial(encode, task=self.task), parts, self.workers, signals)
            for encoded in chain.from_iterable(batches):
                for writer, key in zip(writers, encoded.keys, strict=True):
                    writer.add_documents(key.tokens, key.lengths)
                counts = Counts.of(encoded)
                total.add(counts)
                report(counts)
                signals.raise_received()
            total.seconds = time.monotonic() - start
            if not total.tokens and not self.may_be_empty:
                raise DataError("The inputs have no document with text: check --input and --json-keys.")
        return total


def output_of(prefix: str, key: str) -> str:
    """The prefix of the .bin/.idx of one key."""
    return f"{prefix}_{key}_document"


def map_in_order(
    encode: Callable[[Batch | SourceRange], list[EncodedBatch]],
    parts: Iterator[Batch | SourceRange],
    workers: int,
    signals: HeldSignals,
) -> Iterator[list[EncodedBatch]]:
    """``map`` over worker processes: results in order, a bounded number of parts in flight. Raises ``signals``."""
    if workers == 1:
        yield from map(encode, parts)
        return
    # Forked workers start at once and have the tokenizer already; a process with threads must not fork.
    method = "fork" if threading.active_count() == 1 else "spawn"
    pool = ProcessPoolExecutor(workers, get_context(method), initializer=_start_worker, initargs=(os.getpid(),))
    pending: deque[Future[list[EncodedBatch]]] = deque()

    def next_result() -> list[EncodedBatch]:
        while not wait([pending[0]], timeout=0.2).done:
            signals.raise_received()
        return pending.popleft().result()

    try:
        pool.submit(int).result()  # all are there before reading starts threads
        for part in parts:
            pending.append(pool.submit(encode, part))
            if len(pending) >= workers * _PARTS_PER_WORKER:
                yield next_result()
        while pending:
            yield next_result()
    except BrokenProcessPool as error:
        raise DataError("A worker process died, perhaps for lack of memory: use fewer --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_parent() -> None:
        # Even after kill -9 of the parent: siblings keep the pipe open from which this process reads.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
