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

from megatron.checkpoint.directory import locate_checkpoint
from megatron.checkpoint.files import explained, sync_directory, sync_file
from megatron.checkpoint.hugging_face_directory import TOKENIZER_FILES, TOKENIZER_JSON, TOKENIZER_MODEL
from megatron.checkpoint.hugging_face_files import fresh_directory
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
    files = files_by_name(flags)
    if files and all(path.is_file() for path in files.values()):
        copy_files(files, directory)


def keep_copy(root: AnyPath, flags: TokenizerConfig) -> None:
    """Copy the tokenizer's files, if there are any, beside the checkpoints of ``root``, unless they are there."""
    files = files_by_name(flags)
    digest = tokenizer_digest(flags) if all(path.is_file() for path in files.values()) else None
    if digest is None:
        return
    place = _place_of(root, digest)
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
    """The flags for the tokenizer of a checkpoint: the path in the checkpoint if it exists, else a copy."""
    flags = state.flag_group("tokenizer", TokenizerConfig)
    if all(map(os.path.exists, tokenizer_files(flags))):
        return flags
    digests = [stage.data.get("tokenizer_digest") for stage in state.data_stages]
    if digests and digests[-1] is not None:
        copy = _flags_of_copy(flags, _place_of(root, str(digests[-1])))
        if copy is not None and tokenizer_digest(copy) == digests[-1]:
            return copy
    return _flags_of_copy(flags, locate_checkpoint(root, iteration) / COPY) or flags


def _place_of(root: AnyPath, digest: str) -> AnyPath:
    return root / COPY / digest.replace("+", "-")


def _flags_of_copy(flags: TokenizerConfig, place: AnyPath) -> TokenizerConfig | None:
    """``flags`` with the files in ``place``, which are copied to this machine from a URL; None if they are missing."""
    directory = _fetched(place) if isinstance(place, RemotePath) else place
    if flags.tokenizer_type == "GPT2BPETokenizer":
        vocabulary, merges = (str(directory / name) for name in _GPT2_FILES)
        copy = replace(flags, vocab_file=vocabulary, merge_file=merges)
    else:
        name = TOKENIZER_JSON if flags.tokenizer_type == "HuggingFaceTokenizer" else TOKENIZER_MODEL
        copy = replace(flags, tokenizer_model=str(directory / name))
    return copy if all(map(os.path.isfile, tokenizer_files(copy))) else None


def _fetched(place: RemotePath) -> Path:
    """A local directory with the tokenizer's files at a URL."""
    directory = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name in {*TOKENIZER_FILES, *_GPT2_FILES} & place.files().keys():
        (directory / name).write_bytes((place / name).read_bytes())
    return directory
