"""Safetensors files: written sequentially to stable storage, or built in memory."""

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from megatron.checkpoint.files import DigestedFile, WrittenFile

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


class SafetensorsStream:
    """Creates a safetensors file on stable storage from a stream of tensors, with one in memory.

    ``entries`` are in file order (:func:`aligned`); each may be written in several parts. ``metadata`` has strings for
    other readers. A context manager; ``written`` is set at the end. Errors are ``OSError``.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
        self._header = _header(entries, metadata)
        self._size = len(self._header) + sum(entry.nbytes for entry in entries.values())
        self._file = DigestedFile(path)

    def __enter__(self) -> Self:
        self._file.__enter__()
        try:
            self._file.write(self._header)
        except BaseException as error:
            self._file.__exit__(type(error))
            raise
        return self

    def write(self, part: Tensor) -> None:
        """Write the next part, which may be a view and on any device."""
        self._file.write(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, exception_type: object, *rest: object) -> None:
        self._file.__exit__(exception_type)
        if exception_type is None:
            assert self.written.size == self._size, (self.written, self._size)

    @property
    def written(self) -> WrittenFile:
        return self._file.written


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Create a safetensors file on stable storage.

    Tensors may be views and on any device; they are copied to the host one at a time, so that saving needs no second
    copy of the state. Errors are ``OSError``.
    """
    entries = _entries_of(tensors)
    with SafetensorsStream(path, entries) as stream:
        for name in entries:
            stream.write(tensors[name])
    return stream.written


class SafetensorsImage:
    """The bytes that :func:`write_safetensors` would write, to be copied into shared memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._entries = _entries_of(tensors)
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


def _entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    return aligned({name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})


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
