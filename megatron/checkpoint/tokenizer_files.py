"""Copies of a tokenizer's files, so that checkpoints can be read from any place; and in Hugging Face's format.

SAVE/tokenizer/DIGEST/tokenizer.model        of a run; DIGEST is the one in the data record of its checkpoints
SAVE/iter_0000000/tokenizer/tokenizer.json   of a checkpoint that a tool has written
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.directory import fresh_directory, locate_checkpoint
from megatron.checkpoint.files import AnyPath, RemotePath, explained, sync_directory, sync_file, write_text_durably
from megatron.checkpoint.hugging_face.config import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    read_json_object,
)
from megatron.checkpoint.hugging_face.weights import write_json
from megatron.checkpoint.schema import SavedState
from megatron.config.data import TokenizerConfig
from megatron.data.data_record import tokenizer_digest
from megatron.data.tokenizers import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer, tokenizer_files

COPY = "tokenizer"
"""The directory of copies."""
_GPT2_FILES = ("vocab.json", "merges.txt")


def files_by_name(flags: TokenizerConfig) -> dict[str, Path]:
    """The tokenizer's files by their names in a copy; those that determine the ids are the last."""
    files = tuple(map(Path, tokenizer_files(flags)))
    if flags.tokenizer_type == "GPT2BPETokenizer":
        return dict(zip(_GPT2_FILES, files, strict=True))
    if flags.tokenizer_type != "HuggingFaceTokenizer":
        return dict(zip((TOKENIZER_MODEL,), files))
    (path,) = files
    beside = {name: path.parent / name for name in TOKENIZER_FILES if name not in (TOKENIZER_JSON, TOKENIZER_MODEL)}
    return {name: one for name, one in beside.items() if one.is_file()} | {TOKENIZER_JSON: path}


def copy_files(files: Mapping[str, Path], directory: Path) -> None:
    """Copy ``files`` to new files of ``directory``, on stable storage."""
    with explained("write", directory):
        directory.mkdir(exist_ok=True)
        for name, path in files.items():
            with path.open("rb") as content, (directory / name).open("xb") as copy:
                shutil.copyfileobj(content, copy)
                sync_file(copy)
        sync_directory(directory)


def copy_tokenizer_of(flags: TokenizerConfig, directory: Path) -> None:
    """Copy the tokenizer's files to ``directory``, if there are any and they exist."""
    if _has_files(flags):
        copy_files(files_by_name(flags), directory)


def flags_of_copy(flags: TokenizerConfig, directory: Path) -> TokenizerConfig:
    """``flags`` for the files that :func:`copy_tokenizer_of` writes to ``directory``; unchanged if there are none."""
    return _flags_in(flags, directory) if _has_files(flags) else flags


def keep_copy(root: AnyPath, flags: TokenizerConfig) -> None:
    """Copy the tokenizer's files, if there are any, beside the checkpoints of ``root``, unless they are there."""
    digest = tokenizer_digest(flags) if _has_files(flags) else None
    if digest is None:
        return
    place, files = root / COPY / digest.replace("+", "-"), files_by_name(flags)
    if isinstance(place, RemotePath):
        there = place.files()
        for name, path in files.items():  # those that determine the ids are the last: then the copy is complete
            if there.get(name) != path.stat().st_size:
                (place / name).write_bytes(path.read_bytes())
        return
    with explained("write", place):
        if place.exists():
            return
    with fresh_directory(place) as saving:
        copy_files(files, saving)


def tokenizer_of(state: SavedState, root: AnyPath, iteration: int) -> TokenizerConfig:
    """The flags for the tokenizer of a checkpoint: its own path if the tokenizer of training is there, else a copy."""
    # A relative path may be of another file here.
    flags = state.flag_group("tokenizer", TokenizerConfig)
    digest = state.data_stages[-1].data.get("tokenizer_digest") if state.data_stages else None
    if all(map(os.path.exists, tokenizer_files(flags))) and digest in (None, tokenizer_digest(flags)):
        return flags
    if digest is not None:
        copy = _existing_copy(flags, root / COPY / str(digest).replace("+", "-"))
        if copy is not None and tokenizer_digest(copy) == digest:
            return copy
    return _existing_copy(flags, locate_checkpoint(root, iteration) / COPY) or flags


def _has_files(flags: TokenizerConfig) -> bool:
    """Whether the tokenizer has files, and they exist."""
    files = files_by_name(flags)
    return bool(files) and all(path.is_file() for path in files.values())


def _existing_copy(flags: TokenizerConfig, place: AnyPath) -> TokenizerConfig | None:
    """``flags`` with the files in ``place``, which are copied to this machine from a URL; None if they are missing."""
    if isinstance(place, RemotePath):
        remote, place = place, Path(tempfile.mkdtemp(prefix="tokenizer-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        for name in {*TOKENIZER_FILES, *_GPT2_FILES} & remote.files().keys():
            (place / name).write_bytes((remote / name).read_bytes())
    copy = _flags_in(flags, place)
    return copy if all(map(os.path.isfile, tokenizer_files(copy))) else None


def _flags_in(flags: TokenizerConfig, directory: Path) -> TokenizerConfig:
    """``flags`` with the files of a copy in ``directory``."""
    if flags.tokenizer_type == "GPT2BPETokenizer":
        vocabulary, merges = (str(directory / name) for name in _GPT2_FILES)
        return replace(flags, vocab_file=vocabulary, merge_file=merges)
    name = TOKENIZER_JSON if flags.tokenizer_type == "HuggingFaceTokenizer" else TOKENIZER_MODEL
    return replace(flags, tokenizer_model=str(directory / name))


# --- in Hugging Face's format -------------------------------------------------------------------------------


def copy_tokenizer(source: Path, directory: Path) -> list[str]:
    """Copy the tokenizer files in ``source``, a directory or one file; returns their names.

    A single file is renamed to ``tokenizer.model``, except for a ``tokenizer.json``, which is copied with its
    companions.
    """
    if source.is_dir() or source.name in TOKENIZER_FILES:
        beside = source if source.is_dir() else source.parent
        copied = {name: beside / name for name in TOKENIZER_FILES if (beside / name).is_file()}
    else:
        copied = {TOKENIZER_MODEL: source} if source.is_file() else {}
    if copied:
        copy_files(copied, directory)
    return list(copied)


# The class that uses tokenizer.json as it is. Classes of a model, such as LlamaTokenizer, replace parts of it.
_FAST_CLASS = "PreTrainedTokenizerFast"
# The class that passes texts to SentencePiece unchanged, and the name of its file.
_SENTENCEPIECE_CLASS, _SENTENCEPIECE_FILE = "BertGenerationTokenizer", "spiece.model"
# Types of models for which AutoTokenizer of transformers 5 uses another class than the one in tokenizer_config.json.
_CLASS_IS_IGNORED = {"qwen2": (_FAST_CLASS, _SENTENCEPIECE_CLASS), "mixtral": (_SENTENCEPIECE_CLASS,)}


def write_tokenizer(directory: Path, flags: TokenizerConfig, tokenizer: Tokenizer, model_type: str) -> list[str]:
    """Write the files of ``tokenizer``, which ``flags`` name; returns notes for the user.

    ``config.json`` of the model has ``model_type``.
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
        # The names of the tokens that begin and end a text.
        names = {one["id"]: one["content"] for one in json.loads(description).get("added_tokens") or ()}
        roles = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eod}
        special = {role: names[token] for role, token in roles.items() if token in names}
        settings = {"clean_up_tokenization_spaces": False, **special, **given, "tokenizer_class": _FAST_CLASS}
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
