"""A model's directory in Hugging Face's format: ``config.json``, safetensors shards with an index, tokenizer.

Only safetensors are opened, never a pickle. A directory is written under a hidden name next to its final name, synced,
and renamed when it is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.architectures.spec import MultimodalModel
from megatron.checkpoint.boxes import Place
from megatron.checkpoint.directory import hidden_path
from megatron.checkpoint.files import explained, sync_directory, sync_file, write_text_durably
from megatron.checkpoint.hugging_face.config import TOKENIZER_FILES, TOKENIZER_MODEL, no_directory, read_json_object
from megatron.checkpoint.safetensors_file import DTYPES, Entry, SafetensorsStream, aligned, packed
from megatron.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
_OPEN_FILES = 4
_FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFaceWeights:
    """The tensors in a directory, readable in any part."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # A few files stay open and mapped: neighbouring layers share one.
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)
        self._file_of = self._find_files()
        self._prefix = ""
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in self._file_of}

    def keep_text_model(self, multimodal: MultimodalModel) -> list[str]:
        """Leave out the tensors beside the text model, whose tensors lose their prefix; returns the names left out."""
        text = [name for name in self._file_of if name.startswith(multimodal.text_prefix)]
        left_out = [name for name in self._file_of if name.startswith(multimodal.other_prefixes)]
        unknown = self._file_of.keys() - {*text, *left_out}
        if unknown:
            raise CheckpointError(
                f"{self._directory} has {min(unknown)}, which a {multimodal.hugging_face_class} does not have: it is "
                "another model, or is quantized or adapted; merge or dequantize it first."
            )
        self._prefix = multimodal.text_prefix
        self.shapes = {name.removeprefix(self._prefix): self.shapes[name] for name in text}
        return left_out

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor, which must be floating point with at least 16 bits."""
        dtype = self._slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} in {self._directory} is {dtype}, a quantized or integer format: save the model in bf16, fp16 "
                "or fp32 first."
            )
        return Entry(DTYPES[dtype], self.shapes[name])

    def read(self, name: str, place: Place) -> Tensor:
        """A part of a tensor as a view of the mapped file; only the used part is read."""
        part: Tensor = self._slice(name)[place]
        return part

    def _find_files(self) -> dict[str, str]:
        """The file of every tensor."""
        if (self._directory / SINGLE).exists():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        if not (self._directory / INDEX).exists():
            raise CheckpointError(_why_nothing(self._directory))
        weight_map = read_json_object(self._directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self._directory / INDEX} has no weight_map: download the model again.")
        for file in weight_map.values():
            # A name with a directory could lead out of the model's directory.
            if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{self._directory / INDEX} names {file!r}, not a safetensors file of this directory: download the "
                    "model again."
                )
        return weight_map

    def _slice(self, name: str) -> Any:
        name = self._prefix + name
        path = self._directory / self._file_of[name]
        try:
            return self._open(path.name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged ({error}): download the model again.") from error

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        try:
            with explained("read", path):
                return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({error}): download the model again."
            ) from error


def _why_nothing(directory: Path) -> str:
    if not directory.is_dir():
        return no_directory(directory)
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        return (
            f"{directory} holds {pickles[0]}, pickled weights, which can execute code and are never opened here: fetch "
            "the model's safetensors files, or have transformers write them (save_pretrained)."
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX}: fetch the model's safetensors files."


# --- writing -----------------------------------------------------------------------------------------------


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """A hidden directory next to ``target``, renamed to ``target`` at the end, or removed after an error.

    Raises :class:`CheckpointError` if ``target`` exists and is not an empty directory. Leftovers of a killed conversion
    to ``target`` are removed.
    """
    check_free(target)
    with explained("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        leftover = re.compile(re.escape(f".{target.name}.saving-") + "[0-9a-f]{8}")
        for path in target.parent.iterdir():
            if leftover.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        saving = hidden_path(target, "saving")
        saving.mkdir()
    try:
        yield saving
        with explained("write", target):
            sync_directory(saving)
            os.rename(saving, target)
            sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise


def check_free(target: Path) -> None:
    """Raise :class:`CheckpointError` if ``target`` exists and is not an empty directory."""
    with explained("write", target):
        in_the_way = target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
    if in_the_way:
        raise CheckpointError(f"{target} already exists and is not overwritten: choose another directory.")


def write_weights(
    directory: Path,
    entries: Mapping[str, Entry],
    parts_of: Callable[[str], Iterable[Tensor]],
    max_shard_bytes: int,
) -> None:
    """Write ``entries`` in shards of at most ``max_shard_bytes`` (or one tensor), with an index if there are several.
    ``parts_of`` returns the parts of a tensor one after the other."""
    shards = [dict(shard) for shard in packed(entries.items(), lambda item: item[1].nbytes, max_shard_bytes)]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        # transformers refuses files without a format.
        with (
            explained("write", directory / name),
            SafetensorsStream(directory / name, aligned(shard), {"format": "pt"}) as stream,
        ):
            for tensor in aligned(shard):
                for part in parts_of(tensor):
                    stream.write(part)
                    # Freed before the next part is allocated.
                    del part
    if len(shards) > 1:
        sizes = {
            "total_size": sum(entry.nbytes for entry in entries.values()),
            "total_parameters": sum(prod(entry.shape) for entry in entries.values()),
        }
        write_json(directory / INDEX, {"metadata": sizes, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an indented JSON object on stable storage."""
    with explained("write", path):
        write_text_durably(path, json.dumps(content, indent=2) + "\n")


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
        with explained("write", directory):
            directory.mkdir(exist_ok=True)
            for name, path in copied.items():
                with path.open("rb") as content, (directory / name).open("xb") as copy:
                    shutil.copyfileobj(content, copy)
                    sync_file(copy)
            sync_directory(directory)
    return list(copied)
