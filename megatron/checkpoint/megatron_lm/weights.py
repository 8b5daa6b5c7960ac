"""The weights of a checkpoint of Megatron-LM under the names of Hugging Face's tensors, whose mapping exists.

Both codes use nearly the same names. Megatron-LM's differ in four points. The norms before attention and before a dense
MLP are named after the linear layer that follows. Rows of ``linear_qkv`` are grouped: for every group its query heads,
its key head, its value head. Equal layers, and the experts of a layer, may be stacked in one tensor. Gate and up may be
two tensors. Rotary pairs are halves of a head, as at Hugging Face.
"""

import re
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Place, overlap
from megatron.checkpoint.hugging_face.mapping import GlobalTensor, HuggingFaceMapping
from megatron.checkpoint.megatron_lm.torch_dist import Rows, SavedTensor, TorchDistCheckpoint
from megatron.checkpoint.safetensors_file import Entry
from megatron.errors import CheckpointError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,9})\.)?([a-z].*)", re.ASCII)
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d{1,9})\.)?([a-z].*)", re.ASCII)
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms of a layer, and their names if they are computed with the linear layer that follows."""


class Run(NamedTuple):
    """Consecutive rows of one of Hugging Face's tensors, and their first row in Megatron-LM's."""

    ours: int
    theirs: int
    length: int


class Placement(NamedTuple):
    """Where the rows of one of Hugging Face's tensors are in a checkpoint of Megatron-LM."""

    name: str
    """Name of Megatron-LM's tensor, without ``decoder.`` and with the number of the layer and of the expert."""
    rows: int
    """Rows that Megatron-LM's tensor must have; the vocabulary may have more."""
    runs: tuple[Run, ...]


class MegatronWeights:
    """The weights of ``checkpoint``, a model of ``architecture``, readable in any rows. Raises
    :class:`CheckpointError` if the checkpoint does not hold exactly the weights of this architecture."""

    def __init__(self, checkpoint: TorchDistCheckpoint, architecture: TransformerConfig) -> None:
        self._checkpoint = checkpoint
        self._where = str(checkpoint.directory)
        self._runs: dict[str, tuple[Run, ...]] = {}
        self._rows: dict[str, Rows] = {}
        mapping = HuggingFaceMapping.of(architecture)
        self.shapes = {name: section.shape for name, section in mapping.theirs.items()}
        found = dict(matrices(checkpoint.tensors, architecture, self._where))
        for tensor in mapping.ours.values():
            for number, section in enumerate(tensor.sections):
                placement = place_of(tensor, number, architecture, found)
                self._runs[section.name] = placement.runs
                self._rows[section.name] = self._matrix(placement, section.shape[1:], found)
        self._check_surplus()

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor."""
        return Entry(self._rows[name].dtype, self.shapes[name])

    def read(self, name: str, place: Place) -> Tensor:
        """Whole rows of a tensor, as a copy."""
        wanted, rows = slice(place[0].start, place[0].stop), self._rows[name]
        block = torch.empty((wanted.stop - wanted.start, *self.shapes[name][1:]), dtype=rows.dtype)
        for run in self._runs[name]:
            target, inside = overlap(wanted, run.ours, run.length)
            if target.start < target.stop:
                count = inside.stop - inside.start
                block[target] = self._checkpoint.read(rows, run.theirs + inside.start, count)
        return block

    def _matrix(self, placement: Placement, columns: tuple[int, ...], found: Mapping[str, Rows]) -> Rows:
        """The tensor that holds the rows; raises :class:`CheckpointError` if it is missing or of another kind."""
        if placement.name not in found:
            raise CheckpointError(
                f"{self._where} lacks the weight {placement.name}, which the model of its arguments has: copy the "
                "checkpoint again."
            )
        rows = found[placement.name]
        wanted = (placement.rows, *columns)
        is_vocabulary = not placement.name.startswith("layers.")
        if rows.shape != wanted and not (
            is_vocabulary and rows.shape[1:] == columns and columns and rows.shape[0] > placement.rows
        ):
            raise CheckpointError(
                f"{rows.name} in {self._where} has a shape of {list(rows.shape)}, but its arguments require "
                f"{list(wanted)}: copy the checkpoint again."
            )
        if rows.dtype not in _FLOATS:
            raise CheckpointError(
                f"{rows.name} in {self._where} is {str(rows.dtype).removeprefix('torch.')}, a quantized or integer "
                "format: write the model in bf16, fp16 or fp32 with Megatron-LM first."
            )
        return rows

    def _check_surplus(self) -> None:
        """Raise :class:`CheckpointError` if a weight would be lost."""
        used = {rows.name for rows in self._rows.values()}
        surplus = [name for name in self._checkpoint.tensors if name not in used]
        if surplus:
            others = f" and {len(surplus) - 1} others" if len(surplus) > 1 else ""
            raise CheckpointError(
                f"{self._where} has {surplus[0]}{others}, which the model of its arguments does not have here: "
                "choose a model without such weights."
            )


def matrices(tensors: Mapping[str, SavedTensor], config: TransformerConfig, where: str) -> Iterator[tuple[str, Rows]]:
    """Every matrix and vector of the model by a name of its own: stacked layers and experts are separated. Raises
    :class:`CheckpointError` for a stack of another number of layers or experts than the model's."""
    for name, tensor in tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            yield name.removeprefix("decoder."), tensor.rows(0)[()]
            continue
        number, rest = layer.groups()
        expert, last = matched.groups() if (matched := _EXPERT.fullmatch(rest)) else (None, None)
        counts = [config.num_layers] if number is None else []
        counts += [config.num_experts or 0] if last is not None and expert is None else []
        if tensor.shape[: len(counts)] != tuple(counts):
            raise CheckpointError(
                f"{name} in {where} has a shape of {list(tensor.shape)}, which does not begin with the "
                f"{' layers and '.join(map(str, counts))} of its arguments: copy the checkpoint again."
            )
        for leading, rows in tensor.rows(len(counts)).items():
            indices = iter(leading)
            prefix = f"layers.{next(indices) if number is None else int(number)}."
            if last is None:
                yield prefix + rest, rows
            else:
                yield f"{prefix}mlp.experts.{next(indices) if expert is None else int(expert)}.{last}", rows


def place_of(tensor: GlobalTensor, number: int, config: TransformerConfig, found: Container[str]) -> Placement:
    """Where section ``number`` of ``tensor`` is; ``found`` has the names of a checkpoint that differ by its writer."""
    name, count = tensor.name, tensor.sections[number].shape[0]
    whole = (Run(0, 0, count),)
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        return Placement(name, config.qkv_size, grouped_rows(number, config))
    if ".mlp.experts." in name:
        is_fc1 = name.endswith("linear_fc1.weight")
        expert, number = divmod(number, 2) if is_fc1 else (number, 0)
        name = name.replace(".experts.", f".experts.{expert}.")
    if name.endswith("linear_fc1.weight"):
        half = name + ("_w", "_v")[number]
        if name not in found and half in found:
            return Placement(half, count, whole)
        return Placement(name, 2 * count, (Run(0, number * count, count),))
    in_layer = re.fullmatch(r"(layers\.\d+\.)(.*)", name)
    if in_layer and in_layer[2] in _NORMS and in_layer[1] + _NORMS[in_layer[2]] in found:
        name = in_layer[1] + _NORMS[in_layer[2]]
    return Placement(name, count, whole)


def grouped_rows(section: int, config: TransformerConfig) -> tuple[Run, ...]:
    """The rows of the queries (section 0), keys (1) or values (2) in Megatron-LM's ``linear_qkv``, which has for every
    group its query heads, its key head and its value head."""
    size, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups
    per_group = (queries + 2) * size
    if section == 0:
        return tuple(Run(group * queries * size, group * per_group, queries * size) for group in range(groups))
    first = (queries + section - 1) * size
    return tuple(Run(group * size, group * per_group + first, size) for group in range(groups))
