"""The plan of a run: one rank of every pipeline stage is simulated."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.dry_run import ALLOWANCE
from megatron.config.run import RunConfig
from megatron.core.communication import CollectiveRecord
from megatron.core.models.parallelize import pipeline_schedule
from megatron.core.optimizer import HOST
from megatron.core.precision import number_formats
from megatron.core.topology import EXPERT_AXES, RankGrid
from megatron.planner.launches import Link, Traffic, is_in_node
from megatron.planner.memory import CUDA_BLOCK, MemoryUse
from megatron.planner.rehearsal.extrapolation import Extrapolation
from megatron.planner.rehearsal.records import Division, Map, divide
from megatron.planner.simulated_rank import ShapeTracker, SimulatedTopology, build_rank, run_step, with_local_layers
from megatron.schedules.schedule import Schedule
from megatron.schedules.simulator import Durations, simulate
from megatron.torch_compat import FakeTensorMode, fake_store
from megatron.training.batch_schedule import BatchSchedule, build_batches
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.initialize import rank_grid

_MOST_PROCESSES, _MIN_PARALLEL = 8, 4
"""Processes at most, and simulations from which on they run in several of them."""


@dataclass(frozen=True)
class StagePlan:
    """The simulated step of one rank of a pipeline stage."""

    stage: int
    rank: int
    simulated_rank: int
    """``rank``, or the rank of an earlier stage with the same signature."""
    layers: tuple[int, ...]
    """Layers of each chunk."""
    num_parameters: int
    """Elements of the weights that the rank stores."""
    peak: MemoryUse
    steady: MemoryUse
    """Memory between steps."""
    on_host: int
    """Bytes of optimizer state in host memory, with the copies of gradients and weights."""
    simulated_microbatches: int
    sent_by_axis: dict[str, int]
    """Bytes per step."""
    sent_by_link: dict[Link, int]
    records: Sequence[CollectiveRecord]
    """The collectives of the simulated step."""
    is_extrapolated: bool
    """Whether memory and collectives of equal layers were repeated instead of simulated."""

    @property
    def needed(self) -> int:
        """GPU memory in bytes, with the allowance."""
        return self.peak.total + ALLOWANCE


@dataclass(frozen=True)
class Run:
    """A run, described by its flags and its number of ranks."""

    config: RunConfig
    grid: RankGrid
    vocabulary: Vocabulary
    device: torch.device
    """The device of the real run."""

    @classmethod
    def of(cls, config: RunConfig, num_gpus: int, vocabulary: Vocabulary) -> "Run":
        """The run of checked flags."""
        device = torch.device("cpu" if config.training.device == "cpu" else "cuda")
        return cls(with_local_layers(config), rank_grid(config.parallel, num_gpus), vocabulary, device)

    @cached_property
    def architecture(self) -> TransformerConfig:
        return self.config.model.resolve(self.vocabulary.size, self.grid.tp, self.config.seq_length)

    @cached_property
    def _batches(self) -> BatchSchedule:
        return build_batches(self.config, self.grid.dp)

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step, after a ramp."""
        return self._batches.final_batch_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a rank in a step."""
        return self.global_batch_size // self._batches.unit

    @property
    def node_size(self) -> int:
        return self.config.dry_run.gpus_per_node

    def traffic(self, rank: int) -> Traffic:
        return Traffic(rank, self.node_size)

    def topology(self, rank: int, tracker: ShapeTracker, traffic: Traffic) -> SimulatedTopology:
        return SimulatedTopology(self.grid, rank, self.device, tracker, traffic.observer)

    @property
    def schedule(self) -> Callable[[int], Schedule]:
        """Returns the schedule of a number of microbatches."""
        return pipeline_schedule(self.config, self.architecture.num_layers, self.grid.pp)

    @cached_property
    def division(self) -> Division:
        """The virtual stages of the pipeline, with their units."""
        return divide(self.config, self.architecture, self.grid.pp)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Number of layers by stage and chunk."""
        stages, by_stage = self.division.stages, self.division.by_stage
        return tuple(tuple(len(stages[number].layers) for number in numbers) for numbers in by_stage)

    def rank_of_stage(self, stage: int) -> int:
        """The first rank of a pipeline stage."""
        return self.grid.group(0, ("pp",))[stage]

    def signature(self, rank: int) -> Hashable:
        """A key of the stage whose first rank is ``rank``: stages with equal keys have equal memory and traffic, and
        are simulated once."""
        config, grid = self.config, self.grid
        in_node = partial(is_in_node, node_size=self.node_size)
        stage, stages = grid.coordinates(rank)["pp"], grid.pp
        # Messages to a neighbour, and collectives of a group, stay in a node or cross nodes.
        neighbours = [self.rank_of_stage((stage + step) % stages) for step in (-1, 1)]
        groups: list[tuple[str, ...]] = [("tp",), ("cp",), ("dp",)]
        if any(self.architecture.moe_layers()):
            groups += [*((axis,) for axis in EXPERT_AXES), ("etp", "ep")]
        return (
            self.division.contents[stage],
            live_peaks(self.schedule(self.num_microbatches), stage),
            tuple(in_node((rank, other)) for other in neighbours),
            tuple(in_node(grid.group(rank, axes)) for axes in groups),
            tuple(map(in_node, grid.levels(rank, "cp", config.parallel.hierarchical_context_parallel_sizes))),
        )

    def with_expert_load(self, load: float) -> "Run":
        """This run, whose simulated rank has experts with another load."""
        dry_run = replace(self.config.dry_run, dry_run_expert_load=load)
        return replace(self, config=replace(self.config, dry_run=dry_run))

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs, forward and backward."""
        return self.architecture.flops_per_token(self.config.seq_length)

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.global_batch_size * self.config.seq_length

    def pass_durations(self) -> Durations:
        """Durations of the passes in FLOPs: of GEMMs and attention. Backward takes twice as long as forward, and
        messages take no time."""
        times = tuple(
            self.architecture.flops_of_layers(
                stage.layers, self.config.seq_length, has_output_layer=stage.has_output_layer
            )
            for stage in self.division.stages
        )
        return Durations(times, times, times)

    def bubble_fraction(self) -> float:
        """The idle share of the stages' time, with :meth:`pass_durations`."""
        return simulate(self.schedule(self.num_microbatches), self.pass_durations()).bubble_fraction


@dataclass(frozen=True)
class Plan:
    run: Run
    stages: tuple[StagePlan, ...]
    """The simulated stages."""

    @property
    def limit(self) -> int:
        """Memory of a GPU in bytes."""
        return self.run.config.dry_run.gpu_memory

    @property
    def tightest(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def fits(self) -> bool:
        return self.tightest.needed <= self.limit


def make_plan(run: Run, ranks: Sequence[int]) -> Plan:
    """Simulate ``ranks``, each the first of its stage; one rank per signature, and many in parallel processes."""
    first_of: dict[Hashable, int] = {}
    simulated_ranks = [first_of.setdefault(run.signature(rank) if len(ranks) > 1 else rank, rank) for rank in ranks]
    different = list(first_of.values())
    with parallel_map() if len(different) >= _MIN_PARALLEL else nullcontext(map) as map_in_parallel:
        plan_of = dict(zip(different, map_in_parallel(partial(simulate_rank, run), different)))
    return Plan(
        run,
        tuple(
            replace(plan_of[simulated_rank], stage=run.grid.coordinates(rank)["pp"], rank=rank)
            for rank, simulated_rank in zip(ranks, simulated_ranks)
        ),
    )


@contextmanager
def parallel_map() -> Iterator[Map]:
    """A ``map`` in as many processes as there are cores, in order."""
    workers = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if sys.platform == "linux" else 1
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map


def simulate_rank(run: Run, rank: int, num_microbatches: int | None = None) -> StagePlan:
    """Build ``rank`` and run a step with ``num_microbatches``, by default as many as reach its peak memory."""
    stage = run.grid.coordinates(rank)["pp"]
    count = num_microbatches or enough_microbatches(run.schedule, stage, run.num_microbatches)
    tracker, traffic = ShapeTracker(CUDA_BLOCK if run.device.type == "cuda" else 1), run.traffic(rank)
    with _no_garbage_collection(), fake_processes(run, rank), FakeTensorMode(allow_non_fake_inputs=True), tracker:
        formats = number_formats(run.config.precision, run.config.optimizer)
        defers = run.schedule(1).splits_backward
        # Build the rank as a run does, on fake tensors and a fake network.
        extrapolation = Extrapolation(tracker, traffic.observer, formats.gradient, defers)
        topology = SimulatedTopology(run.grid, rank, run.device, tracker, extrapolation.observer)
        module = build_rank(run.config, topology, run.vocabulary, tracker, run.device)
        if not run.config.dry_run.dry_run_whole:
            # One unit of a kind is rehearsed; an autograd function repeats it for the others.
            units = [run.division.units[number] for number in run.division.by_stage[stage]]
            extrapolation.repeat_layers(module.executor, [[unit.kind for unit in chunk] for chunk in units])
        steady = tracker.now
        # As between steps: with --overlap-param-gather a step gathers most weights that the step before has updated.
        module.data_parallel.start_param_all_gather()
        one: Traffic | None = None
        traffic.clear()
        if count < run.num_microbatches:
            # A step sends a constant and as much for every microbatch: two steps determine both.
            run_step(run.config, topology, module, 1, tracker)
            one = deepcopy(traffic)
            traffic.clear()
        run_step(run.config, topology, module, count, tracker)
        parameters, on_host = module.data_parallel.num_parameters, module.optimizer.memory()[HOST]
    sent = traffic if one is None else traffic.extrapolate(one, count, run.num_microbatches)
    return StagePlan(
        stage,
        rank,
        rank,
        run.layers[stage],
        parameters,
        tracker.peak,
        steady,
        on_host,
        count,
        dict(sent.by_axis),
        dict(sent.by_link),
        traffic.records,
        bool(extrapolation.rehearsed),
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage once at the end instead of all the time, which would take a quarter of the time. Objects that
    exist before, such as all of torch's modules, are frozen, so that this collection does not traverse them."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def fake_processes(run: Run, rank: int) -> Iterator[None]:
    """torch's fake process group, which only FSDP2 needs: it inspects groups, but gathers through communicators."""
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
    """The fewest microbatches whose step has the same peak memory on ``stage`` as a step of ``num_microbatches``.

    Under 1F1B stage 0 of 3 holds three microbatches from the third on, so 4 stand for 64::

        F0 F1 F2 B0 F3 B1 B2 B3
        1  2  3  2  3  2  1  0    live activations

    The maximal numbers of live activations of the chunks must be equal. At that time the first microbatch must not be
    the only one: its gradients are written, not added.
    """
    wanted = live_peaks(schedule(num_microbatches), stage)
    # Interleaved schedules need whole groups of as many microbatches as stages.
    stages = schedule(1).placement.num_stages
    most = max((sum(live) for live in wanted), default=0)
    for count in sorted({*range(2, 2 * stages + 2), *range(2 * stages, num_microbatches, stages)}):
        if count >= num_microbatches:
            break
        shorter = schedule(count)
        if count * shorter.placement.num_chunks > most and live_peaks(shorter, stage) == wanted:
            return count
    return num_microbatches


def live_peaks(schedule: Schedule, stage: int) -> frozenset[tuple[int, ...]]:
    """The maximal numbers of live microbatches by chunk, between F and the end of the backward pass (after B, and after
    W where the schedule has it). A moment counts if no other moment has at least as many of every chunk."""
    kinds = ("B", "W") if schedule.splits_backward else ("B",)
    live = [0] * (schedule.placement.num_chunks * len(kinds))
    seen = set()
    # An F adds a microbatch to every count of its chunk; a B, and a W, end one each.
    for action in schedule.actions[stage]:
        for number, kind in enumerate(kinds):
            live[action.chunk * len(kinds) + number] += (action.kind == "F") - (action.kind == kind)
        seen.add(tuple(live))
    return frozenset(
        one for one in seen if not any(other != one and all(a >= b for a, b in zip(other, one)) for other in seen)
    )


def largest_fitting_load(plan: Plan) -> float | None:
    """The largest load of the experts with which every stage of ``plan`` fits, at most the largest possible one.

    None if the load does not matter (no experts, or all on each rank), and if the plan does not fit.
    """
    run = plan.run
    if run.architecture.num_experts is None or run.grid.ep == 1 or not plan.fits:
        return None
    assumed = run.config.dry_run.dry_run_expert_load
    load = run.architecture.largest_expert_load(run.grid.ep)
    # From the tightest stage on: a later stage mostly fits with the load that an earlier one has left.
    different = {stage.simulated_rank: stage for stage in plan.stages}.values()
    for stage in sorted(different, key=lambda stage: stage.needed, reverse=True):
        # A bound: as if all memory grew with the load but what is there between steps.
        growing = stage.peak.total - stage.steady.total
        if load <= assumed or ALLOWANCE + stage.steady.total + load / assumed * growing <= plan.limit:
            continue
        needed = simulate_rank(run.with_expert_load(load), stage.simulated_rank, stage.simulated_microbatches).needed
        if needed > plan.limit:
            # At each moment memory is linear in the load. So the peak is convex, and a straight line is not below it.
            load = assumed + (load - assumed) * (plan.limit - stage.needed) / (needed - stage.needed)
    return load
