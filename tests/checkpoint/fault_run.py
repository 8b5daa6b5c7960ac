"""A run in miniature that does nothing but save, the processes it runs in, and what its checkpoints must hold.

What it saves is a function of the iteration and of the *life*: the number of the start that saved it. So every
checkpoint can be compared bit for bit with what was meant, and one that is patched together from two is noticed.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint, verify_share
from megatron.checkpoint.directory import TRACKER, iteration_directory, locate_checkpoint, remove_checkpoint
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.lock import LOCK, acquire
from megatron.checkpoint.manifest import JSON, read_checkpoint
from megatron.checkpoint.retention import Retention
from megatron.checkpoint.sharded_tensor import BoxedTensor
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.control import ControlGroup
from megatron.core.run_on_ranks import run_on_all_ranks, run_on_rank0
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import find_saved_run, state_of_weights
from tests.forked import fork_context

PATIENCE = 60.0
"""Seconds of silence after which a world counts as hanging."""
GRACE = 2.0
"""Seconds that the other ranks have to end when one has failed."""
ALONE = ControlGroup([0], 0)
"""A process without others."""

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
    architecture = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=8,
        vocab_size=8,
        padded_vocab_size=8,
        max_position_embeddings=8,
    )
    state = state_of_weights(saved.iteration, architecture, {"life": saved.life}).to_json()
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


# --- the run -------------------------------------------------------------------------------------------------


@dataclass
class Seat:
    """A rank's place in its world."""

    world: ControlGroup
    tell: Callable[[object], None]
    """Tells the test something that survives the death of this process."""


@dataclass(frozen=True)
class Life:
    """From one start of the run to its end."""

    root: Path
    number: int
    kind: str = "sync"
    saves: int | None = None
    """How many; without end if None."""
    again: bool = False
    """Begin with saving the iteration that was loaded once more."""
    keep: int = 2


@dataclass(frozen=True)
class Started:
    """Told when the newest checkpoint is loaded, which was as it should be."""

    found: Saved | None


@dataclass(frozen=True)
class Committed:
    """Told once a checkpoint is there."""

    saved: Saved
    stayed: set[str]
    """What an earlier life left behind, and is still there."""


def run(seat: Seat, life: Life) -> None:
    """Take the lock, load the newest checkpoint, save one iteration after the other, delete old ones."""
    world, root = seat.world, life.root
    with ExitStack() as stack:
        if world.rank == 0:
            stack.callback(acquire(root).release)
        inherited = leftovers(root)
        found = load_newest(root, world)
        seat.tell(Started(found))
        retention = Retention(life.keep, None, partial(_verify, root, world))
        saving = stack.enter_context(closing(Saving(life.kind, world)))
        first = 1 if found is None else found.iteration + (not life.again)
        for iteration in count(first) if life.saves is None else range(first, first + life.saves):
            saving.save(root, Saved(iteration, life.number))
            seat.tell(Committed(Saved(iteration, life.number), inherited & leftovers(root)))
            for old in retention.superfluous(run_on_rank0(world, partial(list_checkpoints, root))):
                if world.rank == 0:
                    remove_checkpoint(locate_checkpoint(root, old))


def _verify(root: Path, world: ControlGroup, iteration: int) -> None:
    run_on_all_ranks(world, partial(verify_share, root, iteration, world.rank, world.size))


# --- processes -----------------------------------------------------------------------------------------------


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
        self._told: list[list[Any]] = [[] for _ in range(size)]
        self._failed_at: float | None = None
        self._heard_at = time.monotonic()
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(rank, size, self._directory, theirs, case, arguments))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._open_pipes = list(self._pipes)

    def wait_for_words(self, number: int) -> None:
        """Wait until the first rank has told so many things, or ended."""
        while len(self._told[0]) < number and self._pipes[0] in self._open_pipes:
            self._listen()

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL."""
        for rank in ranks:
            self._processes[rank].kill()

    def end(self) -> "Ending":
        """Wait until all ranks have ended, in success or because one was killed; no process that they have started
        may remain."""
        # What a rank has started may hold its end of the pipe as well.
        while self._open_pipes:
            self._listen()
            self._end_with_the_first()
        while self._remaining():
            if time.monotonic() > self._heard_at + PATIENCE:
                self._fail("processes remain that a rank has started")
            time.sleep(0.01)
        codes = [self._exit_code(process) for process in self._processes]
        killed = {rank for rank, code in enumerate(codes) if code == -signal.SIGKILL}
        assert all((code != 0) == bool(killed) for code in codes), f"exit codes {codes}:\n{self._log()}"
        shutil.rmtree(self._directory)
        return Ending(self._told, killed)

    def _listen(self) -> None:
        if time.monotonic() > self._heard_at + PATIENCE:
            self._fail("a rank, or what it has started, hangs")
        for pipe in wait(self._open_pipes, timeout=0.1):
            assert isinstance(pipe, Connection)
            self._heard_at = time.monotonic()
            try:
                self._told[self._pipes.index(pipe)].append(pipe.recv())
            except EOFError:
                self._open_pipes.remove(pipe)

    def _end_with_the_first(self) -> None:
        """What torchrun does: once one has failed, all must end. Nearly always they do by themselves, but gloo may
        wait for a dead peer until its timeout."""
        if self._failed_at is None and any(process.exitcode for process in self._processes):
            self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() > self._failed_at + GRACE:
            self.kill(range(len(self._processes)))

    @staticmethod
    def _exit_code(process: BaseProcess) -> int | None:
        process.join(PATIENCE)
        return process.exitcode

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
