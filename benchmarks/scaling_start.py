"""What every rank does at start: its topology, its model, and the objects that it gathers from all ranks."""

import contextlib
import io
import pickle
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.lib.scaling_checkpoint import layouts_fsdp, simulated_module
from benchmarks.lib.scaling_curve import Cost, Curve, Point, cost_of
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
    """Of this rank's object."""


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


def curves(largest: bool) -> list[Curve]:
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
