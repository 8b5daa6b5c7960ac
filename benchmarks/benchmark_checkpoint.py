#!/usr/bin/env python3
"""Speed of saving and loading checkpoints, against torch.save and torch.load of the same bytes on the same disk.

All contenders take turns within one run, in another order every time, so that the ratios hold on a noisy machine:

    python benchmarks/benchmark_checkpoint.py [--size-mb 500] [--repeats 7] [--ranks 2] [--directory DIR] [--json OUT]

The state is that of a Llama in bf16 under AdamW: weights, fp32 master weights and two moments; every rank holds its
rows of each tensor. A save ends when its bytes are on stable storage, unless its name says otherwise. A load ends when
they are in tensors that were there before; ours looks for the latest checkpoint and compares its files with their
digests first. Files are in the page cache, unless the name says that they are cold, and no freed memory is at hand
for what torch.load makes, as when a run has just started. A save in the background ends when training could go on.
"""

import ctypes
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them, here and in the ranks that this process starts.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch import Tensor

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.files import sync_directory
from megatron.checkpoint.names import MASTER, MODEL
from megatron.checkpoint.sharded_tensor import BoxedTensor
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import preset
from megatron.core.control import ControlGroup
from megatron.core.topology import RankGrid, Topology
from megatron.errors import UserError
from megatron.errors import report as report_error
from megatron.ranges import require_at_least
from megatron.training.checkpoints.saved_run import find_saved_run, state_of_weights
from megatron.training.initialize import Process, prepare_cpu
from megatron.urls import refuse_urls

ITERATION = 1
LAYERS = 4
KINDS = {
    MODEL: torch.bfloat16,
    MASTER: torch.float32,
    "optimizer/exp_avg/": torch.float32,
    "optimizer/exp_avg_sq/": torch.float32,
}


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to save and load, where, and how often."""

    size_mb: int = 500
    """Millions of bytes of all ranks together, about."""
    repeats: int = 7
    """Turns of every contender; the median counts."""
    ranks: Literal[1, 2] = 1
    """Processes that save and load together."""
    directory: Path = Path(".")
    """Directory for the files, which need five times the size and are removed at the end."""
    json: Path | None = None
    """File for the figures."""

    def check(self) -> None:
        require_at_least(1, {"--size-mb": self.size_mb, "--repeats": self.repeats})
        refuse_urls({"--directory": self.directory, "--json": self.json}, "name a local path")


# --- what is saved -------------------------------------------------------------------------------------------


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
    """A rank's rows of every tensor of the state, full of random bits, which no disk can compress."""

    def __init__(self, config: BenchmarkConfig, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.local: dict[str, Tensor] = {}
        """What torch saves and loads."""
        self.boxed: dict[str, Tensor] = {}
        """What we save and load: the same memory, and where it belongs."""
        self.num_bytes = 0
        """Of all ranks."""
        for name, shape in weight_shapes(hidden_size(config.size_mb * 10**6)).items():
            rows = shape[0] // config.ranks
            for kind, dtype in KINDS.items():
                tensor = torch.empty(rows, *shape[1:], dtype=dtype)
                tensor.view(torch.uint8).random_(256, generator=generator)
                offset = (rank * rows,) + (0,) * (len(shape) - 1)
                self.local[kind + name] = tensor
                self.boxed[kind + name] = BoxedTensor.from_boxes(shape, dtype, [(offset, tensor)])
                self.num_bytes += tensor.nbytes * config.ranks

    def clear(self) -> None:
        """Forget the content, but not the memory."""
        for tensor in self.local.values():
            tensor.zero_()

    def same_bits(self, other: "Tensors") -> bool:
        """Whether both have the same content."""
        return all(
            torch.equal(tensor.view(torch.uint8), other.local[name].view(torch.uint8))
            for name, tensor in self.local.items()
        )


class Bench:
    """A rank, what it saves, and what it loads into."""

    def __init__(self, config: BenchmarkConfig, directory: Path, world: ControlGroup) -> None:
        self.directory = directory
        self.world = world
        self.saved = Tensors(config, world.rank)
        self.loaded = Tensors(config, world.rank)
        self.background = BackgroundProcess(timeout=600.0)
        self.saving: AsyncSaveBackend | None = None

    def root(self, name: str) -> Path:
        """The directory of checkpoints that ``name`` alone saves to, made anew by :func:`emptied`."""
        return self.directory / name

    def torch_file(self, name: str) -> Path:
        """This rank's file in it, for torch."""
        return self.root(name) / f"rank_{self.world.rank}.pt"


# --- contenders ----------------------------------------------------------------------------------------------

Step = Callable[[Bench], None]


def saved_state() -> dict[str, Any]:
    """The state of a small run: what is not a tensor takes no time."""
    return state_of_weights(ITERATION, preset("tiny").resolve(8, 1, 8), {}).to_json()


def save_ours(name: str) -> Step:
    """As a run saves."""

    def step(bench: Bench) -> None:
        save_checkpoint(bench.root(name), ITERATION, bench.saved.boxed, saved_state(), bench.world)

    return step


def save_behind(name: str) -> Step:
    """As a run saves with ``--async-save``, up to the moment from which it trains on."""

    def step(bench: Bench) -> None:
        bench.saving = AsyncSaveBackend(bench.root(name), ITERATION, bench.background)
        save_checkpoint(bench.root(name), ITERATION, bench.saved.boxed, saved_state(), bench.world, bench.saving)

    return step


def finished(bench: Bench) -> None:
    """Afterwards: wait for the save in the background."""
    assert bench.saving is not None
    failures = bench.world.all_gather_object(bench.saving.finish_own())
    assert not any(failures), failures
    if bench.world.rank == 0:
        failure = bench.saving.finish()
        assert failure is None, failure


class NoDigest:
    """Takes what a digest takes, and makes none of it."""

    def update(self, content: object) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """No digest."""
        return bytes(16)


def save_ours_without_digest(name: str) -> Step:
    """As a run saves, but that nothing is computed from the bytes."""

    def step(bench: Bench) -> None:
        with mock.patch("xxhash.xxh3_128", NoDigest):
            save_ours(name)(bench)

    return step


def save_with_torch(name: str) -> Step:
    """``torch.save`` into the page cache, each rank its own file."""

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
    """As a run resumes: find the latest checkpoint, compare it with its digests, load it."""

    def step(bench: Bench) -> None:
        found = find_saved_run(CheckpointConfig(load=str(bench.root(name))), bench.world)
        assert found is not None
        load_checkpoint(found.root, found.iteration, bench.loaded.boxed, bench.world)

    return step


def load_with_torch(name: str, mapped: bool = False) -> Step:
    """``torch.load``, and a copy into the tensors that are there."""

    def step(bench: Bench) -> None:
        content = torch.load(bench.torch_file(name), weights_only=True, mmap=mapped)
        for key, tensor in bench.loaded.local.items():
            tensor.copy_(content[key])

    return step


def emptied(name: str) -> Step:
    """Beforehand: make the directory anew, and let the disk finish with the old one."""

    def step(bench: Bench) -> None:
        if bench.world.rank == 0:
            shutil.rmtree(bench.root(name), ignore_errors=True)
            bench.root(name).mkdir()
            sync_directory(bench.directory)

    return step


def synced(name: str) -> Step:
    """Afterwards: leave nothing for the disk to do during another's turn."""
    return lambda bench: sync(bench.torch_file(name))


def warmed(name: str) -> Step:
    """Beforehand: as when a run has just started, but that every file has been read."""

    def step(bench: Bench) -> None:
        start_afresh(bench)
        for path in files_under(bench.root(name)):
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass

    return step


def cooled(name: str) -> Step:
    """Beforehand: as when a run has just started, and the page cache knows none of the files."""

    def step(bench: Bench) -> None:
        start_afresh(bench)
        for path in files_under(bench.root(name)):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return step


def start_afresh(bench: Bench) -> None:
    """Clear what is loaded into, and give freed memory back: a run loads once, before it has any (glibc only)."""
    bench.loaded.clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def compared(bench: Bench) -> None:
    """Afterwards: what was loaded must be what was saved."""
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
    """A row of the first table; only ``run`` is timed, until the last rank is through."""

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
    """A row of the second table: how many times as fast as its reference a contender is, and should be at least."""

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

# --- measuring -----------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """One turn of a contender."""

    seconds: float
    """From when all ranks start to when all are through."""
    cpu_seconds: float
    """What the first rank's threads computed meanwhile: steadier where others use the machine."""


def run_rank(rank: int, config: BenchmarkConfig, directory: Path) -> None:
    """Take part in every contender's turns; rank 0 writes how long they took, and what was saved and loaded."""
    prepare_cpu(Process(rank, rank, config.ranks, config.ranks, has_thread_count=True))
    if config.ranks > 1:
        store = f"file://{directory / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=config.ranks)
    bench = Bench(config, directory, Topology(RankGrid(dp=config.ranks), rank, torch.device("cpu")).control)
    turns = take_turns(config.repeats, bench)
    bench.background.close()
    if rank == 0:
        measured = {"bytes": bench.saved.num_bytes, "tensors": len(bench.saved.local), "turns": turns}
        (directory / "measured.json").write_text(json.dumps(measured))
    if config.ranks > 1:
        dist.destroy_process_group()


def take_turns(repeats: int, bench: Bench) -> dict[str, list[Turn]]:
    """The turns of every contender, after one that warms up."""
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in CONTENDERS}
    for repeat in range(repeats + 1):
        for contender in order_of(repeat):
            turns[contender.name].append(take_turn(contender, bench))
        if bench.world.rank == 0:
            print(f"\rturn {repeat} of {repeats}", end="", file=sys.stderr, flush=True)
    if bench.world.rank == 0:
        print(file=sys.stderr)
    return {name: taken[1:] for name, taken in turns.items()}


def order_of(repeat: int) -> list[Contender]:
    """First as they are listed, since a load needs a save; then at random, since each is slowed by what the one
    before it has left behind: full caches, memory that the system has to fetch again."""
    return random.Random(repeat).sample(CONTENDERS, len(CONTENDERS)) if repeat else list(CONTENDERS)


def take_turn(contender: Contender, bench: Bench) -> Turn:
    """All ranks together."""
    contender.before(bench)
    wait_for_all()
    start, cpu_start = time.perf_counter(), time.process_time()
    contender.run(bench)
    wait_for_all()
    turn = Turn(time.perf_counter() - start, time.process_time() - cpu_start)
    contender.after(bench)
    wait_for_all()
    return turn


def wait_for_all() -> None:
    """A barrier, where there are several ranks."""
    if dist.is_initialized():
        dist.barrier()


def measure(config: BenchmarkConfig) -> dict[str, Any]:
    """What :func:`run_rank` wrote, in a directory that is gone afterwards."""
    config.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=config.directory) as directory:
        if config.ranks == 1:
            run_rank(0, config, Path(directory))
        else:
            mp.spawn(run_rank, args=(config, Path(directory)), nprocs=config.ranks)  # type: ignore[attr-defined]
        measured: dict[str, Any] = json.loads((Path(directory) / "measured.json").read_text())
    return measured


# --- reporting -----------------------------------------------------------------------------------------------


def rows_of(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By contender: speed at the median, and every turn's times."""
    rows = {}
    for name, turns in measured["turns"].items():
        seconds, cpu_seconds = map(list, zip(*turns))
        speed = measured["bytes"] / median(seconds) / 1e6
        rows[name] = {"mb_per_s": speed, "seconds": seconds, "cpu_seconds": cpu_seconds}
    return rows


def comparisons_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ratios turn by turn, their median, and whether it is what it should be."""
    found = []
    for comparison in COMPARISONS:
        mine, theirs = rows[comparison.name]["seconds"], rows[comparison.reference]["seconds"]
        ratios = [reference / own for own, reference in zip(mine, theirs)]
        ratio = median(ratios)
        is_met = None if comparison.aim is None else ratio >= comparison.aim
        found.append({**asdict(comparison), "ratio": ratio, "is_met": is_met, "ratios": ratios})
    return found


def print_tables(config: BenchmarkConfig, figures: Mapping[str, Any]) -> None:
    """Both tables; after each median the least and the most."""
    size = f"{figures['bytes'] / 1e6:,.1f} MB in {figures['tensors']} tensors"
    print(f"{size}, {config.ranks} rank{'s'[: config.ranks - 1]}, {config.repeats} turns\n")
    print(f"{'':30}{'MB/s':>8}{'seconds':>9}{'least':>8}{'most':>8}{'CPU s':>8}")
    for name, row in figures["rows"].items():
        least, middle, most = min(row["seconds"]), median(row["seconds"]), max(row["seconds"])
        print(f"{name:30}{row['mb_per_s']:8.0f}{middle:9.3f}{least:8.3f}{most:8.3f}{median(row['cpu_seconds']):8.3f}")
    print(f"\n{'times as fast as':42}{'ratio':>8}{'least':>8}{'most':>8}  aim")
    for row in figures["comparisons"]:
        ratios = f"{row['ratio']:8.3f}{min(row['ratios']):8.3f}{max(row['ratios']):8.3f}"
        print(f"{row['name'] + ' / ' + row['reference']:42}{ratios}  {verdict(row)}")


def verdict(row: Mapping[str, Any]) -> str:
    """The aim of a comparison, and whether it is met."""
    if row["aim"] is None:
        return "(information)"
    meaning = f" ({row['meaning']})" if row["meaning"] else ""
    return f"at least {row['aim']:.2f}{meaning}: {'met' if row['is_met'] else 'MISSED'}"


def main() -> int:
    """Run the tool; the exit code."""
    config = tyro.cli(BenchmarkConfig, description=__doc__)
    try:
        config.check()
        measured = measure(config)
    except UserError as error:
        report_error(error, rank=0)
        return 1
    rows = rows_of(measured)
    figures = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "flags": asdict(config),
        "bytes": measured["bytes"],
        "tensors": measured["tensors"],
        "rows": rows,
        "comparisons": comparisons_of(rows),
    }
    print_tables(config, figures)
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
