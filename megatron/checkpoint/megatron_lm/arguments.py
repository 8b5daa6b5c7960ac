"""The architecture and the tokenizer in the arguments that Megatron-LM saves with a checkpoint.

Arguments have the names of the flags (``--num-layers`` is ``num_layers``), and most flags of the architecture have the
same names and meanings here (:class:`~megatron.config.model.ModelConfig`).
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.megatron_lm.safe_pickle import Global, Record, printable
from megatron.config.data import TokenizerConfig, TokenizerType
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError

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
_NUMBERS = (
    "rotary_base",
    "rope_scaling_factor",
    "norm_epsilon",
    "init_method_std",
    "moe_router_topk_scaling_factor",
)
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
    "window_size": (None,),
    "window_attn_skip_freq": (None,),
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
        _check_required(arguments)
        flags = ModelConfig(**_flags(arguments))
        flags.check()
        return flags.resolve(vocab_size, tensor_parallel_size=1, seq_length=1)
    except ConfigError as error:
        raise CheckpointError(f"{where} describes no usable model: {' '.join(error.sentences)}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} {error}: choose another model.") from None


def _check_required(arguments: Arguments) -> None:
    for name, allowed in _REQUIRED.items():
        value = arguments.get(name)
        # True is not 1, but 0 is 0.0.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise ValueError(f"has {name} {shown(value)}, and only {shown(allowed[0])} is supported")
    balancing = arguments.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        raise ValueError("has moe_router_load_balancing_type sinkhorn, which is not supported")


def _flags(arguments: Arguments) -> dict[str, Any]:
    """The fields of :class:`ModelConfig`. Raises ``ValueError``."""
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
        flags["moe_router_score_function"] = _choice(
            given.get("moe_router_score_function", "softmax"), "moe_router_score_function", ("softmax", "sigmoid")
        )
    if "no_rope_freq" in given:
        flags["no_rope_freq"] = _pattern(given["no_rope_freq"], "no_rope_freq")
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


def arguments_in(common: Mapping[object, object], where: str) -> Arguments:
    """The saved arguments; raises :class:`CheckpointError` if there are none."""
    found = common.get("args")
    if not isinstance(found, Record) or found.name not in ("argparse.Namespace", "types.SimpleNamespace"):
        raise CheckpointError(
            f"{where} has no arguments, from which the architecture is taken: write the checkpoint with Megatron-LM's "
            "pretrain_gpt.py, and convert this one."
        )
    return {name: value for name, value in found.attributes.items() if isinstance(name, str)}


def _size(arguments: Arguments, name: str) -> int:
    """An argument that is a size. Raises ``ValueError``."""
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


def _choice(value: object, name: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"has {name} {shown(value)}, and only {' and '.join(choices)} are supported")
    return value


def _pattern(value: object, name: str) -> str:
    """The text of a pattern of layers, which Megatron-LM saves as a number or a list of 0 and 1."""
    if type(value) is int:
        return str(value)
    if isinstance(value, list) and value and all(type(bit) is int for bit in value):
        return "[" + ",".join(map(str, value)) + "]"
    raise ValueError(f"has {name} {shown(value)}, which is neither a number nor a list of 0 and 1")


def shown(value: object) -> str:
    """A value for a message."""
    if isinstance(value, Record | Global):
        return value.name
    # Nested data is not shown: it may have any size.
    is_scalar = value is None or isinstance(value, str | int | float)
    return printable(str(value)) if is_scalar else f"of type {type(value).__name__}"
