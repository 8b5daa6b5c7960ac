"""Write a model in Hugging Face's format: safetensors shards with an index, converted block by block."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import explained, write_text_durably
from megatron.checkpoint.hugging_face.config import INDEX, SINGLE
from megatron.checkpoint.hugging_face.mapping import (
    EMBEDDING,
    HuggingFaceMapping,
    Section,
    copies_of_section,
    folded_multiplier,
)
from megatron.checkpoint.manifest import EMA, MASTER, MODEL
from megatron.checkpoint.safetensors_file import Entry, SafetensorsStream, aligned, packed
from megatron.checkpoint.schema import upgrade
from megatron.checkpoint.streaming import Advance, SavedTensors, check_range, row_chunks
from megatron.errors import CheckpointError


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
                    stream.write(part)
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
        self.architecture = upgrade(saved.manifest.state, saved.manifest.format_version).architecture
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
        for chunk in row_chunks(section.shape, dtype):
            # No name here refers to a block: it is freed before the next one is made.
            yield self._block(section, tuple(chunk.offsets), tuple(chunk.sizes), dtype)

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
