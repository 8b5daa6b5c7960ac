"""Checkpoints of a single process, written and read chunk by chunk, with one chunk in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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
from megatron.checkpoint.files import explained
from megatron.checkpoint.manifest import JSON, ChunkLocation, Manifest, encode_manifest, read_checkpoint
from megatron.checkpoint.places import Place, overlap
from megatron.checkpoint.remote_path import AnyPath
from megatron.checkpoint.safetensors_file import Entry, SafetensorsStream, aligned, packed
from megatron.checkpoint.storage import chunk_key
from megatron.checkpoint.verified_file import VerifiedSafetensors

FILE_BYTES = 4 << 30
_OPEN_FILES = 16


class _Chunk(NamedTuple):
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
    """Save as the checkpoint of ``iteration`` in ``root``, chunk by chunk, and return its directory.

    ``tensors`` has the chunks of each global tensor, and ``read`` returns the content of one; chunks are requested one
    after the other and dropped after they are written. Files have about ``file_bytes``. ``furnish`` may add files to
    the directory before it becomes visible. After a failure the earlier checkpoint remains.
    """
    saving = new_saving_directory(root, iteration)
    try:
        with explained("write", saving):
            locations: dict[MetadataIndex, ChunkLocation] = {}
            files = packed(_chunks(tensors), lambda chunk: chunk.entry.nbytes, file_bytes)
            for number, chunks in enumerate(files):
                locations |= _write_file(saving / f"weights_{number:05d}.safetensors", chunks, read)
            furnish(saving)
        metadata = Metadata(state_dict_metadata=dict(tensors), storage_data=locations)
        commit(saving, root, iteration, encode_manifest(Manifest(metadata, dict(state))))
    except BaseException:
        remove_checkpoint(saving)
        raise
    return iteration_directory(root, iteration)


def _chunks(tensors: Mapping[str, TensorStorageMetadata]) -> Iterator[_Chunk]:
    for name, tensor in tensors.items():
        for extent in tensor.chunks:
            yield _Chunk(name, extent, Entry(tensor.properties.dtype, tuple(extent.sizes)))


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
            # Freed before the next chunk is allocated.
            del content
    return {
        MetadataIndex(chunk.tensor, chunk.extent.offsets): ChunkLocation(stream.written, chunk.key) for chunk in chunks
    }


class SavedTensors:
    """The global tensors of a checkpoint, readable in any part; no collective."""

    def __init__(self, root: AnyPath, iteration: int) -> None:
        self.iteration = iteration
        self._directory = locate_checkpoint(root, iteration)
        self.manifest = read_checkpoint(root, iteration)
        # A few files stay open, since a tensor's chunks may lie in many.
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)

    def read_into(self, target: Tensor, name: str, place: Place) -> None:
        """Fill ``target`` with the part ``place`` of the global tensor ``name``; their shapes are equal."""
        for chunk in self.manifest.tensors()[name].chunks:
            parts = [overlap(wanted, start, size) for wanted, start, size in zip(place, chunk.offsets, chunk.sizes)]
            if all(taken.start < taken.stop for taken, _ in parts):
                index = MetadataIndex(name, chunk.offsets)
                location = self.manifest.location(index)
                taken, inside = (tuple(part[side] for part in parts) for side in (0, 1))
                self._open(location.file.name).copy_into(
                    target[taken], location.key, inside, self.manifest.entry(index)
                )

    def _open_file(self, name: str) -> VerifiedSafetensors:
        return VerifiedSafetensors(self._directory, self.manifest.files()[name])
