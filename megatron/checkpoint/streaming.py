"""Checkpoints of a single process, written and read chunk by chunk, with one chunk in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from megatron.checkpoint.boxes import Place, overlap
from megatron.checkpoint.directory import (
    commit,
    iteration_directory,
    locate_checkpoint,
    new_saving_directory,
    remove_checkpoint,
)
from megatron.checkpoint.files import WrittenFile, explained
from megatron.checkpoint.manifest import (
    JSON,
    Manifest,
    SavedTensor,
    chunk_key,
    encode_manifest,
    read_checkpoint,
)
from megatron.checkpoint.remote_path import AnyPath
from megatron.checkpoint.safetensors_file import Entry, SafetensorsStream, VerifiedSafetensors, aligned, packed

FILE_BYTES = 4 << 30
_OPEN_FILES = 16


class _Chunk(NamedTuple):
    tensor: str
    extent: ChunkStorageMetadata
    entry: Entry

    @property
    def key(self) -> str:
        return chunk_key(self.tensor, self.extent.offsets)


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
            files: list[WrittenFile] = []
            file_of: dict[str, int] = {}
            for number, chunks in enumerate(packed(_chunks(tensors), lambda chunk: chunk.entry.nbytes, file_bytes)):
                files.append(_write_file(saving / f"weights_{number:05d}.safetensors", chunks, read))
                file_of |= {chunk.key: number for chunk in chunks}
            furnish(saving)
        saved = {name: _saved_tensor(name, tensor, file_of) for name, tensor in tensors.items()}
        commit(saving, root, iteration, encode_manifest(Manifest(saved, files, state)))
    except BaseException:
        remove_checkpoint(saving)
        raise
    return iteration_directory(root, iteration)


def _chunks(tensors: Mapping[str, TensorStorageMetadata]) -> Iterator[_Chunk]:
    for name, tensor in tensors.items():
        for extent in tensor.chunks:
            yield _Chunk(name, extent, Entry(tensor.properties.dtype, tuple(extent.sizes)))


def _saved_tensor(name: str, tensor: TensorStorageMetadata, file_of: Mapping[str, int]) -> SavedTensor:
    """The tensor with its chunks in the files that ``file_of`` has by their keys."""
    offsets, shapes = (
        np.array(rows, np.int64).reshape(len(tensor.chunks), len(tensor.size))
        for rows in ([chunk.offsets for chunk in tensor.chunks], [chunk.sizes for chunk in tensor.chunks])
    )
    files = np.array([file_of[chunk_key(name, chunk.offsets)] for chunk in tensor.chunks], np.int64)
    return SavedTensor.undivided(tensor.properties.dtype, tuple(tensor.size), offsets, shapes, files)


def _write_file(
    path: Path, chunks: Sequence[_Chunk], read: Callable[[str, ChunkStorageMetadata], Tensor]
) -> WrittenFile:
    entries = aligned({chunk.key: chunk.entry for chunk in chunks})
    by_key = {chunk.key: chunk for chunk in chunks}
    with SafetensorsStream(path, entries) as stream:
        for key, entry in entries.items():
            content = read(by_key[key].tensor, by_key[key].extent)
            assert (content.dtype, content.shape) == entry, (key, content.dtype, content.shape)
            stream.write(content)
            # Freed before the next chunk is allocated.
            del content
    return stream.written


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
        near = self.manifest.tensors[name].overlapping([one.start for one in place], [one.stop for one in place])
        for chunk in self.manifest.chunks(name, near):
            parts = [overlap(wanted, start, size) for wanted, start, size in zip(place, chunk.offset, chunk.shape)]
            # A place with a step may lie on both sides of a chunk.
            if all(taken.start < taken.stop for taken, _ in parts):
                taken, inside = (tuple(part[side] for part in parts) for side in (0, 1))
                self._open(chunk.file.name).copy_into(
                    target[taken], chunk.key, inside, self.manifest.entry(name, chunk)
                )

    def _open_file(self, name: str) -> VerifiedSafetensors:
        return VerifiedSafetensors(self._directory, self.manifest.files()[name])
