"""What every rank does at start (topology, model, gathered objects), and what the planner does before it."""

import contextlib
import io
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.lib.scaling_checkpoint import layouts_fsdp, simulated_module
from benchmarks.lib.scaling_curve import Cost, Curve, Point, cost_of
from megatron.commands import planning as plan_layout
from megatron.commands import pretrain_llama
from megatron.core.control import ControlGroup
from megatron.core.topology import RankGrid, Topology

_AXES = (("tp",), ("cp",), ("pp",), ("dp",), ("tp", "cp", "dp"), ("tp", "pp"), ("cp", "dp_shard"), ("dp_replicate",))
_RUN = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 60 "
    "--seq-length 32 --num-workers 0 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --log-interval 1 "
    "--peak-tflops 1 --device cpu --save-interval 2"
)
ITERATIONS = 4


@dataclass(frozen=True)
class Gather:
    """One gather of an object from every rank."""

    where: str
    """Module and function."""
    iteration: int
    """Iterations that were done; 0 is the start."""
    bytes: int
    """Bytes of this rank's object."""


def object_gathers() -> list[Gather]:
    """What a rank of a small run gathers from all ranks, from its start to its end."""
    found: list[Gather] = []

    def record(group: ControlGroup, value: Any) -> list[Any]:
        frame = traceback.extract_stack(limit=3)[0]
        done = output.getvalue().count("elapsed time per iteration")
        found.append(Gather(f"{Path(frame.filename).stem}.{frame.name}", done, len(pickle.dumps(value))))
        return [value]

    with tempfile.TemporaryDirectory(prefix="scaling-") as directory:
        words = f"{_RUN} --train-iters {ITERATIONS} --save {directory}".split()
        with (
            mock.patch.object(ControlGroup, "all_gather_object", record),
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            pretrain_llama.main(words)
    return found


def place_rank(ranks: int) -> int:
    """Build the topology of the last of ``ranks``, TP 8 and PP 16 where they fit, and look up all its groups."""
    tp = min(8, ranks)
    pp = min(16, ranks // tp)
    grid = RankGrid(tp=tp, pp=pp, dp=ranks // tp // pp)
    topology = Topology(grid, ranks - 1, torch.device("cpu"))
    groups = [topology.communicator(*axes) for axes in _AXES]
    # As the detection of stragglers does: which ranks do the same work.
    peers = list(grid.groups(("tp", "cp", "dp")))
    return len(groups) + len(peers)


def build_fsdp(ranks: int) -> Cost:
    """Building the model and the optimizer of a rank under FSDP over all ``ranks``, on fake tensors."""
    run = layouts_fsdp(ranks)[0].run()
    return cost_of(lambda: simulated_module(run, ranks - 1).data_parallel.num_parameters)[1]


def start_curves(largest: bool) -> list[Curve]:
    """Ranks grow: topology, model and gathered objects of one of them."""
    sizes = [8 * 4**step for step in range(8 if largest else 4)]
    points = []
    for ranks in sizes:
        _, cost = cost_of(lambda ranks=ranks: place_rank(ranks))  # type: ignore[misc]
        points.append(Point(ranks, cost.seconds, cost.bytes))
    models = [Point(ranks, (cost := build_fsdp(ranks)).seconds, cost.bytes) for ranks in sizes]
    gathers = object_gathers()
    start = sum(one.bytes for one in gathers if one.iteration == 0)
    later = sum(one.bytes for one in gathers if 0 < one.iteration < ITERATIONS)
    return [
        Curve("topology of a rank", "ranks", tuple(points), "≤ 10 s"),
        Curve("model of a rank, 8B, FSDP", "ranks", tuple(models), "flat", order=0.25),
        # torch pads every object to the largest, so that each rank receives as many bytes from every other.
        Curve("objects received by a rank at start", "ranks", tuple(Point(n, 0, n * start) for n in sizes)),
        Curve(
            "objects received by a rank in an iteration, saves included",
            "ranks",
            tuple(Point(n, 0, n * later // (ITERATIONS - 1)) for n in sizes),
        ),
    ]


# --- the planner ----------------------------------------------------------------------------------------------------
MODELS = {"llama3.2-1b": 1.2e9, "llama3.1-8b": 8.0e9, "llama3.1-70b": 70.6e9, "llama3.1-405b": 405.9e9}
_LAYOUTS = {
    "llama3.2-1b": "",
    "llama3.1-8b": "",
    "llama3.1-70b": "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4",
    "llama3.1-405b": "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
}


def dry_run(model: str, ranks: int) -> int:
    words = (
        f"--model {model} --mock-data --seq-length 8192 --micro-batch-size 1 --global-batch-size {4 * ranks} "
        f"--train-iters 1 --lr 1 --bf16 --use-distributed-optimizer {_LAYOUTS[model]} --dry-run --num-gpus {ranks}"
    )
    with _quiet():
        return int(pretrain_llama.main(words.split()))


def search(model: str, ranks: int) -> int:
    words = (
        f"--model {model} --cluster h100 --num-gpus {ranks} --seq-length 8192 --global-batch-size {4 * ranks} "
        "--precision bf16"
    )
    with _quiet(), mock.patch.object(sys, "argv", ["plan_layout.py", *words.split()]):
        return int(plan_layout.main())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def planner_curves(largest: bool) -> list[Curve]:
    """Ranks grow at one model, and models at one number of ranks."""
    sizes = (8, 64, 512, 4096, 16384) if largest else (8, 64, 512)
    models = dict(list(MODELS.items())[: 4 if largest else 2])
    by_ranks = {ranks: _cost(lambda ranks=ranks: dry_run("llama3.1-8b", ranks)) for ranks in sizes}  # type: ignore[misc]
    by_model = {model: _cost(lambda model=model: dry_run(model, 1024)) for model in models}  # type: ignore[misc]
    searched = {ranks: _cost(lambda ranks=ranks: search("llama3.1-70b", ranks)) for ranks in sizes[1:]}  # type: ignore[misc]
    found = tuple(Point(ranks, *cost) for ranks, cost in searched.items())
    return [
        Curve("dry run of 8B", "ranks", tuple(Point(n, *cost) for n, cost in by_ranks.items()), order=0.5),
        Curve(
            "dry run on 1,024 ranks",
            "parameters",
            tuple(Point(MODELS[model], *cost) for model, cost in by_model.items()),
            order=0.75,
        ),
        Curve("search for a layout of 70B", "ranks", found, order=0.75),
    ]


def _cost(call: Callable[[], int]) -> tuple[float, int]:
    code, cost = cost_of(call)
    assert code == 0, code
    return cost.seconds, cost.bytes
