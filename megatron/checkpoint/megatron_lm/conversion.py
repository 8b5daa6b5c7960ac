"""Conversion from a checkpoint of Megatron-LM, block by block; memory holds one block of rows.

Arguments, from which the architecture and the tokenizer are taken, have the names of the flags (``--num-layers`` is
``num_layers``). Most flags of the architecture have the same names and meanings here
(:class:`~megatron.config.model.ModelConfig`).

Weights are read under the names of Hugging Face's tensors, whose mapping exists. Both codes use nearly the same names.
Megatron-LM's differ in four points. The norms before attention and before a dense MLP are named after the linear layer
that follows. Rows of ``linear_qkv`` are grouped: for every group its query heads, its key head, its value head. Equal
layers, and the experts of a layer, may be stacked in one tensor. Gate and up may be two tensors. Rotary pairs are
halves of a head, as at Hugging Face.
"""

import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Place, overlap
from megatron.checkpoint.hugging_face.mapping import GlobalTensor, HuggingFaceMapping
from megatron.checkpoint.hugging_face.weights import WeightsImport
from megatron.checkpoint.megatron_lm.safe_pickle import Global, Record, printable
from megatron.checkpoint.megatron_lm.torch_dist import COMMON, Rows, SavedTensor, TorchDistCheckpoint
from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.streaming import Advance
from megatron.config.data import TokenizerConfig, TokenizerType
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError

# --- arguments ----------------------------------------------------------------------------------------------

Arguments = Mapping[str, object]

_LARGEST = {"num_layers": 10_000, "num_attention_heads": 100_000, "num_experts": 10_000}
"""Bounds of counts of Python objects."""

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings")
_OPTIONAL_SIZES = (
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
)
_NUMBERS = ("rotary_base", "rope_scaling_factor", "norm_epsilon", "init_method_std", "moe_router_topk_scaling_factor")
_SWITCHES = (
    "use_rope_scaling",
    "qk_layernorm",
    "qk_l2_norm",
    "add_qkv_bias",
    "apply_layernorm_1p",
    "untie_embeddings_and_output_weights",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_apply_probs_on_input",
)
_DEFAULTS: Arguments = {"rotary_base": 10000, "untie_embeddings_and_output_weights": False}
"""Megatron-LM's defaults, where they differ from the defaults here."""

_RENAMED = {"layernorm_epsilon": "norm_epsilon"}
"""Arguments of newer versions that are not named like their flags."""

_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope",),
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "squared_relu": (False, None),
    "quick_geglu": (False, None),
    "add_bias_linear": (False,),
    "rotary_percent": (1.0, None),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    "attention_output_gate": (False, None),
    "qk_clip": (False, None),
    "multi_latent_attention": (False, None),
    "linear_attention_freq": (None,),
    "linear_attention_type": (None,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "spec": (None, ["local"]),
    "is_hybrid_model": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0, None),
    "moe_latent_size": (None,),
    "moe_shared_expert_gate": (False, None),
    "moe_expert_capacity_factor": (None,),
    "use_mup": (False, None),
}
"""Supported values of arguments that change the model and are no flags here; None is an absent argument, too."""


def architecture_of(arguments: Arguments, vocab_size: int, where: str) -> TransformerConfig:
    """The model of ``arguments`` with ``vocab_size`` ids; raises :class:`CheckpointError` for another architecture."""
    try:
        flags = ModelConfig(**_flags(arguments))
        flags.check()
        return flags.resolve(vocab_size, tensor_parallel_size=1, seq_length=1)
    except ConfigError as error:
        raise CheckpointError(f"{where} describes no usable model: {' '.join(error.sentences)}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} {error}: choose another model.") from None


def _flags(arguments: Arguments) -> dict[str, Any]:
    """The fields of :class:`ModelConfig`. Raises ``ValueError``."""
    for name, allowed in _REQUIRED.items():
        value = arguments.get(name)
        # True is not 1, but 0 is 0.0.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise ValueError(f"has {name} {shown(value)}, and only {shown(allowed[0])} is supported")
    balancing = arguments.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        raise ValueError("has moe_router_load_balancing_type sinkhorn, which is not supported")
    given = {_RENAMED.get(name, name): value for name, value in arguments.items() if value is not None}
    given = {**_DEFAULTS, **given}
    flags: dict[str, Any] = {name: _size(given, name) for name in _SIZES}
    flags |= {name: _size(given, name) for name in _OPTIONAL_SIZES if name in given}
    flags |= {name: _number(given[name], name) for name in _NUMBERS if name in given}
    flags |= {name: _switch(given[name], name) for name in _SWITCHES if name in given}
    # The number of groups means nothing without grouped-query attention.
    if _switch(given.get("group_query_attention", False), "group_query_attention"):
        flags["num_query_groups"] = _size(given, "num_query_groups")
    if flags.get("num_experts"):
        flags["moe_layer_freq"] = _pattern(given.get("moe_layer_freq", 1), "moe_layer_freq")
        score = given.get("moe_router_score_function", "softmax")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(
                f"has moe_router_score_function {shown(score)}, and only softmax and sigmoid are supported"
            )
        flags["moe_router_score_function"] = score
    if "window_size" in given:
        match given["window_size"]:
            case [int(left), 0] if left >= 0:
                flags["window_size"] = f"{left},0"
            case other:
                raise ValueError(f"has window_size {shown(other)}, and only (LEFT, 0) is supported")
    for name in ("no_rope_freq", "window_attn_skip_freq"):
        if name in given:
            flags[name] = _pattern(given[name], name)
    for name, largest in _LARGEST.items():
        if (flags.get(name) or 0) > largest:
            raise ValueError(f"has {name} {shown(flags[name])}, and at most {largest} is supported")
    if flags["num_layers"] * (flags.get("num_experts") or 0) > 1_000_000:
        raise ValueError("has more than a million experts")
    return flags


def tokenizer_of(arguments: Arguments) -> TokenizerConfig:
    """The flags of the tokenizer; without a type if it is not a tokenizer of this code."""
    kind = arguments.get("tokenizer_type")
    known = {name for one in get_args(TokenizerType) for name in (get_args(one) or (one,))}
    if not isinstance(kind, str) or kind not in known:
        return TokenizerConfig()
    flags: dict[str, Any] = {"tokenizer_type": kind}
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        value = arguments.get(name)
        flags[name] = value if isinstance(value, str) else None
    if kind == "NullTokenizer":
        value = arguments.get("vocab_size")
        flags["vocab_size"] = value if type(value) is int and value > 0 else None
    return TokenizerConfig(**flags)


def _size(arguments: Arguments, name: str) -> int:
    value = arguments.get(name)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(f"has {name} {shown(value)}, which is not a size")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"has {name} {shown(value)}, which is not a number")
    return float(value)


def _switch(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"has {name} {shown(value)}, which is neither True nor False")
    return value


def _pattern(value: object, name: str) -> str:
    """The text of a pattern of layers, which Megatron-LM saves as a number or a list of 0 and 1."""
    if type(value) is int:
        return str(value)
    if isinstance(value, list) and value and all(type(bit) is int for bit in value):
        return "[" + ",".join(map(str, value)) + "]"
    raise ValueError(f"has {name} {shown(value)}, which is neither a number nor a list of 0 and 1")


def shown(value: object) -> str:
    if isinstance(value, Record | Global):
        return value.name
    # Nested data is not shown: it may have any size.
    is_scalar = value is None or isinstance(value, str | int | float)
    return printable(str(value)) if is_scalar else f"of type {type(value).__name__}"


# --- weights ------------------------------------------------------------------------------------------------

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
    """The weights of ``checkpoint``, a model of ``architecture``, readable in any rows.

    Raises :class:`CheckpointError` if the checkpoint does not hold exactly the weights of this architecture.
    """

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
        used = {rows.name for rows in self._rows.values()}
        surplus = [name for name in checkpoint.tensors if name not in used]  # weights that would be lost
        if surplus:
            others = f" and {len(surplus) - 1} others" if len(surplus) > 1 else ""
            raise CheckpointError(
                f"{self._where} has {surplus[0]}{others}, which the model of its arguments does not have here: "
                "choose a model without such weights."
            )

    def entry(self, name: str) -> Entry:
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


def matrices(tensors: Mapping[str, SavedTensor], config: TransformerConfig, where: str) -> Iterator[tuple[str, Rows]]:
    """Every matrix and vector of the model by a name of its own: stacked layers and experts are separated.

    Raises :class:`CheckpointError` for a stack of another number of layers or experts than the model's.
    """
    for name, tensor in tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            yield name.removeprefix("decoder."), tensor.rows(0)[()]
            continue
        # Either the name has the number of the layer (of the expert), or they are stacked along the first dims.
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
    # ``number`` is the place among queries, keys and values, among gate and up, or among gate and up of all experts.
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
    """The rows of the queries (section 0), keys (1) or values (2) in Megatron-LM's ``linear_qkv``."""
    # Heads of two groups with two query heads each, as Megatron-LM and as Hugging Face order them:
    #
    #   linear_qkv   q0 q1 k0 v0 │ q2 q3 k1 v1
    #   q_proj       q0 q1 q2 q3       k_proj   k0 k1       v_proj   v0 v1
    size, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups
    per_group = (queries + 2) * size
    if section == 0:
        return tuple(Run(group * queries * size, group * per_group, queries * size) for group in range(groups))
    first = (queries + section - 1) * size
    return tuple(Run(group * size, group * per_group + first, size) for group in range(groups))


# --- conversion ---------------------------------------------------------------------------------------------

EMBEDDING = "embedding.word_embeddings.weight"


class MegatronCheckpoint:
    """The tensors and the arguments in ``directory``. Raises :class:`CheckpointError`."""

    def __init__(self, directory: Path) -> None:
        self.tensors = TorchDistCheckpoint(directory)
        self.where = str(directory / COMMON)
        """The file of the arguments."""
        found = self.tensors.common().get("args")
        if not isinstance(found, Record) or found.name not in ("argparse.Namespace", "types.SimpleNamespace"):
            raise CheckpointError(
                f"{self.where} has no arguments, from which the architecture is taken: write the checkpoint with "
                "Megatron-LM's pretrain_gpt.py, and convert this one."
            )
        self.arguments: Arguments = {name: value for name, value in found.attributes.items() if isinstance(name, str)}

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding, with padding. (The argument ``padded_vocab_size`` may be absent.)"""
        embedding = self.tensors.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self.tensors.directory} has no {EMBEDDING}: choose a checkpoint of a language model."
            )
        return embedding.shape[0]


class MegatronImport(WeightsImport):
    """The model of a checkpoint of Megatron-LM as global tensors of this code.

    ``vocab_size`` is the number of ids without padding; None keeps all rows of the embedding. ``dtype`` None keeps the
    dtype of each tensor. Raises :class:`CheckpointError` for a checkpoint that is damaged or of an architecture that is
    not in the registry.
    """

    def __init__(self, source: MegatronCheckpoint, vocab_size: int | None, dtype: torch.dtype | None, advance: Advance):
        padded = source.vocabulary_rows
        if vocab_size is not None and vocab_size > padded:
            raise CheckpointError(
                f"{source.where} is of a model with {padded} rows of the vocabulary, which is less than the "
                f"{vocab_size} ids of the tokenizer: give the model's tokenizer, or lower --vocab-size."
            )
        rows = padded if vocab_size is None else vocab_size
        self.num_padding_rows = padded - rows
        """Rows of the vocabulary that are not converted."""
        resolved = architecture_of(source.arguments, rows, source.where)
        self.architecture = replace(resolved, padded_vocab_size=rows)
        # Megatron-LM, too, stores the gain minus one.
        as_stored = replace(self.architecture, apply_layernorm_1p=False)
        weights = MegatronWeights(source.tensors, as_stored)
        super().__init__(weights, HuggingFaceMapping.of(as_stored), dtype, advance)
