"""Token files in Megatron-LM's format: ``P.bin`` holds the tokens, ``P.idx`` says where each sequence lies.

``.bin`` is all tokens back to back. ``.idx``, little endian: a 34-byte header (magic, version, dtype code,
number of sequences S, length of the document array D), then int32 x S sequence lengths, int64 x S byte
offsets, int64 x D sequence numbers where documents start, and optionally int8 x S modes (ignored here).
"""

import mmap as memory_map
import os
import struct
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megatron.config.errors import DataError
from megatron.data.remote import RemoteFile
from megatron.data.storage import is_remote

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
_CHECKED_RUNS = 256  # places where check_token_range looks, evenly spread
_CHECKED_RUN_LENGTH = 4096
_CHECKED_SEQUENCES = 1 << 20  # that check_sequences holds in memory

_ANEW = "write the data again with tools/preprocess_data.py"


class _Index(NamedTuple):
    """The arrays of an ``.idx`` file, as views of the mapped file."""

    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]
    byte_offsets: npt.NDArray[np.int64]
    document_indices: npt.NDArray[np.int64]
    has_modes: bool = False


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron-LM stores tokens of a vocabulary of this size in: uint16 or int32."""
    return np.dtype("<u2") if vocab_size < _FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 else np.dtype("<i4")


Piece = tuple[int, int, int | None]
"""Of a sequence: its number, the first token, and how many (None: all that follow)."""


class IndexedDataset:
    """Random access to the token sequences of ``prefix.bin`` and ``prefix.idx``.

    Nothing is read before it is asked for: both files are memory-mapped (``mmap=False`` reads ``.bin`` with
    ordinary file reads). A prefix such as ``s3://bucket/corpus`` is one of fsspec's: the index is copied once to the
    local directory ``index_cache``, the tokens are read by ranges. Raises :class:`DataError` when the files are
    missing or damaged, or when they do not fit together.
    """

    def __init__(self, prefix: str, mmap: bool = True, index_cache: str | None = None) -> None:
        self.prefix = prefix
        self._mmap = mmap
        self._index_cache = index_cache
        self._remote: RemoteFile | None = None
        self._tokens: npt.NDArray[Any] | None = None
        self.version: str | None = None
        """Of remote data: a text that changes with it; local data has a :attr:`modification_time` instead."""
        if is_remote(prefix):
            self._open_remote(index_cache)
        else:
            self._open_local()

    def _open_local(self) -> None:
        self._index = _read_index(f"{self.prefix}.idx")
        self.modification_time = os.path.getmtime(f"{self.prefix}.idx")
        self.stored_bytes = _file_size(f"{self.prefix}.bin")
        """Size of ``.bin``; what lies behind the last sequence does not matter."""
        _check_bin_size(self.prefix, self._index, self.stored_bytes)
        self._bin_file = open(f"{self.prefix}.bin", "rb", buffering=0)  # noqa: SIM115 (stays open)
        if self._mmap and self.num_tokens:
            # Bytes behind what the index knows of do not matter.
            self._tokens = _map_file(self._bin_file)[: self.num_tokens * self.dtype.itemsize].view(self.dtype)

    def _open_remote(self, index_cache: str | None) -> None:
        if index_cache is None:
            raise DataError(
                f"{self.prefix} is remote, and its index needs a local copy: give a directory with --data-cache-path "
                "or --object-storage-cache-path."
            )
        index_file = RemoteFile(f"{self.prefix}.idx")
        self._index = _read_index(index_file.copy_to(index_cache), f"{self.prefix}.idx")
        self.modification_time, self.version = 0.0, index_file.version
        self._remote = RemoteFile(f"{self.prefix}.bin")
        self.stored_bytes = self._remote.size
        _check_bin_size(self.prefix, self._index, self.stored_bytes)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str, bool, str | None]]:
        """A worker process opens the files anew instead of receiving their content."""
        return IndexedDataset, (self.prefix, self._mmap, self._index_cache)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._index.sequence_lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of stored tokens."""
        return self._index.dtype

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens per sequence, [S] int32."""
        return self._index.sequence_lengths

    @property
    def byte_offsets(self) -> npt.NDArray[np.int64]:
        """Where each sequence begins in ``.bin``, [S] int64."""
        return self._index.byte_offsets

    @property
    def has_modes(self) -> bool:
        """Whether the index has a mode for each sequence (multimodal data)."""
        return self._index.has_modes

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """Sequence number where each document starts, [documents + 1] int64; first 0, last S."""
        return self._index.document_indices

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        if not len(self):
            return 0
        last = int(self._index.byte_offsets[-1]) // self.dtype.itemsize
        return last + int(self._index.sequence_lengths[-1])

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens ``offset`` to ``offset + length`` (default: the end) of one sequence, in :attr:`dtype`."""
        return self.pieces([(index, offset, length)])[0]

    def pieces(self, pieces: Sequence[Piece]) -> list[npt.NDArray[Any]]:
        """The tokens of each of ``pieces``, in :attr:`dtype`; remote ones are asked for at the same time."""
        return self.runs([self._place(*piece) for piece in pieces])

    def _place(self, index: int, offset: int, length: int | None) -> tuple[int, int]:
        """Position in ``.bin`` and number of tokens of a piece."""
        available = int(self._index.sequence_lengths[index])
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {available} tokens")
        return int(self._index.byte_offsets[index]) // self.dtype.itemsize + offset, length

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from position ``start`` of ``.bin``, whatever sequence they belong to."""
        return self.runs([(start, length)])[0]

    def runs(self, places: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """:meth:`tokens` of each (start, length); remote ones are asked for at the same time."""
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

    def check_sequences(self) -> None:
        """Raise :class:`DataError` when a sequence does not lie in ``.bin``; reads the whole index."""
        lengths, offsets = self._index.sequence_lengths, self._index.byte_offsets
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
        """``size`` bytes of ``.bin``; pread keeps no position, so forked workers can share the file."""
        content = bytearray()
        while len(content) < size:
            piece = os.pread(self._bin_file.fileno(), size - len(content), position + len(content))
            if not piece:
                raise DataError(f"{self.prefix}.bin has become shorter while it was read: {_ANEW}.")
            content += piece
        return content


def check_token_range(dataset: IndexedDataset, vocab_size: int, prefix: str) -> None:
    """Raise :class:`DataError` when a token of the data is no id of the vocabulary.

    Looks at up to a million tokens, evenly spread: enough to notice another tokenizer, cheap enough to do
    on every start.
    """
    total = dataset.num_tokens
    runs = min(_CHECKED_RUNS, -(-total // _CHECKED_RUN_LENGTH))
    starts = np.linspace(0, max(total - _CHECKED_RUN_LENGTH, 0), runs, dtype=np.int64).tolist()
    for tokens in dataset.runs([(start, min(_CHECKED_RUN_LENGTH, total)) for start in starts]):
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise DataError(
                f"{prefix}.bin holds token id {lowest if lowest < 0 else highest}, but the vocabulary has "
                f"ids 0..{vocab_size - 1}: the tokenizer does not match the data, so set --tokenizer-type "
                "and --tokenizer-model (or --vocab-size) to those that the data was made with."
            )


def check_document_ends(dataset: IndexedDataset, document_end: int) -> None:
    """Raise :class:`DataError` when no document ends with the token that ends documents.

    Looks at up to 256 of them, evenly spread. Some may lack it, since long documents are also cut in several.
    """
    documents = len(dataset.document_indices) - 1
    looked_at = np.linspace(0, documents - 1, min(_CHECKED_RUNS, documents), dtype=np.int64)
    last_sequences = (dataset.document_indices[looked_at + 1] - 1).tolist()
    lengths = dataset.sequence_lengths
    ends = [(last, int(lengths[last]) - 1, 1) for last in last_sequences if last >= 0 and lengths[last] > 0]
    tokens = [int(piece[0]) for piece in dataset.pieces(ends)]
    if tokens and document_end not in tokens:
        raise DataError(
            f"None of {len(tokens)} documents of {dataset.prefix} ends with the tokenizer's end-of-document token "
            f"{document_end}, by which --reset-attention-mask, --dataloader-inter-document-masking and "
            "--reset-position-ids find where documents begin: write the data again with tools/preprocess_data.py "
            "--append-eod, or drop these flags."
        )


class IndexedDatasetWriter:
    """Writes ``prefix.bin`` and ``prefix.idx``, one sequence per document, byte-equal to Megatron-LM.

    Tokens stream to disk; memory holds four bytes per document. Both files appear under their names only
    when :meth:`finalize` has completed them. As a context manager it finalizes on success, and removes what
    it has written on an exception.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self.prefix = prefix
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths = array("i")
        suffix = f".{uuid.uuid4().hex[:8]}.incomplete"
        self._paths = {kind: (f"{prefix}{kind}{suffix}", f"{prefix}{kind}") for kind in (".bin", ".idx")}
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._bin_file: BinaryIO = open(self._paths[".bin"][0], "wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise self._cannot_write(error) from error

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document of tokens."""
        array_of_tokens = np.asarray(tokens)
        self.add_documents(array_of_tokens, np.array([array_of_tokens.size]))

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append several documents: their ``tokens`` back to back, and the ``lengths`` in tokens of each."""
        flat, sizes = np.asarray(tokens).reshape(-1), np.asarray(lengths, dtype=np.int32)
        if int(sizes.sum(dtype=np.int64)) != flat.size:
            raise ValueError(f"{flat.size} tokens, but documents of {int(sizes.sum(dtype=np.int64))} in all")
        if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < self._vocab_size:
            raise DataError(
                f"Token ids {int(flat.min())}..{int(flat.max())} do not fit {self.prefix}.bin, which is "
                f"written for a vocabulary of {self._vocab_size} ids: use the tokenizer that made them."
            )
        try:
            self._bin_file.write(flat.astype(self._dtype, copy=False).tobytes())
        except OSError as error:
            raise self._cannot_write(error) from error
        self._lengths.frombytes(sizes.tobytes())

    def finalize(self) -> None:
        """Complete both files and give them their names."""
        try:
            _close_on_disk(self._bin_file)
            with open(self._paths[".idx"][0], "wb") as index_file:
                self._write_index(index_file)
                _close_on_disk(index_file)
            # A reader that starts between the two renames must not pair an old index with new tokens.
            with suppress(FileNotFoundError):
                os.remove(self._paths[".idx"][1])
            for temporary, final in self._paths.values():
                os.replace(temporary, final)
        except OSError as error:
            raise self._cannot_write(error) from error

    def abort(self) -> None:
        """Remove what has been written so far."""
        with suppress(OSError):  # a full disk refuses the last of the buffer, too
            self._bin_file.close()
        for temporary, _ in self._paths.values():
            with suppress(FileNotFoundError):
                os.remove(temporary)

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(f"{self.prefix}.bin and .idx cannot be written ({error.strerror}): choose another output.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if error_type is not None:
            self.abort()
            return
        try:
            self.finalize()
        except BaseException:
            self.abort()
            raise

    def _write_index(self, index_file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        count = len(lengths)
        starts = range(0, count + 1, _WRITE_CHUNK)
        documents = (np.arange(start, min(start + _WRITE_CHUNK, count + 1)) for start in starts)
        write_index(
            index_file, self._dtype, [lengths], _byte_offsets(lengths, self._dtype.itemsize), documents, count, count
        )


def write_index(
    index_file: BinaryIO,
    dtype: np.dtype[Any],
    lengths: Iterable[npt.NDArray[Any]],
    offsets: Iterable[npt.NDArray[Any]],
    documents: Iterable[npt.NDArray[Any]],
    num_sequences: int,
    num_documents: int,
) -> None:
    """Write an ``.idx`` file, its arrays given in pieces: see :class:`IndexedDataset` for what they are."""
    index_file.write(_HEADER.pack(_MAGIC, _VERSION, _CODE_OF_DTYPE[dtype], num_sequences, num_documents + 1))
    for pieces, stored in ((lengths, "<i4"), (offsets, "<i8"), (documents, "<i8")):
        for piece in pieces:
            index_file.write(piece.astype(stored, copy=False).tobytes())


def _byte_offsets(lengths: npt.NDArray[np.int32], itemsize: int) -> Iterator[npt.NDArray[np.int64]]:
    """Where each sequence starts in ``.bin``, a chunk at a time."""
    position = 0
    for start in range(0, len(lengths), _WRITE_CHUNK):
        ends = position + np.cumsum(lengths[start : start + _WRITE_CHUNK], dtype=np.int64) * itemsize
        yield np.concatenate(([position], ends[:-1]))
        position = int(ends[-1])


def _close_on_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _map_file(file: BinaryIO) -> npt.NDArray[np.uint8]:
    """The content of an open, non-empty file as bytes [size], mapped."""
    return np.frombuffer(memory_map.mmap(file.fileno(), 0, access=memory_map.ACCESS_READ), dtype=np.uint8)


def _read_index(path: str, name: str | None = None) -> _Index:
    """Map an index and check that it is whole; errors call it ``name`` (of which ``path`` may be a copy)."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < _HEADER.size:
                raise DataError(f"{name or path} is too short to be an index: {_ANEW}.")
            content = _map_file(file)
    except OSError as error:
        raise DataError(_cannot_open(path, error)) from error
    path = name or path
    dtype, sequences, documents = _parse_header(path, content[: _HEADER.size].tobytes())
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if len(content) not in (expected, expected + sequences):
        raise DataError(f"{path} has {len(content)} bytes where its header announces {expected}: {_ANEW}.")
    return _check_documents(path, _split_index(content, dtype, sequences, documents))


def _cannot_open(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"{path} does not exist: give --data-path prefixes without .bin or .idx, and make the files with "
            "tools/preprocess_data.py."
        )
    return f"{path} cannot be opened ({error.strerror}): make it readable."


def _parse_header(path: str, header: bytes) -> tuple[np.dtype[Any], int, int]:
    """The dtype, the number of sequences and the length of the document array."""
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise DataError(f"{path} is not an index of tokens, as its first bytes show: {_ANEW}.")
    if version != _VERSION:
        raise DataError(f"{path} has format version {version}, where only {_VERSION} is known: {_ANEW}.")
    if code not in _DTYPE_OF_CODE:
        raise DataError(f"{path} has unknown token dtype code {code} (known: 1 to 8): {_ANEW}.")
    return _DTYPE_OF_CODE[code], sequences, documents


def _split_index(content: npt.NDArray[np.uint8], dtype: np.dtype[Any], sequences: int, documents: int) -> _Index:
    offsets_at = _HEADER.size + 4 * sequences
    documents_at = offsets_at + 8 * sequences
    return _Index(
        dtype,
        content[_HEADER.size : offsets_at].view("<i4"),
        content[offsets_at:documents_at].view("<i8"),
        content[documents_at : documents_at + 8 * documents].view("<i8"),
        len(content) > documents_at + 8 * documents,
    )


def _check_documents(path: str, index: _Index) -> _Index:
    sequences = len(index.sequence_lengths)
    if not len(index.document_indices) or int(index.document_indices[-1]) != sequences:
        raise DataError(f"{path} has documents that do not end with its {sequences} sequences: {_ANEW}.")
    return index


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(_cannot_open(path, error)) from error


def _check_bin_size(prefix: str, index: _Index, size: int) -> None:
    """``.bin``, of ``size`` bytes, must hold at least what the last sequence of the index needs."""
    needed = 0
    if len(index.sequence_lengths):
        needed = int(index.byte_offsets[-1]) + int(index.sequence_lengths[-1]) * index.dtype.itemsize
    if size < needed:
        raise DataError(
            f"{prefix}.bin has {size} bytes where {prefix}.idx announces {needed}: copy it again, or {_ANEW}."
        )
