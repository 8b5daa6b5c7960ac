"""Mapping between the tensors of this code and Hugging Face's: pure functions of names and coordinates.

This code fuses query-key-value and gate-up along dim 0, and its rotary pairs are neighbouring rows ``(2i, 2i+1)`` of a
head; Hugging Face's are ``(i, head_size/2 + i)``, except for Llama 4. A box of one side is a few strided parts of
tensors of the other. Llama 4's experts are stacked and transposed there, ``[experts, columns, rows]``. The numbers are
equal, but with ``apply_layernorm_1p`` the weight of a norm is Hugging Face's gain minus one, and multipliers of muP are
factors of some weights there.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from megatron.architectures.spec import ArchitectureSpec, HFTensor, WeightMapping
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Place, overlap, strided
from megatron.checkpoint.hugging_face.config import known_architecture
from megatron.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class _Run(NamedTuple):
    """Consecutive rows of Hugging Face's tensor, and their rows in the tensor of this code, ``step`` apart."""

    theirs: int
    ours: int
    step: int
    length: int


@dataclass(frozen=True)
class Section:
    """A tensor of Hugging Face's, and its rows in a tensor of this code."""

    name: str
    """Hugging Face's name."""
    shape: tuple[int, ...]
    """Hugging Face's shape; three dims are transposed weights of experts, ``[experts, columns, rows]``."""
    ours: str
    """This code's name."""
    first_row: int = 0
    """First row in this code's tensor."""
    head_size: int | None = None
    """Set if the rows of every head are in rotary order."""
    is_gain_minus_one: bool = False
    """Whether this code stores the weight of a norm as the gain minus one; Hugging Face stores the gain."""

    @property
    def is_transposed(self) -> bool:
        return len(self.shape) == 3

    def runs(self) -> Iterator[_Run]:
        """All rows; rows of this code's tensor are counted in the whole tensor."""
        assert not self.is_transposed
        if self.head_size is None:
            yield _Run(0, self.first_row, 1, self.shape[0])
            return
        half = self.head_size // 2
        for head in range(0, self.shape[0], self.head_size):
            for part in range(2):
                yield _Run(head + part * half, self.first_row + head + part, 2, half)


def folded_multiplier(config: TransformerConfig, section: Section) -> float:
    """The factor of a weight at Hugging Face, which has no multipliers of muP; 1 without muP.

    The factor of attention multiplies the queries: their norm, or the weight and the bias of their projection. The
    factor of the logits multiplies the final norm, and so does the inverse of the embedding's factor if the output
    layer is the embedding.
    """
    if section.ours == "embedding.word_embeddings.weight":
        return config.embedding_multiplier
    if section.ours == "final_layernorm.weight":
        is_tied = not config.untie_embeddings_and_output_weights
        return config.output_multiplier / (config.embedding_multiplier if is_tied else 1.0)
    if config.qk_layernorm:
        is_of_queries = section.ours.endswith("self_attention.q_layernorm.weight")
    else:
        is_of_queries = ".self_attention.linear_qkv." in section.ours and section.first_row == 0
    return config.attention_multiplier if is_of_queries else 1.0


class Copy(NamedTuple):
    """A part of a box and its source."""

    source: str
    source_place: Place
    place: Place
    """Part of the box, relative to its corner."""
    is_transposed: bool = False
    """Whether the part is ``[rows, columns]`` on this code's side and ``[1, columns, rows]`` on Hugging Face's."""

    def across(self, part: Tensor) -> Tensor:
        """``part`` of one side as a view with the dims of the other side."""
        if not self.is_transposed:
            return part
        return part.squeeze(0).T if part.dim() == 3 else part.T.unsqueeze(0)


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of this code and its sections of dim 0."""

    name: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]

    @property
    def is_gain_minus_one(self) -> bool:
        """Whether this code stores the tensor as a gain minus one; equal in all sections."""
        return self.sections[0].is_gain_minus_one

    @cached_property
    def _first_rows(self) -> list[int]:
        return [section.first_row for section in self.sections]

    def copies(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
        """Sources of the box of this code's tensor with ``shape`` at ``offset``, in Hugging Face's tensors."""
        there, here = _columns(offset, shape)
        # A tensor of experts has hundreds of sections, of which a box has a few.
        first_rows = self._first_rows
        reached = slice(bisect_right(first_rows, offset[0]) - 1, bisect_left(first_rows, offset[0] + shape[0]))
        for section in self.sections[reached]:
            if section.is_transposed:
                yield from _transposed_copies(section, offset, shape)
                continue
            for run in section.runs():
                taken, rows = overlap(strided(run.ours, run.length, run.step), offset[0], shape[0])
                if taken.start < taken.stop:
                    source = slice(run.theirs + taken.start, run.theirs + taken.stop)
                    yield Copy(section.name, (source, *there), (rows, *here))


def copies_of_section(section: Section, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
    """Sources of the box of Hugging Face's tensor with ``shape`` at ``offset``, in this code's tensors."""
    if section.is_transposed:
        yield from _transposed_copies_of_section(section, offset, shape)
        return
    there, here = _columns(offset, shape)
    for run in section.runs():
        taken, rows = overlap(slice(run.theirs, run.theirs + run.length), offset[0], shape[0])
        if taken.start < taken.stop:
            source = strided(run.ours + taken.start * run.step, taken.stop - taken.start, run.step)
            yield Copy(section.ours, (source, *there), (rows, *here))


def _transposed_copies(section: Section, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
    """The copies from a transposed section into the box of this code's tensor."""
    experts, _, rows = section.shape
    (columns, here), first = _columns(offset, shape), offset[0] - section.first_row
    for expert in range(max(0, first // rows), min(experts, -(-(first + shape[0]) // rows))):
        begin = section.first_row + expert * rows
        taken, inside = overlap(slice(begin, begin + rows), offset[0], shape[0])
        yield Copy(section.name, (slice(expert, expert + 1), *columns, taken), (inside, *here), is_transposed=True)


def _transposed_copies_of_section(section: Section, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
    """The copies from this code's tensor into the box of a transposed section."""
    columns = slice(offset[1], offset[1] + shape[1])
    for number in range(shape[0]):
        first = section.first_row + (offset[0] + number) * section.shape[2] + offset[2]
        place = slice(number, number + 1), slice(0, shape[1]), slice(0, shape[2])
        yield Copy(section.ours, (slice(first, first + shape[2]), columns), place, is_transposed=True)


def _columns(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Place, Place]:
    """All dims but the first are equal on both sides: their part of the tensors, and of the box."""
    there = tuple(slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True))
    return there, tuple(slice(0, size) for size in shape[1:])


@dataclass(frozen=True)
class HuggingFaceMapping:
    """All tensors of a model on both sides. Tied models have no separate output layer."""

    config: TransformerConfig
    architecture: ArchitectureSpec

    @classmethod
    def of(cls, config: TransformerConfig) -> "HuggingFaceMapping":
        """The mapping of the architecture that ``config`` is of; raises :class:`CheckpointError` if it is of none."""
        return cls(config, known_architecture(config))

    @cached_property
    def ours(self) -> dict[str, GlobalTensor]:
        """Tensors of this code by name, in the order of the forward pass."""
        return {tensor.name: tensor for tensor in self._tensors()}

    @cached_property
    def theirs(self) -> dict[str, Section]:
        """Hugging Face's tensors by name, in the order of the forward pass."""
        return {section.name: section for tensor in self.ours.values() for section in tensor.sections}

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise :class:`CheckpointError` if ``shapes``, found in ``where``, are not Hugging Face's: a tensor is
        missing, differs, or would be lost."""
        missing = [name for name in self.theirs if name not in shapes]
        if missing:
            raise CheckpointError(f"{where} lacks {_some(missing)}: download the model again.")
        for name, section in self.theirs.items():
            if shapes[name] != section.shape:
                raise CheckpointError(
                    f"{name} in {where} has shape {list(shapes[name])}, but config.json requires "
                    f"{list(section.shape)}: download the model again."
                )
        surplus = [name for name in shapes if name not in self.theirs and not self._is_derived(name)]
        if surplus:
            raise CheckpointError(
                f"{where} has {_some(surplus)}, which a {self.architecture.title} model does not have: it is another "
                "architecture, or is quantized or adapted; merge or dequantize it first."
            )

    def _is_derived(self, name: str) -> bool:
        """Whether a tensor follows from others: a tied output layer, or the rotary frequencies in old files."""
        is_tied = not self.config.untie_embeddings_and_output_weights
        return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == HEAD)

    def _tensors(self) -> Iterator[GlobalTensor]:
        config = self.config
        vocabulary, width = config.vocab_size, config.hidden_size
        embedding = WeightMapping("embedding.word_embeddings.weight", (HFTensor(EMBEDDING, vocabulary),), width)
        norm = WeightMapping("final_layernorm.weight", (HFTensor("model.norm.weight", width),), is_gain=True)
        yield self._stacked(embedding)
        for number in range(config.num_layers):
            for weight in self.architecture.layer_weights(config, number):
                yield self._stacked(weight, f"layers.{number}.", f"model.layers.{number}.")
        yield self._stacked(norm)
        if config.untie_embeddings_and_output_weights:
            yield self._stacked(WeightMapping("output_layer.weight", (HFTensor(HEAD, vocabulary),), width))

    def _stacked(self, weight: WeightMapping, ours: str = "", theirs: str = "") -> GlobalTensor:
        """The tensor that ``weight`` describes, whose names have the prefixes ``ours`` and ``theirs``."""
        other = () if weight.columns is None else (weight.columns,)
        is_gain_minus_one = weight.is_gain and self.config.apply_layernorm_1p
        sections, first_row = [], 0
        for part in weight.sections:
            shape, head_size = (part.rows, *other), self.config.kv_channels if part.is_rotary else None
            if part.experts is not None:
                shape = (part.experts, *other, part.rows // part.experts)
            sections.append(
                Section(theirs + part.name, shape, ours + weight.name, first_row, head_size, is_gain_minus_one)
            )
            first_row += part.rows
        return GlobalTensor(ours + weight.name, (first_row, *other), tuple(sections))


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} others" if len(names) > 1 else "")
