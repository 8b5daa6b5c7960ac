"""Copies of a tokenizer's files: beside the checkpoints of a run, so that they can be read from any place.

SAVE/tokenizer/DIGEST/tokenizer.model        of a run; DIGEST is the one in the data record of its checkpoints
SAVE/iter_0000000/tokenizer/tokenizer.json   of a checkpoint that a tool has written
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.directory import fresh_directory, locate_checkpoint
from megatron.checkpoint.files import explained, sync_directory, sync_file
from megatron.checkpoint.hugging_face.config import TOKENIZER_FILES, TOKENIZER_JSON, TOKENIZER_MODEL
from megatron.checkpoint.remote_path import AnyPath, RemotePath
from megatron.checkpoint.schema import SavedState
from megatron.config.data import TokenizerConfig
from megatron.data.data_record import tokenizer_digest
from megatron.data.tokenizers import tokenizer_files

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
    """``flags`` for the files that :func:`copy_tokenizer_of` writes, which will be in ``directory``; without any,
    ``flags`` as they are."""
    return _flags_in(flags, directory) if _has_files(flags) else flags


def keep_copy(root: AnyPath, flags: TokenizerConfig) -> None:
    """Copy the tokenizer's files, if there are any, beside the checkpoints of ``root``, unless they are there."""
    digest = tokenizer_digest(flags) if _has_files(flags) else None
    if digest is None:
        return
    place, files = _place_of(root, digest), files_by_name(flags)
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
    """The flags for the tokenizer of a checkpoint: the path in the checkpoint if the tokenizer of training is there,
    else a copy. A relative path may be of another file here."""
    flags = state.flag_group("tokenizer", TokenizerConfig)
    digest = state.data_stages[-1].data.get("tokenizer_digest") if state.data_stages else None
    if all(map(os.path.exists, tokenizer_files(flags))) and digest in (None, tokenizer_digest(flags)):
        return flags
    if digest is not None:
        copy = _existing_copy(flags, _place_of(root, str(digest)))
        if copy is not None and tokenizer_digest(copy) == digest:
            return copy
    return _existing_copy(flags, locate_checkpoint(root, iteration) / COPY) or flags


def _place_of(root: AnyPath, digest: str) -> AnyPath:
    return root / COPY / digest.replace("+", "-")


def _has_files(flags: TokenizerConfig) -> bool:
    """Whether the tokenizer has files, and they exist."""
    files = files_by_name(flags)
    return bool(files) and all(path.is_file() for path in files.values())


def _existing_copy(flags: TokenizerConfig, place: AnyPath) -> TokenizerConfig | None:
    """``flags`` with the files in ``place``, which are copied to this machine from a URL; None if they are missing."""
    copy = _flags_in(flags, _fetched(place) if isinstance(place, RemotePath) else place)
    return copy if all(map(os.path.isfile, tokenizer_files(copy))) else None


def _flags_in(flags: TokenizerConfig, directory: Path) -> TokenizerConfig:
    """``flags`` with the files of a copy in ``directory``."""
    if flags.tokenizer_type == "GPT2BPETokenizer":
        vocabulary, merges = (str(directory / name) for name in _GPT2_FILES)
        return replace(flags, vocab_file=vocabulary, merge_file=merges)
    name = TOKENIZER_JSON if flags.tokenizer_type == "HuggingFaceTokenizer" else TOKENIZER_MODEL
    return replace(flags, tokenizer_model=str(directory / name))


def _fetched(place: RemotePath) -> Path:
    """A local directory with the tokenizer's files at a URL."""
    directory = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name in {*TOKENIZER_FILES, *_GPT2_FILES} & place.files().keys():
        (directory / name).write_bytes((place / name).read_bytes())
    return directory
