"""Save and load the state of a run. Collective: every rank passes its own shards, and all ranks raise the same error.

A checkpoint is safetensors files and one JSON manifest:

    rank_00003.safetensors   the boxes that rank 3 wrote, one entry each, such as ``model/embedding.weight@0,512``
    manifest.json            its own digest; dtype, shape and chunks of every global tensor, as columns of numbers
                             (offset, shape, and place in the list of files); size and XXH3-128 digests of every file;
                             the state: everything but tensors

``torch.distributed.checkpoint`` (DCP) runs the steps of a save and a load, the planners assign boxes to ranks, and a
:class:`SaveBackend` writes the files. Nothing is pickled or unpickled, so a checkpoint cannot execute code.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.planner import LoadPlanner as StateLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as StatePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint.boxes import boxed
from megatron.checkpoint.directory import (
    commit,
    iteration_directory,
    locate_checkpoint,
    new_saving_directory,
    remove_checkpoint,
)
from megatron.checkpoint.files import AnyPath, WrittenFile, explained, sync_directory
from megatron.checkpoint.manifest import JSON, Chunk, Manifest, chunk_key, encode_manifest, read_checkpoint
from megatron.checkpoint.safetensors_file import VerifiedSafetensors, write_safetensors
from megatron.checkpoint.save_plan import SavePlanner
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError

# The public save() and load() are these two behind a warning for every run of a single process.
from megatron.torch_compat import load_state_dict, save_state_dict


class SaveBackend(Protocol):
    """Writes a checkpoint: at once (:class:`SyncSaveBackend`) or in the background."""

    # On the coordinator, before any write: create a directory.
    def begin(self) -> Path: ...

    # On a rank with tensors: write them.
    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile: ...

    # On the coordinator, after all ranks have written: make the checkpoint visible.
    def commit(self, directory: Path, manifest: Manifest) -> None: ...

    # On every rank, after a failure: remove the written files.
    def abandon(self) -> None: ...


class SyncSaveBackend:
    """Every call returns after its files are on stable storage.

    With a ``lock_token``, only the run whose lock on ``root`` has it may commit. The coordinator calls ``on_commit`` as
    soon as the checkpoint is complete, before the collectives that end the save on the other ranks.
    """

    def __init__(
        self, root: Path, iteration: int, lock_token: str | None = None, on_commit: Callable[[], None] = lambda: None
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


class _Storage:
    """The steps of DCP's storages that do nothing here."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class SafetensorsWriter(_Storage, StorageWriter):
    """Passes the plan of ``planner`` to a :class:`SaveBackend`; ``state`` is saved by the coordinator."""

    def __init__(self, state: Mapping[str, JSON], saving: SaveBackend, planner: SavePlanner) -> None:
        self._state, self._saving, self._planner = state, saving, planner
        self._directory = Path()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise for a state that is not JSON before anything is written."""
        if is_coordinator:
            json.dumps(self._state)

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
        # The plan numbers files by rank, the manifest lists only files that exist.
        places = np.cumsum([len(of_rank) for of_rank in results]) - 1
        tensors = {name: tensor.in_files(places) for name, tensor in self._planner.saved.items()}
        files = [result.storage_data for of_rank in results for result in of_rank]
        self._saving.commit(self._directory, Manifest(tensors, files, self._state))


def file_of_rank(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class SafetensorsReader(_Storage, StorageReader):
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
            extents = [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.entry.shape)) for one in chunks]
            found[name] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), extents)
            self._chunks |= {MetadataIndex(name, torch.Size(one.offset)): one for one in chunks}
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the :class:`CheckpointError` of :meth:`read_metadata`."""
        if self._error is not None:
            raise self._error

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: StateLoadPlanner) -> Future[None]:
        """Copy every item of the plan into its target; raises :class:`CheckpointError` for a damaged file."""
        items_of: dict[WrittenFile, list[ReadItem]] = {}
        for item in plan.items:
            items_of.setdefault(self._chunks[item.storage_index].file, []).append(item)
        for file, items in items_of.items():
            with VerifiedSafetensors(self._directory, file) as entries:
                # In the order of the file, so that a block of several small entries is read once.
                items.sort(key=lambda item: entries.position(self._chunks[item.storage_index].key))
                for item in items:
                    chunk = self._chunks[item.storage_index]
                    place = tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths))
                    target = planner.resolve_tensor(item).detach()
                    entries.copy_into(target, chunk.key, place, chunk.entry)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


# --- save and load ------------------------------------------------------------------------------------------

# A save, from tensor to manifest. The coordinator is the first rank of the group; arrows between lines are messages.
#
#   every rank     list its boxes ─┐                          SavePlanner.create_local_plan
#   coordinator                    └─> assign parts ─┐        SavePlanner.create_global_plan, SaveBackend.begin
#   every rank       ┌───────────────────────────────┘
#                    └─> write rank_00003.safetensors ─┐      SaveBackend.write
#   coordinator                                        └─> compare sizes, write manifest.json, rename
#                                                             SafetensorsWriter.finish, SaveBackend.commit
#
# The rename from ``.iter_0000100.saving-1f6c0a9e`` to ``iter_0000100`` is the commit. With ``--async-save`` the ranks
# only copy their boxes, and background processes write and commit while training continues.


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, JSON],
    control: ControlGroup | None = None,
    saving: SaveBackend | None = None,
) -> Path:
    """Save as the checkpoint of ``iteration`` in ``root`` and return its directory; a collective call.

    With a background ``saving`` the directory does not exist yet, but the tensors may change.

    ``tensors`` has this rank's shards by global name: a :class:`BoxedTensor`, a DTensor, or a plain tensor that is
    equal on every rank that passes it. Ranks may have different names. Replicated boxes are written once, spread so
    that ranks write about equally many bytes; boxes that overlap without being equal are an error (of a parameter that
    two stages share, one stage must pass it). ``state`` is taken from the first rank.

    ``control`` has all ranks that call it; None is a single process. A failure raises :class:`CheckpointError` on all
    ranks (for a bug ``RuntimeError`` with all tracebacks) and keeps the earlier checkpoint.
    """
    saving = saving or SyncSaveBackend(root, iteration)
    planner = SavePlanner(0 if control is None else control.ranks[control.rank])
    try:
        with _same_error_on_all_ranks(control) as group:
            writer = SafetensorsWriter(state, saving, planner)
            save_state_dict(dict(tensors), writer, process_group=group, no_dist=group is None, planner=planner)
    except BaseException:
        saving.abandon()
        raise
    return iteration_directory(root, iteration)


def load_checkpoint(
    root: AnyPath, iteration: int, tensors: Mapping[str, Tensor], control: ControlGroup | None = None
) -> dict[str, Any]:
    """Fill ``tensors`` in place from the checkpoint of ``iteration`` and return its state; a collective call.

    ``tensors`` is as for :func:`save_checkpoint`, with any sharding; the checkpoint may have more. Floating-point
    tensors are converted to the dtype of ``tensors``. Raises :class:`CheckpointError` on all ranks for a damaged
    checkpoint, a missing name, or another shape or kind of number; ``tensors`` are undefined then.
    """
    reader = SafetensorsReader(root, iteration, boxed(tensors))
    with _same_error_on_all_ranks(control) as group:
        load_state_dict(dict(tensors), reader, process_group=group, no_dist=group is None, planner=LoadPlanner())
    return dict(reader.manifest.state)


# --- errors ------------------------------------------------------------------------------------------------


@contextmanager
def _same_error_on_all_ranks(control: ControlGroup | None) -> Iterator[Any]:
    """The process group for DCP, None for a single process; its collected failures become one error of all ranks."""
    if control is None:
        assert not dist.is_initialized() or dist.get_world_size() == 1, "several ranks need a control group"
    try:
        yield None if control is None else control.process_group
    except CheckpointException as exception:
        failures = {rank: failure[0] for rank, failure in sorted(exception.failures.items())}
        for error in failures.values():
            if not isinstance(error, Exception):
                raise error from exception  # an interrupt
        if not all(isinstance(error, CheckpointError) for error in failures.values()):
            raise RuntimeError(str(exception)) from exception  # our own mistake: all tracebacks
        rank, first = next(iter(failures.items()))
        # An error of all ranks is reported without a rank.
        where = "" if len(failures) == (1 if control is None else control.size) else f"Rank {rank}: "
        others = {str(error) for error in failures.values()} - {str(first)}
        more = f" ({len(failures) - 1} other ranks failed as well.)" if others else ""
        raise CheckpointError(f"{where}{first}{more}") from exception


# --- planning a load ---------------------------------------------------------------------------------------


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reports all mismatches at once. Each rank plans its own reads, apart from the others."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan = LoadPlan([])

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(boxed(state_dict), metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Send an empty plan to the coordinator, and keep the rank's own."""
        assert self.metadata is not None
        _check_same_model(self.state_dict, self.metadata)
        self._plan = super().create_local_plan()
        return LoadPlan([])

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._plan


def _check_same_model(tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Raise :class:`CheckpointError` if the checkpoint cannot fill ``tensors``."""
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    missing = [name for name in tensors if name not in saved]
    if missing:
        others = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"The checkpoint has no {missing[0]}{others}: it is from another model, or was saved without this part."
        )
    # (name, in the checkpoint, in this model); shapes first, since they explain more than dtypes.
    wrong: list[tuple[str, object, object]] = [
        (name, list(saved[name].size), list(tensor.size()))
        for name, tensor in tensors.items()
        if tensor.size() != saved[name].size
    ]
    for name, tensor in tensors.items():
        dtype = saved[name].properties.dtype
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            wrong.append((name, dtype, tensor.dtype))
    if wrong:
        name, theirs, ours = wrong[0]
        more = f" (and {len(wrong) - 1} others differ)" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{name} is {theirs} in the checkpoint but {ours} in this model{more}: "
            "use the flags of the run that saved the checkpoint."
        )
