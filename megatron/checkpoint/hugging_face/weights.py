"""Read and write a model in Hugging Face's format. Only safetensors are opened, never a pickle.

:class:`HuggingFaceWeights` reads the tensors in a directory, :class:`HuggingFaceModel` is the text model in it, and
:class:`HuggingFaceImport` converts it to global tensors of this code, block by block. :class:`HuggingFaceExport`
converts a checkpoint, and :func:`write_weights` writes safetensors shards with an index.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.architectures.spec import MultimodalModel
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Place
from megatron.checkpoint.files import explained, write_text_durably
from megatron.checkpoint.hugging_face.config import (
    CONFIG,
    INDEX,
    SINGLE,
    describe_directory,
    no_directory,
    read_json_object,
)
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
from megatron.checkpoint.manifest import EMA, MASTER, MODEL
from megatron.checkpoint.safetensors_file import DTYPES, Entry, SafetensorsStream, aligned, packed
from megatron.checkpoint.schema import upgrade
from megatron.checkpoint.streaming import Advance, ChunkedModel, SavedTensors, check_range, row_chunks
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from megatron.errors import CheckpointError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
_OPEN_FILES = 4
_ROWS = 1024  # of a tied output layer, compared at a time
_FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFaceWeights:
    """The tensors in a directory, readable in any part."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # A few files stay open and mapped: neighbouring layers share one.
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)
        self._file_of = self._find_files()
        self._prefix = ""
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in self._file_of}

    def keep_text_model(self, multimodal: MultimodalModel) -> list[str]:
        """Leave out the tensors beside the text model, whose tensors lose their prefix; returns the names left out."""
        text = [name for name in self._file_of if name.startswith(multimodal.text_prefix)]
        left_out = [name for name in self._file_of if name.startswith(multimodal.other_prefixes)]
        unknown = self._file_of.keys() - {*text, *left_out}
        if unknown:
            raise CheckpointError(
                f"{self._directory} has {min(unknown)}, which a {multimodal.hugging_face_class} does not have: it is "
                "another model, or is quantized or adapted; merge or dequantize it first."
            )
        self._prefix = multimodal.text_prefix
        self.shapes = {name.removeprefix(self._prefix): self.shapes[name] for name in text}
        return left_out

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor, which must be floating point with at least 16 bits."""
        dtype = self._slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} in {self._directory} is {dtype}, a quantized or integer format: save the model in bf16, fp16 "
                "or fp32 first."
            )
        return Entry(DTYPES[dtype], self.shapes[name])

    def read(self, name: str, place: Place) -> Tensor:
        """A part of a tensor as a view of the mapped file; only the used part is read."""
        part: Tensor = self._slice(name)[place]
        return part

    def _find_files(self) -> dict[str, str]:
        """The file of every tensor."""
        if (self._directory / SINGLE).exists():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        if not (self._directory / INDEX).exists():
            raise CheckpointError(_why_nothing(self._directory))
        weight_map = read_json_object(self._directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self._directory / INDEX} has no weight_map: download the model again.")
        for file in weight_map.values():
            # A name with a directory could lead out of the model's directory.
            if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{self._directory / INDEX} names {file!r}, not a safetensors file of this directory: download the "
                    "model again."
                )
        return weight_map

    def _slice(self, name: str) -> Any:
        name = self._prefix + name
        path = self._directory / self._file_of[name]
        try:
            return self._open(path.name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged ({error}): download the model again.") from error

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        try:
            with explained("read", path):
                return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({error}): download the model again."
            ) from error


def _why_nothing(directory: Path) -> str:
    if not directory.is_dir():
        return no_directory(directory)
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        return (
            f"{directory} holds {pickles[0]}, pickled weights, which can execute code and are never opened here: fetch "
            "the model's safetensors files, or have transformers write them (save_pretrained)."
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX}: fetch the model's safetensors files."


class HuggingFaceModel:
    """The description and the tensors of the text model in ``source``.

    A multimodal model is refused without ``text_only``, the value of the flag ``text_only_flag``. Raises
    :class:`CheckpointError`.
    """

    def __init__(self, source: Path, text_only: bool = False, text_only_flag: str = "--text-only") -> None:
        self.weights = HuggingFaceWeights(source)
        self.description = describe_directory(source, text_only, text_only_flag)
        self.architecture = self.description.architecture
        self.left_out: list[str] = []
        """Names of the tensors beside the text model."""
        if self.description.multimodal is not None:
            self.left_out = self.weights.keep_text_model(self.description.multimodal)

    def describe_left_out(self) -> str:
        """The tensors that were left out, counted by the first part of their names; empty if there are none."""
        if not self.left_out:
            return ""
        counts = Counter(name.partition(".")[0] for name in self.left_out)
        groups = ", ".join(f"{count} of {first}.*" for first, count in counts.items())
        return f"left out {len(self.left_out)} tensors that are not of the text model: {groups}"


# --- as global tensors of this code -------------------------------------------------------------------------


class NamedWeights(Protocol):
    """Tensors under Hugging Face's names, readable in any part."""

    def entry(self, name: str) -> Entry: ...

    def read(self, name: str, place: Place) -> Tensor: ...


class WeightsImport(ChunkedModel):
    """The weights of a model as global tensors of this code, read chunk by chunk.

    ``weights`` has all tensors of ``mapping``. ``dtype`` None keeps the dtype of each tensor.
    """

    def __init__(
        self, weights: NamedWeights, mapping: HuggingFaceMapping, dtype: torch.dtype | None, advance: Advance
    ) -> None:
        super().__init__(advance)
        self._source = weights
        self._tensors = {MODEL + name: tensor for name, tensor in mapping.ours.items()}
        self._formats = {name: weights.entry(name).dtype for name in mapping.theirs}
        for name, tensor in self._tensors.items():
            # One dtype for all sections of a tensor.
            kept = reduce(torch.promote_types, (self._formats[section.name] for section in tensor.sections))
            stored = dtype or kept
            if tensor.is_gain_minus_one:
                stored = torch.promote_types(stored, torch.float32)
            self._add(name, Entry(stored, tensor.shape), row_chunks(tensor.shape, stored))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding (all weights share it)."""
        return next(iter(self.tensors.values())).dtype

    def read(self, name: str, rows: slice) -> Tensor:
        (dtype, shape), tensor = self.tensors[name], self._tensors[name]
        offset, shape = _box_of(rows, shape)
        block = torch.empty(shape, dtype=dtype)
        for copy in tensor.copies(offset, shape):
            block[copy.place].copy_(_read_part(self._source, copy, tensor))
            check_range(block[copy.place], self._formats[copy.source], copy.source)
        return block


def _box_of(rows: slice, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of these ``rows`` of a tensor of ``shape``."""
    return (rows.start, *(0 for _ in shape[1:])), (rows.stop - rows.start, *shape[1:])


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

        def rows(table: str) -> Iterator[Tensor]:
            for first in range(0, self.architecture.vocab_size, _ROWS):
                yield self._weights.read(table, (slice(first, first + _ROWS), slice(None)))

        is_same = self._weights.entry(EMBEDDING) == self._weights.entry(HEAD)
        if not (is_same and all(map(torch.equal, rows(EMBEDDING), rows(HEAD)))):
            raise CheckpointError(
                f"{self._directory / CONFIG} ties the output layer to the embedding (tie_word_embeddings), but {HEAD} "
                "exists and differs: set it to false."
            )


@torch.no_grad()
def fill_from_hugging_face(
    source: Path,
    weights: HuggingFaceWeights,
    architecture: TransformerConfig,
    targets: Iterable[tuple[ParameterInfo, int, Tensor]],
) -> None:
    """Fill parts of flattened local parameters, ``(info, start, 1-D tensor)``, from the ``weights`` in ``source``.

    Only the required parts are read; numbers are converted to the target dtypes.
    """
    mapping = HuggingFaceMapping.of(architecture)
    mapping.check(weights.shapes, str(source))
    for info, start, flat in targets:
        for box, begin, end in flat_range_boxes(info, start, start + flat.numel()):
            block = flat[begin - start : end - start].view(box.shape)
            tensor = mapping.ours[info.name]
            for copy in tensor.copies(box.global_offset, box.shape):
                block[copy.place].copy_(_read_part(weights, copy, tensor))


def _read_part(weights: NamedWeights, copy: Copy, tensor: GlobalTensor) -> Tensor:
    """The weights of ``tensor`` from the source of ``copy``, with the dims of this code's tensor."""
    part = copy.across(weights.read(copy.source, copy.source_place))
    # Hugging Face stores a gain. In fp64, so that the difference is rounded once.
    return part.double() - 1.0 if tensor.is_gain_minus_one else part


# --- from a checkpoint --------------------------------------------------------------------------------------


def write_weights(
    directory: Path, entries: Mapping[str, Entry], parts_of: Callable[[str], Iterable[Tensor]], max_shard_bytes: int
) -> None:
    """Write ``entries`` in shards of at most ``max_shard_bytes`` (or one tensor), with an index if there are several.

    ``parts_of`` returns the parts of a tensor one after the other.
    """
    shards = [dict(shard) for shard in packed(entries.items(), lambda item: item[1].nbytes, max_shard_bytes)]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        # transformers refuses files without a format.
        with (
            explained("write", directory / name),
            SafetensorsStream(directory / name, aligned(shard), {"format": "pt"}) as stream,
        ):
            for tensor in aligned(shard):
                for part in parts_of(tensor):
                    stream.write_part(part)
                    # Freed before the next part is allocated.
                    del part
    if len(shards) > 1:
        sizes = {
            "total_size": sum(entry.nbytes for entry in entries.values()),
            "total_parameters": sum(prod(entry.shape) for entry in entries.values()),
        }
        write_json(directory / INDEX, {"metadata": sizes, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an indented JSON object on stable storage."""
    with explained("write", path):
        write_text_durably(path, json.dumps(content, indent=2) + "\n")


class HuggingFaceExport:
    """The weights of a checkpoint as Hugging Face's tensors, converted block by block.

    ``dtype`` None keeps the dtype of the model; another dtype is rounded from the master weights if the checkpoint has
    them. A gain ``1 + weight`` is rounded once, and without ``dtype`` has the embedding's dtype, as has a weight times
    a multiplier of muP. With ``average`` the weights are the moving average of the checkpoint.
    """

    def __init__(self, saved: SavedTensors, dtype: torch.dtype | None, advance: Advance, average: bool = False) -> None:
        self._saved, self._advance = saved, advance
        # transformers has no multi-token prediction.
        saved_architecture = upgrade(saved.manifest.state, saved.manifest.format_version).architecture
        self.architecture = replace(saved_architecture, mtp_num_layers=0)
        mapping = HuggingFaceMapping.of(self.architecture)
        self._sections = mapping.theirs
        for name, tensor in mapping.ours.items():
            found = saved.manifest.tensors.get(MODEL + name)
            if found is None or found.shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint has no {MODEL + name} of shape {list(tensor.shape)}, which its architecture "
                    "requires: convert another checkpoint."
                )
        self.source = self._choose_source(dtype, average)
        self.entries: dict[str, Entry] = {}
        """Hugging Face's tensors in order."""
        for name, section in self._sections.items():
            # The weight of a norm may be stored in a wider dtype than the others.
            like = self._sections[EMBEDDING] if section.is_gain_minus_one else section
            self.entries[name] = Entry(dtype or self._stored(MODEL, like), section.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding (all weights share it)."""
        return self.entries[EMBEDDING].dtype

    def parts_of(self, name: str) -> Iterator[Tensor]:
        """The blocks of rows of Hugging Face's tensor ``name``."""
        section, dtype = self._sections[name], self.entries[name].dtype
        for rows in row_chunks(section.shape, dtype):
            # No name here refers to a block: it is freed before the next one is made.
            yield self._block(section, rows, dtype)

    def _block(self, section: Section, rows: slice, dtype: torch.dtype) -> Tensor:
        offset, shape = _box_of(rows, section.shape)
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

    def _name(self, source: str, name: str) -> str:
        """The name of a tensor in the checkpoint: under ``source``, or ``model/`` for frozen parameters."""
        return source + name if source + name in self._saved.manifest.tensors else MODEL + name

    def _stored(self, source: str, section: Section) -> torch.dtype:
        return self._saved.manifest.tensors[self._name(source, section.ours)].dtype

    def _choose_source(self, dtype: torch.dtype | None, average: bool) -> str:
        """Prefix of the weights to read: ``model/``, ``optimizer/master/`` or ``optimizer/ema/``."""
        saved, sections = self._saved.manifest.tensors, self._sections.values()
        if average and not any(EMA + section.ours in saved for section in sections):
            raise CheckpointError(
                "The checkpoint has no moving average of the weights: remove --ema, or convert a checkpoint of a run "
                "with --ema-decay."
            )
        if average:
            return EMA
        if dtype is None or all(self._stored(MODEL, section) == dtype for section in sections):
            return MODEL
        return MASTER if any(MASTER + section.ours in saved for section in sections) else MODEL
