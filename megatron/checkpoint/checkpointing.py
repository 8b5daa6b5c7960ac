"""Save and load the state of a run. Collective: every rank passes its own shards, and all ranks raise the same error.

``torch.distributed.checkpoint`` (DCP) plans; ``storage`` writes the files and ``directory`` makes a checkpoint visible.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

from megatron.checkpoint.directory import iteration_directory, locate_checkpoint
from megatron.checkpoint.files import verify_file
from megatron.checkpoint.manifest import JSON, read_checkpoint
from megatron.checkpoint.remote_path import AnyPath
from megatron.checkpoint.schema import SavedState, upgrade
from megatron.checkpoint.sharded_tensor import BoxedTensor
from megatron.checkpoint.storage import SafetensorsReader, SafetensorsWriter, SaveBackend, SyncSaveBackend
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError

# The public save() and load() are these two behind a warning for every run of a single process.
from megatron.torch_compat import load_state_dict, save_state_dict

SLICE_BYTES = 16 << 20
"""Replicated boxes are cut into slices of about this size, which are spread over the ranks."""


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
    group = _process_group(control)
    try:
        with _same_error_on_all_ranks(group):
            save_state_dict(
                dict(tensors),
                SafetensorsWriter(state, saving),
                process_group=group,
                no_dist=group is None,
                planner=_SavePlanner(),
            )
    except BaseException:
        saving.abandon()
        raise
    return iteration_directory(root, iteration)


def load_checkpoint(
    root: AnyPath,
    iteration: int,
    tensors: Mapping[str, Tensor],
    control: ControlGroup | None = None,
) -> dict[str, Any]:
    """Fill ``tensors`` in place from the checkpoint of ``iteration`` and return its state; a collective call.

    ``tensors`` is as for :func:`save_checkpoint`, with any sharding; the checkpoint may have more. Floating-point
    tensors are converted to the dtype of ``tensors``. Raises :class:`CheckpointError` on all ranks for a damaged
    checkpoint, a missing name, or another shape or kind of number; ``tensors`` are undefined then.
    """
    reader = SafetensorsReader(root, iteration)
    group = _process_group(control)
    with _same_error_on_all_ranks(group):
        load_state_dict(
            dict(tensors),
            reader,
            process_group=group,
            no_dist=group is None,
            planner=_LoadPlanner(),
        )
    return reader.manifest.state


def verify_share(root: AnyPath, iteration: int, rank: int, size: int) -> None:
    """Compare the share of files of ``rank`` of ``size`` with their digests; no collective.

    All ranks together read every file once, each about equally many bytes. Raises :class:`CheckpointError`.
    """
    directory, manifest = locate_checkpoint(root, iteration), read_checkpoint(root, iteration)
    load = [0] * size
    for file in sorted(manifest.files().values(), key=lambda file: (-file.size, file.name)):
        holder = min(range(size), key=load.__getitem__)
        load[holder] += file.size
        if holder == rank:
            verify_file(directory, file)


def read_run_state(root: AnyPath, iteration: int) -> SavedState:
    """The saved state of ``iteration``, upgraded to the current schema; no collective."""
    manifest = read_checkpoint(root, iteration)
    return upgrade(manifest.state, manifest.format_version)


def _process_group(control: ControlGroup | None) -> Any:
    """The group in which the ranks agree on a checkpoint; None for a single process."""
    if control is None:
        assert not dist.is_initialized() or dist.get_world_size() == 1, "several ranks need a control group"
        return None
    return control.process_group


# --- errors ------------------------------------------------------------------------------------------------


@contextmanager
def _same_error_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Convert DCP's collected failures to one error, equal on every rank."""
    try:
        yield
    except CheckpointException as exception:
        raise _one_error(exception, 1 if group is None else dist.get_world_size(group)) from exception


def _one_error(exception: CheckpointException, world_size: int) -> BaseException:
    failures = {rank: failure[0] for rank, failure in sorted(exception.failures.items())}
    for error in failures.values():
        if not isinstance(error, Exception):
            return error  # an interrupt
    for error in failures.values():
        if not isinstance(error, CheckpointError):
            return RuntimeError(str(exception))  # our own mistake: all tracebacks
    rank, first = next(iter(failures.items()))
    # An error of all ranks is reported without a rank.
    where = "" if len(failures) == world_size else f"Rank {rank}: "
    others = {str(error) for error in failures.values()} - {str(first)}
    more = f" ({len(failures) - 1} other ranks failed as well.)" if others else ""
    return CheckpointError(f"{where}{first}{more}")


# --- planning a save ---------------------------------------------------------------------------------------


def _boxed(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor as a :class:`BoxedTensor` or DTensor."""
    boxed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor), (name, type(tensor))  # what is not a tensor belongs in the state
        boxed[name] = tensor if hasattr(tensor, "__create_write_items__") else BoxedTensor.from_whole(tensor)
    return boxed


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner with a better spread of replicas and a check for completeness."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(_boxed(state_dict), storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """On every rank: list all boxes, and send the names of tensors without any."""
        plan = super().create_local_plan()
        absent = set(self.state_dict) - {item.index.fqn for item in plan.items}
        return replace(plan, planner_data=sorted(absent))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: assign boxes to ranks. DCP refuses overlaps and boxes out of bounds."""
        names = {name for plan in all_plans for name in plan.planner_data}
        plans, metadata = super().create_global_plan(spread_replicas(all_plans))
        _check_complete(metadata, names)
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """On every rank: the assigned part of a local box, as a view."""
        chunk = _tensor_data(write_item).chunk
        tensor: Any = self.state_dict[write_item.index.fqn]
        for whole in tensor.__create_chunk_list__():
            starts = [inner - outer for inner, outer in zip(chunk.offsets, whole.offsets)]
            if all(0 <= at <= most - size for at, size, most in zip(starts, chunk.sizes, whole.sizes)):
                box: Tensor = tensor.__get_tensor_shard__(MetadataIndex(write_item.index.fqn, whole.offsets))
                return box[tuple(slice(at, at + size) for at, size in zip(starts, chunk.sizes))]
        raise AssertionError(f"no box of {write_item.index} here")


def spread_replicas(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Assign each box to one of the ranks that hold it, so that ranks write about equally many bytes.

    Large replicated boxes are first cut into slices, so that no rank writes a whole embedding while its replicas wait.
    DCP's own method assigns whole boxes, weighs each by its global tensor, ignores boxes of one rank only, and takes
    boxes of different shapes at one offset for replicas.
    """
    boxes: dict[MetadataIndex, WriteItem] = {}
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = _tensor_data(item)
            if prod(data.chunk.sizes) > 0 or prod(data.size) == 0:
                _check_agreement(item, boxes.setdefault(item.index, item))
                holders.setdefault(item.index, []).append(rank)
    load = [0] * len(plans)
    taken: list[list[WriteItem]] = [[] for _ in plans]
    replicated = []
    for index, item in boxes.items():
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
    """Cut a box along dim 0 into slices of at most ``SLICE_BYTES``, or of one row."""
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
    """Assert that replicas have equal shape and dtype."""
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
    """Assert that all ranks together hold every element; DCP's check skips a single process."""
    for name in names - set(metadata.state_dict_metadata):
        raise ValueError(f"no rank holds any box of {name}")
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        elements = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if elements != prod(tensor.size):
            raise ValueError(f"the ranks hold {elements} of the {prod(tensor.size)} elements of {name}")


# --- planning a load ---------------------------------------------------------------------------------------


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reports all mismatches at once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(_boxed(state_dict), metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        _check_same_model(self.state_dict, self.metadata)
        return super().create_local_plan()


def _check_same_model(tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Raise :class:`CheckpointError` if the checkpoint cannot fill ``tensors``."""
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    missing = [name for name in tensors if name not in saved]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no {_some(missing)}: it is from another model, or was saved without this part."
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


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" (nor {len(names) - 1} others)" if len(names) > 1 else "")
