"""What a save and a load cost on one rank: the plan, the manifest and their memory, for layouts of many ranks.

Every rank of the layout is simulated: the real code builds the models on fake tensors, and :func:`tables_of_cell` lists
the boxes of the ranks. Then the coordinator's part of a save runs with the real code in a process of its own, and so
does the part of one rank that loads into another layout.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

from benchmarks.lib.scaling_curve import Cost, Curve, Point, cost_of
from megatron.checkpoint.boxes import BoxedTensor, DividedBox
from megatron.checkpoint.checkpointing import LoadPlanner, SafetensorsReader, file_of_rank
from megatron.checkpoint.directory import MANIFEST, iteration_directory
from megatron.checkpoint.files import BLOCK_BYTES, WrittenFile
from megatron.checkpoint.manifest import Manifest, encode_manifest
from megatron.checkpoint.save_plan import (
    BoxTable,
    SavePlanner,
    divided_tensors,
    equal_shares,
    known_holders,
    named,
    own_share,
)
from megatron.config.command_line import parse_command_line
from megatron.planner.plan import Run, fake_processes
from megatron.planner.simulated_rank import ShapeTracker, build_rank
from megatron.torch_compat import FakeTensorMode
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.checkpoints.state import model_tensors, optimizer_tensors
from megatron.training.context import TrainModule

VOCABULARY = 128256
FLAGS = (
    f"--mock-data --vocab-size {VOCABULARY} --seq-length 8192 --micro-batch-size 1 --train-iters 1 --lr 1 --bf16 "
    "--device cuda --dry-run"
)
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--data-parallel-sharding-strategy optim_grads_params"


@dataclass(frozen=True)
class Layout:
    """A layout of ``ranks`` of a model."""

    model: str
    """Flags of the model."""
    ranks: int
    tp: int = 1
    pp: int = 1
    sharding: str = ZERO1

    def run(self) -> Run:
        flags = (
            f"{self.model} {FLAGS} --tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
            f"{self.sharding} --global-batch-size {self.ranks // (self.tp * self.pp)} --num-gpus {self.ranks}"
        )
        if self.tp > 1:
            flags += " --sequence-parallel"
        if self.pp > 1:
            flags += " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        config = parse_command_line(flags.split())
        return Run.of(config, self.ranks, Vocabulary(VOCABULARY, VOCABULARY - 1))


# --- what the ranks hold -----------------------------------------------------------------------------------


def simulated_module(run: Run, rank: int) -> TrainModule:
    """The model and the optimizer of ``rank`` on fake tensors, by the real code."""
    tracker = ShapeTracker(512)
    with fake_processes(run, rank), FakeTensorMode(allow_non_fake_inputs=True), tracker:
        topology = run.topology(rank, tracker, run.traffic(rank))
        return build_rank(run.config, topology, run.vocabulary, tracker, run.device)


def tensors_of(module: TrainModule) -> dict[str, torch.Tensor]:
    """What the rank of ``module`` saves."""
    return model_tensors(module.data_parallel.local_params, with_copies=False) | optimizer_tensors(
        module.optimizer, with_copies=False
    )


def tables_of_cell(run: Run, first: int) -> dict[int, bytes]:
    """The pickled list of every rank that shares its model with the rank ``first``, which is the first of them.

    The optimizer state must be sharded over all of them, or the weights, too.
    """
    module = simulated_module(run, first)
    tensors = tensors_of(module)
    if boxes_of := divided_tensors(tensors):
        return _divided_tables(run, first, boxes_of, tensors)
    weights = model_tensors(module.data_parallel.local_params, with_copies=False)
    groups: dict[tuple[int, ...], list[WriteItem]] = {}
    for name, tensor in weights.items():
        holders = tuple(tensor.holders)  # type: ignore[attr-defined]
        groups.setdefault(holders, []).extend(_items({name: tensor}))
    shares = {holders: equal_shares(items, len(holders)) for holders, items in groups.items()}
    kinds = list(dict.fromkeys((state.kind, state.tensor.dtype) for state in module.optimizer.state()))
    splits = [split for split in module.data_parallel.splits if not split.info.is_copy]
    replica_axes = module.data_parallel.sharing.dense.replica_axes
    tables = {}
    for place, rank in enumerate(run.grid.group(first, ("cp", "dp"))):
        shards: dict[str, Tensor] = {}
        for split in splits:
            start, stop = split.range_of(place)
            if start < stop:
                axes = replica_axes if split.info.tensor_parallel_sharded else ("tp", *replica_axes)
                for kind, dtype in kinds:
                    flat = torch.empty(stop - start, dtype=dtype, device="meta")
                    shards[f"optimizer/{kind}/{split.info.name}"] = BoxedTensor.from_flat_range(
                        split.info, flat, start, run.grid.group(rank, axes)
                    )
        items = [item for holders, parts in shares.items() for item in parts[holders.index(rank)]]
        items += own_share(_items(shards), known_holders(shards), rank)
        table = BoxTable.of(named(weights | shards, {item.index.fqn for item in items}, rank), items)
        tables[rank] = pickle.dumps(SavePlan([], planner_data=table))
    return tables


def _divided_tables(
    run: Run, first: int, divided: Mapping[str, Sequence[DividedBox]], tensors: Mapping[str, Tensor]
) -> dict[int, bytes]:
    """:func:`tables_of_cell` under FSDP, which divides all ``tensors``."""
    assert divided.keys() == tensors.keys()
    boxes: dict[int, list[tuple[str, DividedBox]]] = {}
    for name, of_tensor in divided.items():
        for box in of_tensor:
            boxes.setdefault(box.owner, []).append((name, box))
    empty = pickle.dumps(SavePlan([], planner_data=BoxTable.of({}, [])))
    tables = dict.fromkeys(run.grid.group(first, ("cp", "dp")), empty)
    for rank, listed in boxes.items():
        table = BoxTable.of(named(tensors, {name for name, _ in listed}, rank), [], listed)
        tables[rank] = pickle.dumps(SavePlan([], planner_data=table))
    return tables


def _items(tensors: dict[str, Tensor]) -> list[WriteItem]:
    return [item for name, one in tensors.items() for item in one.__create_write_items__(name, one)]  # type: ignore[attr-defined]


def tables_of(run: Run, workers: int) -> list[bytes]:
    """The pickled list of every rank, in rank order."""
    cells = [run.grid.group(stage, ("tp",)) for stage in run.grid.group(0, ("pp",))]
    firsts = [rank for cell in cells for rank in cell]
    if workers == 1 or len(firsts) == 1:
        found = [tables_of_cell(run, first) for first in firsts]
    else:
        with get_context("fork").Pool(workers) as pool:
            found = pool.map(partial(tables_of_cell, run), firsts, chunksize=1)
    tables = {rank: table for cell in found for rank, table in cell.items()}
    return [tables[rank] for rank in range(run.grid.world_size)]


# --- what they cost ----------------------------------------------------------------------------------------


def plan_save(tables: Sequence[bytes], directory: Path) -> int:
    """The coordinator's part of a save without writing tensors: from the lists of all ranks to the manifest.

    Returns the bytes of the manifest.
    """
    planner = SavePlanner(0)
    plans, _ = planner.create_global_plan([pickle.loads(table) for table in tables])
    for plan in plans:
        pickle.dumps(plan)
    sizes = np.zeros(len(tables), np.int64)
    for saved in planner.saved.values():
        saved.add_bytes(sizes)
    # Digests as they are in a manifest; all have the same length.
    files = [
        WrittenFile(file_of_rank(rank), size, (f"{rank:032x}",) * -(-size // BLOCK_BYTES))
        for rank, size in enumerate(sizes.tolist())
    ]
    text = encode_manifest(Manifest(planner.saved, files, {"iteration": 1}))
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_text(text)
    return len(text)


def plan_load(root: Path, tensors: dict[str, Tensor]) -> int:
    """One rank's part of a load without reading tensors; returns the number of reads."""
    reader = SafetensorsReader(root, 1, tensors)
    planner = LoadPlanner()
    planner.set_up_planner(dict(tensors), reader.read_metadata())
    planner.create_local_plan()
    return len(planner.finish_plan(LoadPlan([])).items)


@dataclass(frozen=True)
class CheckpointCost:
    """The cost of a save in one layout, and of a load into another one."""

    ranks: int
    boxes: int
    received: int
    """Bytes of the lists that the coordinator receives."""
    manifest: int
    """Bytes."""
    save: Cost
    load: Cost
    reads: int


def checkpoint_cost(layout: Layout, other: Layout, workers: int = 2) -> CheckpointCost:
    """Simulate a save of ``layout``, and a load by one rank of ``other``, a middle one."""
    tables = tables_of(layout.run(), workers)
    boxes = sum(len(pickle.loads(table).planner_data.tensor) for table in tables)
    loading = other.run()
    tensors = tensors_of(simulated_module(loading, loading.grid.world_size // 2))
    with TemporaryDirectory(prefix="scaling-") as temporary:
        root = Path(temporary)
        manifest, save = cost_of(lambda: plan_save(tables, iteration_directory(root, 1)))
        reads, load = cost_of(lambda: plan_load(root, tensors))
    return CheckpointCost(layout.ranks, boxes, sum(map(len, tables)), manifest, save, load, reads)


# --- curves ------------------------------------------------------------------------------------------------


def layouts_8b(ranks: int) -> tuple[Layout, Layout]:
    """Data parallelism alone, and what one rank of 8 loads with another layout."""
    return Layout("--model llama3.1-8b", ranks), Layout("--model llama3.1-8b", 8, tp=2, pp=2)


def layouts_fsdp(ranks: int, model: str = "--model llama3.1-8b") -> tuple[Layout, Layout]:
    """FSDP over all ranks, and over half of them for the load."""
    return Layout(model, ranks, sharding=FSDP), Layout(model, ranks // 2, sharding=FSDP)


def layouts_405b(ranks: int) -> tuple[Layout, Layout]:
    """The layout of examples/llama3_405b_h100.sh but for its virtual stages, and half as many stages for the load."""
    return Layout("--model llama3.1-405b", ranks, tp=8, pp=16), Layout("--model llama3.1-405b", 1024, tp=8, pp=8)


def curves_of(name: str, costs: Sequence[CheckpointCost]) -> list[Curve]:
    def curve(what: str, goal: str, order: float, point: Callable[[CheckpointCost], tuple[float, int]]) -> Curve:
        return Curve(f"{what}, {name}", "ranks", tuple(Point(cost.ranks, *point(cost)) for cost in costs), goal, order)

    return [
        curve("plan of a save on rank 0", "≤ 10 s, ≤ 4 GiB", 1.0, lambda one: (one.save.seconds, one.save.bytes)),
        curve("lists that rank 0 receives", "", 1.0, lambda one: (0.0, one.received)),
        curve("manifest", "≤ 200 MB", 1.0, lambda one: (0.0, one.manifest)),
        curve("plan of a load on a rank", "≤ 10 s", 1.0, lambda one: (one.load.seconds, one.load.bytes)),
    ]


def curves(largest: bool) -> list[Curve]:
    sizes = (8, 64, 512, 4096, 16384) if largest else (8, 32, 128)
    found = curves_of("8B", [checkpoint_cost(*layouts_8b(ranks)) for ranks in sizes])
    found += curves_of("8B, FSDP", [checkpoint_cost(*layouts_fsdp(ranks)) for ranks in sizes])
    if largest:
        found += curves_of("405B", [checkpoint_cost(*layouts_405b(ranks)) for ranks in (128, 1024, 4096, 16384)])
    return found
