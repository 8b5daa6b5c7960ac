"""Conversion from and to Hugging Face's files, block by block; memory holds one block of rows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Place
from megatron.checkpoint.hugging_face.config import CONFIG
from megatron.checkpoint.hugging_face.mapping import (
    EMBEDDING,
    HEAD,
    Copy,
    GlobalTensor,
    HuggingFaceMapping,
    Section,
    copies_of_section,
    folded_multiplier,
)
from megatron.checkpoint.hugging_face.read import HuggingFaceModel, HuggingFaceWeights
from megatron.checkpoint.manifest import EMA, MASTER, MODEL
from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.schema import upgrade
from megatron.checkpoint.streaming import SavedTensors
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from megatron.errors import CheckpointError

BLOCK_BYTES = 64 << 20
"""Memory of a block; a single longer row is one block."""

_ROWS = 1024  # compared at a time

Advance = Callable[[int], object]
"""Called with the number of additional bytes done."""


class NamedWeights(Protocol):
    """Tensors under Hugging Face's names, readable in any part."""

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor."""

    def read(self, name: str, place: Place) -> Tensor:
        """A part of a tensor."""


class WeightsImport:
    """The weights of a model as global tensors of this code, read chunk by chunk.

    ``weights`` has all tensors of ``mapping``. ``dtype`` None keeps the dtype of each tensor.
    """

    def __init__(
        self, weights: NamedWeights, mapping: HuggingFaceMapping, dtype: torch.dtype | None, advance: Advance
    ) -> None:
        self._source = weights
        self._advance = advance
        self._tensors = {MODEL + name: tensor for name, tensor in mapping.ours.items()}
        self._formats = {name: weights.entry(name).dtype for name in mapping.theirs}
        self.tensors = {name: self._cut(tensor, dtype) for name, tensor in self._tensors.items()}
        """The chunks of each global tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding (all weights share it)."""
        return next(iter(self.tensors.values())).properties.dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in self.tensors.values())

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk of the global tensor ``name``."""
        dtype, tensor = self.tensors[name].properties.dtype, self._tensors[name]
        block = torch.empty(chunk.sizes, dtype=dtype)
        for copy in tensor.copies(tuple(chunk.offsets), tuple(chunk.sizes)):
            block[copy.place].copy_(_weights_of(_part(self._source, copy), tensor))
            check_range(block[copy.place], self._formats[copy.source], copy.source)
        self._advance(block.nbytes)
        return block

    def _cut(self, tensor: GlobalTensor, dtype: torch.dtype | None) -> TensorStorageMetadata:
        """Chunks of whole rows; one dtype for all."""
        if dtype is None:
            dtype = self._formats[tensor.sections[0].name]
            for section in tensor.sections[1:]:
                dtype = torch.promote_types(dtype, self._formats[section.name])
        if tensor.is_gain_minus_one:
            dtype = torch.promote_types(dtype, torch.float32)
        chunks = []
        for first, rows in blocks(tensor.shape, dtype):
            offset = torch.Size((first, *(0 for _ in tensor.shape[1:])))
            chunks.append(ChunkStorageMetadata(offset, torch.Size((rows, *tensor.shape[1:]))))
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)


class HuggingFaceImport(WeightsImport):
    """A Hugging Face model as global tensors of this code, read chunk by chunk.

    ``dtype`` None keeps the dtype of each tensor. With ``apply_layernorm_1p`` the weights of norms, gains minus one,
    are at least fp32: in bf16 a gain below 0.5 would lose bits. Raises :class:`CheckpointError` for a model that is not
    a complete model of an architecture in the registry, and without ``text_only`` for a multimodal model.
    """

    def __init__(
        self,
        source: Path,
        dtype: torch.dtype | None,
        advance: Advance,
        apply_layernorm_1p: bool = False,
        text_only: bool = False,
    ) -> None:
        self._directory = source
        self.model = HuggingFaceModel(source, text_only)
        self._weights = self.model.weights
        self.architecture = replace(self.model.architecture, apply_layernorm_1p=apply_layernorm_1p)
        mapping = HuggingFaceMapping.of(self.architecture)
        mapping.check(self._weights.shapes, str(source))
        self._check_tied_head()
        super().__init__(self._weights, mapping, dtype, advance)

    def _check_tied_head(self) -> None:
        """A tied output layer may be stored, but must equal the embedding."""
        if self.architecture.untie_embeddings_and_output_weights or HEAD not in self._weights.shapes:
            return
        rows = self.architecture.vocab_size
        is_same = self._weights.entry(EMBEDDING) == self._weights.entry(HEAD) and all(
            torch.equal(self._rows(EMBEDDING, first), self._rows(HEAD, first)) for first in range(0, rows, _ROWS)
        )
        if not is_same:
            raise CheckpointError(
                f"{self._directory / CONFIG} ties the output layer to the embedding (tie_word_embeddings), but {HEAD} "
                "exists and differs: set it to false."
            )

    def _rows(self, table: str, first: int) -> Tensor:
        return self._weights.read(table, (slice(first, first + _ROWS), slice(None)))


class HuggingFaceExport:
    """The weights of a checkpoint as Hugging Face's tensors, converted block by block.

    ``dtype`` None keeps the dtype of the model; another dtype is rounded from the master weights if the checkpoint has
    them. A gain ``1 + weight`` is rounded once, and without ``dtype`` has the embedding's dtype, as has a weight times
    a multiplier of muP. With ``average`` the weights are the moving average of the checkpoint.
    """

    def __init__(self, saved: SavedTensors, dtype: torch.dtype | None, advance: Advance, average: bool = False) -> None:
        self._saved = saved
        self._advance = advance
        self.architecture = upgrade(saved.manifest.state, saved.manifest.format_version).architecture
        self._sections = HuggingFaceMapping.of(self.architecture).theirs
        self._check_complete()
        self.source = self._average() if average else self._choose_source(dtype)
        """Prefix of the weights to read: ``model/``, ``optimizer/master/`` or ``optimizer/ema/``."""
        self.entries = {
            name: Entry(dtype or self._stored(MODEL, self._kept_like(section)), section.shape)
            for name, section in self._sections.items()
        }
        """Hugging Face's tensors in order."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding (all weights share it)."""
        return self.entries[EMBEDDING].dtype

    def parts_of(self, name: str) -> Iterator[Tensor]:
        """The blocks of rows of Hugging Face's tensor ``name``."""
        section, dtype = self._sections[name], self.entries[name].dtype
        for first, rows in blocks(section.shape, dtype):
            # Nothing here holds on to a block: it is gone when the next one is made.
            yield self._block(section, (first, *(0 for _ in section.shape[1:])), (rows, *section.shape[1:]), dtype)

    def _block(self, section: Section, offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        factor = folded_multiplier(self.architecture, section)
        computes = section.is_gain_minus_one or factor != 1.0
        block = torch.empty(shape, dtype=torch.float64 if computes else dtype)
        for copy in copies_of_section(section, offset, shape):
            self._saved.read_into(
                copy.across(block[copy.place]), self._name(self.source, copy.source), copy.source_place
            )
        if computes:
            block = ((block + (1.0 if section.is_gain_minus_one else 0.0)) * factor).to(dtype)
        check_range(block, self._stored(self.source, section), section.name)
        self._advance(block.nbytes)
        return block

    def _kept_like(self, section: Section) -> Section:
        """The section whose stored dtype is the dtype of ``section`` in the output. The weight of a norm may be
        stored in a wider dtype."""
        return self._sections[EMBEDDING] if section.is_gain_minus_one else section

    def _name(self, source: str, name: str) -> str:
        """Under which name the checkpoint has the weights ``name``: of frozen parameters it has the weights alone."""
        return source + name if source + name in self._saved.manifest.tensors else MODEL + name

    def _stored(self, source: str, section: Section) -> torch.dtype:
        return self._saved.manifest.tensors[self._name(source, section.ours)].dtype

    def _choose_source(self, dtype: torch.dtype | None) -> str:
        sections = self._sections.values()
        if dtype is None or all(self._stored(MODEL, section) == dtype for section in sections):
            return MODEL
        has_masters = any(MASTER + section.ours in self._saved.manifest.tensors for section in sections)
        return MASTER if has_masters else MODEL

    def _average(self) -> str:
        if not any(EMA + section.ours in self._saved.manifest.tensors for section in self._sections.values()):
            raise CheckpointError(
                "The checkpoint has no moving average of the weights: remove --ema, or convert a checkpoint of a run "
                "with --ema-decay."
            )
        return EMA

    def _check_complete(self) -> None:
        saved = self._saved.manifest.tensors
        for name, tensor in HuggingFaceMapping.of(self.architecture).ours.items():
            if MODEL + name not in saved or saved[MODEL + name].shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint has no {MODEL + name} of shape {list(tensor.shape)}, which its architecture "
                    "requires: convert another checkpoint."
                )


@torch.no_grad()
def fill_from_hugging_face(
    source: Path,
    weights: HuggingFaceWeights,
    architecture: TransformerConfig,
    targets: Iterable[tuple[ParameterInfo, int, Tensor]],
) -> None:
    """Fill parts of flattened local parameters, ``(info, start, 1-D tensor)``, of a model of ``architecture`` from the
    ``weights`` in ``source``. Only the required parts are read; numbers are converted to the target dtypes."""
    mapping = HuggingFaceMapping.of(architecture)
    mapping.check(weights.shapes, str(source))
    for info, start, flat in targets:
        for box, begin, end in flat_range_boxes(info, start, start + flat.numel()):
            block = flat[begin - start : end - start].view(box.shape)
            tensor = mapping.ours[info.name]
            for copy in tensor.copies(box.global_offset, box.shape):
                block[copy.place].copy_(_weights_of(_part(weights, copy), tensor))


def _part(weights: NamedWeights, copy: Copy) -> Tensor:
    """The source of ``copy``, with the dims of this code's tensor."""
    return copy.across(weights.read(copy.source, copy.source_place))


def _weights_of(numbers: Tensor, tensor: GlobalTensor) -> Tensor:
    """The weights of ``tensor`` from Hugging Face's ``numbers``, for norms with ``is_gain_minus_one`` in fp64."""
    return numbers.double() - 1.0 if tensor.is_gain_minus_one else numbers


def blocks(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each block of a tensor of ``shape``."""
    total = shape[0]
    row_bytes = Entry(dtype, (1, *shape[1:])).nbytes
    step = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, total, step):
        yield first, min(step, total - first)


def check_range(converted: Tensor, source: torch.dtype, name: str) -> None:
    """Raise :class:`CheckpointError` if fp16 cannot represent the converted numbers."""
    if converted.dtype == torch.float16 != source and not converted.isfinite().all():
        raise CheckpointError(f"{name} has numbers beyond the range of fp16: choose --dtype bf16 or fp32.")
