"""The plan of a run: one rank of every pipeline stage simulated, and what follows for the whole."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.communication import CollectiveRecord
from megatron.core.models.parallelize import chunks_of_stage, pipeline_schedule
from megatron.core.topology import RankGrid
from megatron.errors import ConfigError
from megatron.planner.fake_backend import ShapeTracker, SimulatedTopology
from megatron.planner.memory import CUDA_BLOCK, Kind, Moment
from megatron.planner.simulated_rank import build_rank, run_step
from megatron.planner.traffic import Link, Traffic, is_in_node
from megatron.schedules.registry import placement_of
from megatron.schedules.schedule import Placement, Schedule
from megatron.schedules.simulator import Durations, simulate
from megatron.schedules.stages import VirtualStage
from megatron.torch_compat import FakeTensorMode, fake_store
from megatron.training.build.plan import build_batches
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.initialize import rank_grid
from megatron.training.loop.batch_schedule import BatchSchedule

_MANY = 4
"""Ranks for which it pays to start processes."""

ALLOWANCE = 4 * 2**30
"""Bytes for what no tensor shows: the CUDA context, NCCL's and cuBLAS' buffers, memory inside kernels, fragments."""


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage after its simulated_rank."""

    stage: int
    rank: int
    simulated_rank: int
    """That rank, or the one of an earlier stage that holds and sends the same."""
    layers: tuple[int, ...]
    """Of each of its chunks."""
    num_parameters: int
    """Elements of the weights that the rank stores."""
    peak: Moment
    steady: Moment
    """Between steps."""
    simulated_microbatches: int
    sent_by_axis: dict[str, int]
    """Bytes per step."""
    sent_by_link: dict[Link, int]
    records: Sequence[CollectiveRecord]
    """Every collective of the step that was simulated."""

    @property
    def by_kind(self) -> dict[Kind, int]:
        """What is in memory at the peak."""
        return dict(self.peak.by_kind)

    @property
    def needed(self) -> int:
        """Bytes of a GPU, the allowance included."""
        return self.peak.total + ALLOWANCE


@dataclass(frozen=True)
class Run:
    """What flags and number of ranks make of a run, before anything is built."""

    config: RunConfig
    grid: RankGrid
    vocabulary: Vocabulary
    device: torch.device
    """Of the real run."""

    @classmethod
    def of(cls, config: RunConfig, num_gpus: int, vocabulary: Vocabulary) -> "Run":
        """That of checked flags."""
        config = without_transformer_engine(config)
        device = torch.device("cpu" if config.training.device == "cpu" else "cuda")
        return cls(config, rank_grid(config.parallel, num_gpus), vocabulary, device)

    @cached_property
    def architecture(self) -> TransformerConfig:
        """The model."""
        return self.config.model.resolve(self.vocabulary.size, self.grid.tp, self.config.seq_length)

    @cached_property
    def global_batch_size(self) -> int:
        """Sequences of a step, after a ramp."""
        return self._batches.final_batch_size

    @cached_property
    def num_microbatches(self) -> int:
        """Of one rank and step."""
        return self.global_batch_size // self._batches.unit

    @cached_property
    def _batches(self) -> BatchSchedule:
        return build_batches(self.config, self.topology(0, ShapeTracker(), Traffic(0)))

    def topology(self, rank: int, tracker: ShapeTracker, traffic: Traffic) -> SimulatedTopology:
        """The place of ``rank``, alone."""
        return SimulatedTopology(self.grid, rank, self.device, tracker, traffic.observer)

    @property
    def schedule(self) -> Callable[[int], Schedule]:
        """Makes the schedule of a number of microbatches."""
        return pipeline_schedule(self.config, self.architecture.num_layers, self.grid.pp)

    @cached_property
    def placement(self) -> Placement:
        """Where the chunks lie."""
        layers, stages = self.architecture.num_layers, self.grid.pp
        pipeline = self.config.pipeline
        return placement_of(pipeline.schedule(layers, stages), stages, pipeline.num_chunks(layers, stages))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers by stage and chunk."""
        return tuple(tuple(len(chunk.layers) for chunk in self._virtual_stages(stage)) for stage in range(self.grid.pp))

    def rank_of_stage(self, stage: int) -> int:
        """The first rank of a pipeline stage."""
        return self.grid.group(0, ("pp",))[stage]

    def signature(self, rank: int) -> Hashable:
        """What decides how much a rank of a stage holds and sends. First ranks of stages that agree in it differ in the
        numbers of their layers alone, and one simulated_rank tells of all."""
        config, grid = self.config, self.grid
        stage, stages = grid.coordinates(rank)["pp"], grid.pp
        chunks = self._virtual_stages(stage)
        # These make one layer another than the next.
        by_number = config.precision.first_last_layers_bf16 or len(set(config.parallel.cp_comm_type)) > 1
        neighbours = [self.rank_of_stage((stage + step) % stages) for step in (-1, 1)]
        return (
            tuple(chunk.layers if by_number else len(chunk.layers) for chunk in chunks),
            tuple((chunk.has_embedding, chunk.has_head) for chunk in chunks),
            live_peaks(self.schedule(self.num_microbatches), stage),
            tuple(is_in_node((rank, other)) for other in neighbours),
            tuple(is_in_node(grid.group(rank, (axis,))) for axis in ("tp", "cp", "dp")),
            tuple(map(is_in_node, grid.levels(rank, "cp", config.parallel.hierarchical_context_parallel_sizes))),
        )

    def _virtual_stages(self, stage: int) -> list[VirtualStage]:
        """The chunks of a stage."""
        stages = self.config.pipeline.virtual_stages(self.architecture.num_layers, self.grid.pp)
        return chunks_of_stage(stages, self.placement, stage)

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs, forward and backward."""
        return self.architecture.flops_per_token(self.config.seq_length)

    @cached_property
    def flops_per_step(self) -> float:
        """Model FLOPs of the global batch."""
        return self.flops_per_token * self.global_batch_size * self.config.seq_length

    def bubble_fraction(self) -> float:
        """The idle share of the stages' time: each pass takes as long as its matrix products and attention have FLOPs,
        backward twice as long as forward, and messages take no time."""
        stages = self.config.pipeline.virtual_stages(self.architecture.num_layers, self.grid.pp)
        times = tuple(
            replace(
                self.architecture,
                num_layers=len(stage.layers),
                vocab_size=self.architecture.vocab_size if stage.has_head else 0,
            ).flops_per_token(self.config.seq_length)
            for stage in stages
        )
        return simulate(self.schedule(self.num_microbatches), Durations(times, times, times)).bubble_fraction


@dataclass(frozen=True)
class Plan:
    """What the run will need."""

    run: Run
    stages: tuple[StagePlan, ...]
    """Those that were simulated."""

    @property
    def limit(self) -> int:
        """Bytes of a GPU."""
        return self.run.config.dry_run.gpu_memory

    @property
    def tightest(self) -> StagePlan:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def fits(self) -> bool:
        """Whether every stage that was simulated does."""
        return self.tightest.needed <= self.limit


def make_plan(run: Run, ranks: Sequence[int]) -> Plan:
    """Rehearse ``ranks``, each the first of its stage, or as many of them as differ; many in as many processes as there
    are cores."""
    first_like: dict[Hashable, int] = {}
    stand_ins = [first_like.setdefault(run.signature(rank) if len(ranks) > 1 else rank, rank) for rank in ranks]
    different = list(first_like.values())
    workers = min(len(os.sched_getaffinity(0)), 8) if sys.platform == "linux" else 1
    if workers == 1 or len(different) < _MANY:
        simulated = [simulate_rank(run, rank) for rank in different]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            simulated = list(pool.map(partial(simulate_rank, run), different))
    found = dict(zip(different, simulated))
    stages = [run.grid.coordinates(rank)["pp"] for rank in ranks]
    return Plan(
        run,
        tuple(replace(found[one], stage=stage, rank=rank) for one, stage, rank in zip(stand_ins, stages, ranks)),
    )


def simulate_rank(run: Run, rank: int, num_microbatches: int | None = None) -> StagePlan:
    """Build ``rank`` and run a step of it, with as many microbatches as show its peak, or as asked for."""
    stage = run.grid.coordinates(rank)["pp"]
    count = num_microbatches or enough_microbatches(run.schedule, stage, run.num_microbatches)
    tracker, traffic = ShapeTracker(CUDA_BLOCK if run.device.type == "cuda" else 1), Traffic(rank)
    with _uncollected(), fake_processes(run, rank), FakeTensorMode(allow_non_fake_inputs=True), tracker:
        topology = run.topology(rank, tracker, traffic)
        built = build_rank(run.config, topology, run.vocabulary, tracker, run.device)
        steady = tracker.now
        traffic.clear()
        first: Traffic | None = None
        if count < run.num_microbatches:
            # What a step sends is so much, and so much more for each microbatch: two steps tell both.
            run_step(run.config, topology, built, 1, tracker)
            first = traffic.taken()
        run_step(run.config, topology, built, count, tracker)
        parameters = sum(weight.tensor.numel() for weight in built.data_parallel.local_params)
    sent = traffic if first is None else traffic.beyond(first, 1, count, run.num_microbatches)
    return StagePlan(
        stage,
        rank,
        rank,
        run.layers[stage],
        parameters,
        tracker.peak,
        steady,
        count,
        dict(sent.by_axis),
        dict(sent.by_link),
        traffic.records,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which would take a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if was_enabled:
            gc.enable()


@contextmanager
def fake_processes(run: Run, rank: int) -> Iterator[None]:
    """torch's own pretended process group, which FSDP2 asks for."""
    # FSDP2 looks at groups, though it gathers through communicators; nobody else does.
    grid = run.grid
    if run.config.parallel.sharding_strategy != "optim_grads_params" or grid.world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=grid.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def enough_microbatches(schedule: Callable[[int], Schedule], stage: int, num_microbatches: int) -> int:
    """The fewest microbatches whose step holds as much on ``stage`` as one of ``num_microbatches``.

    The most that is alive at once of each chunk's activations, together with the others', must be the same; and the
    first microbatch, whose gradients are written and not added, must not be the only one of its kind at that time.
    """
    wanted = live_peaks(schedule(num_microbatches), stage)
    stages = schedule(1).placement.num_stages
    spare = 1
    most = max((sum(live) for live in wanted), default=0)
    candidates = sorted({*range(spare + 1, 2 * stages + spare + 1), *range(2 * stages, num_microbatches, stages)})
    for count in candidates:
        if count >= num_microbatches:
            break
        shorter = schedule(count)
        if count * shorter.placement.num_chunks >= most + spare and live_peaks(shorter, stage) == wanted:
            return count
    return num_microbatches


def live_peaks(schedule: Schedule, stage: int) -> frozenset[tuple[int, ...]]:
    """By chunk, how many microbatches are between their F and the end of their backward pass (after B, and after W
    where there is one), at every moment at which none of the others holds as much."""
    kinds = ("B", "W") if schedule.splits_backward else ("B",)
    live = [0] * (schedule.placement.num_chunks * len(kinds))
    seen = set()
    for action in schedule.actions[stage]:
        for number, kind in enumerate(kinds):
            place = action.chunk * len(kinds) + number
            live[place] += (action.kind == "F") - (action.kind == kind)
        seen.add(tuple(live))
    return frozenset(
        one for one in seen if not any(other != one and all(a >= b for a, b in zip(other, one)) for other in seen)
    )


def without_transformer_engine(config: RunConfig) -> RunConfig:
    """With layers of this project where those of Transformer Engine are asked for, which cannot be built without a GPU;
    what they keep is much the same. Recipes that these alone have are planned as ``tensorwise``."""
    if config.model.transformer_impl == "local":
        return config
    precision = config.precision
    if precision.fp8_recipe in ("blockwise", "mxfp8"):
        precision = replace(precision, fp8_recipe="tensorwise")
    return replace(config, model=replace(config.model, transformer_impl="local"), precision=precision)


def planned_vocabulary_size(config: RunConfig) -> int:
    """Ids of the vocabulary, if the flags alone tell; the tokenizer's file need not be here.

    Raises :class:`ConfigError` where nothing tells.
    """
    tokenizer = config.tokenizer
    if tokenizer.vocab_size is not None:
        return tokenizer.vocab_size + (tokenizer.tokenizer_type == "NullTokenizer")
    if config.model.preset_vocab_size is not None:
        return config.model.preset_vocab_size
    raise ConfigError(
        f"--dry-run has no vocabulary size: {tokenizer.tokenizer_model} does not exist, and no --model preset sets "
        "one: add --vocab-size."
    )
