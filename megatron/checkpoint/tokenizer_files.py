"""Copies of a tokenizer's files. Imports no torch."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron.checkpoint.files import explained, sync_directory, sync_file
from megatron.checkpoint.hugging_face_directory import TOKENIZER_FILES, TOKENIZER_JSON, TOKENIZER_MODEL
from megatron.config.data import TokenizerConfig
from megatron.data.tokenizers import tokenizer_files

_GPT2_FILES = ("vocab.json", "merges.txt")


def files_by_name(flags: TokenizerConfig) -> dict[str, Path]:
    """The tokenizer's files by their names in a copy; those that determine the ids are the last."""
    files = tuple(map(Path, tokenizer_files(flags)))
    if flags.tokenizer_type == "GPT2BPETokenizer":
        return dict(zip(_GPT2_FILES, files, strict=True))
    if flags.tokenizer_type != "HuggingFaceTokenizer":
        return dict.fromkeys((TOKENIZER_MODEL,), *files) if files else {}
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
