"""A checkpoint on disk: safetensors files and one JSON manifest.

    rank_00003.safetensors   the pieces that rank 3 wrote, one entry each
    manifest.json            for each global tensor its dtype, shape and chunks (place, file, key of the
                             entry); size and XXH3-128 digest of every file; under "state" all that is not
                             a tensor; and before all this the digest of its own text

``SafetensorsWriter`` and ``SafetensorsReader`` store what the planners of ``torch.distributed.checkpoint``
(DCP) decide. Nothing is ever pickled to disk or unpickled from it, so a checkpoint cannot execute code.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint.directory import commit, new_saving_directory, remove_checkpoint
from megatron.checkpoint.files import WrittenFile, check_file, explained, sync_directory
from megatron.checkpoint.manifest import JSON, ChunkLocation, Manifest, encode_manifest, read_manifest
from megatron.checkpoint.safetensors_file import write_safetensors
from megatron.config.errors import CheckpointError


class Saving(Protocol):
    """One save, as it comes to disk: at once (:class:`DirectSaving`) or in the background."""

    def begin(self) -> Path:
        """On the coordinator, before anything is written: make a directory for it."""
        ...

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """On a rank that has some: write its tensors."""
        ...

    def commit(self, directory: Path, manifest: Manifest) -> None:
        """On the coordinator, after all ranks: make it visible."""
        ...

    def abandon(self) -> None:
        """On every rank, after a failure: leave nothing behind."""
        ...


class DirectSaving:
    """Everything is on stable storage when a call returns."""

    def __init__(self, root: Path, iteration: int) -> None:
        self._root, self._iteration = root, iteration
        self._directory: Path | None = None

    def begin(self) -> Path:
        """Make a hidden directory."""
        self._directory = new_saving_directory(self._root, self._iteration)
        return self._directory

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """Write the file and sync it."""
        with explained("write", path):
            file = write_safetensors(path, tensors)
            sync_directory(path.parent)
        return file

    def commit(self, directory: Path, manifest: Manifest) -> None:
        """Write the manifest and rename the directory."""
        commit(directory, self._root, self._iteration, encode_manifest(manifest))

    def abandon(self) -> None:
        """Remove the directory where it was made."""
        if self._directory is not None:
            remove_checkpoint(self._directory)


class SafetensorsWriter(StorageWriter):
    """Hands what DCP decided to a :class:`Saving`; ``state`` is the coordinator's."""

    def __init__(self, state: Mapping[str, JSON], saving: Saving) -> None:
        self._state = state
        self._saving = saving
        self._directory = Path()

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
        self._directory = self._saving.begin()
        return [
            dataclasses.replace(plan, storage_data=self._directory / file_of_rank(rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces into its file (none for no pieces)."""
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, Tensor), item
            tensors[chunk_key(item.index)] = piece
        future: Future[list[WriteResult]] = Future()
        if not tensors:
            future.set_result([])
            return future
        file = self._saving.write(plan.storage_data, tensors)
        future.set_result([_write_result(item.index, tensors, file) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: commit."""
        locations = {result.index: result.storage_data for rank in results for result in rank}
        metadata = dataclasses.replace(metadata, storage_data=locations)
        self._saving.commit(self._directory, Manifest(metadata, dict(self._state)))


def file_of_rank(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


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
