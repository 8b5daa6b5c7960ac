"""Checkpoints of a single process, written and read chunk by chunk, with one chunk in memory.

So are models that are computed from checkpoints: the average of several, and a dense model with experts.
"""

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Divisions, Place
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


class ChunkedModel(ABC):
    """A model that is computed or converted chunk by chunk, for :func:`save_streaming`."""

    def __init__(self, advance: Advance) -> None:
        self.advance = advance
        self.tensors: dict[str, Entry] = {}
        """Dtype and shape of each global tensor."""
        self.chunks: dict[str, list[slice]] = {}
        """The rows of each chunk of a tensor, in order."""

    def _add(self, name: str, entry: Entry, chunks: list[slice]) -> None:
        self.tensors[name], self.chunks[name] = entry, chunks

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @abstractmethod
    def read(self, name: str, rows: slice) -> Tensor:
        """The chunk of the global tensor ``name`` that has these ``rows``."""


def row_chunks(shape: Sequence[int], dtype: torch.dtype, first_row: int = 0) -> list[slice]:
    """The rows of a tensor of ``shape``, from ``first_row`` on, in chunks of at most :data:`BLOCK_BYTES` or one row."""
    rows, *other = shape
    step = max(1, BLOCK_BYTES // Entry(dtype, (1, *other)).nbytes)
    return [slice(first_row + row, first_row + min(row + step, rows)) for row in range(0, rows, step)]


def check_range(converted: Tensor, source: torch.dtype, name: str) -> None:
    """Raise :class:`CheckpointError` if fp16 cannot represent the converted numbers."""
    if converted.dtype == torch.float16 != source and not converted.isfinite().all():
        raise CheckpointError(f"{name} has numbers beyond the range of fp16: choose --dtype bf16 or fp32.")


class _Chunk(NamedTuple):
    tensor: str
    rows: slice
    entry: Entry

    @property
    def key(self) -> str:
        return chunk_key(self.tensor, (self.rows.start, *(0 for _ in self.entry.shape[1:])))


def save_streaming(
    root: Path,
    iteration: int,
    model: ChunkedModel,
    state: Mapping[str, JSON],
    furnish: Callable[[Path], object] = lambda directory: None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Save ``model`` as the checkpoint of ``iteration`` in ``root``, chunk by chunk, and return its directory.

    Chunks are read one after the other and dropped after they are written. Files have about ``file_bytes``. ``furnish``
    may add files to the directory before it becomes visible. After a failure the earlier checkpoint remains.
    """
    saving = new_saving_directory(root, iteration)
    try:
        with explained("write", saving):
            files: list[WrittenFile] = []
            files_of: defaultdict[str, list[int]] = defaultdict(list)  # the file of each chunk of a tensor
            all_chunks = (
                _Chunk(name, rows, Entry(entry.dtype, (rows.stop - rows.start, *entry.shape[1:])))
                for name, entry in model.tensors.items()
                for rows in model.chunks[name]
            )
            for number, chunks in enumerate(packed(all_chunks, lambda chunk: chunk.entry.nbytes, file_bytes)):
                files.append(_write_file(saving / f"weights_{number:05d}.safetensors", chunks, model))
                for chunk in chunks:
                    files_of[chunk.tensor].append(number)
            furnish(saving)
        saved = {
            name: _saved_tensor(entry, model.chunks[name], files_of[name]) for name, entry in model.tensors.items()
        }
        commit(saving, root, iteration, encode_manifest(Manifest(saved, files, state)))
    except BaseException:
        remove_checkpoint(saving)
        raise
    return iteration_directory(root, iteration)


def _saved_tensor(entry: Entry, chunks: Sequence[slice], files: Sequence[int]) -> SavedTensor:
    """A tensor with chunks of these rows, and the file of each."""
    shapes = np.tile(np.array(entry.shape, np.int64), (len(chunks), 1))  # [chunks, dims]
    offsets = np.zeros_like(shapes)
    offsets[:, 0] = [rows.start for rows in chunks]
    shapes[:, 0] = [rows.stop - rows.start for rows in chunks]
    places = np.array(files, np.int64)
    return SavedTensor(entry.dtype, entry.shape, offsets, shapes, places, Divisions.none(len(files)))


def _write_file(path: Path, chunks: Sequence[_Chunk], model: ChunkedModel) -> WrittenFile:
    entries = aligned({chunk.key: chunk.entry for chunk in chunks})
    by_key = {chunk.key: chunk for chunk in chunks}
    with SafetensorsStream(path, entries) as stream:
        for key, entry in entries.items():
            content = model.read(by_key[key].tensor, by_key[key].rows)
            assert (content.dtype, content.shape) == entry, (key, content.dtype, content.shape)
            stream.write_part(content)
            model.advance(content.nbytes)
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
        for chunk, taken, inside in self.manifest.parts(name, place):
            self._open(chunk.file.name).copy_into(target[taken], chunk.key, inside, chunk.entry)


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
            self._add(name, Entry(reduce(torch.promote_types, dtypes), shape), row_chunks(shape, torch.float64))

    def read(self, name: str, rows: slice) -> Tensor:
        dtype, (_, *other) = self.tensors[name]
        total = torch.zeros((rows.stop - rows.start, *other), dtype=torch.float64)
        block = torch.empty_like(total)
        place = rows, *(slice(0, size) for size in other)
        for one, share in zip(self._saved, self._shares):
            one.read_into(block, _source(one, name), place)
            total.add_(block, alpha=share)
        return total.to(dtype)


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
        self._readers: dict[str, Callable[[slice], Tensor]] = {}
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

    def read(self, name: str, rows: slice) -> Tensor:
        return self._readers[name](rows)

    def _add_copies(self, name: str, source: str, copies: int) -> None:
        """Add the stack of ``copies`` of the tensor ``source`` along dim 0."""
        stored = self._saved.manifest.tensors[source]
        height, *other = stored.shape
        chunks = [rows for copy in range(copies) for rows in row_chunks(stored.shape, stored.dtype, copy * height)]

        def read(rows: slice) -> Tensor:
            block = torch.empty((rows.stop - rows.start, *other), dtype=stored.dtype)
            first = rows.start % height  # no chunk has rows of two copies
            place = slice(first, first + len(block)), *(slice(0, size) for size in other)
            self._saved.read_into(block, source, place)
            return block

        self._add(name, Entry(stored.dtype, (copies * height, *other)), chunks)
        self._readers[name] = read

    def _add_router(self, name: str, dtype: torch.dtype) -> None:
        """Add a router with the weights that a new run with the seed has: a function of seed, name and index."""
        config = self._architecture
        assert config.num_experts is not None
        shape = (config.num_experts, config.hidden_size)
        box = Box((0, 0), (0, 0), shape)
        info = ParameterInfo(name, shape, shape, (box,), config.router_init_std, True, tensor_parallel_sharded=False)

        def read(rows: slice) -> Tensor:
            weights = torch.empty(shape, dtype=dtype)
            initialize_range(weights.view(-1), info, 0, self._seed)
            return weights

        self._add(MODEL + name, Entry(dtype, shape), [slice(0, config.num_experts)])
        self._readers[MODEL + name] = read
