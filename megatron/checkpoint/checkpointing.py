"""Save and load a run: every rank calls, each with its own part; success and failure are everybody's.

The planning is that of ``torch.distributed.checkpoint`` (DCP); what lies on disk (``storage``) and how a
checkpoint becomes visible (``directory``) are ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem

# The public save() and load() are these two behind a warning for every run of a single process.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from megatron.checkpoint.directory import iteration_directory, locate_checkpoint
from megatron.checkpoint.files import verify_file
from megatron.checkpoint.manifest import JSON, read_manifest
from megatron.checkpoint.sharded_tensor import BoxedTensor
from megatron.checkpoint.storage import DirectSaving, SafetensorsReader, SafetensorsWriter, Saving
from megatron.config.errors import CheckpointError

# A replicated piece is shared out among its holders in slices of about this size.
SLICE_BYTES = 16 << 20


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, JSON],
    process_group: dist.ProcessGroup | None = None,
    saving: Saving | None = None,
) -> Path:
    """Save as the checkpoint of ``iteration`` under ``root`` and return its directory; a collective call.

    With a ``saving`` in the background it is not there yet, but the tensors may change.

    ``tensors`` holds this rank's part by global name: a :class:`BoxedTensor`, a DTensor, or a plain tensor
    that every rank with that name holds alike. Ranks may have different names. Pieces that several ranks hold
    are written once, spread so that ranks write about equally much; pieces that overlap without being equal
    are refused (a parameter that two stages share must be passed by one of them). ``state`` is the first
    rank's.

    Without a group: the default group, or one process alone when ``torch.distributed`` is not initialised.
    A failure anywhere raises :class:`CheckpointError` (a mistake of ours: ``RuntimeError`` with all tracebacks)
    on all ranks and leaves what was there before.
    """
    saving = saving or DirectSaving(root, iteration)
    try:
        with _same_error_on_all_ranks(process_group):
            _save_state_dict(
                dict(tensors),
                SafetensorsWriter(state, saving),
                process_group=process_group,
                no_dist=not _is_distributed(),
                planner=_SavePlanner(),
            )
    except BaseException:
        saving.abandon()
        raise
    return iteration_directory(root, iteration)


def load_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill ``tensors`` in place from the checkpoint of ``iteration`` and return its state; a collective call.

    ``tensors`` is as for :func:`save_checkpoint`, cut in any way; the checkpoint may hold more.
    Floating-point tensors are converted to the dtype asked for. A checkpoint that is damaged, lacks a name,
    or has another shape or kind of number for it raises :class:`CheckpointError` on all ranks; the tensors
    are then undefined.
    """
    reader = SafetensorsReader(partial(locate_checkpoint, root, iteration))
    with _same_error_on_all_ranks(process_group):
        _load_state_dict(
            dict(tensors),
            reader,
            process_group=process_group,
            no_dist=not _is_distributed(),
            planner=_LoadPlanner(),
        )
    return reader.manifest.state


def verify_share(root: Path, iteration: int, rank: int, size: int) -> None:
    """Compare the files that ``rank`` of ``size`` is given with their digests; no collective.

    Together the ranks read every file once, each about as many bytes. Raises :class:`CheckpointError`.
    """
    directory = locate_checkpoint(root, iteration)
    load = [0] * size
    for file in sorted(read_manifest(directory).files(), key=lambda file: (-file.size, file.name)):
        holder = min(range(size), key=load.__getitem__)
        load[holder] += file.size
        if holder == rank:
            verify_file(directory, file)


def read_state(root: Path, iteration: int) -> dict[str, Any]:
    """The state that was saved with ``iteration``; no collective."""
    return read_manifest(locate_checkpoint(root, iteration)).state


def read_tensor_shapes(root: Path, iteration: int) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor in the checkpoint of ``iteration``; no collective."""
    tensors = read_manifest(locate_checkpoint(root, iteration)).tensors()
    return {name: tuple(tensor.size) for name, tensor in tensors.items()}


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


# --- errors ------------------------------------------------------------------------------------------------


@contextmanager
def _same_error_on_all_ranks(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn DCP's collection of failures into one error, the same on every rank."""
    try:
        yield
    except CheckpointException as exception:
        world_size = dist.get_world_size(process_group) if _is_distributed() else 1
        raise _one_error(exception, world_size) from exception


def _one_error(exception: CheckpointException, world_size: int) -> BaseException:
    failures = {rank: failure[0] for rank, failure in sorted(exception.failures.items())}
    for error in failures.values():
        if not isinstance(error, Exception):
            return error  # an interrupt
    for error in failures.values():
        if not isinstance(error, CheckpointError):
            return RuntimeError(str(exception))  # our own mistake: all tracebacks
    rank, first = next(iter(failures.items()))
    # What every rank met needs no rank's name.
    where = "" if len(failures) == world_size else f"Rank {rank}: "
    others = {str(error) for error in failures.values()} - {str(first)}
    more = f" ({len(failures) - 1} other ranks failed as well.)" if others else ""
    return CheckpointError(f"{where}{first}{more}")


# --- planning a save ---------------------------------------------------------------------------------------


def _boxed(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor in a form that says which part of the global tensor it is."""
    boxed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor), (name, type(tensor))  # what is not a tensor belongs in the state
        boxed[name] = tensor if hasattr(tensor, "__create_write_items__") else BoxedTensor.from_whole(tensor)
    return boxed


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner with a better spread of replicas and a check that nothing is forgotten."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """On every rank: take the tensors of this rank."""
        super().set_up_planner(_boxed(state_dict), storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """On every rank: offer all pieces, and send the names of the tensors of which it holds none along."""
        plan = super().create_local_plan()
        absent = set(self.state_dict) - {item.index.fqn for item in plan.items}
        return replace(plan, planner_data=sorted(absent))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: decide who writes what. DCP refuses overlaps and pieces out of bounds."""
        names = {name for plan in all_plans for name in plan.planner_data}
        plans, metadata = super().create_global_plan(spread_replicas(all_plans))
        _check_complete(metadata, names)
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """On every rank: the part of a local piece that this rank was told to write, as a view."""
        chunk = _tensor_data(write_item).chunk
        tensor: Any = self.state_dict[write_item.index.fqn]
        for whole in tensor.__create_chunk_list__():
            starts = [inner - outer for inner, outer in zip(chunk.offsets, whole.offsets)]
            if all(0 <= at <= most - size for at, size, most in zip(starts, chunk.sizes, whole.sizes)):
                piece: Tensor = tensor.__get_tensor_shard__(MetadataIndex(write_item.index.fqn, whole.offsets))
                return piece[tuple(slice(at, at + size) for at, size in zip(starts, chunk.sizes))]
        raise AssertionError(f"no piece of {write_item.index} here")


def spread_replicas(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave each piece to one of the ranks that hold it, so that ranks write about equally many bytes.

    Large replicated pieces are first cut in slices, so that one embedding does not keep one rank busy while
    its replicas wait. DCP spreads replicas too, but only whole ones, weighs each as its whole global tensor,
    forgets what a rank must write alone, and takes pieces of different shapes at one offset for replicas.
    """
    pieces: dict[MetadataIndex, WriteItem] = {}
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = _tensor_data(item)
            if prod(data.chunk.sizes) > 0 or prod(data.size) == 0:
                _check_agreement(item, pieces.setdefault(item.index, item))
                holders.setdefault(item.index, []).append(rank)
    load = [0] * len(plans)
    taken: list[list[WriteItem]] = [[] for _ in plans]
    replicated = []
    for index, item in pieces.items():
        if len(holders[index]) == 1:
            load[holders[index][0]] += _nbytes(item)
            taken[holders[index][0]].append(item)
        else:
            replicated += [(part, holders[index]) for part in _slices(item)]
    # The largest first: the small ones level the load at the end.
    for item, ranks in sorted(replicated, key=lambda part: -_nbytes(part[0])):
        rank = min(ranks, key=load.__getitem__)
        load[rank] += _nbytes(item)
        taken[rank].append(item)
    return [replace(plan, items=items) for plan, items in zip(plans, taken)]


def _slices(item: WriteItem) -> Iterator[WriteItem]:
    """Cut a piece along dim 0 in slices of at most ``SLICE_BYTES``, or of one row."""
    data = _tensor_data(item)
    rows = data.chunk.sizes[0] if data.chunk.sizes else 1
    step = max(1, SLICE_BYTES * rows // max(1, _nbytes(item)))
    if step >= rows:
        yield item
        return
    for row in range(0, rows, step):
        offsets = torch.Size((data.chunk.offsets[0] + row, *data.chunk.offsets[1:]))
        sizes = torch.Size((min(step, rows - row), *data.chunk.sizes[1:]))
        part = replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
        yield replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=part)


def _check_agreement(mine: WriteItem, theirs: WriteItem) -> None:
    """A mistake of ours if two ranks have pieces of different shape or dtype at the same place."""
    one, other = _tensor_data(mine), _tensor_data(theirs)
    assert one.chunk.sizes == other.chunk.sizes, (mine.index, one.chunk, other.chunk)
    assert one.size == other.size, (mine.index, one.size, other.size)
    assert one.properties.dtype == other.properties.dtype, (mine.index, one.properties, other.properties)


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, item
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    data = _tensor_data(item)
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _check_complete(metadata: Metadata, names: set[str]) -> None:
    """A mistake of ours if ranks together do not hold all of a tensor: DCP's check skips a single process."""
    for name in names - set(metadata.state_dict_metadata):
        raise ValueError(f"no rank holds any piece of {name}")
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        elements = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if elements != prod(tensor.size):
            raise ValueError(f"the ranks hold {elements} of the {prod(tensor.size)} elements of {name}")


# --- planning a load ---------------------------------------------------------------------------------------


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which tells at once all that does not fit."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """On every rank: take the tensors to fill."""
        super().set_up_planner(_boxed(state_dict), metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """On every rank: find what to read for each piece."""
        assert self.metadata is not None
        _check_same_model(self.state_dict, self.metadata)
        return super().create_local_plan()


def _check_same_model(tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Raise :class:`CheckpointError` when the checkpoint cannot fill ``tensors``."""
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    missing = [name for name in tensors if name not in saved]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no {_some(missing)}: it is of another model, or was saved without this part."
        )
    # (name, what it is in the checkpoint, what it is here); a wrong shape tells more than a wrong dtype.
    wrong: list[tuple[str, object, object]] = []
    for name, tensor in tensors.items():
        if tensor.size() != saved[name].size:
            wrong.append((name, list(saved[name].size), list(tensor.size())))
    for name, tensor in tensors.items():
        if not _convertible(saved[name].properties.dtype, tensor.dtype):
            wrong.append((name, saved[name].properties.dtype, tensor.dtype))
    if wrong:
        name, theirs, ours = wrong[0]
        more = f" (and {len(wrong) - 1} others differ)" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{name} is {theirs} in the checkpoint but {ours} in this model{more}: "
            "give the flags the checkpoint was trained with."
        )


def _convertible(saved: torch.dtype, wanted: torch.dtype) -> bool:
    return saved == wanted or (saved.is_floating_point and wanted.is_floating_point)


def _some(names: Sequence[str]) -> str:
    """The first name and how many more there are."""
    return names[0] + (f" (nor {len(names) - 1} others)" if len(names) > 1 else "")
