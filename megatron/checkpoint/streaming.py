"""Checkpoints of one process that never holds more than a piece of them: written and read rectangle by rectangle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.checkpoint.directory import (
    commit,
    iteration_directory,
    locate_checkpoint,
    new_saving_directory,
    remove_checkpoint,
)
from megatron.checkpoint.files import check_file, explained
from megatron.checkpoint.manifest import JSON, ChunkLocation, Manifest, encode_manifest, read_manifest
from megatron.checkpoint.places import Place, overlap
from megatron.checkpoint.safetensors_file import Entry, SafetensorsStream, aligned
from megatron.checkpoint.storage import chunk_key
from megatron.config.errors import CheckpointError

FILE_BYTES = 4 << 30
_OPEN_FILES = 16


class _Chunk(NamedTuple):
    """A chunk of a global tensor that is to be written."""

    tensor: str
    extent: ChunkStorageMetadata
    entry: Entry

    @property
    def key(self) -> str:
        return chunk_key(MetadataIndex(self.tensor, self.extent.offsets))


def save_streaming(
    root: Path,
    iteration: int,
    tensors: Mapping[str, TensorStorageMetadata],
    read: Callable[[str, ChunkStorageMetadata], Tensor],
    state: Mapping[str, JSON],
    furnish: Callable[[Path], object] = lambda directory: None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Save as the checkpoint of ``iteration`` under ``root``, chunk by chunk, and return its directory.

    ``tensors`` say how each global tensor is cut in chunks, and ``read`` makes the content of one; it is asked for
    them one after the other and each is let go of once it is written. Files have about ``file_bytes``. ``furnish``
    may add files to the directory before it becomes visible. A failure leaves what was there before.
    """
    saving = new_saving_directory(root, iteration)
    try:
        with explained("write", saving):
            locations: dict[MetadataIndex, ChunkLocation] = {}
            for number, chunks in enumerate(_files(tensors, file_bytes)):
                locations |= _write_file(saving / f"weights_{number:05d}.safetensors", chunks, read)
            furnish(saving)
        metadata = Metadata(state_dict_metadata=dict(tensors), storage_data=locations)
        commit(saving, root, iteration, encode_manifest(Manifest(metadata, dict(state))))
    except BaseException:
        remove_checkpoint(saving)
        raise
    return iteration_directory(root, iteration)


def _files(tensors: Mapping[str, TensorStorageMetadata], file_bytes: int) -> Iterator[list[_Chunk]]:
    """The chunks of each file; a larger chunk has a file of its own."""
    chunks: list[_Chunk] = []
    size = 0
    for name, tensor in tensors.items():
        for extent in tensor.chunks:
            entry = Entry(tensor.properties.dtype, tuple(extent.sizes))
            if chunks and size + entry.nbytes > file_bytes:
                yield chunks
                chunks, size = [], 0
            chunks.append(_Chunk(name, extent, entry))
            size += entry.nbytes
    if chunks:
        yield chunks


def _write_file(
    path: Path, chunks: Sequence[_Chunk], read: Callable[[str, ChunkStorageMetadata], Tensor]
) -> dict[MetadataIndex, ChunkLocation]:
    entries = aligned({chunk.key: chunk.entry for chunk in chunks})
    by_key = {chunk.key: chunk for chunk in chunks}
    with SafetensorsStream(path, entries) as stream:
        for key, entry in entries.items():
            content = read(by_key[key].tensor, by_key[key].extent)
            assert (content.dtype, content.shape) == entry, (key, content.dtype, content.shape)
            stream.write(content)
            # Before the next one is made, or two would live at once.
            del content
    return {
        MetadataIndex(chunk.tensor, chunk.extent.offsets): ChunkLocation(stream.written, chunk.key) for chunk in chunks
    }


class SavedTensors:
    """The global tensors of a checkpoint, any part of which can be read; no collective."""

    def __init__(self, root: Path, iteration: int) -> None:
        self._directory = locate_checkpoint(root, iteration)
        self.manifest = read_manifest(self._directory)
        # A few files stay open, since a tensor's chunks may lie in many.
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)

    def read_into(self, target: Tensor, name: str, place: Place) -> None:
        """Fill ``target``, which has the shape of ``place``, with that part of the global tensor ``name``."""
        for chunk in self.manifest.tensors()[name].chunks:
            parts = [overlap(wanted, start, size) for wanted, start, size in zip(place, chunk.offsets, chunk.sizes)]
            if all(taken.start < taken.stop for taken, _ in parts):
                content = self._content(name, chunk)
                target[tuple(taken for taken, _ in parts)].copy_(content[tuple(inside for _, inside in parts)])

    def _content(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk, as a view of the mapped file: only what is used of it will be read."""
        location = self.manifest.location(MetadataIndex(name, chunk.offsets))
        path = self._directory / location.file.name
        dtype = self.manifest.tensors()[name].properties.dtype
        try:
            with explained("read", path):
                content: Tensor = self._open(location.file.name).get_tensor(location.key)
            if (content.dtype, content.shape) != (dtype, chunk.sizes):
                raise ValueError(f"its entry {location.key} is not what the manifest says")
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): load another checkpoint.") from error
        return content

    def _open_file(self, name: str) -> Any:
        (file,) = (file for file in self.manifest.files() if file.name == name)
        check_file(self._directory, file)
        return safe_open(self._directory / name, framework="pt")
