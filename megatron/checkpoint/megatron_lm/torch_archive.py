"""Files of ``torch.save``: a ZIP archive with a pickle and the bytes of the tensors' storages, not compressed.

The pickle is read by :mod:`megatron.checkpoint.megatron_lm.safe_pickle`; a storage is a range of the file, whose
bounds are checked here.
"""

import re
import struct
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import SeekableFile, explained
from megatron.checkpoint.megatron_lm.safe_pickle import MAX_BYTES, Global, PersistentId, Record, printable, read_pickle
from megatron.checkpoint.safetensors_file import Entry
from megatron.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_READ_BYTES = 4 << 20
_ENCRYPTED = 1
_STORAGES = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
    "torch.storage.UntypedStorage": torch.uint8,
}


class Range(NamedTuple):
    start: int
    size: int


class StoredTensor(NamedTuple):
    """A tensor, and the range of the file with its storage."""

    entry: Entry
    first: int
    """Its first element in the storage."""
    strides: tuple[int, ...]
    storage: Range

    @property
    def is_contiguous(self) -> bool:
        expected = [prod(self.entry.shape[dim + 1 :]) for dim in range(len(self.entry.shape))]
        pairs = zip(self.entry.shape, self.strides, expected, strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


class TorchArchive:
    """One archive in ``file``, at ``part`` of it; ``where`` names it in a :class:`CheckpointError`."""

    def __init__(self, file: BinaryIO, part: Range, where: str) -> None:
        self._file, self._part, self._where = file, part, where
        with explained("read", Path(where)):
            try:
                names = zipfile.ZipFile(_Window(file, part)).infolist()
            except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
                raise self.damaged(f"no complete archive of torch.save: {printable(str(error))}") from None
        self._members = {name.filename.partition("/")[2]: name for name in names}
        if "byteorder" in self._members and self.read("byteorder") != b"little":
            raise CheckpointError(f"{where} was written on a big-endian machine: choose another checkpoint.")

    def value(self) -> object:
        """The saved value, as :func:`~megatron.checkpoint.megatron_lm.safe_pickle.read_pickle` returns it."""
        return read_pickle(self.read("data.pkl"), self._where)

    def tensor(self, value: object) -> StoredTensor:
        """The tensor that ``value``, a part of the saved value, describes; its storage is verified."""
        try:
            return self._tensor(value)
        except (ValueError, TypeError) as error:
            raise self.damaged(f"no usable tensor: {printable(str(error))}") from None

    def read(self, name: str) -> bytes:
        """The content of a member of the archive."""
        place = self._locate(name)
        if place.size > MAX_BYTES:
            raise self.damaged(f"{name} of {place.size:,} bytes")
        self._verify(name, place)
        return read_range(self._file, place, self._where)

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._where} is damaged ({reason}): copy the checkpoint again.")

    def _locate(self, name: str) -> Range:
        member = self._members.get(name)
        if member is None:
            raise self.damaged(f"the archive lacks {printable(name)!r}")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            raise self.damaged(f"{printable(name)!r} is compressed or encrypted, which torch.save does not do")
        header = Range(self._part.start + member.header_offset, _LOCAL_HEADER.size + 4)
        self._check_inside(header)
        content = read_range(self._file, header, self._where)
        signature, name_size, extra_size = _LOCAL_HEADER.unpack(content[: _LOCAL_HEADER.size])
        place = Range(header.start + _LOCAL_HEADER.size + name_size + extra_size, member.file_size)
        self._check_inside(place)
        if signature != b"PK\3\4" or member.compress_size != member.file_size:
            raise self.damaged(f"the entry of {printable(name)!r} contradicts itself")
        return place

    def _check_inside(self, place: Range) -> None:
        end = self._part.start + self._part.size
        if not self._part.start <= place.start <= place.start + place.size <= end:
            raise self.damaged("an entry lies outside of the archive")

    def _verify(self, name: str, place: Range) -> None:
        """Compare a member with its checksum. Zero means none: torch can leave it out."""
        expected, checksum, end = self._members[name].CRC, 0, place.start + place.size
        if expected == 0:
            return
        for start in range(place.start, end, _READ_BYTES):
            part = Range(start, min(_READ_BYTES, end - start))
            checksum = zlib.crc32(read_range(self._file, part, self._where), checksum)
        if checksum != expected:
            raise self.damaged(f"the checksum of {printable(name)!r} differs")

    def _tensor(self, value: object) -> StoredTensor:
        """The tensor of a call of one of torch's functions that rebuild tensors. Raises ``ValueError``.

        The arguments are: storage, first element, shape, strides, …, and of version 3 the dtype.
        """
        if isinstance(value, Record) and value.name == "torch._utils._rebuild_parameter":
            value = value.arguments[0] if value.arguments else None
        versions = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
        if not isinstance(value, Record) or len(value.arguments) < versions.get(value.name, 99):
            raise ValueError("it is not a plain tensor")
        storage, first, *rest = value.arguments
        dtype, count, name = _storage_of(storage)
        if value.name.endswith("v3"):
            untyped, dtype = dtype, dtype_of(rest[4])
            count = count * untyped.itemsize // dtype.itemsize
        shape, strides = integers(rest[0]), integers(rest[1])
        if type(first) is not int or first < 0 or len(shape) != len(strides):
            raise ValueError("its shape is wrong")
        member = f"data/{name}"
        place = self._locate(member)
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if place.size != count * dtype.itemsize or (0 not in shape and last >= count):
            raise ValueError("its elements lie outside of its storage")
        self._verify(member, place)
        return StoredTensor(Entry(dtype, shape), first, strides, place)


def read_rows(file: BinaryIO, tensor: StoredTensor, rows: slice, where: str) -> Tensor:
    """Rows ``rows.start`` to ``rows.stop`` of a tensor with at least one dim, as a copy.

    Only these rows are read if the tensor is contiguous, otherwise its whole storage.
    """
    dtype, shape = tensor.entry
    count, width = rows.stop - rows.start, prod(shape[1:]) * dtype.itemsize
    if tensor.is_contiguous:
        start = tensor.storage.start + tensor.first * dtype.itemsize + rows.start * width
        content = read_range(file, Range(start, count * width), where)
        if not content:
            return torch.empty((count, *shape[1:]), dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(count, *shape[1:])
    flat = torch.frombuffer(bytearray(read_range(file, tensor.storage, where)), dtype=dtype)
    return flat.as_strided(shape, tensor.strides, tensor.first)[rows].clone()


def read_range(file: BinaryIO, place: Range, where: str) -> bytes:
    """The bytes of a range of ``file``; raises :class:`CheckpointError` if they end early."""
    with explained("read", Path(where)):
        file.seek(place.start)
        content = file.read(place.size)
    if len(content) != place.size:
        raise CheckpointError(f"{where} is truncated: copy the checkpoint again.")
    return content


def dtype_of(value: object) -> torch.dtype:
    """The dtype that a global names. Raises ``ValueError``."""
    module, _, name = value.name.rpartition(".") if isinstance(value, Global) else ("", "", "")
    dtype = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has no known dtype")
    return dtype


def _storage_of(value: object) -> tuple[torch.dtype, int, str]:
    """Dtype, number of elements and name of the storage that a persistent id names. Raises ``ValueError``."""
    identity = value.value if isinstance(value, PersistentId) else None
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("it has no storage")
    kind, name, _, count = identity[1:]
    dtype = _STORAGES.get(kind.name) if isinstance(kind, Global) else None
    if dtype is None or type(count) is not int or count < 0:
        raise ValueError("its storage has an unknown type")
    if not isinstance(name, str) or re.fullmatch(r"\d{1,9}", name, re.ASCII) is None:
        raise ValueError("the name of its storage is not a number")
    return dtype, count, name


def integers(value: object) -> tuple[int, ...]:
    """A tuple of integers that are not negative. Raises ``ValueError``."""
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("its shape is not made of numbers")
    return value


class _Window(SeekableFile):
    """A part of a file as a file of its own, for ``zipfile``."""

    def __init__(self, file: BinaryIO, part: Range) -> None:
        super().__init__(part.size)
        self._file, self._start = file, part.start

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self._size - self._position))
        self._file.seek(self._start + self._position)
        content = self._file.read(count)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)
