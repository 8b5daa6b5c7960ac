"""Token files in Megatron-LM's format: ``P.bin`` has the tokens, ``P.idx`` the position of every sequence."""

# P.bin   all tokens back to back, uint16 or int32
#
# P.idx   little endian, for S sequences and D - 1 documents:
#
#   | 9 s   | Q       | B     | Q | Q | int32 x S        | int64 x S    | int64 x D          | int8 x S        |
#   | magic | version | dtype | S | D | sequence lengths | byte offsets | sequence at which  | modes, optional |
#   |            34 bytes             |                  | in P.bin     | a document starts  | (ignored here)  |

import difflib
import mmap as memory_map
import os
import resource
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.storage import RemoteFile
from megatron.errors import ConfigError, DataError
from megatron.urls import is_url

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")
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
CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}

# Megatron-LM's writer leaves a margin under 65,536.
_FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 = 65_500
_CHECKED_RUNS = 256  # checked by check_token_range in one corpus, evenly spread, ...
_LEAST_CHECKED_RUNS = 16
_CHECKED_RUNS_OF_ALL = 16 * _CHECKED_RUNS  # ... and in all corpora of a blend, where these suffice
_CHECKED_RUN_LENGTH = 4096
_CHECKED_SEQUENCES = 1 << 20  # of check_sequences in memory

_ANEW = "write the data again with tools/preprocess_data.py"


class _Index(NamedTuple):
    """The arrays of an ``.idx`` file, as views of the mapped file."""

    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]  # [S]
    byte_offsets: npt.NDArray[np.int64]  # [S]
    document_indices: npt.NDArray[np.int64]  # [D]
    has_modes: bool  # whether every sequence has a mode (multimodal data)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Dtype in which Megatron-LM stores tokens of a vocabulary of this size: uint16 or int32."""
    return np.dtype("<u2") if vocab_size < _FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 else np.dtype("<i4")


# A part of a sequence: number of the sequence, first token, number of tokens (None: all that follow).
TokenRange = tuple[int, int, int | None]


_MOST_UNDER_LOCK = 512  # elements; NPY_BEGIN_THREADS_THRESHOLDED


def part_of(array: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[Any]:
    """``array[start:stop]`` of a mapped file, for a thread that reads while others run.

    NumPy copies up to 500 elements without releasing the interpreter's lock, so a page that the storage does not
    deliver would stop all threads. ``take`` always releases it. A long part is a view.
    """
    return array[start:stop] if stop - start > _MOST_UNDER_LOCK else array.take(np.arange(start, stop), axis=0)


class IndexedDataset:
    """Random access to the token sequences of ``prefix.bin`` and ``prefix.idx``.

    Both files are memory-mapped (``mmap=False`` reads ``.bin`` with ordinary file reads). For a URL such as
    ``s3://bucket/corpus``, the index is copied once to the local directory ``index_cache`` and tokens are read by
    ranges. Raises :class:`DataError` if the files are missing, damaged or inconsistent.
    """

    def __init__(self, prefix: str, mmap: bool = True, index_cache: str | None = None) -> None:
        self.prefix = prefix
        self._remote: RemoteFile | None = None
        self._tokens: npt.NDArray[Any] | None = None
        # The order cache compares these: remote data has a version of its content, local data a time.
        self.modification_time = 0.0
        self.version: str | None = None
        # The .idx file, or the local copy of a remote one.
        self.index_path = f"{prefix}.idx"
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
        # Tokens of each sequence, [S] int32, and its first byte in .bin, [S] int64.
        self.sequence_lengths, self.byte_offsets = index.sequence_lengths, index.byte_offsets
        # Sequence number where each document starts, [documents + 1] int64; first 0, last S.
        self.document_indices = index.document_indices
        # The size of .bin; bytes after the last sequence are ignored.
        self.stored_bytes: int
        if is_url(prefix):
            self._remote = RemoteFile(f"{prefix}.bin")
            self.stored_bytes = self._remote.size
        else:
            self.modification_time = os.path.getmtime(self.index_path)
            try:
                self._bin_file = open(f"{prefix}.bin", "rb", buffering=0)  # noqa: SIM115 (stays open)
            except OSError as error:
                raise DataError(_cannot_open(f"{prefix}.bin", error)) from error
            self.stored_bytes = os.fstat(self._bin_file.fileno()).st_size
        needed = self.num_tokens * self.dtype.itemsize
        if self.stored_bytes < needed:
            raise DataError(
                f"{prefix}.bin has {self.stored_bytes} bytes, but {prefix}.idx requires {needed}: copy it again, or "
                f"{_ANEW}."
            )
        if mmap and self._remote is None and needed:
            self._tokens = _map_file(self._bin_file)[:needed].view(self.dtype)

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
        places, size = [], self.dtype.itemsize
        sequences = [sequence for sequence, _, _ in ranges]
        # ``take``: see :func:`part_of`.
        available_lengths, starts = self.sequence_lengths.take(sequences), self.byte_offsets.take(sequences)
        for (_, offset, length), available, start in zip(
            ranges, available_lengths.tolist(), starts.tolist(), strict=True
        ):
            if length is None:
                length = available - offset
            if offset < 0 or length < 0 or offset + length > available:
                raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {available} tokens")
            places.append((start // size + offset, length))
        return self.runs(places)

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from position ``start`` of ``.bin``, across sequences."""
        return self.runs([(start, length)])[0]

    def runs(self, places: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """:meth:`tokens` of each (start, length); remote ranges are requested concurrently."""
        if self._tokens is not None:
            return [part_of(self._tokens, start, start + length) for start, length in places]
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
        """``size`` bytes of ``.bin``; pread has no file position, so threads can share the file."""
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
    # Runs of tokens across sequences, evenly spread over the file.
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


def _map_file(file: BinaryIO) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory_map.mmap(file.fileno(), 0, access=memory_map.ACCESS_READ), dtype=np.uint8)


def _read_index(path: str, name: str) -> _Index:
    """Map and check an index; errors name ``name`` (``path`` may be a copy)."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < INDEX_HEADER.size:
                raise DataError(f"{name} is too short to be an index: {_ANEW}.")
            content = _map_file(file)
    except OSError as error:
        raise DataError(_cannot_open(path, error)) from error
    magic, version, code, sequences, documents = INDEX_HEADER.unpack(content[: INDEX_HEADER.size].tobytes())
    if magic != INDEX_MAGIC:
        raise DataError(f"{name} is not an index of tokens (wrong magic bytes): {_ANEW}.")
    if version != INDEX_VERSION:
        raise DataError(f"{name} has format version {version}, but only {INDEX_VERSION} is supported: {_ANEW}.")
    if code not in _DTYPE_OF_CODE:
        raise DataError(f"{name} has unknown token dtype code {code} (known: 1 to 8): {_ANEW}.")
    offsets_at = INDEX_HEADER.size + 4 * sequences
    documents_at = offsets_at + 8 * sequences
    end = documents_at + 8 * documents
    if len(content) not in (end, end + sequences):
        raise DataError(f"{name} has {len(content)} bytes, but its header requires {end}: {_ANEW}.")
    document_indices = content[documents_at:end].view("<i8")
    if not documents or int(document_indices[-1]) != sequences:
        raise DataError(f"{name} has document boundaries that do not match its {sequences} sequences: {_ANEW}.")
    lengths, offsets = content[INDEX_HEADER.size : offsets_at].view("<i4"), content[offsets_at:documents_at].view("<i8")
    return _Index(_DTYPE_OF_CODE[code], lengths, offsets, document_indices, len(content) > end)


def _remedy(prefix: str) -> str:
    """The end of the message about a corpus that does not exist: what the user may have meant."""
    if prefix.endswith((".idx", ".bin")) and os.path.isfile(prefix):
        return f"set --data-path to {prefix[: -len('.idx')]}, the prefix of both files."
    if os.path.isfile(prefix):
        return (
            f"{prefix} is a text, so tokenize it with tools/preprocess_data.py --input {prefix} --output-prefix P, and "
            "set --data-path to P_text_document."
        )
    folder, name = (prefix, "") if os.path.isdir(prefix) else os.path.split(prefix)
    there: list[str] = []
    with suppress(OSError):
        there = sorted(file[: -len(".idx")] for file in os.listdir(folder or ".") if file.endswith(".idx"))
    near = [one for one in there if one.startswith(name)] or difflib.get_close_matches(name, there, 1)
    if near and name not in there:
        return f"did you mean {os.path.join(folder, near[0])}?"
    return "set --data-path to prefixes without .bin or .idx, and make the files with tools/preprocess_data.py."


def _cannot_open(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} does not exist: {_remedy(path[: -len('.idx')])}"
    return f"{path} cannot be opened ({error.strerror}): make it readable."


# Open files of a corpus: .bin, and the mappings of .bin and .idx, for which Python keeps a file descriptor each.
FILES_OF_CORPUS = 3
# The mapped arrays of a sample order, at most.
FILES_OF_ORDER = 5
_OTHERS = 1024  # files of the run that are not of corpora: sockets, checkpoints, libraries


def allow_open_files(num_corpora: int, files_of_each: int) -> None:
    """Let this process open the files of ``num_corpora``, in place of the 1,024 that many systems allow at first.

    Raises :class:`ConfigError` if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_corpora * files_of_each
    wanted = needed + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY or hard >= wanted else hard
    if limit <= needed:
        raise ConfigError(
            f"{num_corpora} corpora need {wanted} open files in each process, but the hard limit is {hard}: raise it "
            "(ulimit -Hn), or merge corpora with tools/merge_datasets.py."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
