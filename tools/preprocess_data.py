#!/usr/bin/env python3
"""Tokenize jsonl files into the .bin/.idx files that training reads.

Every line of the inputs is a JSON object; its text becomes one document of PREFIX_KEY_document.bin/.idx. The
output does not depend on the number of workers.
"""

import functools
import gzip
import json
import os
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt
import tyro

from megatron.config.data import TokenizerConfig
from megatron.config.errors import ConfigError, DataError, UserError
from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.tokenizers import Tokenizer, build_tokenizer

_BATCH_BYTES = 1 << 19
_BATCH_LINES = 1000
_BATCHES_PER_WORKER = 4  # in flight at a time; bounds memory


@dataclass(frozen=True)
class PreprocessConfig:
    """Which files to tokenize, and how."""

    input: tuple[str, ...]
    """jsonl files, gzipped if named .gz; documents keep their order."""
    output_prefix: str
    """Start of the output names: PREFIX_KEY_document.bin and .idx."""
    tokenizer: tyro.conf.OmitArgPrefixes[TokenizerConfig] = field(default_factory=TokenizerConfig)
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON objects whose text to tokenize; each gets its own output."""
    workers: int = 1
    """Processes that tokenize; 1 works in this process."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-document token."""
    log_interval: int = 1000
    """Documents between progress reports when standard error is not a terminal."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        if self.workers < 1 or self.log_interval < 1:
            raise ConfigError("--workers and --log-interval must be at least 1.")
        if not self.input or not self.json_keys:
            raise ConfigError("--input and --json-keys need at least one value each.")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError("--json-keys names a key twice: name each once.")


class Batch(NamedTuple):
    """Consecutive lines of one file."""

    path: str
    first_line: int
    lines: list[bytes]


class EncodedKey(NamedTuple):
    """The tokens of a batch for one JSON key."""

    tokens: npt.NDArray[np.int32]
    """All documents back to back."""
    lengths: npt.NDArray[np.int32]
    """Tokens of each document that is not empty."""
    empty: int
    """Documents without a token, which are left out."""


class EncodedBatch(NamedTuple):
    """What a worker sends back."""

    documents: int
    num_bytes: int
    keys: list[EncodedKey]


def read_batches(paths: tuple[str, ...]) -> Iterator[Batch]:
    """The non-blank lines of all files, in order, in batches small enough to travel."""
    for path in paths:
        lines: list[bytes] = []
        size, first = 0, 1
        for number, line in enumerate(_read_lines(path), start=1):
            lines.append(line)
            size += len(line)
            if size >= _BATCH_BYTES or len(lines) >= _BATCH_LINES:
                yield Batch(path, first, lines)
                lines, size, first = [], 0, number + 1
        if lines:
            yield Batch(path, first, lines)


def _read_lines(path: str) -> Iterator[bytes]:
    try:
        with cast(IO[bytes], gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")) as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): copy it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check --input.") from error


_tokenizer = functools.cache(build_tokenizer)  # one per process, however many batches it gets


def encode_batch(batch: Batch, config: TokenizerConfig, keys: tuple[str, ...], append_eod: bool) -> EncodedBatch:
    """Tokenize a batch. Raises :class:`DataError` that names the file and line of a bad document."""
    documents = [_parse_line(batch, place, keys) for place, line in enumerate(batch.lines) if line.strip()]
    tokenizer = _tokenizer(config)
    encoded = []
    for key in range(len(keys)):
        ids = _tokenize(batch, [document[key] for document in documents], tokenizer)
        encoded.append(_join_documents(ids, [tokenizer.eod] if append_eod else []))
    return EncodedBatch(len(documents), sum(map(len, batch.lines)), encoded)


def _parse_line(batch: Batch, place: int, keys: tuple[str, ...]) -> list[str]:
    """The text of every key in one line."""
    where = f"{batch.path}, line {batch.first_line + place}"
    try:
        document: Any = json.loads(batch.lines[place])
    except ValueError as error:  # malformed JSON or UTF-8
        raise DataError(f"{where} is not valid JSON ({error}): mend or remove it.") from error
    if not isinstance(document, dict):
        raise DataError(f"{where} is not a JSON object: mend or remove it.")
    for key in keys:
        if not isinstance(document.get(key), str):
            found = f"has no text under the key {key!r}" if key in document else f"has no key {key!r}"
            raise DataError(f"{where} {found}: name the right key with --json-keys, or remove the line.")
        if not document[key].isascii() and any("\ud800" <= character <= "\udfff" for character in document[key]):
            raise DataError(f"{where} holds half of a surrogate pair, which is no text: mend or remove it.")
    return [document[key] for key in keys]


def _tokenize(batch: Batch, texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return tokenizer.tokenize_batch(texts)
    except DataError:
        pass
    # Once more, one by one, to say which line it was.
    numbers = [batch.first_line + place for place, line in enumerate(batch.lines) if line.strip()]
    ids = []
    for number, text in zip(numbers, texts, strict=True):
        try:
            ids.append(tokenizer.tokenize(text))
        except DataError as error:
            raise DataError(f"{batch.path}, line {number}: {error}") from error
    return ids


def _join_documents(documents: list[list[int]], end: list[int]) -> EncodedKey:
    kept = [np.array(ids + end, dtype=np.int32) for ids in documents if ids]
    tokens = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int32)
    return EncodedKey(tokens, np.array([len(ids) for ids in kept], dtype=np.int32), len(documents) - len(kept))


def map_in_order(
    encode: Callable[[Batch], EncodedBatch], batches: Iterator[Batch], workers: int
) -> Iterator[EncodedBatch]:
    """``map`` over worker processes: results in order, a bounded number of batches in flight."""
    if workers == 1:
        yield from map(encode, batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_leave_interrupts_to_parent)
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode, batch))
            if len(pending) >= workers * _BATCHES_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("A worker process died, perhaps for lack of memory: use fewer --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Progress:
    """Counts what has been written and reports it: a bar on a terminal, else a line now and then."""

    def __init__(self, paths: tuple[str, ...], log_interval: int) -> None:
        self.documents = self.num_bytes = self.tokens = self.empty = 0
        self._log_interval = log_interval
        self._next_log = log_interval
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            total = None if any(path.endswith(".gz") for path in paths) else sum(map(os.path.getsize, paths))
            self._bar = tqdm(total=total, unit="B", unit_scale=True)

    def add(self, encoded: EncodedBatch) -> None:
        """Count a batch that has been written."""
        self.documents += encoded.documents
        self.num_bytes += encoded.num_bytes
        self.tokens += sum(key.tokens.size for key in encoded.keys)
        self.empty += sum(key.empty for key in encoded.keys)
        if self._bar is not None:
            self._bar.update(encoded.num_bytes)
        elif self.documents >= self._next_log:
            print(self.summary(), file=sys.stderr, flush=True)
            self._next_log = (self.documents // self._log_interval + 1) * self._log_interval

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()

    def summary(self) -> str:
        """All counts and speeds so far, in one line."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.empty:,} empty documents skipped; "
            f"{self.documents / seconds:,.0f} documents/s, {self.num_bytes / seconds / 1e6:.2f} MB/s, "
            f"{self.tokens / seconds:,.0f} tokens/s"
        )


def preprocess(config: PreprocessConfig) -> Progress:
    """Tokenize all inputs and write the outputs, which appear only when complete."""
    config.check()
    for path in config.input:
        if not os.path.isfile(path):
            raise DataError(f"{path} does not exist or is not a file: check --input.")
    vocab_size = build_tokenizer(config.tokenizer).vocab_size
    encode = functools.partial(
        encode_batch, config=config.tokenizer, keys=config.json_keys, append_eod=config.append_eod
    )
    progress = Progress(config.input, config.log_interval)
    with ExitStack() as stack:
        stack.callback(progress.close)
        writers = [
            stack.enter_context(IndexedDatasetWriter(f"{config.output_prefix}_{key}_document", vocab_size))
            for key in config.json_keys
        ]
        for encoded in map_in_order(encode, read_batches(config.input), config.workers):
            for writer, key in zip(writers, encoded.keys, strict=True):
                writer.add_documents(key.tokens, key.lengths)
            progress.add(encoded)
        if not progress.tokens:
            raise DataError("The inputs hold no document with any text: check --input and --json-keys.")
    return progress


def main() -> int:
    """Run the tool; returns the exit status."""
    config = tyro.cli(PreprocessConfig, description=__doc__)
    # A terminated run, too, removes its incomplete files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if config.workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    try:
        progress = preprocess(config)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ERROR: interrupted; nothing has been written.", file=sys.stderr)
        return 130
    print(progress.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
