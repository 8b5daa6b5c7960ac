"""Which elements of our tensors are which of Hugging Face's: a pure mapping of names and coordinates.

Ours fuse query-key-value and gate-up along dim 0, and their rotary pairs are neighbouring rows ``(2i, 2i+1)`` of a
head, where Hugging Face keeps the halves of a head apart, rows ``(i, head_size/2 + i)``. Any rectangle of one side is
a few strided parts of the other's tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.checkpoint.places import Place, overlap, strided
from megatron.config.errors import CheckpointError
from megatron.config.model import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class _Run(NamedTuple):
    """Consecutive rows of Hugging Face's tensor, and the rows of ours that they are, ``step`` apart."""

    theirs: int
    ours: int
    step: int
    length: int


@dataclass(frozen=True)
class Section:
    """A tensor of Hugging Face's, and the rows of one of ours that hold it."""

    name: str
    """Hugging Face's name."""
    shape: tuple[int, ...]
    ours: str
    """The name of our tensor."""
    first_row: int = 0
    """Where it begins there."""
    head_size: int | None = None
    """Set where the rows of every head are in rotary order."""

    def runs(self) -> Iterator[_Run]:
        """All rows; those of ours counted in the whole tensor."""
        if self.head_size is None:
            yield _Run(0, self.first_row, 1, self.shape[0])
            return
        half = self.head_size // 2
        for head in range(0, self.shape[0], self.head_size):
            for part in range(2):
                yield _Run(head + part * half, self.first_row + head + part, 2, half)


class Copy(NamedTuple):
    """A part of a rectangle, and what it is a copy of."""

    source: str
    source_place: Place
    place: Place
    """In the rectangle, counted from its corner."""


@dataclass(frozen=True)
class GlobalTensor:
    """One of our tensors, and the sections of dim 0 that it consists of."""

    name: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]

    def copies(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
        """What the rectangle of our tensor with ``shape`` at ``offset`` is, in Hugging Face's tensors."""
        there, here = _columns(offset, shape)
        for section in self.sections:
            for run in section.runs():
                taken, rows = overlap(strided(run.ours, run.length, run.step), offset[0], shape[0])
                if taken.start < taken.stop:
                    source = slice(run.theirs + taken.start, run.theirs + taken.stop)
                    yield Copy(section.name, (source, *there), (rows, *here))


def copies_of_section(section: Section, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Copy]:
    """What the rectangle of Hugging Face's tensor with ``shape`` at ``offset`` is, in ours."""
    there, here = _columns(offset, shape)
    for run in section.runs():
        taken, rows = overlap(slice(run.theirs, run.theirs + run.length), offset[0], shape[0])
        if taken.start < taken.stop:
            source = strided(run.ours + taken.start * run.step, taken.stop - taken.start, run.step)
            yield Copy(section.ours, (source, *there), (rows, *here))


def _columns(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Place, Place]:
    """Dimensions but the first are the same on both sides: their place in the tensors, and in the rectangle."""
    there = tuple(slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True))
    return there, tuple(slice(0, size) for size in shape[1:])


@dataclass(frozen=True)
class LlamaMapping:
    """All tensors of a Llama on both sides. Tied models have no head of their own on either."""

    config: LlamaConfig

    @cached_property
    def ours(self) -> dict[str, GlobalTensor]:
        """Our tensors by name, in the order of the forward pass."""
        return {tensor.name: tensor for tensor in self._tensors()}

    @cached_property
    def theirs(self) -> dict[str, Section]:
        """Hugging Face's tensors by name, in the order of the forward pass."""
        return {section.name: section for tensor in self.ours.values() for section in tensor.sections}

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise :class:`CheckpointError` where ``shapes``, of the tensors found in ``where``, are not those of
        Hugging Face's: one is missing, differs, or would be lost."""
        missing = [name for name in self.theirs if name not in shapes]
        if missing:
            raise CheckpointError(f"{where} lacks {_some(missing)}: fetch the model again.")
        for name, section in self.theirs.items():
            if shapes[name] != section.shape:
                raise CheckpointError(
                    f"{name} in {where} has shape {list(shapes[name])}, but config.json makes it "
                    f"{list(section.shape)}: fetch the model again."
                )
        surplus = [name for name in shapes if name not in self.theirs and not self._is_derived(name)]
        if surplus:
            raise CheckpointError(
                f"{where} has {_some(surplus)}, for which a Llama has no place: it is another architecture, or is "
                "quantized or adapted; merge or dequantize it first."
            )

    def _is_derived(self, name: str) -> bool:
        """Whether a tensor follows from others: a tied head, or the frequencies that old files hold."""
        is_tied = not self.config.untie_embeddings_and_output_weights
        return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == HEAD)

    def _tensors(self) -> Iterator[GlobalTensor]:
        table = (self.config.vocab_size, self.config.hidden_size)
        yield _whole("embedding.word_embeddings.weight", EMBEDDING, *table)
        for number in range(self.config.num_layers):
            yield from self._layer(f"layers.{number}", f"model.layers.{number}")
        yield _whole("final_layernorm.weight", "model.norm.weight", self.config.hidden_size)
        if self.config.untie_embeddings_and_output_weights:
            yield _whole("output_layer.weight", HEAD, *table)

    def _layer(self, ours: str, theirs: str) -> Iterator[GlobalTensor]:
        config = self.config
        hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.kv_channels
        attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
        yield _whole(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
        yield _fused(
            f"{attention}.linear_qkv.weight",
            hidden,
            (f"{their_attention}.q_proj.weight", config.query_size, head),
            (f"{their_attention}.k_proj.weight", config.key_value_size, head),
            (f"{their_attention}.v_proj.weight", config.key_value_size, None),
        )
        yield _whole(f"{attention}.linear_proj.weight", f"{their_attention}.o_proj.weight", hidden, config.query_size)
        yield _whole(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", hidden)
        yield _fused(
            f"{ours}.mlp.linear_fc1.weight",
            hidden,
            (f"{theirs}.mlp.gate_proj.weight", ffn, None),
            (f"{theirs}.mlp.up_proj.weight", ffn, None),
        )
        yield _whole(f"{ours}.mlp.linear_fc2.weight", f"{theirs}.mlp.down_proj.weight", hidden, ffn)


def _whole(ours: str, theirs: str, *shape: int) -> GlobalTensor:
    return GlobalTensor(ours, shape, (Section(theirs, shape, ours),))


def _fused(ours: str, columns: int, *parts: tuple[str, int, int | None]) -> GlobalTensor:
    """Of ``parts`` with their name, rows and head size, stacked along dim 0."""
    sections = []
    first_row = 0
    for name, rows, head_size in parts:
        sections.append(Section(name, (rows, columns), ours, first_row, head_size))
        first_row += rows
    return GlobalTensor(ours, (first_row, columns), tuple(sections))


def _some(names: list[str]) -> str:
    """The first name and how many more there are."""
    return names[0] + (f" and {len(names) - 1} others" if len(names) > 1 else "")
