"""A checkpoint on disk: safetensors files and one JSON manifest.

    rank_00003.safetensors   the pieces that rank 3 wrote, one entry each
    manifest.json            for each global tensor its dtype, shape and chunks (place, file, key of the
                             entry); size and XXH3-128 digest of every file; under "state" all that is not
                             a tensor; and before all this the digest of its own text

``SafetensorsWriter`` and ``SafetensorsReader`` store what the planners of ``torch.distributed.checkpoint``
(DCP) decide. Nothing is ever pickled to disk or unpickled from it, so a checkpoint cannot execute code.
"""

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, WrittenFile, sync_file, write_safetensors
from megatron.config.errors import CheckpointError

MANIFEST = "manifest.json"
_BLOCK = 4 << 20  # bytes read at a time
FORMAT_VERSION = 2

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

_REMEDIES = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "free some space or choose another directory",
    errno.EACCES: "give this user access to it or choose another directory",
    errno.EPERM: "give this user access to it or choose another directory",
    errno.EROFS: "choose a directory that can be written",
    errno.ENOENT: "every rank must see the whole checkpoint, so use a file system that all nodes share",
    errno.EEXIST: "something else has this name, so move it away",
    errno.EISDIR: "something else has this name, so move it away",
    errno.ENOTDIR: "a part of this path is a file, so choose another directory",
}


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`CheckpointError` that says what failed, where, and what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the file system")
        raise CheckpointError(f"Cannot {action} {path} ({error.strerror or error}): {remedy}.") from error


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory: they order its changes themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_text_durably(path: Path, text: str) -> None:
    """Create ``path`` with ``text`` on stable storage; the caller syncs the directory."""
    with path.open("xb") as file:
        file.write(text.encode())
        sync_file(file)


# --- the manifest ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkLocation:
    """Where the bytes of one chunk of a global tensor are."""

    file: WrittenFile
    key: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    metadata: Metadata
    """DCP's: the global tensors and their chunks; ``storage_data`` has the location of each chunk."""
    state: dict[str, Any]
    """What is not a tensor, as JSON gives it back."""

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The global tensors by name."""
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)

    def files(self) -> set[WrittenFile]:
        """The files that hold the tensors."""
        return {
            location.file for location in cast(dict[MetadataIndex, ChunkLocation], self.metadata.storage_data).values()
        }

    def location(self, index: MetadataIndex) -> ChunkLocation:
        """Where the chunk at ``index`` lies."""
        location: ChunkLocation = self.metadata.storage_data[index]
        return location


def encode_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``."""
    files: dict[str, dict[str, int | str]] = {}
    tensors = {}
    for name, tensor in manifest.tensors().items():
        chunks = []
        for chunk in tensor.chunks:
            location = manifest.location(MetadataIndex(name, chunk.offsets))
            files[location.file.name] = {"bytes": location.file.size, "xxh3_128": location.file.digest}
            place = {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
            chunks.append({**place, "file": location.file.name, "key": location.key})
        dtype = DTYPE_NAMES[tensor.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    content = {"format_version": FORMAT_VERSION, "state": manifest.state, "files": files, "tensors": tensors}
    text = json.dumps(content)
    return f"{_manifest_head(text)}{text}}}"


def _manifest_head(text: str) -> str:
    """What stands before the ``text`` of a manifest's content."""
    return f'{{"xxh3_128": "{xxhash.xxh3_128_hexdigest(text.encode())}", "manifest": '


def decode_manifest(text: str) -> Manifest:
    """The inverse of :func:`encode_manifest`; a text that is not a manifest is a ``ValueError``."""
    try:
        document = json.loads(text)["manifest"]
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {document['format_version']}; this code reads {FORMAT_VERSION}")
        head_length = len(_manifest_head(""))
        if text[:head_length] != _manifest_head(text[head_length:-1]):
            raise ValueError("its digest is not that of its content")
        if not isinstance(document["state"], dict):
            raise ValueError("its state is not an object")
        files = {name: _decode_file(name, record) for name, record in document["files"].items()}
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, record in document["tensors"].items():
            _decode_tensor(name, record, files, metadata)
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error
    return Manifest(metadata, document["state"])


def _decode_file(name: str, record: dict[str, Any]) -> WrittenFile:
    # A name with a directory in it could make the reader leave the checkpoint.
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError(f"bad file name {name!r}")
    return WrittenFile(name, int(record["bytes"]), str(record["xxh3_128"]))


def _decode_tensor(name: str, record: dict[str, Any], files: Mapping[str, WrittenFile], metadata: Metadata) -> None:
    size = torch.Size(record["shape"])
    chunks = []
    for entry in record["chunks"]:
        chunk = ChunkStorageMetadata(torch.Size(entry["offset"]), torch.Size(entry["shape"]))
        chunks.append(chunk)
        location = ChunkLocation(files[entry["file"]], str(entry["key"]))
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = location
    if not _chunks_fill(chunks, size):
        raise ValueError(f"the chunks of {name} do not fill its shape {list(size)}")
    properties = TensorProperties(dtype=DTYPES[record["dtype"]])
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)


def _chunks_fill(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether all chunks lie inside ``size`` and have its number of elements together."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        for start, length, limit in zip(chunk.offsets, chunk.sizes, size):
            if start < 0 or length < 0 or start + length > limit:
                return False
    return sum(prod(chunk.sizes) for chunk in chunks) == prod(size)


def read_manifest(directory: Path) -> Manifest:
    """Read ``directory/manifest.json``; raises :class:`CheckpointError` when it is missing or damaged."""
    path = directory / MANIFEST
    with explained("read", path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory} is not a checkpoint (it has no {MANIFEST}): load another one."
            ) from None
    try:
        return decode_manifest(content.decode())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): load another checkpoint.") from error


# --- DCP's two sides ---------------------------------------------------------------------------------------


class SafetensorsWriter(StorageWriter):
    """Writes a checkpoint into one directory.

    On the coordinator, ``begin`` makes the directory before anything is written, and ``commit`` is called
    with it once every file and the manifest are on stable storage. ``state`` is the coordinator's.
    """

    def __init__(self, state: Mapping[str, JSON], begin: Callable[[], Path], commit: Callable[[Path], object]) -> None:
        self._state = state
        self._begin = begin
        self._commit = commit
        self.directory: Path | None = None
        """The coordinator's: the directory that ``begin`` made."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP asks this only when it has to choose a storage itself: it never chooses this one."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a state that is not JSON before anything is written."""
        if is_coordinator:
            json.dumps(self._state)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add on a single rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the directory and tell every rank its file there."""
        self.directory = self._begin()
        return [
            dataclasses.replace(plan, storage_data=self.directory / f"rank_{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces into its file (none for no pieces) and sync it."""
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, Tensor), item
            tensors[chunk_key(item.index)] = piece
        future: Future[list[WriteResult]] = Future()
        if not tensors:
            future.set_result([])
            return future
        path: Path = plan.storage_data
        with explained("write", path):
            file = write_safetensors(path, tensors)
            sync_directory(path.parent)
        future.set_result([_write_result(item.index, tensors, file) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: write the manifest, then commit."""
        assert self.directory is not None
        locations = {result.index: result.storage_data for rank in results for result in rank}
        metadata = dataclasses.replace(metadata, storage_data=locations)
        path = self.directory / MANIFEST
        with explained("write", path):
            write_text_durably(path, encode_manifest(Manifest(metadata, dict(self._state))))
            sync_directory(self.directory)
        self._commit(self.directory)


def chunk_key(index: MetadataIndex) -> str:
    """The name of a chunk's entry in its file, such as ``layers.0.mlp.linear_fc2.weight@0,512``."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _write_result(index: MetadataIndex, tensors: Mapping[str, Tensor], file: WrittenFile) -> WriteResult:
    key = chunk_key(index)
    return WriteResult(index, tensors[key].nbytes, ChunkLocation(file, key))


class SafetensorsReader(StorageReader):
    """Reads a checkpoint from the directory that ``locate`` gives.

    Each rank maps only the files that hold what it needs. ``locate`` is called when the load has begun, so
    that other ranks learn of an error that it raises.
    """

    def __init__(self, locate: Callable[[], Path]) -> None:
        self._locate = locate
        self._directory = Path()
        self.manifest = Manifest(Metadata({}), {})
        self._error: CheckpointError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP asks this only when it has to choose a storage itself: it never chooses this one."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the manifest."""
        try:
            self._directory = self._locate()
            self.manifest = read_manifest(self._directory)
        except CheckpointError as error:
            # DCP would log an error raised here as a warning and go on with a vague one of its own, so it is
            # raised by the next step.
            self._error = error
        return self.manifest.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the :class:`CheckpointError` that reading the manifest met."""
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item of the plan into its place; raises :class:`CheckpointError` for a bad file."""
        items_of: dict[WrittenFile, list[ReadItem]] = {}
        for item in plan.items:
            items_of.setdefault(self.manifest.location(item.storage_index).file, []).append(item)
        for file, items in items_of.items():
            self._read_file(file, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, file: WrittenFile, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        path = self._directory / file.name
        check_file(self._directory, file)
        try:
            with explained("read", path), safe_open(path, framework="pt") as entries:
                for item in items:
                    self._read_item(entries, item, planner)
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): load another checkpoint.") from error

    def _read_item(self, entries: Any, item: ReadItem, planner: LoadPlanner) -> None:
        key = self.manifest.location(item.storage_index).key
        place = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths))
        # A view of the mapped file: only the pages under it are read, by the copy.
        piece: Tensor = entries.get_slice(key)[place]
        dtype = self.manifest.tensors()[item.storage_index.fqn].properties.dtype
        if piece.shape != item.lengths or piece.dtype != dtype:
            raise ValueError(f"its entry {key} is not what the manifest says")
        target = planner.resolve_tensor(item).detach()
        target.copy_(piece)
        planner.commit_tensor(item, target)


def check_file(directory: Path, file: WrittenFile) -> None:
    """Raise :class:`CheckpointError` when ``file`` is missing from ``directory`` or has another size."""
    path = directory / file.name
    with explained("read", path):
        size = path.stat().st_size
    if size != file.size:
        raise CheckpointError(f"{path} has {size:,} bytes but was written with {file.size:,}: load another checkpoint.")


def verify_file(directory: Path, file: WrittenFile) -> None:
    """Raise :class:`CheckpointError` when ``file`` is missing from ``directory``, or has other bytes than were
    written."""
    check_file(directory, file)
    path = directory / file.name
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK))
    with explained("read", path), path.open("rb", buffering=0) as content:
        while length := content.readinto(buffer):
            digest.update(buffer[:length])
    if digest.hexdigest() != file.digest:
        raise CheckpointError(
            f"{path} is damaged (its digest is {digest.hexdigest()} but was {file.digest} when it was written): load "
            "another checkpoint."
        )
