"""Orders of samples on disk: ``.npy`` arrays under the md5 of a JSON description of all that they depend on.

Keys and files are those of Megatron-LM.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.config.errors import DataError
from megatron.data.build_lock import load_or_build_once, write_atomically

Description = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


def description_hash(description: Description) -> str:
    """The cache key of a description: the md5 of its JSON text, in which the order of fields counts."""
    return hashlib.md5(_description_text(description).encode(), usedforsecurity=False).hexdigest()


def _description_text(description: Description) -> str:
    return json.dumps(description, indent=4)


def load_or_build(
    directory: str | None,
    description: Description,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    newer_than: float,
    build: Callable[[], Arrays],
) -> Arrays:
    """The arrays named in ``shapes``: mapped from the cache, or built and written to it.

    An entry counts only if its arrays have these shapes and are not older than the data (``newer_than``,
    seconds since the epoch): the key names the data by path, and someone may have made them anew.
    One process builds and the others wait for it. Without a ``directory`` nothing is kept.
    """
    if directory is None:
        return build()
    split = description.get("index_split") or description["split"]
    stem = os.path.join(directory, f"{description_hash(description)}-{description['class']}-{split}")

    def load() -> Arrays | None:
        return _load(stem, shapes, newer_than)

    def build_and_store() -> Arrays:
        arrays = build()
        _store(stem, description, arrays, newer_than)
        return load() or arrays

    try:
        return load_or_build_once(stem, load, build_and_store)
    except OSError as error:
        raise DataError(
            f"Cannot write the sample order to {directory} ({error.strerror or error}): give a writable "
            "directory that all ranks share with --data-cache-path."
        ) from error


def _store(stem: str, description: Description, arrays: Arrays, newer_than: float) -> None:
    text = _description_text(description).encode()
    write_atomically(f"{stem}-description.txt", lambda file: file.write(text))
    for name, array in arrays.items():

        def save(file: BinaryIO, array: npt.NDArray[Any] = array) -> None:
            np.save(file, array, allow_pickle=False)
            file.flush()
            if os.fstat(file.fileno()).st_mtime < newer_than:  # the clock that wrote the data is ahead of this one
                os.utime(file.fileno(), (math.ceil(newer_than),) * 2)  # some file systems keep whole seconds

        write_atomically(f"{stem}-{name}.npy", save)


def _load(stem: str, shapes: Mapping[str, tuple[int, ...]], newer_than: float) -> Arrays | None:
    """The arrays of an entry, mapped, or None when there is none or it does not fit the data."""
    arrays: Arrays = {}
    for name, shape in shapes.items():
        path = f"{stem}-{name}.npy"
        try:
            if os.path.getmtime(path) < newer_than:
                return None
            array = np.load(path, mmap_mode=None if 0 in shape else "r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if array.shape != shape:
            return None
        arrays[name] = array.view(np.ndarray)  # indexing a plain array is several times faster
    return arrays
