"""The time of training steps of this project from the records of their units: many layouts at once.

Every launch of a unit has a price (:mod:`megatron.planner.rehearsal.launch_prices`). Virtual stages are sums of units;
then come the pipeline, the reduction of gradients, and the optimizer.

Sources: the bubble of 1F1B is (p - 1) / v passes (arXiv 2104.04473, section 2.2). Zero-bubble schedules
(arXiv 2401.10241) have no such formula for few microbatches: their actions are followed one by one, for all runs of one
schedule at once.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from megatron.config.run import RunConfig
from megatron.core.precision import number_formats
from megatron.core.topology import RankGrid
from megatron.planner.rehearsal.launch_prices import LaunchPrices, Product, together
from megatron.planner.rehearsal.records import UnitsOfRun
from megatron.planner.rehearsal.unit import UnitRecord
from megatron.planner.step_time.prices import (
    Constants,
    Machines,
    between_pods,
    elementwise_seconds,
    exposed_reduction,
    exposed_sharding,
    growth,
    host_optimizer_seconds,
    message_rate,
    optimizer_seconds,
    reduction_window,
    ring_rate,
)
from megatron.planner.step_time.workload import TERMS, Array, Attention, Cluster, StepTime
from megatron.schedules.catalog import build_schedule
from megatron.schedules.schedule import Result
from megatron.schedules.simulator import execution_order

_CLOSED = ("1f1b", "interleaved")
"""Schedules whose bubble has a formula."""
_MOST_MICROBATCHES = 3
"""Times the pipeline's stages that are followed; further microbatches take as long as the slowest stage."""
_TERM = {name: place for place, name in enumerate(TERMS)}
_ATTENTION: dict[str, Attention] = {"flash": "flash", "sdpa": "flash", "cpu": "flash", "reference": "unfused"}


def attention_kind(config: RunConfig, cluster: Cluster) -> Attention:
    """Attention kernels of a run: on GPUs cuDNN, or a kernel of its speed, from Hopper on."""
    wanted, backend = config.kernels.wanted("attention"), config.model.attention_backend
    if wanted is not None:
        return _ATTENTION.get(wanted.implementation, "cudnn")
    # The kernels of torch have no cap, and cuDNN's no window.
    if backend in ("unfused", "local") or config.model.attn_logit_softcapping is not None:
        return "unfused"
    if config.model.window_size is not None:
        return "flash"
    return "cudnn" if cluster.generation in ("hopper", "blackwell") and backend != "flash" else "flash"


@dataclass(frozen=True)
class PlannedStep:
    """A training step to price."""

    units: UnitsOfRun
    global_batch_size: int
    """Sequences."""

    @property
    def config(self) -> RunConfig:
        return self.units.config

    @property
    def grid(self) -> RankGrid:
        return self.units.grid

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a rank in the step."""
        return self.global_batch_size // (self.config.micro_batch_size * self.grid.dp)


class StepPrices:
    """Prices steps on one cluster with given constants."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self.cluster, self.constants = cluster, constants
        self._units: dict[Hashable, Array] = {}
        self._stages: dict[Hashable, Array] = {}

    def price(self, steps: Sequence[PlannedStep]) -> StepTime:
        return _Steps(self, steps).price()

    def passes(self, step: PlannedStep, number: int) -> Array:
        """Seconds of a microbatch in virtual stage ``number``: ``[pass, term]``, forward, backward and deferred weight
        gradients."""
        units, division, grid = step.units, step.units.division, step.grid
        # With the usual order neither tensor- nor context-parallel ranks move with the other sizes, so that layouts of
        # all sizes share the price of a unit.
        moves = grid.ep * grid.etp > 1 or not grid.order.startswith("tp-cp")
        place = (grid.order, *((grid.pp, grid.dp) if moves else ()))
        shared = units.records, units.key, units.ends_key, place
        key = division.kinds[number], shared
        if key not in self._stages:
            stage = division.stages[number]
            found = np.zeros((3, len(TERMS)))  # [pass, term]
            if stage.has_embedding:
                found += self._passes(step, ("embedding", shared), units.ends.embedding)
            for unit in division.units[number]:
                found += self._passes(step, (unit.kind, shared), units.unit(unit), unit.is_recomputed)
            if stage.has_output_layer:
                # Whatever the output layer launches is one term.
                output = self._passes(step, ("output", shared), units.ends.output)
                found[:, _TERM["output layer"]] += output.sum(axis=1)
            self._stages[key] = found
        return self._stages[key]

    def _passes(self, step: PlannedStep, key: Hashable, record: UnitRecord, is_recomputed: bool = False) -> Array:
        if key not in self._units:
            prices = self.launch_prices(step)
            found = np.zeros((3, len(TERMS)))
            for number, launches in enumerate(record.launches):
                for name, seconds in prices.by_term(launches).items():
                    found[number, _TERM[name]] += seconds
            # A third of a layer's gap is in the forward pass, two in the backward pass, and one more if it runs again.
            gap = self.constants["layer_gap"] * record.num_layers / 3
            found[:2, _TERM["gaps"]] += gap, (3 if is_recomputed else 2) * gap
            self._units[key] = found
        return self._units[key]

    def launch_prices(self, step: PlannedStep) -> LaunchPrices:
        is_cudnn = attention_kind(step.config, self.cluster) == "cudnn"
        return LaunchPrices(self.cluster, self.constants, step.grid, step.config.seq_length, is_cudnn)


@dataclass(frozen=True)
class PassTimes:
    """What the passes of a step consist of."""

    by_virtual_stage: tuple[tuple[float, float, float], ...]
    """Seconds of forward, backward and weight-gradient passes, with the exposed part of a message each."""
    products: tuple[Product, ...]
    """The GEMMs of the slowest pipeline stage."""


def pass_times(prices: StepPrices, step: PlannedStep, step_time_s: float) -> PassTimes:
    """The passes of one step. ``step_time_s`` is its time after a correction by a measured run."""
    units, division, price = step.units, step.units.division, prices.price([step])
    factor = step_time_s / float(price.total[0]) * float(growth(prices.constants, step.grid.world_size))
    assert price.passes is not None
    first, inner, last = factor * price.passes[:, :, 0]
    count = len(division.stages)
    passes = [first, *[inner] * (count - 2), last][:count]
    busiest = max(division.by_stage, key=lambda numbers: sum(passes[number].sum() for number in numbers))
    launches = [
        launch
        for number in busiest
        for unit in units.of_stage(number)
        for of_pass in unit.launches
        for launch in of_pass
    ]
    products = prices.launch_prices(step).products(launches, step.num_microbatches)
    return PassTimes(
        tuple(tuple(map(float, one)) for one in passes),  # type: ignore[misc]
        tuple(replace(product, seconds=factor * product.seconds) for product in products),
    )


class _Steps:
    """Steps as arrays; ``[runs]`` where nothing else is said."""

    def __init__(self, prices: StepPrices, steps: Sequence[PlannedStep]) -> None:
        self.prices, self.steps, self.c = prices, steps, prices.constants
        self.machines = Machines([prices.cluster])
        grids, configs = [step.grid for step in steps], [step.config for step in steps]

        def array(values: Iterator[float]) -> Array:
            return np.fromiter(values, dtype=float, count=len(steps))

        # The grid.
        self.pp, self.dp, self.cp = (array(getattr(grid, name) for grid in grids) for name in ("pp", "dp", "cp"))
        self.vp = array(step.units.division.placement.num_chunks for step in steps)
        self.gpus, self.edp = array(grid.world_size for grid in grids), array(grid.edp for grid in grids)
        self.microbatches = array(step.num_microbatches for step in steps)
        # The schedule; a V has the first and the last virtual stage on the first pipeline stage.
        self.schedules = [step.units.schedule for step in steps]
        self.is_v = np.array([step.units.division.placement.shape == "v" for step in steps]) & (self.pp > 1)
        # Bytes of an element.
        formats = [number_formats(config.precision, config.optimizer) for config in configs]
        self.weight_bytes = array(one.weight.itemsize for one in formats)
        self.gradient_bytes = array(one.gradient.itemsize for one in formats)
        # The sharding over data-parallel ranks, and what overlaps.
        parallel = [config.parallel for config in configs]
        strategies = np.array([one.sharding_strategy for one in parallel])
        self.is_sharded, self.reduces_each = strategies != "no_shard", strategies == "optim_grads"
        self.is_fully_sharded = np.array([step.units.is_fully_sharded for step in steps])
        self.splits_backward = np.array([step.units.splits_backward for step in steps])
        self.replicas = array(
            grid.dp_replicas if one.sharding_strategy != "no_shard" else 1 for grid, one in zip(grids, parallel)
        )
        self.overlaps_reduction = np.array([one.overlap_grad_reduce for one in parallel]) & (self.dp * self.cp > 1)
        self.overlaps_gathers = np.array([one.overlap_param_gather for one in parallel])
        self.keeps_gathered = np.array([not one.torch_fsdp2_reshard_after_forward for one in parallel])
        self.defers_reduction = np.array([one.defer_grad_reduce for one in parallel])
        # The ranks of each group that share a node or a pod.
        node, pod = prices.cluster.node_size, prices.cluster.pod_size
        places = [_places(grid, node, pod or grid.world_size, bool(one)) for grid, one in zip(grids, self.is_sharded)]
        self.places = {name: array(place[name] for place in places) for name in places[0]}

    def price(self) -> StepTime:
        c, m = self.c, self.microbatches
        terms_of = self._virtual_stages()  # [kind, pass, term, runs]
        passes = terms_of.sum(axis=2)  # [kind, pass, runs]
        shares = self._shares()  # [stage, kind, runs]
        # Seconds of a microbatch on the first, an inner and the last pipeline stage; the slowest one sets the pace.
        stages = np.einsum("skr,kpr->sr", shares, passes)
        busiest = np.argmax(stages, axis=0)
        slowest = np.take_along_axis(stages, busiest[None], axis=0)[0]
        makespan = self._makespan(passes, slowest, busiest)
        busiest_shares = np.take_along_axis(shares, busiest[None, None], axis=0)[0]  # [kind, runs]
        of_terms = m * np.einsum("kr,kptr->tr", busiest_shares, terms_of)
        terms = dict(zip(TERMS, of_terms))
        terms["gaps"] = terms["gaps"] + c["step"]
        terms["bubble"] = np.maximum(makespan - m * slowest, 0.0)
        terms["data parallelism"] = self._data_parallel(slowest)
        terms["optimizer"] = self._optimizer()
        larger = growth(c, self.gpus)
        terms = {name: np.asarray(seconds * larger) for name, seconds in terms.items()}
        return StepTime(np.asarray(sum(terms.values())), terms, passes)

    # The pipeline.

    @cached_property
    def _kinds(self) -> list[tuple[int, int | None, int | None]]:
        """The first, the slowest inner and the last virtual stage of each run. With one virtual stage the first is also
        the last."""
        found = []
        for step in self.steps:
            like = step.units.division.like
            inner = max(
                dict.fromkeys(like[1:-1]), key=lambda number: self.prices.passes(step, number).sum(), default=None
            )
            found.append((0, inner, like[-1] if len(like) > 1 else None))
        return found

    def _by_kind(self, values: Callable[[PlannedStep, int], Any], *shape: int) -> Array:
        """Values of the kinds of virtual stages, ``[kind, *shape, runs]``; 0 where a run has none of a kind."""
        found = np.zeros((len(self.steps), 3, *shape))
        for place, (step, numbers) in enumerate(zip(self.steps, self._kinds)):
            for kind, number in enumerate(numbers):
                if number is not None:
                    found[place, kind] = values(step, number)
        return np.moveaxis(found, 0, -1)

    def _virtual_stages(self) -> Array:
        """Seconds of the kinds of virtual stages, ``[kind, pass, term, runs]``."""
        by_kind = self._by_kind(self.prices.passes, 3, len(TERMS))
        by_kind[:, :2, _TERM["pipeline messages"]] += self.message
        self._write_gradients(by_kind)
        return by_kind

    def _shares(self) -> Array:
        """The number of first, inner and last virtual stages of the first, an inner and the last pipeline stage:
        ``[stage, kind, runs]``."""
        is_whole, one = self.pp * self.vp == 1, np.ones_like(self.pp)
        none = np.zeros_like(one)
        inner_of_ends = np.where(self.is_v, 0.0, self.vp - 1)
        first = (one, inner_of_ends, np.where(self.is_v & ~is_whole, 1.0, 0.0))
        inner_exists = (self.pp > 2) | self.is_v
        inner = (none, np.where(inner_exists, self.vp, 0.0), none)
        has_last = ~(self.is_v | is_whole)
        last = (none, np.where(has_last, self.vp - 1, 0.0), np.where(has_last, 1.0, 0.0))
        return np.array([first, inner, last])

    def _bubble(self, passes: Array, slowest: Array, busiest: Array) -> Array:
        """The idle time of the slowest stage under 1F1B, interleaved or not.

        With one chunk it waits for one microbatch on all other stages. With several, for the first chunks of the stages
        before it; of equal inner stages the last one is meant.
        """
        first, inner, last = passes.sum(axis=1)
        count = self.pp * self.vp
        others = np.where(count == 1, first, first + (count - 2) * inner + last) - slowest
        before = first + np.maximum(self.pp - np.where(busiest == 2, 2, 3), 0) * inner
        return np.where((self.vp > 1) & (busiest > 0), before, others / self.vp)

    def _makespan(self, passes: Array, slowest: Array, busiest: Array) -> Array:
        """Seconds from the first to the last pass."""
        found = np.array(self.microbatches * slowest + self._bubble(passes, slowest, busiest))
        # Other schedules are followed, all runs with one program at once.
        keys = list(zip(self.schedules, self.pp.astype(int), self.vp.astype(int), self.microbatches.astype(int)))
        for key in dict.fromkeys(key for key in keys if key[0] not in _CLOSED and key[1] > 1):
            runs = np.array([other == key for other in keys])
            found[runs] = followed_makespan(*key, passes[:, :, runs], slowest[runs])
        return found

    @cached_property
    def message(self) -> Array:
        """The exposed part of a message between two stages: of every tensor-parallel rank."""
        size = np.array([float(step.units.ends.shard) for step in self.steps])  # bytes of [s/cp/tp, b, h]
        in_pod = self.places["stages_in_pod"]
        pods = between_pods(self.machines, in_pod, in_pod < self.pp)
        rate = message_rate(self.machines, self.c, self.places["stages_in_node"] == self.pp, pods)
        share = np.where(self.vp > 1, self.c["exposed_interleaved_messages"], self.c["exposed_messages"])
        return np.where(self.pp > 1, size / rate * share, 0.0)

    # Data parallelism and the optimizer.

    @cached_property
    def _parameters(self) -> Array:
        """Parameters of the largest pipeline stage of a rank, outside of experts and of experts: ``[2, runs]``."""
        found = []
        for step in self.steps:
            sizes = {number: _sizes(step.units, number) for number in set(step.units.division.like)}
            stages = [[sizes[number] for number in content] for content in set(step.units.division.contents)]
            found.append([max(sum(one[kind] for one in stage) for stage in stages) for kind in range(2)])
        return np.array(found).T

    def _write_gradients(self, by_kind: Array) -> None:
        """Change the terms of passes, ``[kind, pass, term, runs]``, of sharded gradients. Those of layers are written,
        and not added to as in the records; every microbatch reduces them and adds them to the main gradient's shard."""
        sizes = self._by_kind(lambda step, number: _sizes(step.units, number), 3)
        dense, experts, of_layers = sizes.swapaxes(0, 1)  # [kind, runs] each
        writes = (self.reduces_each | self.is_fully_sharded) & ~self.defers_reduction
        shards = self.dp * self.cp / self.replicas, self.edp / self.replicas
        written = np.where(writes, self.gradient_bytes * of_layers, 0.0)
        added = np.where(writes, 3 * self.gradient_bytes * (dense / shards[0] + experts / shards[1]), 0.0)
        saved = self.c["product_bytes"] * written / self.machines.hbm
        for number, is_pass in ((1, ~self.splits_backward), (2, self.splits_backward)):
            by_kind[:, number, _TERM["products"]] -= np.where(is_pass, saved, 0.0)
        by_kind[:, 1, _TERM["between products"]] += elementwise_seconds(self.machines, self.c, added)

    def _moved(self, gathered: Array, reduced: Array, copied: Array) -> Array:
        """Seconds to gather ``gathered`` and reduce ``reduced`` bytes of each parameter of the largest stage among its
        shards, and ``copied`` among their replicas."""
        dense, experts = self._parameters
        return dense * self._collectives(gathered, reduced, copied, self.dp * self.cp, "shards") + (
            experts * self._collectives(gathered, reduced, copied, self.edp, "expert_shards")
        )

    def _collectives(self, gathered: Array, reduced: Array, copied: Array, ranks: Array, group: str) -> Array:
        """The seconds of :meth:`_moved` for one parameter that ``ranks`` share: gathers and reduce-scatters in groups
        of shards, an all-reduce of each shard among its replicas, or of everything without shards."""
        shards = np.where(self.is_sharded, ranks / self.replicas, 1.0)
        replicas = ranks / shards
        ring = (shards - 1) / shards / self._ring_rate(group, shards)
        copies = np.where(self.is_sharded, self._ring_rate("replicas", replicas), self._ring_rate(group, replicas))
        return (gathered + reduced) * ring + 2 * (replicas - 1) / replicas * copied / shards / copies

    def _ring_rate(self, group: str, ranks: Array) -> Array:
        in_node, in_pod = self.places[f"{group}_in_node"], self.places[f"{group}_in_pod"]
        share = between_pods(self.machines, in_pod, in_pod < ranks)
        return ring_rate(self.machines, self.c, in_node, in_node >= ranks, share)

    def _data_parallel(self, slowest: Array) -> Array:
        """The exposed part of the reduction of gradients and of the gathers of weights."""
        c, m, gradient, weight = self.c, self.microbatches, self.gradient_bytes, self.weight_bytes
        none = np.zeros_like(m)
        # In each microbatch: FSDP gathers weights forward and backward, sharded gradients are reduced.
        gathers = np.where(self.keeps_gathered, none, 2 * weight)
        reduces = np.where(self.defers_reduction, none, gradient)
        is_each = self.is_fully_sharded | self.reduces_each
        each = self._moved(np.where(self.is_fully_sharded, gathers, none), np.where(is_each, reduces, none), none)
        # Once in a step: the updated weights are gathered, the other gradients reduced.
        gathered_once = np.where(self.is_fully_sharded, np.where(self.keeps_gathered, weight, none), weight)
        gathered_once = np.where(self.is_sharded, gathered_once, none)
        gathered = self._moved(gathered_once, none, none)
        reduced_once = self._moved(none, np.where(is_each, gradient - reduces, gradient), gradient)
        overlapped = np.where(self.overlaps_gathers, gathered, 0.0) + np.where(
            self.overlaps_reduction, reduced_once, 0.0
        )
        # What overlaps hides behind the last backward passes; the rest is exposed in full.
        window = reduction_window(slowest, m, self.pp, self.vp > 1)
        exposed = exposed_reduction(c, overlapped, window, True) + (gathered + reduced_once - overlapped)
        sharded = exposed_sharding(c, each, slowest, c["fsdp2_contention"])
        sharded = np.where(self.overlaps_gathers, sharded, each)
        one_window = reduction_window(slowest, m, self.pp, False)
        reduced = exposed_reduction(c, each, one_window, self.overlaps_reduction)
        return np.asarray(exposed + m * np.where(self.is_fully_sharded, sharded, reduced))

    def _optimizer(self) -> Array:
        """The norm of the gradients and their scaling, copies of narrow ones in fp32, the update of main weights and
        moments, and the cast to the dtype of the model; of the shards in host memory with the copies to it and back."""
        ranks = np.array([self.dp * self.cp, self.edp])
        shards = np.where(self.is_sharded, ranks / self.replicas, 1.0)
        parameters = (self._parameters / shards).sum(axis=0)
        gradient, weight = self.gradient_bytes, self.weight_bytes
        moments = np.array([float(step.units.bytes_of_moments) for step in self.steps])
        # The update reads and writes gradients, main weights and moments in fp32. Narrow gradients are copied into fp32
        # (6 bytes), narrow moments there and back (12).
        rules = [step.config.optimizer for step in self.steps]
        narrow = np.array([(rule.exp_avg_dtype == "bf16") + (rule.exp_avg_sq_dtype == "bf16") for rule in rules])
        moved = 2 * (8 + moments + 2 * narrow) + 12 * narrow + np.where(gradient < 4, 6.0, 0.0)
        # FSDP casts the weights that it gathers.
        moved = moved + np.where((weight < 4) & ~self.is_fully_sharded, 4 + weight, 0.0)
        on_host = parameters * np.array([step.config.optimizer.offloaded_fraction for step in self.steps])
        device = optimizer_seconds(self.machines, self.c, 3 * gradient * parameters + moved * (parameters - on_host))
        # The host writes the gradients that arrive, and reads the weights that it sends.
        sent = np.where(self.is_fully_sharded, 4.0, weight)
        overlaps = np.array([step.config.optimizer.overlap_cpu_optimizer_d2h_h2d for step in self.steps])
        return device + host_optimizer_seconds(
            self.machines, self.c, (moved + gradient + sent) * on_host, gradient * on_host, sent * on_host, overlaps
        )


def _sizes(units: UnitsOfRun, number: int) -> tuple[float, float, float]:
    """Parameters of a virtual stage outside of experts, of experts, and of its layers. A weight that both ends share
    counts once."""
    stage, ends = units.division.stages[number], units.ends
    layers = [units.unit(unit).num_parameters for unit in units.division.units[number]]
    dense, experts = (sum(sizes[kind] for sizes in layers) for kind in range(2))
    in_layers = dense + experts
    dense += ends.embedding.num_parameters[0] * stage.has_embedding
    dense += ends.output.num_parameters[0] * stage.has_output_layer
    experts += ends.output.num_parameters[1] * stage.has_output_layer  # of multi-token prediction
    if stage.has_embedding and stage.has_output_layer:
        names = {info.name for info in ends.embedding.parameters}
        dense -= sum(prod(info.local_shape) for info in ends.output.parameters if info.name in names)
    return float(dense), float(experts), float(in_layers)


# Where ranks are.


@lru_cache(maxsize=4096)
def _places(grid: RankGrid, node_size: int, pod_size: int, is_sharded: bool) -> dict[str, int]:
    """The number of ranks of each group of the first rank in its node and in its pod."""
    shards = ("cp", "dp_shard") if is_sharded else ("cp", "dp")
    groups = {
        "stages": ("pp",),
        "shards": shards,
        "replicas": ("dp_replicate",),
        "expert_shards": ("edp_shard",) if is_sharded else ("edp",),
    }
    return {
        f"{name}_in_{place}": together(grid.group(0, axes), size)
        for name, axes in groups.items()
        for place, size in (("node", node_size), ("pod", pod_size))
    }


# Schedules without a formula.


@lru_cache(maxsize=512)
def _program(
    name: str, stages: int, chunks: int, microbatches: int
) -> tuple[tuple[int, int, int, tuple[int, ...]], ...]:
    """The actions of a schedule in an order in which they can run: stage, virtual stage, kind, and the places of the
    actions that they wait for."""
    schedule = build_schedule(name, stages, microbatches, chunks)
    place: dict[Result, int] = {}
    found: list[tuple[int, int, int, tuple[int, ...]]] = []
    for stage, action in execution_order(schedule):
        result = schedule.result(stage, action)
        needs = tuple(place[one] for one in schedule.requirements(stage, action))
        place[result] = len(found)
        found.append((stage, result.virtual_stage, "FBW".index(action.kind), needs))
    return tuple(found)


def followed_makespan(name: str, stages: int, chunks: int, microbatches: int, passes: Array, slowest: Array) -> Array:
    """The makespan of a schedule for many runs; ``passes`` are those of the first, an inner and the last virtual
    stage, ``[kind, pass, runs]``."""
    # Further microbatches repeat the middle of the pipeline at the pace of the slowest stage.
    left_out = max(0, -(-(microbatches - _MOST_MICROBATCHES * stages) // stages)) * stages
    program = _program(name, stages, chunks, microbatches - left_out)
    splits = any(kind == 2 for _, _, kind, _ in program)
    last = stages * chunks - 1
    ends: list[Array] = []  # [runs] each, by place in the program
    free = [np.zeros_like(slowest) for _ in range(stages)]
    for stage, virtual_stage, kind, needs in program:
        times = passes[0 if virtual_stage == 0 else 2 if virtual_stage == last else 1]
        # Without W passes a backward pass computes both gradients.
        duration = times[kind] if splits or kind == 0 else times[1] + times[2]
        start = free[stage]
        for need in needs:
            start = np.maximum(start, ends[need])
        free[stage] = start + duration
        ends.append(free[stage])
    return np.maximum.reduce(free) + left_out * slowest
