"""What a directory in Hugging Face's format describes besides weights: architecture, tokenizer, generation settings.

``config.json`` is read with the fields of transformers 4 (``rope_theta``, ``rope_scaling``) and 5
(``rope_parameters``), and written with those of transformers 4, which both versions and other programs read.
Unsupported fields that would change the model are refused by name.

Imports no torch, because the command line is completed from it before torch is imported.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.architectures.catalog import ARCHITECTURES, architecture_of
from megatron.architectures.spec import FEATURES, ArchitectureSpec, Fields, MultimodalModel, flag, number, size
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.files import explained
from megatron.config.data import TokenizerConfig, TokenizerType
from megatron.errors import CheckpointError
from megatron.urls import from_hub, is_hub_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\s*")


@dataclass(frozen=True)
class HuggingFaceDescription:
    """The description of the text model in a directory."""

    architecture: TransformerConfig
    tokenizer: TokenizerConfig
    """Its type is None if the directory has no tokenizer."""
    generation_config: str | None
    """The text of ``generation_config.json``; None if the directory has none."""
    multimodal: MultimodalModel | None
    """The multimodal model that the text model is a part of."""


def describe_directory(
    source: Path, text_only: bool = False, text_only_flag: str = "--text-only"
) -> HuggingFaceDescription:
    """Describe the model in ``source``.

    A multimodal model is refused without ``text_only``, the value of the flag ``text_only_flag``. Raises
    :class:`CheckpointError`.
    """
    if not source.is_dir():
        raise CheckpointError(no_directory(source))
    config = source / CONFIG
    fields: Fields = read_json_object(config)
    multimodal = multimodal_model(fields)
    if multimodal is not None:
        if not text_only:
            starred = " and ".join(f"{prefix}*" for prefix in multimodal.other_prefixes)
            raise CheckpointError(
                f"{config} describes a multimodal model ({multimodal.hugging_face_class}), of which only the text "
                f"model can be used: add {text_only_flag} to leave out {starred}."
            )
        fields = text_model_fields(fields, multimodal, str(config))
    architecture = transformer_config_of(fields, str(config))
    tokenizer = tokenizer_flags(source, source)
    return HuggingFaceDescription(architecture, tokenizer, read_generation_config(source), multimodal)


def no_directory(source: Path) -> str:
    if is_hub_name(str(source)):
        return f"{source} does not exist: {from_hub(str(source))} and give DIR instead."
    return f"{source} is not a directory: give the one that holds the model's config.json."


def tokenizer_flags(source: Path, place: Path) -> TokenizerConfig:
    """The flags for the tokenizer in ``source``, whose files are, or will be copied to, ``place``."""
    for kind, path in tokenizers_in(source):
        if path.parent == source:
            return TokenizerConfig(kind, str(place if kind == "HuggingFaceTokenizer" else place / path.name))
    return TokenizerConfig()


def tokenizers_in(source: Path) -> Iterator[tuple[TokenizerType, Path]]:
    """The type and the file of each tokenizer in ``source``, the preferred one first."""
    if (source / TOKENIZER_JSON).is_file():
        yield "HuggingFaceTokenizer", source / TOKENIZER_JSON
    # Repositories of Llama 3 have Meta's file in ``original``.
    for model in (source / TOKENIZER_MODEL, source / "original" / TOKENIZER_MODEL):
        if model.is_file():
            with explained("read", model), model.open("rb") as content:
                # Llama 3's file is lines of a token in base64 and its rank; Llama 2's is binary.
                is_text = _TIKTOKEN_LINE.fullmatch(content.readline(1000)) is not None
            yield "TikTokenizer" if is_text else "SentencePieceTokenizer", model
            return


def read_generation_config(source: Path) -> str | None:
    """The text of ``generation_config.json`` in ``source``; None if there is none."""
    path = source / GENERATION_CONFIG
    if not path.is_file():
        return None
    read_json_object(path)
    try:
        with explained("read", path):
            return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 ({error}): download the model again.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises :class:`CheckpointError`."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing: use the complete directory of a model.")
    try:
        with explained("read", path):
            content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download the model again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download the model again.")
    return content


# --- config.json --------------------------------------------------------------------------------------------


_FIXED: dict[str, tuple[object, str]] = {
    "hidden_act": ("silu", "only SwiGLU with silu is implemented"),
    "mlp_bias": (False, "linear layers have no bias here"),
    "partial_rotary_factor": (1.0, "whole heads are rotated here"),
    "quantization_config": (None, "save the model in bf16, fp16 or fp32 without quantization first"),
    "auto_map": (None, "it asks for code from the model's directory, which is never run"),
}
"""Required values of fields that cannot be converted (also the value of an absent field), and the reason."""

_YARN_NAMES = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def transformer_config_of(fields: Fields, where: str) -> TransformerConfig:
    """The model that ``config.json`` describes; ``where`` names the file in a :class:`CheckpointError`.

    Absent fields have the defaults that transformers gives them.
    """
    try:
        architecture = _architecture(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        fields = {**fields, **architecture.field_defaults, **given}
        hidden, heads = size(fields, "hidden_size"), size(fields, "num_attention_heads")
        groups = size(fields, "num_key_value_heads", heads)
        head_size = size(fields, "head_dim", hidden // heads)
        if heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}: correct the file"
            )
        if head_size % 2:
            raise ValueError(f"head_dim {head_size} is odd, but rotary embeddings need an even size: correct the file")
        vocab_size = size(fields, "vocab_size")
        common = {
            "num_layers": size(fields, "num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": size(fields, "intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": head_size,
            "vocab_size": vocab_size,
            "padded_vocab_size": vocab_size,
            "max_position_embeddings": size(fields, "max_position_embeddings", 2048),
            **_rotary(fields),
            "norm_epsilon": number(fields, "rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not flag(fields, "tie_word_embeddings", False),
            "init_method_std": number(fields, "initializer_range", 0.02),
        }
        return TransformerConfig(**common | dict(architecture.read_fields(fields)) | dict(architecture.features))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}.") from error


def known_architecture(config: TransformerConfig) -> ArchitectureSpec:
    """The architecture of transformers that ``config`` is of; raises :class:`CheckpointError` if it is of none."""
    architecture = architecture_of(config)
    if architecture is None:
        # What distinguishes its family.
        kinds = {True: "MoE layers", False: "dense layers"}
        layers = " and ".join(kinds[is_moe] for is_moe in sorted(set(config.moe_layers())))
        unusual = [name for name in FEATURES if getattr(config, name) != getattr(TransformerConfig, name)]
        features = layers + "".join(f", {name} {getattr(config, name)}" for name in unusual)
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"No architecture of transformers has {features}: choose a model of {known}.")
    return architecture


def multimodal_model(fields: Fields) -> MultimodalModel | None:
    """The multimodal model that ``config.json`` describes; None for any other model."""
    known = (architecture.multimodal for architecture in ARCHITECTURES.values())
    return next((model for model in known if model is not None and model.name == fields.get("model_type")), None)


def text_model_fields(fields: Fields, multimodal: MultimodalModel, where: str) -> Fields:
    """The config of the text model inside that of a ``multimodal`` one; ``where`` names the file in an error."""
    text_model = next(name for name, one in ARCHITECTURES.items() if one.multimodal is multimodal)
    classes = fields.get("architectures")
    if classes and multimodal.hugging_face_class not in classes:
        raise CheckpointError(
            f"{where}: architectures is {classes!r}, but only {multimodal.hugging_face_class} can be converted."
        )
    text = fields.get(multimodal.text_fields) or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: {multimodal.text_fields} is {text!r}, not an object: correct the file.")
    # A quantization, for example, is described beside the text model's fields.
    outer = {name: fields[name] for name in _FIXED if fields.get(name) is not None}
    return {"model_type": text_model, **outer, **text, "architectures": None}


def _architecture(fields: Fields) -> ArchitectureSpec:
    """The architecture in the registry; refuses one that is not there, and a variant that it does not cover."""
    architecture = ARCHITECTURES.get(str(fields.get("model_type")))
    if architecture is None:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"model_type is {fields.get('model_type')!r}, but only {known} can be converted")
    classes = fields.get("architectures")
    if classes and architecture.hugging_face_class not in classes:
        raise ValueError(f"architectures is {classes!r}, but only {architecture.hugging_face_class} can be converted")
    for name, (wanted, reason) in (_FIXED | dict(architecture.required_fields)).items():
        value = architecture.field_defaults.get(name) if fields.get(name) is None else fields[name]
        if value is not None and value != wanted:
            raise ValueError(f"{name} is {value!r}, not {wanted!r}: {reason}; convert another model")
    if set(fields.get("layer_types") or ()) - architecture.layer_types:
        known = " and ".join(map(repr, sorted(architecture.layer_types)))
        raise ValueError(f"layer_types has other layers than {known}: convert another model")
    return architecture


def _rotary(fields: Fields) -> dict[str, Any]:
    """The rotary fields from either spelling; with both, transformers uses the older."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {rope!r}, not an object: correct the file")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("partial_rotary_factor is not 1: whole heads are rotated here; convert another model")
    base = number(rope if rope.get("rope_theta") is not None else fields, "rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rotary_base": base}
    if kind == "yarn":
        return {"rotary_base": base, **_yarn(rope, fields)}
    if kind != "llama3":
        raise ValueError(
            f"rope_type is {kind!r}, but only 'default', 'llama3' and 'yarn' are implemented; convert another model"
        )
    scaling = {name: number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    for name, value in scaling.items():
        if value == 0:
            raise ValueError(f"{name} is 0, not a positive number: correct the file")
    factor, low, high = scaling.values()
    if high < low:
        raise ValueError(f"high_freq_factor {high} is below low_freq_factor {low}: correct the file")
    return {
        "rotary_base": base,
        "use_rope_scaling": True,
        "rope_scaling_factor": factor,
        "rope_scaling_original_length": size(rope, "original_max_position_embeddings"),
        "rope_scaling_low_freq_factor": low,
        "rope_scaling_high_freq_factor": high,
    }


def _yarn(rope: Fields, fields: Fields) -> dict[str, Any]:
    """The fields of YaRN, with the defaults of transformers.

    It takes 0 for an absent number, ``mscale`` only together with ``mscale_all_dim``, and ``attention_factor`` before
    both.
    """
    unknown = sorted(rope.keys() - _YARN_NAMES)
    if unknown:
        raise ValueError(f"rope_type 'yarn' with {unknown[0]!r} is not implemented; convert another model")
    positions = size(fields, "max_position_embeddings", 2048)
    original = size(rope, "original_max_position_embeddings", positions)
    factor = number(rope, "factor", positions / original)
    if factor < 1:
        raise ValueError(f"factor is {factor}, but YaRN needs at least 1: correct the file")
    optional = {name: number(rope, name, 0.0) or None for name in ("mscale", "mscale_all_dim", "attention_factor")}
    if optional["attention_factor"] is not None or None in (optional["mscale"], optional["mscale_all_dim"]):
        optional |= {"mscale": None, "mscale_all_dim": None}
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": number(rope, "beta_fast", 0.0) or 32.0,
        "yarn_beta_slow": number(rope, "beta_slow", 0.0) or 1.0,
        "yarn_correction_range_round_to_int": flag(rope, "truncate", True),
        **{f"yarn_{name}": value for name, value in optional.items()},
    }


def config_fields(
    config: TransformerConfig, dtype: str, bos: int | None = None, eos: int | None = None
) -> dict[str, Any]:
    """The content of ``config.json``, whose ``dtype`` is transformers' name of the weights' dtype.

    Raises :class:`CheckpointError` for a model that transformers would refuse.
    """
    architecture = known_architecture(config)
    if architecture.name == "llama" and config.hidden_size % config.num_attention_heads:
        raise CheckpointError(
            f"transformers refuses a Llama whose hidden size ({config.hidden_size}) is not divisible by its heads "
            f"({config.num_attention_heads}): such a model cannot be converted."
        )
    return {
        "architectures": [architecture.hugging_face_class],
        "model_type": architecture.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.init_method_std,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "use_cache": True,
        **architecture.config_fields(config),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def _rope_scaling(config: TransformerConfig) -> dict[str, Any] | None:
    if config.position_embedding_type == "yarn":
        optional = {
            "mscale": config.yarn_mscale,
            "mscale_all_dim": config.yarn_mscale_all_dim,
            "attention_factor": config.yarn_attention_factor,
        }
        return {
            "rope_type": "yarn",
            "factor": config.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "truncate": config.yarn_correction_range_round_to_int,
            **{name: value for name, value in optional.items() if value is not None},
        }
    if not config.use_rope_scaling:
        return None
    return {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": config.rope_scaling_low_freq_factor,
        "high_freq_factor": config.rope_scaling_high_freq_factor,
        "original_max_position_embeddings": config.rope_scaling_original_length,
    }
