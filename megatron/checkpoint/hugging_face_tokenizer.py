"""A tokenizer in the files from which transformers' AutoTokenizer gives the ids of training."""

import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import explained, write_text_durably
from megatron.checkpoint.hugging_face.config import TOKENIZER_CONFIG, TOKENIZER_JSON, read_json_object
from megatron.checkpoint.hugging_face.write import write_json
from megatron.checkpoint.tokenizer_files import copy_files, files_by_name
from megatron.config.data import TokenizerConfig
from megatron.data.tokenizers import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer

# The class that uses tokenizer.json as it is. Classes of a model, such as LlamaTokenizer, replace parts of it.
_FAST_CLASS = "PreTrainedTokenizerFast"
# The class that passes texts to SentencePiece unchanged, and the name of its file.
_SENTENCEPIECE_CLASS, _SENTENCEPIECE_FILE = "BertGenerationTokenizer", "spiece.model"
# Types of models for which AutoTokenizer of transformers 5 uses another class than the one in tokenizer_config.json.
_CLASS_IS_IGNORED = {"qwen2": (_FAST_CLASS, _SENTENCEPIECE_CLASS), "mixtral": (_SENTENCEPIECE_CLASS,)}


def write_tokenizer(directory: Path, flags: TokenizerConfig, tokenizer: Tokenizer, model_type: str) -> list[str]:
    """Write the files of ``tokenizer``, which ``flags`` name, for a model whose ``config.json`` has ``model_type``.

    Returns what the user must know.
    """
    # The original goes along for programs that read it, and what is beside a tokenizer.json.
    files = {} if isinstance(tokenizer, GPT2BPETokenizer) else files_by_name(flags)
    original = files.pop(TOKENIZER_CONFIG, None)
    given = {} if original is None else read_json_object(original)
    given.pop("auto_map", None)  # code, which is not copied
    description, notes = tokenizer.tokenizer_json(), []
    if description is not None:
        files.pop(TOKENIZER_JSON, None)
        with explained("write", directory):
            write_text_durably(directory / TOKENIZER_JSON, description.decode())
        common = {"clean_up_tokenization_spaces": False, **_special_tokens(description, tokenizer)}
        settings = {**common, **given, "tokenizer_class": _FAST_CLASS}
    else:
        assert isinstance(tokenizer, SentencePieceTokenizer)
        (files[_SENTENCEPIECE_FILE],) = files.values()
        # The class would add tokens for the roles that have none.
        settings = {**tokenizer.special_pieces(), "pad_token": None, "sep_token": None}
        settings["tokenizer_class"] = _SENTENCEPIECE_CLASS
        notes.append(
            f"tokenizer: no tokenizer.json gives its ids, so transformers reads {_SENTENCEPIECE_FILE} with the package "
            "sentencepiece; decode ids with this package, too"
        )
    copy_files(files, directory)
    write_json(directory / TOKENIZER_CONFIG, settings)
    is_of_model = str(given.get("tokenizer_class", "")).startswith("Qwen2Tokenizer")
    if settings["tokenizer_class"] in _CLASS_IS_IGNORED.get(model_type, ()) and not is_of_model:
        notes.append(
            f"tokenizer: AutoTokenizer ignores tokenizer_config.json for models of type {model_type}, so load it with "
            f"transformers.{settings['tokenizer_class']}.from_pretrained"
        )
    return notes


def _special_tokens(description: bytes, tokenizer: Tokenizer) -> dict[str, Any]:
    """The names of the tokens that begin and end a text, by role."""
    names = {one["id"]: one["content"] for one in json.loads(description).get("added_tokens") or ()}
    roles = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eod}
    return {role: names[token] for role, token in roles.items() if token in names}
