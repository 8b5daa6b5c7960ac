"""Save and load the state of a run. Collective: every rank passes its own shards, and all ranks raise the same error.

``torch.distributed.checkpoint`` (DCP) plans; ``storage`` writes the files and ``directory`` makes a checkpoint visible.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from megatron.checkpoint.boxes import boxed
from megatron.checkpoint.checkpointing import (
    SafetensorsReader,
    SafetensorsWriter,
    SaveBackend,
    SyncSaveBackend,
)
from megatron.checkpoint.directory import iteration_directory, locate_checkpoint
from megatron.checkpoint.files import verify_file
from megatron.checkpoint.manifest import JSON, read_checkpoint
from megatron.checkpoint.remote_path import AnyPath
from megatron.checkpoint.save_plan import SavePlanner
from megatron.checkpoint.schema import SavedState, upgrade
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError

# The public save() and load() are these two behind a warning for every run of a single process.
from megatron.torch_compat import load_state_dict, save_state_dict


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
    planner = SavePlanner(0 if control is None else control.ranks[control.rank])
    try:
        with _same_error_on_all_ranks(group):
            save_state_dict(
                dict(tensors),
                SafetensorsWriter(state, saving, planner),
                process_group=group,
                no_dist=group is None,
                planner=planner,
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
    reader = SafetensorsReader(root, iteration, boxed(tensors))
    group = _process_group(control)
    with _same_error_on_all_ranks(group):
        load_state_dict(
            dict(tensors),
            reader,
            process_group=group,
            no_dist=group is None,
            planner=LoadPlanner(),
        )
    return dict(reader.manifest.state)


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


# --- planning a load ---------------------------------------------------------------------------------------


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reports all mismatches at once. Each rank plans its own reads, apart from the others."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan = LoadPlan([])

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
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
