"""Sample orders on disk: ``.npy`` arrays under the md5 of a JSON description of their parameters.

Keys and names of these files are Megatron-LM's. ``…-digests.json`` has the size of each and the XXH3-64 of its blocks.
A start compares the sizes and the first blocks, and builds an entry again that does not match. Every other block is
compared when it is first read: an order has tens of gigabytes, of which a start would use nothing.
"""

import hashlib
import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.data.digests import BLOCK_BYTES, DigestedWriter, FileDigests, is_sealed, seal
from megatron.data.indexed_dataset import part_of
from megatron.data.sample_order import IndexArray
from megatron.data.storage import load_or_build_once, write_atomically
from megatron.errors import DataError

# An entry of the cache, KEY being the md5 of the description:
#
#   KEY-GPTDataset-train-description.txt       what was asked for
#   KEY-GPTDataset-train-document_index.npy    the arrays of a SampleOrder (PackedOrder, a blend's two)
#   KEY-GPTDataset-train-sample_index.npy
#   KEY-GPTDataset-train-shuffle_index.npy
#   KEY-GPTDataset-train-digests.json          written last and removed first: without it there is no entry
#   KEY-GPTDataset-train.lock                  while a process builds

_logger = logging.getLogger(__name__)

_FORMAT_VERSION = 2

Description = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


def description_hash(description: Description) -> str:
    """Cache key of a description: the md5 of its JSON text, in which the order of fields matters."""
    return hashlib.md5(json.dumps(description, indent=4).encode(), usedforsecurity=False).hexdigest()


def load_or_build(
    directory: str | None,
    description: Description,
    *,
    shapes: Mapping[str, tuple[int | None, ...]],
    newer_than: float,
    build: Callable[[], Arrays],
) -> Mapping[str, IndexArray]:
    """The arrays named in ``shapes``: mapped from the cache, or built and written to it.

    An entry is used only if the sizes and first blocks of its files match their digests, and its arrays have these
    shapes (None: any length) and are not older than the data (``newer_than``, seconds since the epoch): the key has the
    path of the data, which may have been replaced. One process builds while the others wait. Without a ``directory``
    nothing is stored.
    """
    if directory is None:
        return build()
    split = description.get("index_split") or description["split"]
    stem = os.path.join(directory, f"{description_hash(description)}-{description['class']}-{split}")
    named: set[str] = set()

    def load() -> Mapping[str, IndexArray] | None:
        try:
            return _load(stem, shapes, newer_than)
        except _UnusableEntry as error:
            reason = str(error)
        if reason not in named:  # a waiting process polls
            _logger.warning("The cached sample order %s: building it again.", reason)
            named.add(reason)
        return None

    def build_and_store() -> Mapping[str, IndexArray]:
        arrays = build()
        _store(stem, description, arrays, newer_than)
        return load() or arrays  # mapped from the files, so that ranks of a node share the memory

    try:
        return load_or_build_once(stem, load, build_and_store)
    except OSError as error:
        raise DataError(
            f"Cannot write the sample order to {directory} ({error.strerror or error}): use a writable "
            "directory that all ranks share with --data-cache-path."
        ) from error


class _UnusableEntry(Exception):
    """An entry that exists but must not be used; the message begins with the file."""


def _store(stem: str, description: Description, arrays: Arrays, newer_than: float) -> None:
    # Only arrays that a start does not compare completely are synced: a blend of 1,000 corpora has 5,000 files.
    # Without this file there is no entry, so waiting processes do not read unfinished arrays.
    with suppress(FileNotFoundError):
        os.remove(f"{stem}-digests.json")
    text = json.dumps(description, indent=4).encode()
    write_atomically(f"{stem}-description.txt", lambda file: file.write(text), sync=False)
    records = {}
    for name, array in arrays.items():

        def save(file: BinaryIO, array: npt.NDArray[Any] = array) -> dict[str, int | str]:
            writer = DigestedWriter(file)
            np.save(writer, np.ascontiguousarray(array), allow_pickle=False)
            file.flush()
            if os.fstat(file.fileno()).st_mtime < newer_than:  # the data's clock is ahead
                os.utime(file.fileno(), (math.ceil(newer_than),) * 2)  # some file systems keep whole seconds
            return FileDigests.of(writer.digests).encode()

        records[name] = write_atomically(f"{stem}-{name}.npy", save, sync=array.nbytes > BLOCK_BYTES)
    sealed = seal("digests", json.dumps({"format_version": _FORMAT_VERSION, "files": records})).encode()
    write_atomically(f"{stem}-digests.json", lambda file: file.write(sealed), sync=False)


def _load(
    stem: str, shapes: Mapping[str, tuple[int | None, ...]], newer_than: float
) -> Mapping[str, IndexArray] | None:
    """The mapped arrays of an entry; None if there is none, or an entry of other data.

    Raises :class:`_UnusableEntry` for a damaged entry, or one without digests.
    """
    paths = {name: f"{stem}-{name}.npy" for name in shapes}
    records = _read_digests(stem, any(map(os.path.exists, paths.values())))
    if records is None:
        return None
    arrays: dict[str, IndexArray] = {}
    for name, path in paths.items():
        try:
            with open(path, "rb", buffering=0) as file:
                status, digests = os.fstat(file.fileno()), records.get(name)
                if status.st_mtime < newer_than:
                    return None
                if digests is None or status.st_size != digests.size:
                    raise _UnusableEntry(
                        f"{path} has {status.st_size} bytes, a different size than when it was written"
                    )
                array = _VerifiedArray(path, file, digests)
        except OSError as error:
            raise _UnusableEntry(f"{path} cannot be read ({error.strerror})") from error
        # Other shapes are those of another corpus under the same path.
        wanted = shapes[name]
        if len(array.shape) != len(wanted) or any(
            size not in (None, found) for size, found in zip(wanted, array.shape)
        ):
            return None
        arrays[name] = array
    return arrays


def _read_digests(stem: str, has_arrays: bool) -> dict[str, FileDigests] | None:
    """The digests of each array, from ``…-digests.json``; None if there is no entry."""
    path = f"{stem}-digests.json"
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = json.loads(text)
        if not is_sealed("digests", text):
            raise ValueError("its digest does not match its content")
        version = document["digests"]["format_version"]
        if version != _FORMAT_VERSION:
            raise _UnusableEntry(f"{path} has format version {version}, where this code reads {_FORMAT_VERSION}")
        return {name: FileDigests.decode(record) for name, record in document["digests"]["files"].items()}
    except FileNotFoundError:
        if os.path.exists(f"{stem}.lock") or not has_arrays:  # it is being built, or there is none
            return None
        raise _UnusableEntry(f"{stem} has no digests (another program or an older version wrote it)") from None
    except OSError as error:
        raise _UnusableEntry(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _UnusableEntry(f"{path} is damaged ({type(error).__name__})") from error


class _VerifiedArray:
    """A mapped ``.npy`` array. A block of the file is compared with its digest when this process first reads it.

    Raises :class:`_UnusableEntry` if the first block, which has the header, is damaged; later :class:`DataError`.
    """

    def __init__(self, path: str, file: BinaryIO, digests: FileDigests) -> None:
        self._path, self._digests = path, digests
        self._is_verified = bytearray(digests.num_blocks)
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._content = memoryview(content)
        self._verify(0)
        assert np.lib.format.read_magic(file) == (1, 0)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        self._header_bytes = file.tell()
        # A plain array, not np.memmap: indexing it is several times faster.
        self._array = np.frombuffer(content, dtype, math.prod(shape), self._header_bytes).reshape(shape)
        self.shape = self._array.shape

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, rows: int | slice | npt.NDArray[np.int64], /) -> Any:
        for block in self._blocks_of(rows):
            if not self._is_verified[block]:
                try:
                    self._verify(block)
                except _UnusableEntry as error:
                    raise DataError(
                        f"The cached sample order {error}: remove this file, and the next start builds it again."
                    ) from error
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            return part_of(self._array, start, stop) if step == 1 else self._array[rows]
        return self._array.take(rows, axis=0)  # see part_of

    def _blocks_of(self, rows: int | slice | npt.NDArray[np.int64]) -> Iterable[int]:
        """The blocks of the file that hold these rows."""
        row_bytes = self._array.strides[0]
        if isinstance(rows, np.ndarray):
            starts = self._header_bytes + rows % len(self) * row_bytes
            return np.unique(np.stack((starts, starts + row_bytes - 1)) // BLOCK_BYTES).tolist()
        # For row -1 the slice ends at None, not at 0.
        chosen = range(len(self))[rows if isinstance(rows, slice) else slice(rows, rows + 1 or None)]
        if not chosen:  # no rows, or an index that NumPy refuses
            return ()
        first, last = sorted((chosen[0], chosen[-1]))
        start, stop = self._header_bytes + first * row_bytes, self._header_bytes + (last + 1) * row_bytes
        return range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)

    def _verify(self, block: int) -> None:
        start, stop = self._digests.range_of(block)
        if not self._digests.matches(block, self._content[start:stop]):
            raise _UnusableEntry(f"{self._path} is damaged (the digest of its bytes {start} to {stop} does not match)")
        self._is_verified[block] = True
