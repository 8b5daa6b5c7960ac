"""What the checkpoint benchmark saves and loads, and by which implementations: ours, torch.save and torch.load."""

import ctypes
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess
from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.files import sync_directory
from megatron.checkpoint.manifest import MASTER, MODEL
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import preset
from megatron.core.control import ControlGroup
from megatron.training.checkpoints.saved_run import find_saved_run, state_of_weights

ITERATION = 1
LAYERS = 4
KINDS = {
    MODEL: torch.bfloat16,
    MASTER: torch.float32,
    "optimizer/exp_avg/": torch.float32,
    "optimizer/exp_avg_sq/": torch.float32,
}


def weight_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama with an MLP three times and a vocabulary four times as wide as ``hidden``."""
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": (3 * hidden, hidden),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (6 * hidden, hidden),
        "mlp.linear_fc2.weight": (hidden, 3 * hidden),
    }
    shapes = {f"layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    ends = {"embedding.weight": (4 * hidden, hidden), "final_layernorm.weight": (hidden,)}
    return {**ends, **shapes, "output_layer.weight": (4 * hidden, hidden)}


def hidden_size(num_bytes: int) -> int:
    """The width, a multiple of 16, at which the whole state has about ``num_bytes``."""
    # Every matrix is so many squares of the hidden size; norms do not count.
    squares = sum(prod(shape) for shape in weight_shapes(1).values() if len(shape) == 2)
    per_square = squares * sum(dtype.itemsize for dtype in KINDS.values())
    return max(16, round((num_bytes / per_square) ** 0.5 / 16) * 16)


class Tensors:
    """The rows of ``rank`` of ``ranks`` of every tensor of a state of about ``num_bytes`` on all ranks, filled with
    random bits, which no disk can compress."""

    def __init__(self, num_bytes: int, ranks: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.local: dict[str, Tensor] = {}
        """For torch."""
        self.boxed: dict[str, Tensor] = {}
        """For our checkpoints: the same memory, and its box of the global tensor."""
        self.num_bytes = 0
        """Bytes of all ranks."""
        for name, shape in weight_shapes(hidden_size(num_bytes)).items():
            rows = shape[0] // ranks
            for kind, dtype in KINDS.items():
                tensor = torch.empty(rows, *shape[1:], dtype=dtype)
                tensor.view(torch.uint8).random_(256, generator=generator)
                offset = (rank * rows,) + (0,) * (len(shape) - 1)
                self.local[kind + name] = tensor
                self.boxed[kind + name] = BoxedTensor.from_boxes(shape, dtype, [(offset, tensor)])
                self.num_bytes += tensor.nbytes * ranks

    def clear(self) -> None:
        """Overwrite the content with zeros."""
        for tensor in self.local.values():
            tensor.zero_()

    def same_bits(self, other: "Tensors") -> bool:
        """Whether both have the same content."""
        return all(
            torch.equal(tensor.view(torch.uint8), other.local[name].view(torch.uint8))
            for name, tensor in self.local.items()
        )


class Bench:
    """A rank, the tensors that it saves, and the tensors into which it loads."""

    def __init__(self, num_bytes: int, directory: Path, world: ControlGroup) -> None:
        self.directory = directory
        self.world = world
        self.saved = Tensors(num_bytes, world.size, world.rank)
        self.loaded = Tensors(num_bytes, world.size, world.rank)
        self.background = BackgroundProcess(timeout=600.0)
        self.saving: AsyncSaveBackend | None = None

    def root(self, name: str) -> Path:
        """The directory of the checkpoints ``name``, which :func:`emptied` makes again."""
        return self.directory / name

    def torch_file(self, name: str) -> Path:
        """The file of this rank in :meth:`root`, for torch."""
        return self.root(name) / f"rank_{self.world.rank}.pt"


Step = Callable[[Bench], None]


def saved_state() -> dict[str, Any]:
    """The state of a small run, whose time does not count."""
    return state_of_weights(ITERATION, preset("tiny").resolve(8, 1, 8), {}).to_json()


def save_ours(name: str) -> Step:
    """The save of a run."""

    def step(bench: Bench) -> None:
        save_checkpoint(bench.root(name), ITERATION, bench.saved.boxed, saved_state(), bench.world)

    return step


def save_behind(name: str) -> Step:
    """The save of a run with ``--async-save``, until training can continue."""

    def step(bench: Bench) -> None:
        bench.saving = AsyncSaveBackend(bench.root(name), ITERATION, bench.background)
        save_checkpoint(bench.root(name), ITERATION, bench.saved.boxed, saved_state(), bench.world, bench.saving)

    return step


def finished(bench: Bench) -> None:
    """After a turn: wait for the save in the background."""
    assert bench.saving is not None
    failures = bench.world.all_gather_object(bench.saving.finish_own())
    assert not any(failures), failures
    if bench.world.rank == 0:
        failure = bench.saving.finish()
        assert failure is None, failure


class NoDigest:
    """The interface of a digest, without a computation."""

    def update(self, content: object) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """No digest."""
        return bytes(16)


def save_ours_without_digest(name: str) -> Step:
    """The save of a run without the computation of digests."""

    def step(bench: Bench) -> None:
        with mock.patch("xxhash.xxh3_128", NoDigest):
            save_ours(name)(bench)

    return step


def save_with_torch(name: str) -> Step:
    """``torch.save`` into the page cache, with one file per rank."""

    def step(bench: Bench) -> None:
        torch.save(bench.saved.local, bench.torch_file(name))

    return step


def save_with_torch_and_sync(name: str) -> Step:
    """``torch.save`` to stable storage."""

    def step(bench: Bench) -> None:
        save_with_torch(name)(bench)
        sync(bench.torch_file(name))

    return step


def load_ours(name: str) -> Step:
    """The load of a run that resumes: find the latest checkpoint, compare it with its digests, load it."""

    def step(bench: Bench) -> None:
        found = find_saved_run(CheckpointConfig(load=str(bench.root(name))), bench.world)
        assert found is not None
        load_checkpoint(found.root, found.iteration, bench.loaded.boxed, bench.world)

    return step


def load_with_torch(name: str, mapped: bool = False) -> Step:
    """``torch.load``, and a copy into allocated tensors."""

    def step(bench: Bench) -> None:
        content = torch.load(bench.torch_file(name), weights_only=True, mmap=mapped)
        for key, tensor in bench.loaded.local.items():
            tensor.copy_(content[key])

    return step


def emptied(name: str) -> Step:
    """Before a turn: remove the directory, make it again, and sync."""

    def step(bench: Bench) -> None:
        if bench.world.rank == 0:
            shutil.rmtree(bench.root(name), ignore_errors=True)
            bench.root(name).mkdir()
            sync_directory(bench.directory)

    return step


def synced(name: str) -> Step:
    """After a turn: sync, so that the disk is idle in the next turn."""
    return lambda bench: sync(bench.torch_file(name))


def warmed(name: str) -> Step:
    """Before a turn: the state of a run that has just started, with all files in the page cache."""

    def step(bench: Bench) -> None:
        start_afresh(bench)
        for path in files_under(bench.root(name)):
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass

    return step


def cooled(name: str) -> Step:
    """Before a turn: the state of a run that has just started, with no file in the page cache."""

    def step(bench: Bench) -> None:
        start_afresh(bench)
        for path in files_under(bench.root(name)):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return step


def start_afresh(bench: Bench) -> None:
    """Clear the tensors into which a load writes, and return freed memory to the system (glibc only): a run loads once,
    before it has freed any."""
    bench.loaded.clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def compared(bench: Bench) -> None:
    """After a turn: the loaded bits must be the saved bits."""
    assert bench.loaded.same_bits(bench.saved)


def sync(path: Path) -> None:
    """Bring a file's content to stable storage."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def files_under(directory: Path) -> list[Path]:
    """All files below, in the order of their names."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Contender:
    """A row of the first table; only ``run`` is timed, until the last rank has finished."""

    name: str
    run: Step
    before: Step
    after: Step = lambda bench: None


CONTENDERS = (
    Contender("save", save_ours("ours"), emptied("ours")),
    Contender("save without digests", save_ours_without_digest("undigested"), emptied("undigested")),
    Contender("save in the background", save_behind("behind"), emptied("behind"), finished),
    Contender("torch.save + fsync", save_with_torch_and_sync("torch"), emptied("torch")),
    Contender("torch.save, page cache only", save_with_torch("unsynced"), emptied("unsynced"), synced("unsynced")),
    Contender("load", load_ours("ours"), warmed("ours"), compared),
    Contender("torch.load + copy", load_with_torch("torch"), warmed("torch"), compared),
    Contender("torch.load + copy, memory there", load_with_torch("torch"), load_with_torch("torch"), compared),
    Contender("torch.load mmap + copy", load_with_torch("torch", mapped=True), warmed("torch"), compared),
    Contender("load, cold", load_ours("ours"), cooled("ours"), compared),
    Contender("torch.load + copy, cold", load_with_torch("torch"), cooled("torch"), compared),
    Contender("torch.load mmap + copy, cold", load_with_torch("torch", mapped=True), cooled("torch"), compared),
)


@dataclass(frozen=True)
class Comparison:
    """A row of the second table: a contender, its reference, and the least ratio of speeds that is a success."""

    name: str
    reference: str
    aim: float | None = None
    meaning: str = ""
    """The aim in other words."""


COMPARISONS = (
    Comparison("save", "torch.save + fsync", 0.9),
    Comparison("save", "save without digests", 0.95, "digests cost under 5 %"),
    Comparison("save in the background", "save", 4.0, "training waits for under 25 % of a save"),
    Comparison("load", "torch.load + copy", 0.9),
    Comparison("load", "torch.load + copy, memory there"),
    Comparison("load", "torch.load mmap + copy"),
    Comparison("load, cold", "torch.load + copy, cold", 0.9),
    Comparison("load, cold", "torch.load mmap + copy, cold"),
)
