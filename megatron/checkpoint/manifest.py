"""The manifest of a checkpoint: what it holds, and where."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpoint.directory import MANIFEST
from megatron.checkpoint.files import WrittenFile, explained, is_sealed, seal
from megatron.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES
from megatron.config.errors import CheckpointError

FORMAT_VERSION = 2

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]


@dataclass(frozen=True)
class ChunkLocation:
    """Where the bytes of one chunk of a global tensor are."""

    file: WrittenFile
    key: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    metadata: Metadata
    """DCP's: the global tensors and their chunks; ``storage_data`` has the location of each chunk."""
    state: dict[str, Any]
    """What is not a tensor, as JSON gives it back."""

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The global tensors by name."""
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)

    def files(self) -> set[WrittenFile]:
        """The files that hold the tensors."""
        return {
            location.file for location in cast(dict[MetadataIndex, ChunkLocation], self.metadata.storage_data).values()
        }

    def location(self, index: MetadataIndex) -> ChunkLocation:
        """Where the chunk at ``index`` lies."""
        location: ChunkLocation = self.metadata.storage_data[index]
        return location


def encode_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``."""
    return seal(encode_content(manifest))


def encode_content(manifest: Manifest) -> str:
    """The text of a manifest without its own digest."""
    files: dict[str, dict[str, int | str]] = {}
    tensors = {}
    for name, tensor in manifest.tensors().items():
        chunks = []
        for chunk in tensor.chunks:
            location = manifest.location(MetadataIndex(name, chunk.offsets))
            files[location.file.name] = {"bytes": location.file.size, "xxh3_128": location.file.digest}
            place = {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
            chunks.append({**place, "file": location.file.name, "key": location.key})
        dtype = DTYPE_NAMES[tensor.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return json.dumps({"format_version": FORMAT_VERSION, "state": manifest.state, "files": files, "tensors": tensors})


def decode_manifest(text: str) -> Manifest:
    """The inverse of :func:`encode_manifest`; a text that is not a manifest is a ``ValueError``."""
    try:
        document = json.loads(text)["manifest"]
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {document['format_version']}; this code reads {FORMAT_VERSION}")
        if not is_sealed(text):
            raise ValueError("its digest is not that of its content")
        if not isinstance(document["state"], dict):
            raise ValueError("its state is not an object")
        files = {name: _decode_file(name, record) for name, record in document["files"].items()}
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, record in document["tensors"].items():
            _decode_tensor(name, record, files, metadata)
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error
    return Manifest(metadata, document["state"])


def _decode_file(name: str, record: dict[str, Any]) -> WrittenFile:
    # A name with a directory in it could make the reader leave the checkpoint.
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError(f"bad file name {name!r}")
    return WrittenFile(name, int(record["bytes"]), str(record["xxh3_128"]))


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
    """Whether all chunks lie inside ``size`` and have its number of elements together."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        for start, length, limit in zip(chunk.offsets, chunk.sizes, size):
            if start < 0 or length < 0 or start + length > limit:
                return False
    return sum(prod(chunk.sizes) for chunk in chunks) == prod(size)


def read_manifest(directory: Path) -> Manifest:
    """Read ``directory/manifest.json``; raises :class:`CheckpointError` when it is missing or damaged."""
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
