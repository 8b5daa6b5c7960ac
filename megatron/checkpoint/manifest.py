"""The manifest of a checkpoint: its global tensors, their location in files, and its state."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.checkpoint.boxes import Divisions, Numbers, Place, boxes_are_disjoint, overlap
from megatron.checkpoint.directory import MANIFEST, iteration_directory, locate_checkpoint
from megatron.checkpoint.files import AnyPath, WrittenFile, explained
from megatron.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, Entry
from megatron.checkpoint.schema import FORMAT_VERSION, READABLE_VERSIONS
from megatron.data.digests import is_sealed, seal
from megatron.errors import CheckpointError

# Prefixes of the names of parameters and layers.
MODEL = "model/"  # weights in the precision of the model
MASTER = "optimizer/master/"  # fp32 master weights, if the optimizer keeps any
EMA = "optimizer/ema/"  # moving average of the weights, if the optimizer keeps one
FP8 = "fp8/"  # scales and amax histories of FP8 linear layers, by layer name
LOADER = "loader/rank_"  # states of a user's data loader, by data-parallel rank

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

_FIRST_WITH_COLUMNS = 8
"""Earlier format versions have an object per chunk, with the key of its entry."""
_DIVISION_COLUMNS = ("first_rows", "rows", "stride")
"""Columns of boxes that several files divide; absent where no box of the tensor is divided. Since format version 9."""


class Chunk(NamedTuple):
    offset: tuple[int, ...]
    entry: Entry
    file: WrittenFile
    key: str


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor and its chunks, as columns of numbers: there are millions of chunks in a large checkpoint."""

    # A box is a chunk, or rows that are divided into chunks of several files. Chunks are numbered box by box. Two boxes
    # of a tensor [10, 4], the second divided with first_rows 2, rows 2 and stride 1:
    #
    #   offsets   shapes   files  │  chunk   rows      file
    #   0, 0      4, 4     0      │  0       0 to 3    0
    #   4, 0      6, 4     1      │  1       4 and 5   1
    #                             │  2       6 and 7   2
    #                             │  3       8 and 9   3

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Numbers  # [boxes, dims]
    shapes: Numbers  # [boxes, dims]
    files: Numbers  # [boxes], the first chunk's place in the manifest's list of files
    divisions: Divisions
    """The divisions of the boxes into chunks."""
    keys: tuple[str, ...] | None = None
    """Keys of the chunks' entries in their files, where they are not :func:`chunk_key`. Then no box is divided."""

    @property
    def rows(self) -> Numbers:
        """``[boxes]``: sizes of dim 0; 1 for a scalar."""
        return self.shapes[:, 0] if self.shape else np.ones(len(self.files), np.int64)

    @property
    def chunk_counts(self) -> Numbers:
        return self.divisions.counts(self.rows)  # [boxes]

    def add_bytes(self, load: Numbers) -> None:
        """Add the bytes of the chunks to ``load`` ``[files]``."""
        row_bytes = self.shapes.prod(axis=1) * self.dtype.itemsize // np.maximum(self.rows, 1)
        self.divisions.add_bytes(load, self.files, self.rows, row_bytes)

    def overlapping(self, starts: Sequence[int], stops: Sequence[int]) -> Numbers:
        """Numbers of the chunks that share elements with the box ``[starts, stops)``."""
        begin, end = np.array(starts, np.int64), np.array(stops, np.int64)
        found = np.flatnonzero(((self.offsets < end) & (begin < self.offsets + self.shapes)).all(axis=1))
        if not self.shape:
            return found
        counts = self.chunk_counts
        divisions, tops, rows = self.divisions.take(found), self.offsets[found, 0], self.shapes[found, 0]
        first = divisions.part_of(np.maximum(begin[0] - tops, 0))
        last = divisions.part_of(np.minimum(end[0] - tops, rows) - 1)
        # Of every box the numbers from its first to its last chunk, one box after another.
        first_chunk, near = first + (np.cumsum(counts) - counts)[found], last - first + 1
        return np.arange(int(near.sum())) + np.repeat(first_chunk - (np.cumsum(near) - near), near)

    def expanded(self, numbers: Numbers | None = None) -> "SavedTensor":
        """The chunks with these ``numbers``, or all, as boxes of their own."""
        counts = self.chunk_counts
        firsts = np.cumsum(counts) - counts
        numbers = np.arange(int(counts.sum())) if numbers is None else numbers
        box = np.searchsorted(firsts, numbers, side="right") - 1
        parts: Numbers = numbers - firsts[box]
        divisions = self.divisions.take(box)
        offsets, shapes = self.offsets[box], self.shapes[box]
        if self.shape:
            first_rows, ends = divisions.ranges(parts, shapes[:, 0])
            offsets[:, 0] += first_rows
            shapes[:, 0] = ends - first_rows
        files = self.files[box] + parts * divisions.strides
        keys = None if self.keys is None else tuple(self.keys[number] for number in numbers.tolist())
        return SavedTensor(self.dtype, self.shape, offsets, shapes, files, Divisions.none(len(box)), keys)

    def in_files(self, places: Numbers) -> "SavedTensor":
        """The tensor with ``places[file]`` instead of every file."""
        last = self.files + (self.chunk_counts - 1) * self.divisions.strides
        if (places[last] - places[self.files] == last - self.files).all():
            return replace(self, files=places[self.files])
        expanded = self.expanded()
        return replace(expanded, files=places[expanded.files])


def chunk_key(name: str, offset: Sequence[int]) -> str:
    """The key of a chunk's entry in its file, such as ``layers.0.mlp.linear_fc2.weight@0,512``."""
    return f"{name}@{','.join(map(str, offset))}"


@dataclass(frozen=True)
class Manifest:
    tensors: Mapping[str, SavedTensor]
    file_list: Sequence[WrittenFile]
    state: Mapping[str, Any]
    """Everything that is not a tensor, as JSON."""
    format_version: int = FORMAT_VERSION

    def files(self) -> dict[str, WrittenFile]:
        return {file.name: file for file in self.file_list}

    def chunks(self, name: str, numbers: Sequence[int] | Numbers | None = None) -> Iterator[Chunk]:
        """The chunks of the tensor ``name``, or those with these numbers."""
        tensor = self.tensors[name].expanded(None if numbers is None else np.array(numbers, np.int64))
        columns = tensor.offsets.tolist(), tensor.shapes.tolist(), tensor.files.tolist()
        for number, (offset, shape, file) in enumerate(zip(*columns)):
            key = chunk_key(name, offset) if tensor.keys is None else tensor.keys[number]
            yield Chunk(tuple(offset), Entry(tensor.dtype, tuple(shape)), self.file_list[file], key)

    def parts(self, name: str, place: Place) -> Iterator[tuple[Chunk, Place, Place]]:
        """The chunks that hold elements of the part ``place`` of the tensor ``name``.

        Each with the place of these elements in the part, and in the chunk.
        """
        near = self.tensors[name].overlapping([one.start for one in place], [one.stop for one in place])
        for chunk in self.chunks(name, near):
            parts = [overlap(*extent) for extent in zip(place, chunk.offset, chunk.entry.shape)]
            # A place with a step may lie on both sides of a chunk.
            if all(taken.start < taken.stop for taken, _ in parts):
                yield chunk, tuple(taken for taken, _ in parts), tuple(inside for _, inside in parts)


def encode_manifest(manifest: Manifest) -> str:
    return seal("manifest", encode_content(manifest))


def encode_content(manifest: Manifest) -> str:
    """The text of a manifest without its digest."""
    tensors = {}
    for name, tensor in manifest.tensors.items():
        assert tensor.keys is None, "keys of their own are of earlier format versions"
        chunks = {"offset": tensor.offsets, "shape": tensor.shapes, "file": tensor.files}
        if tensor.divisions.is_divided.any():
            chunks |= dict(zip(_DIVISION_COLUMNS, tensor.divisions.columns))
        columns = {kind: column.ravel().tolist() for kind, column in chunks.items()}
        tensors[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "chunks": columns}
    content = {
        "format_version": manifest.format_version,
        "state": manifest.state,
        "files": {file.name: file.to_json() for file in manifest.file_list},
        "tensors": tensors,
    }
    # Without spaces: of millions of numbers, they would be a sixth of the file.
    return json.dumps(content, separators=(",", ":"))


def decode_manifest(text: str) -> Manifest:
    """The inverse of :func:`encode_manifest`; raises ``ValueError`` for an invalid text."""
    try:
        document = json.loads(text)["manifest"]
        version = document["format_version"]
        if version not in READABLE_VERSIONS:
            known = " and ".join(map(str, READABLE_VERSIONS))
            raise ValueError(f"format version {version}; this code reads {known}")
        if not is_sealed("manifest", text):
            raise ValueError("its digest does not match its content")
        if not isinstance(document["state"], dict):
            raise ValueError("its state is not an object")
        files = [WrittenFile.from_json(name, record) for name, record in document["files"].items()]
        for file in files:
            # A name with a directory could lead out of the checkpoint, and one with a NUL is none.
            if file.name != os.path.basename(file.name) or file.name in ("", ".", "..") or "\0" in file.name:
                raise ValueError(f"bad file name {file.name!r}")
        places = {file.name: place for place, file in enumerate(files)}
        tensors = {}
        for name, record in document["tensors"].items():
            columns = version >= _FIRST_WITH_COLUMNS
            tensors[name] = _decode_tensor(record) if columns else _decode_objects(name, record, places)
        _check_chunks(tensors, len(files))
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error
    return Manifest(tensors, files, document["state"], version)


def _decode_tensor(record: dict[str, Any]) -> SavedTensor:
    shape, chunks = record["shape"], record["chunks"]
    files = _column(chunks["file"])
    offsets, shapes = (_column(chunks[kind]).reshape(len(files), len(shape)) for kind in ("offset", "shape"))
    divisions = Divisions.none(len(files))
    if _DIVISION_COLUMNS[0] in chunks:
        divisions = Divisions(*(_column(chunks[kind]) for kind in _DIVISION_COLUMNS))
        if any(len(column) != len(files) for column in divisions.columns):
            raise ValueError("divided boxes without all of their numbers")
    return SavedTensor(DTYPES[record["dtype"]], tuple(torch.Size(shape)), offsets, shapes, files, divisions)


def _decode_objects(name: str, record: dict[str, Any], places: Mapping[str, int]) -> SavedTensor:
    """A tensor of a format version before :data:`_FIRST_WITH_COLUMNS`."""
    chunks = record["chunks"]
    columns = {
        "offset": [number for chunk in chunks for number in chunk["offset"]],
        "shape": [number for chunk in chunks for number in chunk["shape"]],
        "file": [places[chunk["file"]] for chunk in chunks],
    }
    if any(not len(chunk["offset"]) == len(chunk["shape"]) == len(record["shape"]) for chunk in chunks):
        raise ValueError(f"the chunks of {name} do not fill its shape {record['shape']}")
    tensor = _decode_tensor({**record, "chunks": columns})
    return replace(tensor, keys=tuple(str(chunk["key"]) for chunk in chunks))


def _column(numbers: list[int]) -> Numbers:
    column = np.array(numbers) if numbers else np.zeros(0, np.int64)
    if column.dtype != np.int64 or column.ndim != 1:
        raise ValueError("a chunk without whole numbers")
    return column


def _check_chunks(tensors: Mapping[str, SavedTensor], num_files: int) -> None:
    """Raise ``ValueError`` unless the chunks of every tensor are disjoint, cover it, and lie in known files.

    The chunks of a divided box are so if the box is.
    """
    for name, tensor in tensors.items():
        if ((tensor.files < 0) | (tensor.files >= num_files)).any() or not _is_well_divided(tensor, num_files):
            raise ValueError(f"a chunk of {name} is in no file")
        # Compared without a sum, which a forged offset would let overflow.
        fits = (tensor.offsets >= 0) & (tensor.shapes >= 0) & (tensor.offsets <= np.array(tensor.shape) - tensor.shapes)
        if not fits.all() or not _is_filled(tensor):
            raise ValueError(f"the chunks of {name} do not fill its shape {list(tensor.shape)}")
    dims = max((len(tensor.shape) for tensor in tensors.values()), default=0)
    offsets = [padded(tensor.offsets, dims, 0) for tensor in tensors.values()]
    shapes = [padded(tensor.shapes, dims, 1) for tensor in tensors.values()]
    counts = [len(tensor.files) for tensor in tensors.values()]
    if tensors:
        starts = np.concatenate(offsets)
        if not boxes_are_disjoint(starts, starts + np.concatenate(shapes), np.repeat(np.arange(len(counts)), counts)):
            raise ValueError("the chunks of a tensor overlap")


def _is_well_divided(tensor: SavedTensor, num_files: int) -> bool:
    """Whether every chunk of a divided box has rows, and a file of its own."""
    boxes = np.flatnonzero(tensor.divisions.strides)
    if not len(boxes):
        return True
    if not tensor.shape:
        return False
    divisions, sizes = tensor.divisions.take(boxes), tensor.shapes[boxes, 0]
    limit = (divisions.strides > 0) & (divisions.strides <= num_files) & (divisions.rows > 0)
    if not (limit & (divisions.first_rows > 0) & (divisions.first_rows <= sizes)).all():
        return False
    # The products cannot overflow: counts and strides are at most as many as the files.
    counts = divisions.counts(sizes)
    return bool(
        (counts <= num_files).all() and (tensor.files[boxes] + (counts - 1) * divisions.strides < num_files).all()
    )


def _is_filled(tensor: SavedTensor) -> bool:
    """Whether disjoint chunks of these shapes have as many elements as the tensor."""
    volume = math.prod(tensor.shape)
    # Each chunk is a part of the tensor, so only their sum could overflow.
    if volume * len(tensor.files) < 1 << 62:
        return int(tensor.shapes.prod(axis=1).sum()) == volume
    return sum(math.prod(shape) for shape in tensor.shapes.tolist()) == volume


def padded(column: Numbers, dims: int, value: int) -> Numbers:
    """``[chunks, dims]`` from fewer dims: further ones with offset 0 and size 1 do not change a box."""
    if column.shape[1] == dims:
        return column
    return np.pad(column, ((0, 0), (0, dims - column.shape[1])), constant_values=value)


def read_checkpoint(root: AnyPath, iteration: int) -> Manifest:
    """The manifest of the checkpoint of ``iteration`` in ``root``. Raises :class:`CheckpointError`."""
    directory = locate_checkpoint(root, iteration)
    manifest = read_manifest(directory)
    saved = manifest.state.get("iteration", iteration)
    if saved != iteration:
        raise CheckpointError(
            f"{directory} holds the state of iteration {saved}: rename it to "
            f"{iteration_directory(root, saved).name}, or load another checkpoint."
        )
    return manifest


def read_manifest(directory: AnyPath) -> Manifest:
    """Read ``directory/manifest.json``; raises :class:`CheckpointError` if it is missing or damaged."""
    path = directory / MANIFEST
    with explained("read", path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory} is not a checkpoint (it has no {MANIFEST}): load another one."
            ) from None
    try:
        return decode_manifest(content.decode())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): load another checkpoint.") from error
