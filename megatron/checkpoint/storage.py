"""A checkpoint on disk: safetensors files and one JSON manifest.

    rank_00003.safetensors   the boxes that rank 3 wrote, one entry each, such as ``model/embedding.weight@0,512``
    manifest.json            its own digest; dtype, shape and chunks of every global tensor, as columns of numbers
                             (offset, shape, and place in the list of files); size and XXH3-128 digests of every file;
                             the state: everything but tensors

``SafetensorsWriter`` and ``SafetensorsReader`` store what the planners of ``torch.distributed.checkpoint``
(DCP) decide. Nothing is pickled or unpickled, so a checkpoint cannot execute code.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as StatePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint.directory import commit, locate_checkpoint, new_saving_directory, remove_checkpoint
from megatron.checkpoint.files import WrittenFile, explained, sync_directory
from megatron.checkpoint.manifest import (
    JSON,
    Chunk,
    Manifest,
    chunk_key,
    encode_manifest,
    read_checkpoint,
)
from megatron.checkpoint.remote_path import AnyPath
from megatron.checkpoint.safetensors_file import VerifiedSafetensors, write_safetensors
from megatron.checkpoint.save_plan import SavePlanner
from megatron.errors import CheckpointError


class SaveBackend(Protocol):
    """How a checkpoint is written: :class:`SyncSaveBackend` or in the background."""

    def begin(self) -> Path:
        """On the coordinator, before any write: create a directory."""
        ...

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        """On a rank with tensors: write them."""
        ...

    def commit(self, directory: Path, manifest: Manifest) -> None:
        """On the coordinator, after all ranks have written: make the checkpoint visible."""
        ...

    def abandon(self) -> None:
        """On every rank, after a failure: remove what was written."""
        ...


class SyncSaveBackend:
    """Every call returns after its files are on stable storage.

    With a ``lock_token``, only the run whose lock on ``root`` has it may commit. The coordinator calls ``on_commit`` as
    soon as the checkpoint is complete, before the other ranks know.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        lock_token: str | None = None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._iteration, self._lock_token, self._on_commit = root, iteration, lock_token, on_commit
        self._directory: Path | None = None

    def begin(self) -> Path:
        self._directory = new_saving_directory(self._root, self._iteration)
        return self._directory

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        with explained("write", path):
            file = write_safetensors(path, tensors)
            sync_directory(path.parent)
        return file

    def commit(self, directory: Path, manifest: Manifest) -> None:
        commit(directory, self._root, self._iteration, encode_manifest(manifest), self._lock_token)
        self._on_commit()

    def abandon(self) -> None:
        if self._directory is not None:
            remove_checkpoint(self._directory)


class SafetensorsWriter(StorageWriter):
    """Passes the plan of ``planner`` to a :class:`SaveBackend`; ``state`` is saved by the coordinator."""

    def __init__(self, state: Mapping[str, JSON], saving: SaveBackend, planner: SavePlanner) -> None:
        self._state = state
        self._saving = saving
        self._planner = planner
        self._directory = Path()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise for a state that is not JSON before anything is written."""
        if is_coordinator:
            json.dumps(self._state)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: create the directory and assign a file to every rank."""
        self._directory = self._saving.begin()
        return [
            dataclasses.replace(plan, storage_data=self._directory / file_of_rank(rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: StatePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes to its file; no file without boxes."""
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            box = planner.resolve_data(item)
            assert isinstance(box, Tensor), item
            tensors[chunk_key(item.index.fqn, item.index.offset or ())] = box
        results = []
        if tensors:
            file = self._saving.write(plan.storage_data, tensors)
            # The coordinator knows the chunks from the plan.
            results.append(WriteResult(MetadataIndex(file.name), sum(box.nbytes for box in tensors.values()), file))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written: commit.

        Raises ``ValueError`` if a rank has written more or less than planned. The plan has a divided box from its owner
        alone, so the other ranks could disagree.
        """
        planned = np.zeros(len(results), np.int64)
        for tensor in self._planner.saved.values():
            tensor.add_bytes(planned)
        for rank, (nbytes, of_rank) in enumerate(zip(planned.tolist(), results)):
            written = sum(result.size_in_bytes for result in of_rank)
            if written != nbytes:
                raise ValueError(f"rank {rank} has written {written} bytes of tensors instead of {nbytes}")
        places = np.cumsum([len(of_rank) for of_rank in results]) - 1
        tensors = {name: tensor.in_files(places) for name, tensor in self._planner.saved.items()}
        files = [result.storage_data for of_rank in results for result in of_rank]
        self._saving.commit(self._directory, Manifest(tensors, files, self._state))


def file_of_rank(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class SafetensorsReader(StorageReader):
    """Reads the checkpoint of ``iteration`` in ``root``.

    Each rank opens only the files and reads only the blocks that it needs, and compares each block with its digest. The
    manifest is read inside the collective load, so that all ranks receive its errors.
    """

    def __init__(self, root: AnyPath, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        self._root, self._iteration, self._tensors = root, iteration, tensors
        self._directory: AnyPath = Path()
        self.manifest = Manifest({}, (), {})
        self._chunks: dict[MetadataIndex, Chunk] = {}
        """The chunks that this rank reads."""
        self._error: CheckpointError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            self._directory = locate_checkpoint(self._root, self._iteration)
            self.manifest = read_checkpoint(self._root, self._iteration)
        except CheckpointError as error:
            # DCP would log the error as a warning and raise a vague one. The next step raises it.
            self._error = error
        return Metadata(self._needed_chunks())

    def _needed_chunks(self) -> dict[str, STORAGE_TYPES]:
        """DCP's facts of every tensor to load, with the chunks that this rank's boxes overlap."""
        found: dict[str, STORAGE_TYPES] = {}
        for name, local in self._tensors.items():
            if name not in self.manifest.tensors:
                continue
            saved = self.manifest.tensors[name]
            numbers: set[int] = set()
            for box in local.__create_chunk_list__() if local.size() == saved.shape else ():  # type: ignore[attr-defined]
                stops = [start + size for start, size in zip(box.offsets, box.sizes)]
                numbers.update(saved.overlapping(box.offsets, stops).tolist())
            chunks = list(self.manifest.chunks(name, sorted(numbers)))
            extents = [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)) for one in chunks]
            found[name] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), extents)
            self._chunks |= {MetadataIndex(name, torch.Size(one.offset)): one for one in chunks}
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the :class:`CheckpointError` of :meth:`read_metadata`."""
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item of the plan into its target; raises :class:`CheckpointError` for a damaged file."""
        items_of: dict[WrittenFile, list[ReadItem]] = {}
        for item in plan.items:
            items_of.setdefault(self._chunk(item).file, []).append(item)
        for file, items in items_of.items():
            self._read_file(file, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, file: WrittenFile, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with VerifiedSafetensors(self._directory, file) as entries:
            # In the order of the file, so that a block of several small entries is read once.
            for item in sorted(items, key=lambda item: entries.position(self._chunk(item).key)):
                chunk = self._chunk(item)
                place = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths))
                target = planner.resolve_tensor(item).detach()
                entries.copy_into(target, chunk.key, place, self.manifest.entry(item.storage_index.fqn, chunk))
                planner.commit_tensor(item, target)

    def _chunk(self, item: ReadItem) -> Chunk:
        return self._chunks[item.storage_index]
