"""The directory of a checkpoint in Megatron-LM's format ``torch_dist``: its tensors, and the state beside them.

DIR/latest_checkpointed_iteration.txt    "10"
DIR/iter_0000010/metadata.json           the format and its version
DIR/iter_0000010/common.pt               torch.save: arguments, iteration, schedules
DIR/iter_0000010/.metadata               pickle of torch's DCP: shapes, chunks, and their places in the files
DIR/iter_0000010/__0_0.distcp            one archive of torch.save for every chunk
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.boxes import boxes_are_disjoint, overlap
from megatron.checkpoint.directory import TRACKER, iteration_directory
from megatron.checkpoint.files import explained
from megatron.checkpoint.megatron_lm.safe_pickle import MAX_BYTES, Record, printable, read_pickle
from megatron.checkpoint.megatron_lm.torch_archive import (
    Range,
    StoredTensor,
    TorchArchive,
    dtype_of,
    read_rows,
)
from megatron.errors import CheckpointError

COMMON, METADATA, FORMAT = "common.pt", ".metadata", "metadata.json"
_OPEN_FILES = 32
_DCP = "torch.distributed.checkpoint.metadata."
_LONGEST_NAME = 300
_BYTES = _DCP + "BytesStorageMetadata"
_MEGATRONS = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_TRAINING_STATE = re.compile(r"(chained_\d+\.)?(optimizer|rng_state|rerun_state_machine_state)\b|.*\._extra_state\b")
"""Names beside the weights: of the optimizer, of random numbers, of FP8 scales."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor, and its archive."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    part: Range


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as all ranks together saved it: a weight, or the stack of the weights of all layers or experts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def rows(self, dims: int) -> "dict[tuple[int, ...], Rows]":
        """The tensors of the remaining dims, by the indices of the first ``dims`` dims."""
        chunks: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            extents = zip(chunk.offset[:dims], chunk.shape[:dims], strict=True)
            for leading in product(*(range(start, start + size) for start, size in extents)):
                chunks.setdefault(leading, []).append(chunk)
        return {
            leading: Rows(self.name, self.dtype, self.shape[dims:], leading, tuple(holding))
            for leading, holding in chunks.items()
        }


@dataclass(frozen=True)
class Rows:
    """A matrix or vector within a global tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    leading: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """The chunks that hold a part of it."""


def find_iteration(root: Path, ckpt_step: int | None) -> Path:
    """The directory of a checkpoint in ``root``: of the iteration ``ckpt_step``, of the one in the tracker, or ``root``
    itself. Raises :class:`CheckpointError`."""
    if ckpt_step is None and (root / METADATA).exists():
        return root
    directory = _tracked_directory(root) if ckpt_step is None else iteration_directory(root, ckpt_step)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist: change --load or --ckpt-step.")
    return directory


def _tracked_directory(root: Path) -> Path:
    """The directory that the tracker names; Megatron-LM's own converters write ``release`` instead of a number."""
    if not (root / TRACKER).is_file():
        raise CheckpointError(
            f"{root} has neither {TRACKER} nor {METADATA}: give --load the directory of Megatron-LM's checkpoints."
        )
    with explained("read", root / TRACKER), (root / TRACKER).open("rb") as file:
        text = file.read(64).strip()
    if text == b"release":
        return root / "release"
    if re.fullmatch(rb"\d{1,15}", text) is None:
        found = printable(text.decode(errors="replace"))
        raise CheckpointError(f"{root / TRACKER} has {found!r} instead of an iteration: choose one with --ckpt-step.")
    return iteration_directory(root, int(text))


class TorchDistCheckpoint:
    """The checkpoint of one iteration in ``directory``. Raises :class:`CheckpointError`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        _check_format(directory)
        self.tensors = _read_metadata(directory / METADATA)
        self._check_files()
        self._stored: dict[Chunk, StoredTensor] = {}
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)

    def _check_files(self) -> None:
        """Raise :class:`CheckpointError` if a file is missing or too short, before the first tensor is read."""
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.part.start + chunk.part.size)
        for name, end in ends.items():
            path = self.directory / name
            with explained("read", path):
                size = path.stat().st_size
            if size < end:
                raise CheckpointError(f"{path} is truncated: copy the checkpoint again.")

    def common(self) -> Mapping[object, object]:
        """The state that is not sharded."""
        path = self.directory / COMMON
        file = self._open(COMMON)
        value = TorchArchive(file, Range(0, _size_of(file)), str(path)).value()
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} does not hold the state of a run: copy the checkpoint again.")
        return value

    def read(self, rows: Rows, first: int, count: int) -> Tensor:
        """``count`` rows from ``first`` on."""
        block = torch.empty((count, *rows.shape[1:]), dtype=rows.dtype)
        dims = len(rows.leading)
        for chunk in rows.chunks:
            taken, inside = overlap(slice(first, first + count), chunk.offset[dims], chunk.shape[dims])
            if taken.start < taken.stop:
                others = zip(chunk.offset[dims + 1 :], chunk.shape[dims + 1 :], strict=True)
                place = (taken, *(slice(start, start + size) for start, size in others))
                block[place] = self._read_chunk(rows, chunk, inside)
        return block

    def _read_chunk(self, rows: Rows, chunk: Chunk, inside: slice) -> Tensor:
        """Rows of a chunk at the leading indices of ``rows``."""
        stored, file, dims = self._stored_chunk(chunk, rows), self._open(chunk.file), len(rows.leading)
        # The leading dims and the rows are one dim in the file.
        before, size = 0, chunk.shape[dims]
        for index, start, extent in zip(rows.leading, chunk.offset, chunk.shape, strict=False):
            before = before * extent + index - start
        merged = _merge_dims(stored, dims)
        part = slice(before * size + inside.start, before * size + inside.stop)
        return read_rows(file, merged, part, str(self.directory / chunk.file))

    def _stored_chunk(self, chunk: Chunk, rows: Rows) -> StoredTensor:
        """The verified tensor of a chunk."""
        if chunk not in self._stored:
            where = f"{self.directory / chunk.file}, {rows.name}"
            file = self._open(chunk.file)
            archive = TorchArchive(file, chunk.part, where)
            stored = archive.tensor(archive.value())
            if stored.entry != (rows.dtype, chunk.shape):
                raise archive.damaged(f"its shape or dtype differs from {METADATA}")
            self._stored[chunk] = stored
        return self._stored[chunk]

    def _open_file(self, name: str) -> BinaryIO:
        with explained("read", self.directory / name):
            return (self.directory / name).open("rb")


def _merge_dims(stored: StoredTensor, dims: int) -> StoredTensor:
    """``stored`` with the first ``dims`` dims merged into the next; they are a single dim in a contiguous tensor."""
    if dims == 0:
        return stored
    if not stored.is_contiguous:
        raise CheckpointError("A chunk of stacked layers is not contiguous: write the checkpoint again.")
    shape = stored.entry.shape
    merged = (prod(shape[: dims + 1]), *shape[dims + 1 :])
    strides = tuple(prod(merged[dim + 1 :]) for dim in range(len(merged)))
    return stored._replace(entry=stored.entry._replace(shape=merged), strides=strides)


def _size_of(file: BinaryIO) -> int:
    return file.seek(0, 2)


def _check_format(directory: Path) -> None:
    """Raise :class:`CheckpointError` unless ``metadata.json`` names the format ``torch_dist``."""
    path = directory / FORMAT
    if not path.is_file():
        kind = "the format torch" if any(directory.glob("mp_rank_*")) else "an unknown format"
        raise CheckpointError(
            f"{directory} has {kind}, because it lacks {FORMAT}: write it with Megatron-LM in --ckpt-format "
            "torch_dist, or give another directory."
        )
    try:
        with explained("read", path), path.open("rb") as file:
            fields = json.loads(file.read(1 << 16))
        found = fields["sharded_backend"], fields["sharded_backend_version"], fields["common_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} does not name a format: copy the checkpoint again.") from None
    if found != ("torch_dist", 1, "torch"):
        described = ", ".join(printable(str(word)) for word in found)
        raise CheckpointError(
            f"{path} names the format {described}, and only torch_dist 1 is read: write it with Megatron-LM in "
            "--ckpt-format torch_dist."
        )


# --- .metadata -----------------------------------------------------------------------------------------------


def _read_metadata(path: Path) -> dict[str, SavedTensor]:
    """The weights by name; the state of the training, and objects such as FP8 states, are left out."""
    with explained("read", path), path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    value = read_pickle(content, str(path))
    try:
        return dict(_tensors(value))
    except (ValueError, TypeError, LookupError) as error:
        reason = printable(str(error))
        raise CheckpointError(f"{path} does not describe tensors ({reason}): copy the checkpoint again.") from None


def _tensors(value: object) -> Iterator[tuple[str, SavedTensor]]:
    """The tensors of DCP's ``Metadata``. Raises ``ValueError``."""
    metadata = _attributes(value, "Metadata", _MEGATRONS)
    places = _places(metadata["storage_data"])
    tensors = metadata["state_dict_metadata"]
    if not isinstance(tensors, dict):
        raise ValueError("it has no table of tensors")
    for name, described in tensors.items():
        if not isinstance(name, str):
            raise ValueError("the name of a tensor is not a text")
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise ValueError(f"{printable(name)} is not the name of a tensor")
        if (isinstance(described, Record) and described.name == _BYTES) or _TRAINING_STATE.match(name):
            continue
        yield name, _tensor(name, described, places)


def _tensor(name: str, value: object, places: Mapping[tuple[str, tuple[int, ...]], tuple[str, Range]]) -> SavedTensor:
    fields = _attributes(value, "TensorStorageMetadata")
    properties = fields["properties"]
    state = properties.state if isinstance(properties, Record) else None
    dtype = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) else None
    shape, listed = _sizes(fields["size"]), fields["chunks"]
    if not isinstance(listed, list):
        raise ValueError("a tensor has no list of chunks")
    chunks = []
    for one in listed:
        extent = _attributes(one, "ChunkStorageMetadata")
        offset = _sizes(extent["offsets"])
        if (name, offset) not in places:
            raise ValueError(f"a chunk of {name} is in no file")
        chunks.append(Chunk(offset, _sizes(extent["sizes"]), *places[name, offset]))
    tensor = SavedTensor(name, dtype_of(dtype), shape, tuple(chunks))
    _check_cover(tensor)
    return tensor


def _check_cover(tensor: SavedTensor) -> None:
    """Raise ``ValueError`` unless the chunks cover the tensor, each element once, and fit into their archives."""
    name, shape, chunks = tensor.name, tensor.shape, tensor.chunks
    if any(len(chunk.offset) != len(shape) or len(chunk.shape) != len(shape) for chunk in chunks):
        raise ValueError(f"a chunk of {name} has other dims than the tensor")
    # A malicious size must not overflow.
    if any(size >= 1 << 62 for chunk in chunks for size in (*shape, *chunk.offset, *chunk.shape)):
        raise ValueError(f"{name} has an impossible size")
    if any(prod(chunk.shape) * tensor.dtype.itemsize > chunk.part.size for chunk in chunks):
        raise ValueError(f"a chunk of {name} is larger than its archive")
    is_inside = all(
        start + size <= whole for chunk in chunks for start, size, whole in zip(chunk.offset, chunk.shape, shape)
    )
    starts = np.array([chunk.offset for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
    stops = starts + np.array([chunk.shape for chunk in chunks], np.int64).reshape(starts.shape)
    covered = sum(prod(chunk.shape) for chunk in chunks)
    if not is_inside or covered != prod(shape) or not boxes_are_disjoint(starts, stops):
        raise ValueError(f"the chunks of {name} do not cover it once")


def _places(value: object) -> dict[tuple[str, tuple[int, ...]], tuple[str, Range]]:
    """File and range of every chunk, by the name of the tensor and the offset of the chunk. Raises ``ValueError``."""
    if not isinstance(value, dict):
        raise ValueError("it has no table of files")
    places = {}
    for index, storage in value.items():
        key, info = _attributes(index, "MetadataIndex"), _attributes(storage)
        if key.get("offset") is None:
            continue
        name, file, start, size = key["fqn"], info["relative_path"], info["offset"], info["length"]
        # A name with a directory could lead out of the checkpoint's directory.
        if not isinstance(file, str) or re.fullmatch(r"[\w-]+\.distcp", file, re.ASCII) is None:
            raise ValueError(f"{printable(str(file))!r} is not the name of a file of a checkpoint")
        if not isinstance(name, str) or type(start) is not int or type(size) is not int or min(start, size) < 0:
            raise ValueError("a chunk has no place in its file")
        if info.get("transform_descriptors"):
            raise ValueError("its files are compressed")
        places[name, _sizes(key["offset"])] = file, Range(start, size)
    return places


def _attributes(value: object, *names: str) -> Mapping[object, object]:
    """The attributes of an object of DCP. Raises ``ValueError``."""
    if not isinstance(value, Record) or (names and value.name.removeprefix(_DCP) not in names):
        raise ValueError(f"it has no {names[0] if names else 'record'} where one is due")
    return value.attributes


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("it has sizes that are not numbers")
    return value
