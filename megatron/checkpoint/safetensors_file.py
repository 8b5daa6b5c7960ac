"""Safetensors files: written part by part to stable storage, with a digest taken meanwhile."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, NamedTuple, Self

import torch
import xxhash
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# So much is copied to the system before the disk is told to begin with it.
SYNC_BYTES = 64 << 20


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint, as the rank that wrote it knows it."""

    name: str
    size: int
    digest: str
    """XXH3-128 of its bytes, in hexadecimal."""


class Entry(NamedTuple):
    """A tensor of a file, without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its content."""
        return prod(self.shape) * self.dtype.itemsize


def aligned(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """``entries`` in an order that keeps every one aligned, which a memory-mapped reader needs: wider ones first."""
    return dict(sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize))


class SafetensorsStream:
    """Creates a safetensors file on stable storage from a stream of tensors, so that none need be held but one.

    ``entries`` are those of the file in their order (:func:`aligned`), each of which may be written in several parts;
    ``metadata`` are strings for other readers. A context manager; ``written`` is known after it. Errors are
    ``OSError``.
    """

    written: WrittenFile
    """The file, once it is complete."""

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._header = _header(entries, metadata)
        self._size = len(self._header) + sum(entry.nbytes for entry in entries.values())
        self._digest = xxhash.xxh3_128()
        self._syncing: Future[None] | None = None
        self._next_sync = SYNC_BYTES

    def __enter__(self) -> Self:
        """Create the file, which must not be there yet."""
        self._file = self._path.open("xb")
        # One hashes, one syncs.
        self._workers = ThreadPoolExecutor(2)
        try:
            self._write(self._header)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def write(self, part: Tensor) -> None:
        """Write the next part, which may be a view and on any device."""
        self._write(_bytes_of(part))

    def _write(self, content: bytes | memoryview) -> None:
        # The digest is of what is meant to be written, taken while it is; both let other threads run meanwhile.
        hashed = self._workers.submit(self._digest.update, content)
        self._file.write(content)
        hashed.result()
        if self._file.tell() >= self._next_sync:
            self._wait_for_sync()
            # The disk works while more is copied, rather than after all is.
            self._syncing = self._workers.submit(os.fsync, self._file.fileno())
            self._next_sync = self._file.tell() + SYNC_BYTES

    def _wait_for_sync(self) -> None:
        # The system tells of an error once: the last sync would know nothing of that of an earlier one.
        if self._syncing is not None:
            self._syncing.result()

    def __exit__(self, exception_type: object, *rest: object) -> None:
        """Sync and close the file; after an exception only close it."""
        with self._file, self._workers:
            if exception_type is None:
                self._wait_for_sync()
                assert self._file.tell() == self._size, (self._path, self._file.tell(), self._size)
                sync_file(self._file)
                self.written = WrittenFile(self._path.name, self._size, self._digest.hexdigest())


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Create a safetensors file on stable storage.

    Tensors may be views and on any device; one at a time is copied to the host, so that saving a GPU's state
    takes no second copy of it. Errors are ``OSError``.
    """
    entries = aligned({name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    with SafetensorsStream(path, entries) as stream:
        for name in entries:
            stream.write(tensors[name])
    return stream.written


def sync_file(file: IO[bytes]) -> None:
    """Bring what was written to ``file`` to stable storage."""
    # The flush must come first: fsync knows nothing of what Python still holds in its buffer.
    file.flush()
    os.fsync(file.fileno())


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None) -> bytes:
    records: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, entry in entries.items():
        end = begin + entry.nbytes
        shape = list(entry.shape)
        records[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(records, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
