"""Safetensors files: written to stable storage or built in memory, and read block by block.

Every byte that is read was compared with its digest.
"""

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.boxes import Place, overlap
from megatron.checkpoint.files import (
    BLOCK_BYTES,
    AnyPath,
    DigestedFile,
    WrittenFile,
    check_file,
    damaged_block,
    explained,
)
from megatron.errors import CheckpointError

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
T = TypeVar("T")


class Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def aligned(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """``entries`` sorted by element size, widest first, so that each is aligned for memory mapping."""
    return dict(sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize))


def packed(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """``items`` in order, in groups of at most ``limit`` bytes; a larger item is a group of its own."""
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


class SafetensorsStream(DigestedFile):
    """Creates a safetensors file on stable storage from a stream of tensors, with one in memory.

    ``entries`` are in file order (:func:`aligned`); each may be written in several parts. ``metadata`` has strings for
    other readers. A context manager; ``written`` is set at the end. Errors are ``OSError``.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(path)
        self._header = _header(entries, metadata)
        self._size = len(self._header) + sum(entry.nbytes for entry in entries.values())

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.write(self._header)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def write_part(self, part: Tensor) -> None:
        """Write the next part, which may be a view and on any device."""
        self.write(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, exception_type: object, *rest: object) -> None:
        super().__exit__(exception_type)
        if exception_type is None:
            assert self.written.size == self._size, (self.written, self._size)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Create a safetensors file on stable storage.

    Tensors may be views and on any device; they are copied to the host one at a time, so that saving needs no second
    copy of the state. Errors are ``OSError``.
    """
    entries = aligned({name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    with SafetensorsStream(path, entries) as stream:
        for name in entries:
            stream.write_part(tensors[name])
    return stream.written


class SafetensorsImage:
    """The bytes that :func:`write_safetensors` would write, to be copied into shared memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._entries = aligned({name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
        self._header = _header(self._entries, None)
        self.size = len(self._header) + sum(entry.nbytes for entry in self._entries.values())

    @property
    def device(self) -> torch.device:
        """The GPU that holds tensors; the CPU if none does."""
        devices = (tensor.device for tensor in self._tensors.values())
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def lay_out(self, memory: mmap.mmap) -> list[tuple[Tensor, Tensor]]:
        """Write the header to the beginning of ``memory``; returns every tensor's place, with the tensor."""
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=self.size)
        position = len(self._header)
        whole[:position] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        pairs = []
        for name, entry in self._entries.items():
            place = whole[position : position + entry.nbytes]
            pairs.append((place.view(entry.dtype).view(entry.shape), self._tensors[name].detach()))
            position += entry.nbytes
        return pairs


# A file: 8 bytes with the length of the header, little-endian │ header, JSON padded with spaces │ the tensors' bytes.
# Offsets in the header count from the first byte of the tensors.


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


# --- reading ------------------------------------------------------------------------------------------------

_STAGING_BYTES = 16 << 20  # numbers are converted, or sent to a GPU, in parts of this size
_BAND_BYTES = 16 << 20  # rows of which only a part is wanted are read in bands of about this size


class VerifiedFile:
    """The bytes of a checkpoint file, block by block.

    Every block is read whole into memory and compared with its digest there. A file of format version 2 has one digest
    for all bytes: its blocks are returned unverified, because the whole file is verified before the load.
    """

    def __init__(self, content: IO[bytes], file: WrittenFile, path: AnyPath) -> None:
        self._content, self._file, self._path = content, file, path
        self._block_bytes = file.block_bytes or BLOCK_BYTES
        self._staged_number, self._staged = -1, memoryview(b"")

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill ``target`` with the bytes from ``start`` on; raises :class:`CheckpointError` for a damaged block."""
        #   blocks of the file    │ 0 ──────── │ 1 ──────── │ 2 ──────── │
        #   target                      ├──────┼────────────┼─────┤
        #                           staged, copied  in place  staged, copied
        position = 0
        while position < len(target):
            number, offset = divmod(start + position, self._block_bytes)
            rest = target[position:]
            size = min(self._block_bytes, self._file.size - number * self._block_bytes)
            if offset == 0 and size <= len(rest):
                # Digested in the memory of the tensor, without a copy in between.
                self._read_block(number, rest[:size])
                position += size
            else:
                # The next request often wants the rest of the same block.
                if number != self._staged_number:
                    self._staged_number = -1
                    if len(self._staged) != size:
                        self._staged = memoryview(bytearray(size))
                    self._read_block(number, self._staged)
                    self._staged_number = number
                part = self._staged[offset : offset + len(rest)]
                rest[: len(part)] = part
                position += len(part)

    def _read_block(self, number: int, block: memoryview) -> None:
        with explained("read", self._path):
            self._content.seek(number * self._block_bytes)
            position = 0
            while position < len(block):
                length = self._content.readinto(block[position:])  # type: ignore[attr-defined]
                if not length:
                    raise CheckpointError(f"{self._path} became shorter while it was read: load another checkpoint.")
                position += length
        if self._file.block_bytes is not None:
            digest = xxhash.xxh3_128_hexdigest(block)
            if digest != self._file.digests[number]:
                raise damaged_block(self._path, self._file, number, digest)


class VerifiedSafetensors(AbstractContextManager["VerifiedSafetensors"]):
    """The entries of a safetensors file; a context manager.

    Raises :class:`CheckpointError` for a missing or damaged file.
    """

    def __init__(self, directory: AnyPath, file: WrittenFile) -> None:
        self._path = directory / file.name
        check_file(directory, file)
        with explained("read", self._path):
            self._content = self._path.open("rb", buffering=0)
        try:
            self._file = VerifiedFile(self._content, file, self._path)
            self._entries = self._read_header(file.size)
        except BaseException:
            self.close()
            raise

    def _read_header(self, size: int) -> dict[str, tuple[Entry, int]]:
        """Every entry with the position of its first byte."""
        try:
            length = int.from_bytes(self._bytes(0, 8), "little")
            if 8 + length > size:
                raise ValueError("its header is longer than the file")
            header: Mapping[str, Any] = json.loads(self._bytes(8, 8 + length))
            entries = {}
            for name, record in header.items():
                if name == "__metadata__":
                    continue
                entry = Entry(DTYPES[record["dtype"]], tuple(record["shape"]))
                start, stop = record["data_offsets"]
                if not 0 <= start <= stop <= size - 8 - length or stop - start != entry.nbytes:
                    raise ValueError(f"its entry {name} has {stop - start} bytes where its shape has {entry.nbytes}")
                entries[name] = entry, 8 + length + start
            return entries
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"{type(error).__name__} {error}") from error

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged ({reason}): load another checkpoint.")

    def position(self, key: str) -> int:
        """Position of the entry ``key``; 0 if it does not exist."""
        return self._entries[key][1] if key in self._entries else 0

    def check_entries(self, entries: Mapping[str, Entry]) -> None:
        """Raise :class:`CheckpointError` unless the file has these entries and no others."""
        for key, entry in entries.items():
            if self._entries.get(key, (None,))[0] != entry:
                raise self._damaged(f"its entry {key} is not what the manifest says")
        unnamed = sorted(self._entries.keys() - entries.keys())
        if unnamed:
            raise self._damaged(f"it holds {unnamed[0]}, which the manifest does not name")

    def copy_into(self, target: Tensor, key: str, place: Place, entry: Entry) -> None:
        """Fill ``target`` with the part ``place`` of the entry ``key``, which must be an ``entry``.

        ``target`` has the shape of ``place`` and may have another floating-point dtype.
        """
        if self._entries.get(key, (None,))[0] != entry:
            raise self._damaged(f"its entry {key} is not what the manifest says")
        start = self._entries[key][1]
        rows, inner = (place[0], place[1:]) if entry.shape else (slice(0, 1), ())
        shape = entry.shape or (1,)
        row_bytes = Entry(entry.dtype, shape[1:]).nbytes
        is_whole_rows = rows.step in (None, 1) and all(
            (part.start, part.stop, part.step or 1) == (0, size, 1) for part, size in zip(inner, shape[1:], strict=True)
        )
        if is_whole_rows and target.is_contiguous():
            self._fill(target.view(-1), start + rows.start * row_bytes, entry.dtype)
            return
        band = max(1, _BAND_BYTES // max(row_bytes, 1))
        for first in range(rows.start, rows.stop, band):
            count = min(band, rows.stop - first)
            taken, inside = overlap(rows, first, count)
            content = torch.empty((count, *shape[1:]), dtype=entry.dtype)
            self._fill(content.view(-1), start + first * row_bytes, entry.dtype)
            target[taken].copy_(content[(inside, *inner)])
            del content  # before the next band is in memory

    def _fill(self, target: Tensor, start: int, dtype: torch.dtype) -> None:
        """Fill the flat ``target`` with numbers of ``dtype`` from byte ``start`` on."""
        if target.dtype == dtype and target.device.type == "cpu":
            self._file.read_into(target.view(torch.uint8).numpy().data, start)
            return
        step = _STAGING_BYTES // dtype.itemsize
        staging = torch.empty(min(step, target.numel()), dtype=dtype)
        for first in range(0, target.numel(), step):
            part = staging[: target.numel() - first]
            self._file.read_into(part.view(torch.uint8).numpy().data, start + first * dtype.itemsize)
            target[first : first + len(part)].copy_(part)

    def _bytes(self, start: int, stop: int) -> bytearray:
        content = bytearray(stop - start)
        self._file.read_into(memoryview(content), start)
        return content

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._content.close()
