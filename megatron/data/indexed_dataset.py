"""Token files in Megatron-LM's format: ``P.bin`` has the tokens, ``P.idx`` the position of every sequence.

``.bin`` is all tokens back to back. ``.idx``, little endian: a 34-byte header (magic, version, dtype code,
number of sequences S, length of the document array D), then int32 x S sequence lengths, int64 x S byte
offsets, int64 x D sequence numbers where documents start, and optionally int8 x S modes (ignored here).
"""

import difflib
import mmap as memory_map
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megatron.data.corpus_writer import NewCorpus
from megatron.data.digests import Writable
from megatron.data.storage import RemoteFile
from megatron.errors import DataError
from megatron.urls import is_url

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}

# Megatron-LM's writer leaves a margin under 65,536.
_FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 = 65_500

_WRITE_CHUNK = 1 << 20  # sequences per write of an index array
_CHECKED_RUNS = 256  # checked by check_token_range in one corpus, evenly spread, ...
_LEAST_CHECKED_RUNS = 16
_CHECKED_RUNS_OF_ALL = 16 * _CHECKED_RUNS  # ... and in all corpora of a blend, where these suffice
_CHECKED_RUN_LENGTH = 4096
_CHECKED_SEQUENCES = 1 << 20  # of check_sequences in memory

_ANEW = "write the data again with tools/preprocess_data.py"


class _Index(NamedTuple):
    """The arrays of an ``.idx`` file, as views of the mapped file."""

    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]
    byte_offsets: npt.NDArray[np.int64]
    document_indices: npt.NDArray[np.int64]
    has_modes: bool
    """Whether every sequence has a mode (multimodal data)."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Dtype in which Megatron-LM stores tokens of a vocabulary of this size: uint16 or int32."""
    return np.dtype("<u2") if vocab_size < _FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 else np.dtype("<i4")


TokenRange = tuple[int, int, int | None]
"""A part of a sequence: number of the sequence, first token, number of tokens (None: all that follow)."""


class IndexedDataset:
    """Random access to the token sequences of ``prefix.bin`` and ``prefix.idx``.

    Both files are memory-mapped (``mmap=False`` reads ``.bin`` with ordinary file reads). For a URL such as
    ``s3://bucket/corpus``, the index is copied once to the local directory ``index_cache`` and tokens are read by
    ranges. Raises :class:`DataError` if the files are missing, damaged or inconsistent.
    """

    def __init__(self, prefix: str, mmap: bool = True, index_cache: str | None = None) -> None:
        self.prefix = prefix
        self._mmap, self._index_cache = mmap, index_cache
        self._remote: RemoteFile | None = None
        self._tokens: npt.NDArray[Any] | None = None
        self.modification_time = 0.0
        self.version: str | None = None
        """Content version of remote data; local data has a :attr:`modification_time`."""
        self.index_path = f"{prefix}.idx"
        """The ``.idx`` file, or the local copy of a remote one."""
        if is_url(prefix):
            if index_cache is None:
                raise DataError(
                    f"{prefix} is remote, and its index needs a local copy: set --data-cache-path or "
                    "--object-storage-cache-path to a local directory."
                )
            index_file = RemoteFile(f"{prefix}.idx")
            self.index_path, self.version = index_file.copy_to(index_cache), index_file.version
        index = _read_index(self.index_path, f"{prefix}.idx")
        self.dtype, self.has_modes = index.dtype, index.has_modes
        self.sequence_lengths, self.byte_offsets = index.sequence_lengths, index.byte_offsets
        """Tokens of each sequence, [S] int32, and its start in ``.bin``, [S] int64."""
        self.document_indices = index.document_indices
        """Sequence number where each document starts, [documents + 1] int64; first 0, last S."""
        if is_url(prefix):
            self._remote = RemoteFile(f"{prefix}.bin")
            self.stored_bytes = self._remote.size
            """Size of ``.bin``; bytes after the last sequence are ignored."""
        else:
            self.modification_time = os.path.getmtime(self.index_path)
            try:
                self._bin_file = open(f"{prefix}.bin", "rb", buffering=0)  # noqa: SIM115 (stays open)
            except OSError as error:
                raise DataError(_cannot_open(f"{prefix}.bin", error)) from error
            self.stored_bytes = os.fstat(self._bin_file.fileno()).st_size
        needed = 0
        if len(self):
            needed = int(self.byte_offsets[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if self.stored_bytes < needed:
            raise DataError(
                f"{prefix}.bin has {self.stored_bytes} bytes, but {prefix}.idx requires {needed}: copy it again, or "
                f"{_ANEW}."
            )
        if mmap and self._remote is None and self.num_tokens:
            self._tokens = _map_file(self._bin_file)[: self.num_tokens * self.dtype.itemsize].view(self.dtype)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str, bool, str | None]]:
        """A worker process opens the files again instead of receiving their content."""
        return IndexedDataset, (self.prefix, self._mmap, self._index_cache)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        if not len(self):
            return 0
        last = int(self.byte_offsets[-1]) // self.dtype.itemsize
        return last + int(self.sequence_lengths[-1])

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens ``offset`` to ``offset + length`` (default: the end) of one sequence, in :attr:`dtype`."""
        return self.ranges([(index, offset, length)])[0]

    def ranges(self, ranges: Sequence[TokenRange]) -> list[npt.NDArray[Any]]:
        """Tokens of each range, in :attr:`dtype`; remote ranges are requested concurrently."""
        return self.runs([self._position(*one) for one in ranges])

    def _position(self, index: int, offset: int, length: int | None) -> tuple[int, int]:
        """Position in ``.bin`` and number of tokens of a range."""
        available = int(self.sequence_lengths[index])
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {available} tokens")
        return int(self.byte_offsets[index]) // self.dtype.itemsize + offset, length

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from position ``start`` of ``.bin``, across sequences."""
        return self.runs([(start, length)])[0]

    def runs(self, places: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """:meth:`tokens` of each (start, length); remote ranges are requested concurrently."""
        if self._tokens is not None:
            return [self._tokens[start : start + length] for start, length in places]
        size = self.dtype.itemsize
        ranges = [(start * size, length * size) for start, length in places]
        contents: Sequence[bytes | bytearray]
        if self._remote is not None:
            contents = self._remote.read_ranges(ranges)
        else:
            contents = [self._read(*place) for place in ranges]
        return [np.frombuffer(content, self.dtype) for content in contents]

    def stored(self, start: int, size: int) -> bytes | bytearray:
        """``size`` bytes of ``.bin`` from ``start``, read from the file and not from the mapping."""
        if self._remote is not None:
            return self._remote.read_ranges([(start, size)])[0]
        try:
            return self._read(start, size)
        except OSError as error:
            raise DataError(_cannot_open(f"{self.prefix}.bin", error)) from error

    def check_sequences(self) -> None:
        """Raise :class:`DataError` if a sequence is outside of ``.bin``; reads the whole index."""
        lengths, offsets = self.sequence_lengths, self.byte_offsets
        end = self.num_tokens * self.dtype.itemsize
        for start in range(0, len(self), _CHECKED_SEQUENCES):
            part = slice(start, start + _CHECKED_SEQUENCES)
            ends = offsets[part] + lengths[part].astype(np.int64) * self.dtype.itemsize
            bad = (lengths[part] < 0) | (offsets[part] < 0) | (ends > end)
            if bad.any():
                number = start + int(bad.argmax())
                raise DataError(
                    f"{self.prefix}.idx places sequence {number} ({int(lengths[number])} tokens from byte "
                    f"{int(offsets[number])}) outside of {self.prefix}.bin: {_ANEW}."
                )

    def _read(self, position: int, size: int) -> bytearray:
        """``size`` bytes of ``.bin``; pread has no file position, so forked workers can share the file."""
        content = bytearray()
        while len(content) < size:
            part = os.pread(self._bin_file.fileno(), size - len(content), position + len(content))
            if not part:
                raise DataError(f"{self.prefix}.bin was truncated while it was read: {_ANEW}.")
            content += part
        return content


def check_token_range(dataset: IndexedDataset, vocab_size: int, prefix: str, corpora: int = 1) -> None:
    """Raise :class:`DataError` if a token is outside of the vocabulary.

    Checks up to a million tokens, evenly spread: enough to detect another tokenizer, cheap enough for every start. Of
    each of many ``corpora`` it checks fewer, but up to 65,536.
    """
    total = dataset.num_tokens
    most = min(_CHECKED_RUNS, max(_LEAST_CHECKED_RUNS, _CHECKED_RUNS_OF_ALL // corpora))
    runs = min(most, -(-total // _CHECKED_RUN_LENGTH))
    starts = np.linspace(0, max(total - _CHECKED_RUN_LENGTH, 0), runs, dtype=np.int64).tolist()
    for tokens in dataset.runs([(start, min(_CHECKED_RUN_LENGTH, total)) for start in starts]):
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise DataError(
                f"{prefix}.bin holds token id {lowest if lowest < 0 else highest}, but the vocabulary has "
                f"ids 0..{vocab_size - 1}: the tokenizer does not match the data, so set --tokenizer-type "
                "and --tokenizer-model (or --vocab-size) to the tokenizer of the corpus."
            )


def check_document_ends(dataset: IndexedDataset, document_end: int) -> None:
    """Raise :class:`DataError` if no document ends with the end-of-document token.

    Checks up to 256 documents, evenly spread. Some may lack it, since long documents may be split into several.
    """
    documents = len(dataset.document_indices) - 1
    looked_at = np.linspace(0, documents - 1, min(_CHECKED_RUNS, documents), dtype=np.int64)
    last_sequences = (dataset.document_indices[looked_at + 1] - 1).tolist()
    lengths = dataset.sequence_lengths
    ends = [(last, int(lengths[last]) - 1, 1) for last in last_sequences if last >= 0 and lengths[last] > 0]
    tokens = [int(last[0]) for last in dataset.ranges(ends)]
    if tokens and document_end not in tokens:
        raise DataError(
            f"None of {len(tokens)} documents of {dataset.prefix} ends with the tokenizer's end-of-document token "
            f"{document_end}, by which --reset-attention-mask, --dataloader-inter-document-masking and "
            "--reset-position-ids find where documents begin: write the data again with tools/preprocess_data.py "
            "--append-eod, or remove these flags."
        )


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
        starts = range(0, count + 1, _WRITE_CHUNK)
        documents = (np.arange(start, min(start + _WRITE_CHUNK, count + 1)) for start in starts)
        write_index(
            index_file, self._dtype, [lengths], _byte_offsets(lengths, self._dtype.itemsize), documents, count, count
        )


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
    index_file.write(_HEADER.pack(_MAGIC, _VERSION, _CODE_OF_DTYPE[dtype], num_sequences, num_documents + 1))
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


def _map_file(file: BinaryIO) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory_map.mmap(file.fileno(), 0, access=memory_map.ACCESS_READ), dtype=np.uint8)


def _read_index(path: str, name: str) -> _Index:
    """Map and check an index; errors name ``name`` (``path`` may be a copy)."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < _HEADER.size:
                raise DataError(f"{name} is too short to be an index: {_ANEW}.")
            content = _map_file(file)
    except OSError as error:
        raise DataError(_cannot_open(path, error)) from error
    magic, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise DataError(f"{name} is not an index of tokens (wrong magic bytes): {_ANEW}.")
    if version != _VERSION:
        raise DataError(f"{name} has format version {version}, but only {_VERSION} is supported: {_ANEW}.")
    if code not in _DTYPE_OF_CODE:
        raise DataError(f"{name} has unknown token dtype code {code} (known: 1 to 8): {_ANEW}.")
    offsets_at = _HEADER.size + 4 * sequences
    documents_at = offsets_at + 8 * sequences
    end = documents_at + 8 * documents
    if len(content) not in (end, end + sequences):
        raise DataError(f"{name} has {len(content)} bytes, but its header requires {end}: {_ANEW}.")
    document_indices = content[documents_at:end].view("<i8")
    if not documents or int(document_indices[-1]) != sequences:
        raise DataError(f"{name} has document boundaries that do not match its {sequences} sequences: {_ANEW}.")
    lengths, offsets = content[_HEADER.size : offsets_at].view("<i4"), content[offsets_at:documents_at].view("<i8")
    return _Index(_DTYPE_OF_CODE[code], lengths, offsets, document_indices, len(content) > end)


def _remedy(prefix: str) -> str:
    """What to do about a corpus that is not there."""
    if prefix.endswith((".idx", ".bin")) and os.path.isfile(prefix):
        return f"set --data-path to {prefix[: -len('.idx')]}, the prefix of both files."
    if os.path.isfile(prefix):
        return (
            f"{prefix} is a text, so tokenize it with tools/preprocess_data.py --input {prefix} --output-prefix P, and "
            "set --data-path to P_text_document."
        )
    folder, name = (prefix, "") if os.path.isdir(prefix) else os.path.split(prefix)
    there = sorted(file[: -len(".idx")] for file in _files_in(folder) if file.endswith(".idx"))
    near = [one for one in there if one.startswith(name)] or difflib.get_close_matches(name, there, 1)
    if near and name not in there:
        return f"did you mean {os.path.join(folder, near[0])}?"
    return "set --data-path to prefixes without .bin or .idx, and make the files with tools/preprocess_data.py."


def _files_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:
        return []


def _cannot_open(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} does not exist: {_remedy(path[: -len('.idx')])}"
    return f"{path} cannot be opened ({error.strerror}): make it readable."
