"""Save and load the state of a run. Collective: every rank passes its own shards, and all ranks raise the same error.

A checkpoint is safetensors files and one JSON manifest:

    rank_00003.safetensors   the boxes that rank 3 wrote, one entry each, such as ``model/embedding.weight@0,512``
    manifest.json            its own digest; dtype, shape and chunks of every global tensor, as columns of numbers
                             (offset, shape, and place in the list of files); size and XXH3-128 digests of every file;
                             the state: everything but tensors

In a save the coordinator assigns boxes to ranks (``save_plan.py``), and a :class:`SaveBackend` writes the files. In a
load each rank reads what its boxes need. ``torch.distributed.checkpoint`` (DCP) gathers the errors of all ranks. No
file is pickled or unpickled, so a checkpoint cannot execute code.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.boxes import Boxable, BoxedTensor, Numbers, Place, boxed
from megatron.checkpoint.directory import (
    commit,
    iteration_directory,
    locate_checkpoint,
    new_saving_directory,
    remove_checkpoint,
)
from megatron.checkpoint.files import AnyPath, WrittenFile, explained, sync_directory
from megatron.checkpoint.manifest import (
    JSON,
    Chunk,
    Manifest,
    SavedTensor,
    chunk_key,
    encode_manifest,
    read_checkpoint,
)
from megatron.checkpoint.safetensors_file import VerifiedSafetensors, write_safetensors
from megatron.checkpoint.save_plan import BoxTable, LocalPlan, assign_boxes, view_of
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError
from megatron.torch_compat import checkpoint_steps

T = TypeVar("T")


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


class _Save:
    """The steps of a save; ``state`` is saved by the coordinator, the first rank of the group."""

    def __init__(self, tensors: Mapping[str, Boxable], state: Mapping[str, JSON], saving: SaveBackend, rank: int):
        self._given, self._state, self._saving, self._rank = tensors, state, saving, rank
        self._directory = Path()
        self._saved: dict[str, SavedTensor] = {}

    def list_boxes(self) -> BoxTable:
        """On every rank: list its boxes."""
        self._tensors = boxed(self._given)
        self._plan = LocalPlan.of(self._tensors, self._rank)
        return self._plan.table

    def assign(self, tables: list[BoxTable]) -> list[tuple[Path, Numbers]]:
        """On the coordinator: the file and the share of every rank, in a new directory.

        Raises for a state that is not JSON before anything is written.
        """
        json.dumps(self._state)
        self._saved, shares = assign_boxes(tables)
        self._directory = self._saving.begin()
        return [(self._directory / file_of_rank(rank), share) for rank, share in enumerate(shares)]

    def write(self, path: Path, share: Numbers) -> tuple[int, WrittenFile | None]:
        """On every rank: write its parts to its file, and return their bytes; no file without parts."""
        parts = self._plan.parts(share)
        content = {chunk_key(part.name, part.offset): view_of(self._tensors[part.name], part) for part in parts}
        file = self._saving.write(path, content) if content else None
        return sum(part.nbytes for part in parts), file

    def commit(self, written: list[tuple[int, WrittenFile | None]]) -> None:
        """On the coordinator, after all ranks have written.

        Raises ``ValueError`` if a rank has written more or less than planned. The plan has a divided box from its owner
        alone, so the other ranks could disagree.
        """
        planned = np.zeros(len(written), np.int64)
        for tensor in self._saved.values():
            tensor.add_bytes(planned)
        for rank, (wanted, (nbytes, _)) in enumerate(zip(planned.tolist(), written)):
            if nbytes != wanted:
                raise ValueError(f"rank {rank} has written {nbytes} bytes of tensors instead of {wanted}")
        # The plan numbers files by rank, the manifest lists only files that exist.
        places = np.cumsum([file is not None for _, file in written]) - 1
        tensors = {name: tensor.in_files(places) for name, tensor in self._saved.items()}
        files = [file for _, file in written if file is not None]
        self._saving.commit(self._directory, Manifest(tensors, files, self._state))


def file_of_rank(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


# --- save and load ------------------------------------------------------------------------------------------

# A save, from tensor to manifest. The coordinator is the first rank of the group; arrows between lines are messages.
#
#   every rank     list its boxes ─┐                          LocalPlan.of
#   coordinator                    └─> assign parts ─┐        assign_boxes, SaveBackend.begin
#   every rank       ┌───────────────────────────────┘
#                    └─> write rank_00003.safetensors ─┐      SaveBackend.write
#   coordinator                                        └─> compare sizes, write manifest.json, rename
#                                                             SaveBackend.commit
#
# The rename from ``.iter_0000100.saving-1f6c0a9e`` to ``iter_0000100`` is the commit. With ``--async-save`` the ranks
# only copy their boxes, and background processes write and commit while training continues.


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Boxable],
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
    save = _Save(tensors, state, saving, 0 if control is None else control.ranks[control.rank])
    try:
        with _same_error_on_all_ranks(control) as group:
            steps = checkpoint_steps(group)
            own = steps.reduce_scatter("plan", save.list_boxes, save.assign)
            steps.all_reduce("write", lambda: save.write(*own), save.commit)
    except BaseException:
        saving.abandon()
        raise
    return iteration_directory(root, iteration)


def load_checkpoint(
    root: AnyPath, iteration: int, tensors: Mapping[str, Boxable], control: ControlGroup | None = None
) -> dict[str, Any]:
    """Fill ``tensors`` in place from the checkpoint of ``iteration`` and return its state; a collective call.

    ``tensors`` is as for :func:`save_checkpoint`, with any sharding; the checkpoint may have more. Floating-point
    tensors are converted to the dtype of ``tensors``. Raises :class:`CheckpointError` on all ranks for a damaged
    checkpoint, a missing name, or another shape or kind of number; ``tensors`` are undefined then.
    """

    def plan() -> tuple[Manifest, dict[WrittenFile, list[Read]]]:
        manifest = read_checkpoint(root, iteration)
        return manifest, plan_reads(manifest, tensors)

    # Each rank plans its own reads, apart from the others.
    manifest, reads = _on_all_ranks(control, plan)
    _on_all_ranks(control, lambda: _fill(root, iteration, reads))
    return dict(manifest.state)


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


def _on_all_ranks(control: ControlGroup | None, action: Callable[[], T]) -> T:
    """The result of ``action`` on this rank, if it succeeds on all."""
    result: list[T] = []
    with _same_error_on_all_ranks(control) as group:
        checkpoint_steps(group).all_gather("load", lambda: result.append(action()))
    return result[0]


# --- load --------------------------------------------------------------------------------------------------


class Read(NamedTuple):
    """A part of a chunk, and the part of a local box that it fills."""

    chunk: Chunk
    place: Place
    target: Tensor


def plan_reads(manifest: Manifest, tensors: Mapping[str, Boxable]) -> dict[WrittenFile, list[Read]]:
    """The reads that fill this rank's boxes of ``tensors``, by file.

    Raises :class:`CheckpointError` if the checkpoint is of another model.
    """
    wanted = boxed(tensors)
    _check_same_model(wanted, manifest.tensors)
    reads: dict[WrittenFile, list[Read]] = {}
    for name, local in wanted.items():
        for offset, box in local.boxes:
            place = tuple(slice(start, start + size) for start, size in zip(offset, box.shape))
            for chunk, taken, inside in manifest.parts(name, place):
                reads.setdefault(chunk.file, []).append(Read(chunk, inside, box[taken]))
    return reads


def _fill(root: AnyPath, iteration: int, reads: Mapping[WrittenFile, list[Read]]) -> None:
    """Read only the files and the blocks that are needed; raises :class:`CheckpointError` for a damaged file."""
    directory = locate_checkpoint(root, iteration)
    for file, of_file in reads.items():
        with VerifiedSafetensors(directory, file) as entries:
            # In the order of the file, so that a block of several small entries is read once.
            for read in sorted(of_file, key=lambda read: entries.position(read.chunk.key)):
                entries.copy_into(read.target, read.chunk.key, read.place, read.chunk.entry)


def _check_same_model(tensors: Mapping[str, BoxedTensor], saved: Mapping[str, SavedTensor]) -> None:
    """Raise :class:`CheckpointError` if the ``saved`` tensors cannot fill ``tensors``."""
    missing = [name for name in tensors if name not in saved]
    if missing:
        others = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"The checkpoint has no {missing[0]}{others}: it is from another model, or was saved without this part."
        )
    # (name, in the checkpoint, in this model); shapes first, since they explain more than dtypes.
    wrong: list[tuple[str, object, object]] = [
        (name, list(saved[name].shape), list(tensor.shape))
        for name, tensor in tensors.items()
        if tensor.shape != saved[name].shape
    ]
    for name, tensor in tensors.items():
        dtype = saved[name].dtype
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            wrong.append((name, dtype, tensor.dtype))
    if wrong:
        name, theirs, ours = wrong[0]
        more = f" (and {len(wrong) - 1} others differ)" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{name} is {theirs} in the checkpoint but {ours} in this model{more}: "
            "use the flags of the run that saved the checkpoint."
        )
