"""Checkpoints of a single process, written and read chunk by chunk, with one chunk in memory.

So are models that are computed from checkpoints: the average of several, and a dense model with experts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Divisions, Place, overlap
from megatron.checkpoint.directory import (
    commit,
    iteration_directory,
    locate_checkpoint,
    new_saving_directory,
    remove_checkpoint,
)
from megatron.checkpoint.files import AnyPath, WrittenFile, explained
from megatron.checkpoint.manifest import (
    JSON,
    MASTER,
    MODEL,
    Manifest,
    SavedTensor,
    chunk_key,
    encode_manifest,
    read_checkpoint,
)
from megatron.checkpoint.safetensors_file import Entry, SafetensorsStream, VerifiedSafetensors, aligned, packed
from megatron.core.parameter import Box, ParameterInfo, initialize_range
from megatron.errors import CheckpointError

FILE_BYTES = 4 << 30
BLOCK_BYTES = 64 << 20
"""Memory of a block; a single longer row is one block."""
_OPEN_FILES = 16

Advance = Callable[[int], object]
"""Called with the number of additional bytes done."""


class ChunkedModel:
    """A model that is computed or converted chunk by chunk, for :func:`save_streaming`."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """The chunks of each global tensor."""

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype, chunks: list[ChunkStorageMetadata]) -> None:
        self.tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)

    @property
    def nbytes(self) -> int:
        return sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in self.tensors.values())


def row_chunks(shape: Sequence[int], dtype: torch.dtype, first_row: int = 0) -> list[ChunkStorageMetadata]:
    """Chunks of whole rows of a tensor of ``shape``, each of at most :data:`BLOCK_BYTES` or one row."""
    rows, *other = shape
    step = max(1, BLOCK_BYTES // Entry(dtype, (1, *other)).nbytes)
    return [
        ChunkStorageMetadata(
            torch.Size((first_row + row, *(0 for _ in other))), torch.Size((min(step, rows - row), *other))
        )
        for row in range(0, rows, step)
    ]


def check_range(converted: Tensor, source: torch.dtype, name: str) -> None:
    """Raise :class:`CheckpointError` if fp16 cannot represent the converted numbers."""
    if converted.dtype == torch.float16 != source and not converted.isfinite().all():
        raise CheckpointError(f"{name} has numbers beyond the range of fp16: choose --dtype bf16 or fp32.")


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
            all_chunks = (
                _Chunk(name, extent, Entry(tensor.properties.dtype, tuple(extent.sizes)))
                for name, tensor in tensors.items()
                for extent in tensor.chunks
            )
            for number, chunks in enumerate(packed(all_chunks, lambda chunk: chunk.entry.nbytes, file_bytes)):
                files.append(_write_file(saving / f"weights_{number:05d}.safetensors", chunks, read))
                file_of |= {chunk.key: number for chunk in chunks}
            furnish(saving)
        saved = {name: _saved_tensor(name, tensor, file_of) for name, tensor in tensors.items()}
        commit(saving, root, iteration, encode_manifest(Manifest(saved, files, state)))
    except BaseException:
        remove_checkpoint(saving)
        raise
    return iteration_directory(root, iteration)


def _saved_tensor(name: str, tensor: TensorStorageMetadata, file_of: Mapping[str, int]) -> SavedTensor:
    """The tensor with its chunks in the files that ``file_of`` has by their keys."""
    offsets, shapes = (
        np.array(rows, np.int64).reshape(len(tensor.chunks), len(tensor.size))
        for rows in ([chunk.offsets for chunk in tensor.chunks], [chunk.sizes for chunk in tensor.chunks])
    )
    files = np.array([file_of[chunk_key(name, chunk.offsets)] for chunk in tensor.chunks], np.int64)
    undivided = Divisions.none(len(files))
    return SavedTensor(tensor.properties.dtype, tuple(tensor.size), offsets, shapes, files, undivided)


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
        files = self.manifest.files()

        @lru_cache(maxsize=_OPEN_FILES)  # a tensor's chunks may lie in many files
        def open_file(name: str) -> VerifiedSafetensors:
            return VerifiedSafetensors(self._directory, files[name])

        self._open = open_file

    def read_into(self, target: Tensor, name: str, place: Place) -> None:
        """Fill ``target`` with the part ``place`` of the global tensor ``name``; their shapes are equal."""
        near = self.manifest.tensors[name].overlapping([one.start for one in place], [one.stop for one in place])
        for chunk in self.manifest.chunks(name, near):
            parts = [overlap(wanted, start, size) for wanted, start, size in zip(place, chunk.offset, chunk.shape)]
            # A place with a step may lie on both sides of a chunk.
            if all(taken.start < taken.stop for taken, _ in parts):
                taken, inside = (tuple(part[side] for part in parts) for side in (0, 1))
                entry = self.manifest.entry(name, chunk)
                self._open(chunk.file.name).copy_into(target[taken], chunk.key, inside, entry)


# --- models computed from checkpoints -----------------------------------------------------------------------

# Upcycling (arXiv 2212.05055; --moe-use-upcycling of Megatron-LM) makes a model with experts from a dense one. Every
# expert is a copy of the MLP of its layer, and the router has initial weights. The weights of the chosen experts sum to
# one, so the output of the new model is the output of the dense model.

_MLP_WEIGHT = re.compile(rf"{MODEL}layers\.(\d+)\.mlp\.(linear_fc[12])\.weight")


class AveragedModel(ChunkedModel):
    """The tensors of the average of ``saved``, of which each counts by its share of the ``weights``.

    Read from the fp32 master weights where a checkpoint has them, else from the model's weights; summed in fp64. The
    average has the widest dtype of its sources.
    """

    def __init__(self, saved: Sequence[SavedTensors], weights: Sequence[float], advance: Advance) -> None:
        super().__init__(advance)
        self._saved = saved
        self._shares = [weight / sum(weights) for weight in weights]
        models = [
            {name: tensor.shape for name, tensor in one.manifest.tensors.items() if name.startswith(MODEL)}
            for one in saved
        ]
        for one, shapes in zip(saved, models):
            different = models[0].items() ^ shapes.items()
            if different:
                raise CheckpointError(
                    f"The checkpoints of iterations {saved[0].iteration} and {one.iteration} are of different models: "
                    f"{min(different)[0]} is in one of them, or has another shape: average checkpoints of one run."
                )
        for name, shape in models[0].items():
            dtypes = [one.manifest.tensors[_source(one, name)].dtype for one in saved]
            self._add(name, shape, reduce(torch.promote_types, dtypes), row_chunks(shape, torch.float64))

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk of the average of the tensor ``name``."""
        total = torch.zeros(chunk.sizes, dtype=torch.float64)
        block = torch.empty(chunk.sizes, dtype=torch.float64)
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
        for one, share in zip(self._saved, self._shares):
            one.read_into(block, _source(one, name), place)
            total.add_(block, alpha=share)
        content = total.to(self.tensors[name].properties.dtype)
        self._advance(content.nbytes)
        return content


def _source(saved: SavedTensors, name: str) -> str:
    """The tensor to read for the model's tensor ``name``: its master weights, which frozen parameters do not have."""
    master = MASTER + name.removeprefix(MODEL)
    return master if master in saved.manifest.tensors else name


class UpcycledModel(ChunkedModel):
    """The tensors of a model with experts, read from the checkpoint of a dense model.

    ``architecture`` is the one of the dense model, with experts as wide as its MLP. The weights are the fp32 master
    weights if the checkpoint has them.
    """

    def __init__(self, saved: SavedTensors, architecture: TransformerConfig, seed: int, advance: Advance) -> None:
        super().__init__(advance)
        self._saved, self._architecture, self._seed = saved, architecture, seed
        self._readers: dict[str, Callable[[ChunkStorageMetadata], Tensor]] = {}
        is_moe = architecture.moe_layers()
        for name in (name for name in saved.manifest.tensors if name.startswith(MODEL)):
            source, mlp = _source(saved, name), _MLP_WEIGHT.fullmatch(name)
            if mlp is None or not is_moe[int(mlp[1])]:
                self._add_copies(name, source, copies=1)
                continue
            layer, linear = f"layers.{mlp[1]}.mlp", mlp[2]
            if linear == "linear_fc1":
                self._add_router(f"{layer}.router.weight", saved.manifest.tensors[source].dtype)
            assert architecture.num_experts is not None
            self._add_copies(f"{MODEL}{layer}.experts.{linear}.weight", source, architecture.num_experts)

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk of the global tensor ``name``."""
        content = self._readers[name](chunk)
        self._advance(content.nbytes)
        return content

    def _add_copies(self, name: str, source: str, copies: int) -> None:
        """Add the stack of ``copies`` of the tensor ``source`` along dim 0."""
        stored = self._saved.manifest.tensors[source]
        rows, *other = stored.shape
        chunks = [chunk for copy in range(copies) for chunk in row_chunks(stored.shape, stored.dtype, copy * rows)]

        def read(chunk: ChunkStorageMetadata) -> Tensor:
            block = torch.empty(chunk.sizes, dtype=stored.dtype)
            first = chunk.offsets[0] % rows  # no chunk has rows of two copies
            place = (slice(first, first + chunk.sizes[0]), *(slice(0, size) for size in other))
            self._saved.read_into(block, source, place)
            return block

        self._add(name, (copies * rows, *other), stored.dtype, chunks)
        self._readers[name] = read

    def _add_router(self, name: str, dtype: torch.dtype) -> None:
        """Add a router with the weights that a new run with the seed has: a function of seed, name and index."""
        config = self._architecture
        assert config.num_experts is not None
        shape = (config.num_experts, config.hidden_size)
        box = Box((0, 0), (0, 0), shape)
        info = ParameterInfo(name, shape, shape, (box,), config.router_init_std, True, tensor_parallel_sharded=False)

        def read(chunk: ChunkStorageMetadata) -> Tensor:
            weights = torch.empty(shape, dtype=dtype)
            initialize_range(weights.view(-1), info, 0, self._seed)
            return weights

        self._add(MODEL + name, shape, dtype, [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(shape))])
        self._readers[MODEL + name] = read
