"""Write the files of a corpus: ``P.bin``, ``P.idx`` and their digests appear together, when all are complete."""

# Everything is written under temporary names, and renamed at the end in an order in which no reader, who opens P.idx
# first, combines old and new files:
#
#   P.bin.1a2b3c4d.incomplete           tokens, as they come; Linux writes them back early
#   P.idx.1a2b3c4d.incomplete           the index
#   remove P.idx -> P.bin -> P.digests.json -> P.idx

import logging
import os
import tempfile
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron.data.corpus_digests import CorpusDigests, digests_path, encode_digests
from megatron.data.digests import DigestedWriter, FileDigests, Writable
from megatron.data.indexed_dataset import (
    CODE_OF_DTYPE,
    INDEX_HEADER,
    INDEX_MAGIC,
    INDEX_VERSION,
    IndexedDataset,
    token_dtype,
)
from megatron.errors import DataError

_logger = logging.getLogger(__name__)

_KINDS = (".bin", ".idx")
_WRITE_BACK_BYTES = 64 << 20


def warn_of_overwriting(prefix: str) -> None:
    """Log a warning with the existing files that a new corpus replaces."""
    existing = []
    for path in (f"{prefix}{kind}" for kind in _KINDS):
        if os.path.exists(path):
            status = os.stat(path)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.st_mtime))
            existing.append(f"{path} ({status.st_size:,} bytes, written {written})")
    if existing:
        _logger.warning(
            "WARNING: overwriting %s: use another --output-prefix to keep the old corpus.", " and ".join(existing)
        )


class NewCorpus:
    """The files of an unfinished corpus, under temporary names; a context manager, which removes them after an
    exception. File-system errors are :class:`DataError`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        suffix = f".{uuid.uuid4().hex[:8]}.incomplete"
        self._temporary = {kind: f"{prefix}{kind}{suffix}" for kind in _KINDS}
        warn_of_overwriting(prefix)
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._bin_file: BinaryIO = open(self._temporary[".bin"], "wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise self._cannot_write(error) from error
        self._tokens = DigestedWriter(self._bin_file)
        self._written_back = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *rest: object) -> None:
        if error_type is not None:
            self.abort()

    def write_tokens(self, content: bytes) -> None:
        """Append to ``P.bin``."""
        try:
            self._tokens.write(content)
            start, end = self._written_back, self._tokens.digests.size
            if end - start >= _WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
                # Linux writes the new bytes to the disk now, and not all when ``commit`` waits for them.
                os.posix_fadvise(self._bin_file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
                self._written_back = end
        except OSError as error:
            raise self._cannot_write(error) from error

    def commit(self, write_index: Callable[[Writable], object]) -> None:
        """Complete ``P.bin``, write ``P.idx`` with ``write_index``, and rename all files."""
        try:
            _close_on_disk(self._bin_file)
            with open(self._temporary[".idx"], "wb") as index_file:
                index = DigestedWriter(index_file)
                write_index(index)
                _close_on_disk(index_file)
            self._rename(CorpusDigests(FileDigests.of(self._tokens.digests), FileDigests.of(index.digests)))
        except OSError as error:
            raise self._cannot_write(error) from error

    def _rename(self, digests: CorpusDigests) -> None:
        temporary = f"{self._temporary['.bin']}.digests"
        try:
            with open(temporary, "wb") as file:
                file.write(encode_digests(digests).encode())
                _close_on_disk(file)
            with suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.idx")
            os.replace(self._temporary[".bin"], f"{self.prefix}.bin")
            os.replace(temporary, digests_path(self.prefix))
            os.replace(self._temporary[".idx"], f"{self.prefix}.idx")
        finally:
            with suppress(FileNotFoundError):
                os.remove(temporary)

    def abort(self) -> None:
        with suppress(OSError):  # a full disk has no space for the buffer
            self._bin_file.close()
        for path in self._temporary.values():
            with suppress(FileNotFoundError):
                os.remove(path)

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(f"{self.prefix}.bin and .idx cannot be written ({error.strerror}): choose another output.")


def _close_on_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


_WRITE_CHUNK = 1 << 20  # numbers of an index array in memory


class IndexedDatasetWriter:
    """Writes ``prefix.bin``, ``prefix.idx`` and their digests, one sequence per document, byte-equal to Megatron-LM.

    A context manager: the files appear at the end, and are removed after an exception. Tokens stream to disk; a
    document needs four bytes of memory.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self.prefix = prefix
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths = array("i")
        self._files = NewCorpus(prefix)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        array_of_tokens = np.asarray(tokens)
        self.add_documents(array_of_tokens, np.array([array_of_tokens.size]))

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append several documents: concatenated ``tokens``, and the ``lengths`` of each."""
        flat, sizes = np.asarray(tokens).reshape(-1), np.asarray(lengths, dtype=np.int32)
        if int(sizes.sum(dtype=np.int64)) != flat.size:
            raise ValueError(f"{flat.size} tokens, but documents of {int(sizes.sum(dtype=np.int64))} in all")
        if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < self._vocab_size:
            raise DataError(
                f"Token ids {int(flat.min())}..{int(flat.max())} do not fit {self.prefix}.bin, which is "
                f"written for a vocabulary of {self._vocab_size} ids: use the tokenizer of the corpus."
            )
        self._files.write_tokens(flat.astype(self._dtype, copy=False).tobytes())
        self._lengths.frombytes(sizes.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        with self._files:
            if error_type is None:
                self._files.commit(self._write_index)
            else:
                self._files.abort()

    def _write_index(self, index_file: Writable) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        count = len(lengths)
        # Every sequence is a document: the document array counts up to S.
        documents = (
            np.arange(start, min(start + _WRITE_CHUNK, count + 1)) for start in range(0, count + 1, _WRITE_CHUNK)
        )
        offsets = _byte_offsets(lengths, self._dtype.itemsize)
        write_index(index_file, self._dtype, [lengths], offsets, documents, count, count)


def write_index(
    index_file: Writable,
    dtype: np.dtype[Any],
    lengths: Iterable[npt.NDArray[Any]],
    offsets: Iterable[npt.NDArray[Any]],
    documents: Iterable[npt.NDArray[Any]],
    num_sequences: int,
    num_documents: int,
) -> None:
    """Write an ``.idx`` file from arrays in parts; see :class:`IndexedDataset`."""
    index_file.write(
        INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, CODE_OF_DTYPE[dtype], num_sequences, num_documents + 1)
    )
    for parts, stored in ((lengths, "<i4"), (offsets, "<i8"), (documents, "<i8")):
        for part in parts:
            index_file.write(part.astype(stored, copy=False).tobytes())


def _byte_offsets(lengths: npt.NDArray[np.int32], itemsize: int) -> Iterator[npt.NDArray[np.int64]]:
    """Start of each sequence in ``.bin``, in chunks."""
    position = 0
    for start in range(0, len(lengths), _WRITE_CHUNK):
        ends = position + np.cumsum(lengths[start : start + _WRITE_CHUNK], dtype=np.int64) * itemsize
        yield np.concatenate(([position], ends[:-1]))
        position = int(ends[-1])


_COPIED_TOKENS = 1 << 22


def merge_datasets(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Concatenate all datasets in order; returns the numbers of sequences and tokens.

    Both files appear only when complete. Memory does not depend on the size of the data. Raises :class:`DataError` for
    a damaged dataset and for different token dtypes.
    """
    with tempfile.TemporaryDirectory() as index_cache:  # for the indexes of remote datasets
        datasets = [IndexedDataset(prefix, index_cache=index_cache) for prefix in prefixes]
        _check_mergeable(datasets, output)
        with NewCorpus(output) as files:
            for dataset in datasets:
                for start in range(0, dataset.num_tokens, _COPIED_TOKENS):
                    length = min(_COPIED_TOKENS, dataset.num_tokens - start)
                    files.write_tokens(dataset.tokens(start, length).tobytes())
            files.commit(lambda index: _write_index(datasets, index))
        return sum(map(len, datasets)), sum(dataset.num_tokens for dataset in datasets)


def _check_mergeable(datasets: Sequence[IndexedDataset], output: str) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{first.prefix} stores tokens as {first.dtype}, {dataset.prefix} as {dataset.dtype}: datasets of "
                "different tokenizers cannot be merged; list both in --data-path instead."
            )
        if dataset.has_modes:
            raise DataError(f"{dataset.prefix}.idx has sequence modes, which cannot be merged: remove it.")
        if os.path.abspath(dataset.prefix) == os.path.abspath(output):
            raise DataError(f"{output} is also an input: choose another --output-prefix.")


def _write_index(datasets: Sequence[IndexedDataset], index: Writable) -> None:
    # Byte in the merged .bin, and sequence in the merged .idx, at which each dataset begins.
    bases = np.cumsum([0] + [dataset.num_tokens * dataset.dtype.itemsize for dataset in datasets])
    firsts = np.cumsum([0] + [len(dataset) for dataset in datasets])
    write_index(
        index,
        datasets[0].dtype,
        lengths=(dataset.sequence_lengths for dataset in datasets),
        offsets=(chunk + base for dataset, base in zip(datasets, bases) for chunk in _chunks(dataset.byte_offsets)),
        # The end of a dataset is the start of the next one.
        documents=chain(
            (
                chunk + first
                for dataset, first in zip(datasets, firsts)
                for chunk in _chunks(dataset.document_indices[:-1])
            ),
            [firsts[-1:]],
        ),
        num_sequences=int(firsts[-1]),
        num_documents=sum(len(dataset.document_indices) - 1 for dataset in datasets),
    )


def _chunks(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (array[start : start + _WRITE_CHUNK] for start in range(0, len(array), _WRITE_CHUNK))
