"""Sample orders on disk: ``.npy`` arrays under the md5 of a JSON description of their parameters.

Keys and names of these files are Megatron-LM's. ``…-digests.json`` has the size and XXH3-128 of each. An entry is used
only if every byte matches its digest; otherwise it is built again.
"""

import hashlib
import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.data.build_lock import load_or_build_once, write_atomically
from megatron.data.digests import BlockDigests, DigestedWriter, is_sealed, seal
from megatron.errors import DataError

_logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1

Description = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


def description_hash(description: Description) -> str:
    """Cache key of a description: the md5 of its JSON text, in which the order of fields matters."""
    return hashlib.md5(_description_text(description).encode(), usedforsecurity=False).hexdigest()


def _description_text(description: Description) -> str:
    return json.dumps(description, indent=4)


def load_or_build(
    directory: str | None,
    description: Description,
    *,
    shapes: Mapping[str, tuple[int | None, ...]],
    newer_than: float,
    build: Callable[[], Arrays],
) -> Arrays:
    """The arrays named in ``shapes``: mapped from the cache, or built and written to it.

    An entry is used only if its files match their digests, and its arrays have these shapes (None: any length) and are
    not older than the data (``newer_than``, seconds since the epoch): the key has the path of the data, which may have
    been replaced. One process builds while the others wait. Without a ``directory`` nothing is stored.
    """
    if directory is None:
        return build()
    split = description.get("index_split") or description["split"]
    stem = os.path.join(directory, f"{description_hash(description)}-{description['class']}-{split}")
    named: set[str] = set()

    def load() -> Arrays | None:
        try:
            return _load(stem, shapes, newer_than)
        except _UnusableEntry as error:
            reason = str(error)
        if reason not in named:  # a waiting process polls
            _logger.warning("The cached sample order %s: building it again.", reason)
            named.add(reason)
        return None

    def build_and_store() -> Arrays:
        arrays = build()
        _store(stem, description, arrays, newer_than)
        return load() or arrays

    try:
        return load_or_build_once(stem, load, build_and_store)
    except OSError as error:
        raise DataError(
            f"Cannot write the sample order to {directory} ({error.strerror or error}): use a writable "
            "directory that all ranks share with --data-cache-path."
        ) from error


class _UnusableEntry(Exception):
    """An entry that exists but must not be used; the message begins with the file."""


def _digests_path(stem: str) -> str:
    return f"{stem}-digests.json"


def _store(stem: str, description: Description, arrays: Arrays, newer_than: float) -> None:
    # Nothing is synced, because a reader compares every byte with its digest: a blend of 1,000 corpora has 5,000 files.
    # Without this file there is no entry, so waiting processes do not read unfinished arrays.
    with suppress(FileNotFoundError):
        os.remove(_digests_path(stem))
    text = _description_text(description).encode()
    write_atomically(f"{stem}-description.txt", lambda file: file.write(text), sync=False)
    records = {}
    for name, array in arrays.items():

        def save(file: BinaryIO, array: npt.NDArray[Any] = array) -> dict[str, int | str]:
            writer = DigestedWriter(file, BlockDigests(None))
            np.save(writer, np.ascontiguousarray(array), allow_pickle=False)
            file.flush()
            if os.fstat(file.fileno()).st_mtime < newer_than:  # the data's clock is ahead
                os.utime(file.fileno(), (math.ceil(newer_than),) * 2)  # some file systems keep whole seconds
            return {"bytes": writer.digests.size, "xxh3_128": writer.digests.finish()[0].hex()}

        records[name] = write_atomically(f"{stem}-{name}.npy", save, sync=False)
    sealed = seal("digests", json.dumps({"format_version": _FORMAT_VERSION, "files": records})).encode()
    write_atomically(_digests_path(stem), lambda file: file.write(sealed), sync=False)


def _load(stem: str, shapes: Mapping[str, tuple[int | None, ...]], newer_than: float) -> Arrays | None:
    """The mapped arrays of an entry; None if there is none, or an entry of other data.

    Raises :class:`_UnusableEntry` for a damaged entry, or one without digests.
    """
    paths = {name: f"{stem}-{name}.npy" for name in shapes}
    records = _read_digests(stem, any(map(os.path.exists, paths.values())))
    if records is None:
        return None
    arrays: Arrays = {}
    for name, path in paths.items():
        try:
            with open(path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_mtime < newer_than:
                    return None
                size, record = os.fstat(file.fileno()).st_size, records.get(name)
                if record is None or size != record["bytes"]:
                    raise _UnusableEntry(f"{path} has {size} bytes, a different size than when it was written")
                if BlockDigests(None).read(file)[0].hex() != record["xxh3_128"]:
                    raise _UnusableEntry(f"{path} is damaged (its digest does not match)")
                array = _map_array(file)
        except OSError as error:
            raise _UnusableEntry(f"{path} cannot be read ({error.strerror})") from error
        wanted = shapes[name]
        if len(array.shape) != len(wanted) or any(
            size not in (None, found) for size, found in zip(wanted, array.shape)
        ):
            return None
        arrays[name] = array
    return arrays


def _read_digests(stem: str, has_arrays: bool) -> dict[str, Any] | None:
    """The records in ``…-digests.json``; None if there is no entry."""
    path = _digests_path(stem)
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = json.loads(text)
        if not is_sealed("digests", text) or document["digests"]["format_version"] != _FORMAT_VERSION:
            raise ValueError("its digest does not match its content")
        files: dict[str, Any] = document["digests"]["files"]
        return files
    except FileNotFoundError:
        if os.path.exists(f"{stem}.lock") or not has_arrays:  # it is being built, or there is none
            return None
        raise _UnusableEntry(f"{stem} has no digests (another program or an older version wrote it)") from None
    except OSError as error:
        raise _UnusableEntry(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _UnusableEntry(f"{path} is damaged ({type(error).__name__})") from error


def _map_array(file: BinaryIO) -> npt.NDArray[Any]:
    """The mapped array of a verified ``.npy`` file."""
    file.seek(0)
    assert np.lib.format.read_magic(file) == (1, 0)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if 0 in shape:
        return np.empty(shape, dtype)
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # A plain array, not np.memmap: indexing it is several times faster.
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)
