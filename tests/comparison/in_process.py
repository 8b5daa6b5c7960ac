"""Experiments inside of this process, and in ranks that are started once; with a planted fault on side B."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

import megatron_llama as ml
from megatron.comparison.experiment import ExperimentError, Request
from megatron.comparison.flags import compare_flags
from megatron.comparison.search import Found, Search
from megatron.comparison.side import Side
from megatron.config.command_line import CommandLine
from megatron.config.run import RunConfig
from megatron.config.run_yaml import run_yaml
from megatron.errors import UserError
from tests.comparison.faults import PATCHES

REPOSITORY = Path(__file__).parents[2]
_PATIENCE_S = 400.0


def run_steps(yaml: str, request: str, fault: str) -> None:
    """Two steps of a run of flags in a file; ``fault`` is planted unless it is empty."""
    parts = Request(**json.loads(request)).parts()
    with PATCHES[fault]() if fault else nullcontext(), redirect_stdout(StringIO()):
        with ml.Run.from_flags(["--config", yaml], parts=parts) as run:
            run.step()
            run.step()


class Ranks:
    """Processes that wait for experiments in the files of a directory."""

    def __init__(self, directory: Path, size: int) -> None:
        self.root, self.size, self._starts = directory, size, 0
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the processes: for the first case, and after one in which a process ended."""
        self._starts, self._count = self._starts + 1, 0
        self.directory = self.root / str(self._starts)
        self.directory.mkdir(parents=True)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.size}"]
        words += ["-m", "tests.comparison.in_process", str(self.directory), str(os.getpid())]
        with (self.directory / "log.txt").open("w") as log:
            return subprocess.Popen(words, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)

    def run(self, yaml: str, request: str, fault: str) -> None:
        self._process = self._process or self._start()
        self._count += 1
        draft = self.directory / "draft"
        draft.write_text(json.dumps([yaml, request, fault]))
        draft.rename(self.directory / f"{self._count}.case")
        ends = [self.directory / f"{self._count}.{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + _PATIENCE_S
        while not all(end.exists() for end in ends):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "log.txt").read_text()
                self.close()
                raise AssertionError(log[:3000])
            time.sleep(0.01)
        errors = {end.read_text() for end in ends} - {""}
        if errors:
            raise ExperimentError("; ".join(sorted(errors)))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        (self.directory / "stop").touch()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def serve(directory: Path, tests: Path, rank: int) -> None:
    """A rank: run the cases in their order, until the process of the ``tests`` stops them or is no more."""
    number = 1
    while tests.exists() and not (directory / "stop").exists():
        case = directory / f"{number}.case"
        if not case.exists():
            time.sleep(0.01)
            continue
        error = ""
        try:
            run_steps(*json.loads(case.read_text()))
        except UserError as refused:
            error = str(refused)
        draft = directory / f"draft.{number}.{rank}"
        draft.write_text(error)
        draft.rename(directory / f"{number}.{rank}")
        number += 1


@dataclass
class InProcess:
    """A runner of experiments (:class:`megatron.comparison.search.Runner`)."""

    ranks: dict[int, Ranks]
    fault: str = ""

    def __call__(self, label: str, config: RunConfig, world_size: int, request: Request, directory: Path) -> None:
        directory.mkdir(parents=True)
        yaml = directory / "flags.yaml"
        yaml.write_text(run_yaml(config, "flags.yaml"), encoding="utf-8")
        run = run_steps if world_size == 1 else self.ranks[world_size].run
        run(str(yaml), json.dumps(asdict(request)), self.fault if label == "B" else "")


@contextmanager
def ranks_started(directory: Path, *sizes: int) -> Iterator[dict[int, Ranks]]:
    ranks = {size: Ranks(directory / str(size), size) for size in sizes}
    try:
        yield ranks
    finally:
        for one in ranks.values():
            one.close()


MODEL = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --num-workers 0 --eval-iters 0"
)


def side(flags: str) -> tuple[RunConfig, int]:
    """The run of ``flags`` and its number of ranks: those of the layout, in two replicas if it divides these."""
    config = CommandLine.of(f"{MODEL} {flags}".split()).parse().checked()
    is_divided = any(flag in flags for flag in ("distributed-optimizer", "fsdp2", "expert-model-parallel"))
    return config, config.parallel.model_parallel_size * (2 if is_divided else 1)


def search(runner: InProcess, directory: Path, a: str, b: str) -> Found:
    sides = side(a), side(b)
    known = [Side(label, directory, "run", config=one[0]) for label, one in zip(("A", "B"), sides)]  # type: ignore[arg-type]
    return Search(runner, directory, *sides, compare_flags(*known).differences)()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path("/proc", sys.argv[2]), int(os.environ["RANK"]))
