"""What a model's directory in Hugging Face's format says besides weights: architecture, tokenizer, generation settings.

Imports no torch, because the command line is completed from it before torch is imported.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.architectures.spec import Fields, MultimodalModel
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.files import explained
from megatron.checkpoint.hugging_face.config import multimodal_model, text_model_fields, transformer_config_of
from megatron.config.data import TokenizerConfig, TokenizerType
from megatron.errors import CheckpointError
from megatron.urls import from_hub, is_hub_name

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
    """The description of the model in ``source``.

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
        fields = text_model_fields(fields, str(config))
    architecture = transformer_config_of(fields, str(config))
    tokenizer = tokenizer_flags(source, source)
    return HuggingFaceDescription(architecture, tokenizer, read_generation_config(source), multimodal)


def no_directory(source: Path) -> str:
    """The sentence about a model that is not a directory."""
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
    """The type and the file of each tokenizer in ``source``, the preferred one first.

    Repositories of Llama 3 have Meta's file in ``original``.
    """
    if (source / TOKENIZER_JSON).is_file():
        yield "HuggingFaceTokenizer", source / TOKENIZER_JSON
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
