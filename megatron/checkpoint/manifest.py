"""The manifest of a checkpoint: its global tensors, their location in files, and its state."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpoint.directory import MANIFEST, iteration_directory, locate_checkpoint
from megatron.checkpoint.files import WrittenFile, explained
from megatron.checkpoint.places import boxes_are_disjoint
from megatron.checkpoint.remote_path import AnyPath
from megatron.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, Entry
from megatron.checkpoint.schema import FORMAT_VERSION, READABLE_VERSIONS
from megatron.data.digests import is_sealed, seal
from megatron.errors import CheckpointError

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]


@dataclass(frozen=True)
class ChunkLocation:
    file: WrittenFile
    key: str


@dataclass(frozen=True)
class Manifest:
    metadata: Metadata
    """DCP's metadata: global tensors and chunks; ``storage_data`` has the location of each chunk."""
    state: dict[str, Any]
    """Everything that is not a tensor, as JSON."""
    format_version: int = FORMAT_VERSION

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)

    def files(self) -> dict[str, WrittenFile]:
        """The files with the tensors, by name."""
        locations = cast(dict[MetadataIndex, ChunkLocation], self.metadata.storage_data or {}).values()
        return {location.file.name: location.file for location in locations}

    def location(self, index: MetadataIndex) -> ChunkLocation:
        location: ChunkLocation = self.metadata.storage_data[index]
        return location

    def entry(self, index: MetadataIndex) -> Entry:
        """Dtype and shape of the chunk at ``index``."""
        return Entry(self.tensors()[index.fqn].properties.dtype, self._chunk_shapes[index])

    @cached_property
    def _chunk_shapes(self) -> dict[MetadataIndex, tuple[int, ...]]:
        return {
            MetadataIndex(name, chunk.offsets): tuple(chunk.sizes)
            for name, tensor in self.tensors().items()
            for chunk in tensor.chunks
        }


def encode_manifest(manifest: Manifest) -> str:
    return seal("manifest", encode_content(manifest))


def encode_content(manifest: Manifest) -> str:
    """The text of a manifest without its digest."""
    tensors = {}
    for name, tensor in manifest.tensors().items():
        chunks = []
        for chunk in tensor.chunks:
            location = manifest.location(MetadataIndex(name, chunk.offsets))
            place = {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
            chunks.append({**place, "file": location.file.name, "key": location.key})
        dtype = DTYPE_NAMES[tensor.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    content = {
        "format_version": manifest.format_version,
        "state": manifest.state,
        "files": {name: file.to_json() for name, file in manifest.files().items()},
        "tensors": tensors,
    }
    return json.dumps(content)


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
        files = {name: WrittenFile.from_json(name, record) for name, record in document["files"].items()}
        for name in files:
            # A name with a directory could lead out of the checkpoint.
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise ValueError(f"bad file name {name!r}")
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, record in document["tensors"].items():
            _decode_tensor(name, record, files, metadata)
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error
    return Manifest(metadata, document["state"], version)


def _decode_tensor(name: str, record: dict[str, Any], files: Mapping[str, WrittenFile], metadata: Metadata) -> None:
    size = torch.Size(record["shape"])
    chunks = []
    for entry in record["chunks"]:
        chunk = ChunkStorageMetadata(torch.Size(entry["offset"]), torch.Size(entry["shape"]))
        chunks.append(chunk)
        location = ChunkLocation(files[entry["file"]], str(entry["key"]))
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = location
    if not _chunks_fill(chunks, size):
        raise ValueError(f"the chunks of {name} do not fill its shape {list(size)}")
    properties = TensorProperties(dtype=DTYPES[record["dtype"]])
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)


def _chunks_fill(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether the chunks are disjoint and cover a tensor of ``size``."""
    if any(not len(chunk.offsets) == len(chunk.sizes) == len(size) for chunk in chunks):
        return False
    # [chunks, dims]
    starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(size))
    lengths = np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(size))
    if (starts < 0).any() or (lengths < 0).any() or (starts + lengths > np.array(size, dtype=np.int64)).any():
        return False
    # Python's integers: a forged size must not wrap around. Disjoint chunks of the right volume cover the tensor.
    volume = sum(math.prod(shape) for shape in lengths.tolist())
    return volume == math.prod(size) and boxes_are_disjoint(starts, starts + lengths)


def read_checkpoint(root: AnyPath, iteration: int) -> Manifest:
    """The manifest of the checkpoint of ``iteration`` in ``root``.

    Raises :class:`CheckpointError` like :func:`read_manifest`, and for a directory that was renamed to another
    iteration.
    """
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
