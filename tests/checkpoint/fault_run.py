"""The processes of a run that does nothing but save, and what its checkpoints must hold.

What it saves is a function of the iteration and of the *life*: the number of the start that saved it. So every
checkpoint can be compared bit for bit with what was meant, and one that is patched together from two is noticed.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess
from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.directory import TRACKER, iteration_directory
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.checkpoint.lock import LOCK
from megatron.checkpoint.manifest import JSON, read_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.control import ControlGroup, run_on_rank0
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import find_saved_run, state_of_weights
from tests.checkpoint.models import LLAMA
from tests.forked import fork_context

PATIENCE = 60.0
"""Seconds of silence after which a world counts as hanging."""
GRACE = 2.0
"""Seconds that the other ranks have to end when one has failed."""
ALONE = ControlGroup([0], 0)
"""A process without others."""


def sentence(call: Callable[[], object]) -> str:
    """What the :class:`CheckpointError` says that ``call`` raises; empty without."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


# --- what is saved -------------------------------------------------------------------------------------------

SHAPES = {"rows": (64, 256), "columns": (96, 128), "replicated": (5000,)}


class Saved(NamedTuple):
    """A checkpoint, and the start of the run that saved it; the later of two is the greater."""

    iteration: int
    life: int


def tensors_of(saved: Saved, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """What ``rank`` of ``size`` holds of a checkpoint's tensors."""
    generator = torch.Generator().manual_seed(saved.iteration * 1000 + saved.life)
    tensors: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        whole = torch.rand(shape, generator=generator)
        offset = [0] * len(shape)
        if name != "replicated":
            dim = ("rows", "columns").index(name)
            offset[dim] = rank * shape[dim] // size
            whole = whole.chunk(size, dim)[rank]
        tensors[name] = BoxedTensor.from_boxes(shape, whole.dtype, [(offset, whole)])
    return tensors


def state_of(saved: Saved) -> dict[str, JSON]:
    """What a checkpoint holds beside tensors."""
    state = state_of_weights(saved.iteration, LLAMA, {"life": saved.life}).to_json()
    return cast(dict[str, JSON], json.loads(json.dumps(state)))


def content_of(root: Path, iteration: int, world: ControlGroup = ALONE) -> Saved:
    """Load a checkpoint and compare every bit with what was meant; all ranks call it."""
    saved = Saved(iteration, read_checkpoint(root, iteration).state["flags"]["life"])
    expected, loaded = (tensors_of(saved, world.rank, world.size) for _ in range(2))
    for tensor in _pieces(loaded):
        tensor.fill_(-1)
    assert load_checkpoint(root, iteration, loaded, world) == state_of(saved)
    for one, other in zip(_pieces(loaded), _pieces(expected)):
        assert torch.equal(one, other), f"{saved} is not what was saved"
    return saved


def _pieces(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [piece for tensor in tensors.values() if isinstance(tensor, BoxedTensor) for _, piece in tensor.boxes]


def load_newest(root: Path, world: ControlGroup, fall_back: bool = True) -> Saved | None:
    """What a run would start from; all ranks call it."""
    found = find_saved_run(CheckpointConfig(load=str(root), checkpoint_fallback=fall_back), world)
    return None if found is None else content_of(root, found.iteration, world)


def all_saved(root: Path) -> list[Saved]:
    """Every checkpoint that a reader finds, each of which must be whole."""
    for iteration in list_checkpoints(root):
        verify_share(root, iteration, 0, 1)
    return [content_of(root, iteration) for iteration in list_checkpoints(root)]


def leftovers(root: Path) -> set[str]:
    """What lies beside the checkpoints, the tracker and the lock."""
    if not root.exists():
        return set()
    known = {TRACKER, LOCK, *(iteration_directory(root, iteration).name for iteration in list_checkpoints(root))}
    return set(os.listdir(root)) - known


# --- kinds of save -------------------------------------------------------------------------------------------


KINDS = ("sync", "async")


class Saving:
    """A way to save; every rank has one, and all but ``close`` are collective calls. ``async``: a process beside each
    rank writes."""

    def __init__(self, kind: str, world: ControlGroup) -> None:
        self._world = world
        self._process = BackgroundProcess(PATIENCE) if kind == "async" else None

    def save(self, root: Path, saved: Saved) -> None:
        """Save a checkpoint, and return once it is there, as a run that cannot go on without it."""
        world, backend = self._world, None
        if self._process is not None:
            backend = AsyncSaveBackend(root, saved.iteration, self._process, read_back=True)
        tensors = tensors_of(saved, world.rank, world.size)
        save_checkpoint(root, saved.iteration, tensors, state_of(saved), world, backend)
        if backend is None:
            return
        failures = world.all_gather_object(backend.finish_own())
        failure = next(filter(None, failures), None) or run_on_rank0(world, backend.finish)
        if failure is not None:
            backend.abandon()
            raise CheckpointError(failure)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


def save(kind: str, root: Path, saved: Saved, world: ControlGroup) -> None:
    """Save one checkpoint; all ranks call it."""
    with closing(Saving(kind, world)) as saving:
        saving.save(root, saved)


# --- processes -----------------------------------------------------------------------------------------------


@dataclass
class Seat:
    """A rank's place in its world."""

    world: ControlGroup
    tell: Callable[[object], None]
    """Tells the test something that survives the death of this process."""


class Ending(NamedTuple):
    """How a world ended."""

    told: list[list[Any]]
    """What each rank told."""
    killed: set[int]
    """The ranks that were killed."""


class World:
    """The ranks of a run, each a process; ``case`` is called with a :class:`Seat` and ``arguments``."""

    def __init__(self, directory: Path, size: int, case: Callable[..., None], *arguments: Any) -> None:
        self._directory = Path(tempfile.mkdtemp(dir=directory, prefix="world-"))
        context = fork_context()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(rank, size, self._directory, theirs, case, arguments))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def end(self) -> Ending:
        """Wait until all ranks have ended, in success or because one was killed; no process that they have started
        may remain.

        Once one has failed, all must end, as torchrun ends them. Nearly always they do by themselves, but gloo may wait
        for a dead peer until its timeout.
        """
        told: list[list[Any]] = [[] for _ in self._pipes]
        open_pipes, failed_at = list(self._pipes), None
        heard_at = time.monotonic()
        # What a rank has started may hold its end of the pipe as well.
        while open_pipes or self._remaining():
            for pipe in wait(open_pipes, timeout=0.1 if open_pipes else 0.01):
                assert isinstance(pipe, Connection)
                heard_at = time.monotonic()
                try:
                    told[self._pipes.index(pipe)].append(pipe.recv())
                except EOFError:
                    open_pipes.remove(pipe)
            now = time.monotonic()
            if now > heard_at + PATIENCE:
                self._fail("a rank, or what it has started, hangs")
            if failed_at is None and any(process.exitcode for process in self._processes):
                failed_at = now
            if failed_at is not None and now > failed_at + GRACE:
                for process in self._processes:
                    process.kill()
        for process in self._processes:
            process.join(PATIENCE)
        codes = [process.exitcode for process in self._processes]
        killed = {rank for rank, code in enumerate(codes) if code == -signal.SIGKILL}
        assert all((code != 0) == bool(killed) for code in codes), f"exit codes {codes}:\n{self._log()}"
        shutil.rmtree(self._directory)
        return Ending(told, killed)

    def _remaining(self) -> dict[int, str]:
        """Processes of the sessions that the ranks lead, they and what they have started, with their commands."""
        sessions = {process.pid for process in self._processes}
        remaining: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            # One may just have ended.
            with suppress(OSError):
                # "pid (name) state parent group session ...": the name may hold blanks and parentheses.
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
                if int(session) in sessions and state != "Z":
                    remaining[int(path.parent.name)] = path.with_name("cmdline").read_text().replace("\0", " ")
        return remaining

    def _fail(self, problem: str) -> NoReturn:
        remaining = self._remaining()
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"{problem}: {remaining}\n{self._log()}")

    def _log(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self._directory.glob("*.log")))


def _serve(
    rank: int, size: int, directory: Path, pipe: Connection, case: Callable[..., None], arguments: Sequence[Any]
) -> None:
    os.setsid()  # what this process starts is known by its session
    log = os.open(directory / f"rank_{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if size > 1:
        store = dist.FileStore(str(directory / "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    case(Seat(ControlGroup(range(size), rank), pipe.send), *arguments)
    if size > 1:
        dist.destroy_process_group()
