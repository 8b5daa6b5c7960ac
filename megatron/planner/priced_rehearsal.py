"""The price of a step from a rehearsal of the real code: every product, collective and pass has a price, and the
schedule's simulator adds them up.

The closed form (:mod:`megatron.planner.step_time.formulas`) counts the same step by formulas. Both use the prices of
:mod:`megatron.planner.step_time.prices`, and a test compares them, so that formulas follow when layers change. The
constants are fitted to other people's software; the kernels of this project are unmeasured on GPUs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron.core.parameter import ParameterInfo
from megatron.planner.launch_prices import LaunchPrices, Product
from megatron.planner.launches import Launch
from megatron.planner.plan import Run
from megatron.planner.recorded_step import RecordedStep, record_step
from megatron.planner.shallow_run import MICROBATCHES, ShallowRun, UnitKind, virtual_stages
from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.constants import Constants
from megatron.planner.step_time.of_run import attention_kind
from megatron.planner.step_time.prices import exposed_reduction, exposed_sharding, growth, reduction_window
from megatron.planner.step_time.workload import TERMS, Attention
from megatron.planner.traffic import axis_of
from megatron.schedules.simulator import Durations, simulate

_PASSES = ("forward", "backward", "weight gradients")
_MOST_MICROBATCHES = 4
"""Times the pipeline's stages that are simulated; further microbatches take as long as the slowest stage."""
Terms = dict[str, float]


@dataclass(frozen=True)
class PricedStep:
    """The price of a step."""

    seconds: float
    terms: dict[str, float]
    """Seconds by cause, named as in the closed form; their sum is ``seconds``."""
    stage_passes: tuple[tuple[float, float, float], ...]
    """By virtual stage: seconds of forward, backward and weight-gradient passes, as given to the simulator."""
    products: tuple[Product, ...]
    """Of the slowest stage."""


def price_rehearsal(run: Run, cluster: Cluster, constants: Mapping[str, float]) -> PricedStep:
    """The price of a step of ``run`` on ``cluster``.

    Raises :class:`ConfigError` for a run that has no shallow rehearsal.
    """
    attention = attention_kind(run.config, cluster)
    run = _with_attention_kernel(run, attention)
    shallow = ShallowRun.of(run)
    stages = dict.fromkeys((0, shallow.run.grid.pp - 1))
    recorded = [record_step(shallow.run, _slowest_rank(shallow.run, stage), MICROBATCHES) for stage in stages]
    prices = LaunchPrices.of(cluster, constants, run.grid, run.config.seq_length, attention == "cudnn")
    return _Step(run, shallow, recorded, prices).price()


def _slowest_rank(run: Run, stage: int) -> int:
    """The last of the context-parallel ranks: its queries see the most keys of others, whose tiles it merges."""
    return run.grid.group(run.rank_of_stage(stage), ("cp",))[-1]


def _with_attention_kernel(run: Run, attention: Attention) -> Run:
    """``run`` with the attention that it chooses on the GPUs, which this machine does not have. Over packed sequences
    that is a kernel that takes all of them in one call, as FlashAttention does."""
    if run.device.type == "cpu" or run.config.kernels.wanted("attention") is not None:
        return run
    kernels = run.config.kernels
    fused = "flash" if run.config.masks_attention else "cudnn"
    kernel = {"cudnn": fused, "flash": "flash", "unfused": "reference"}[attention]
    return replace(
        run, config=replace(run.config, kernels=replace(kernels, kernel=(*kernels.kernel, f"attention={kernel}")))
    )


@dataclass(frozen=True)
class _Step:
    """A step from the recorded steps of the first and the last stage of a shallow run."""

    run: Run
    shallow: ShallowRun
    recorded: Sequence[RecordedStep]
    prices: LaunchPrices

    @property
    def _constants(self) -> Constants:
        return self.prices.constants

    def price(self) -> PricedStep:
        c, microbatches = self._constants, self.run.num_microbatches
        passes = [self._virtual_stage(number) for number in range(len(self.shallow.virtual_stages))]
        placement = self.run.placement
        by_stage: list[list[int]] = [[] for _ in range(self.run.grid.pp)]
        for number in range(len(passes)):
            by_stage[placement.location(number)[0]].append(number)
        busy = [sum(_total(one) for number in numbers for one in passes[number]) for numbers in by_stage]
        slowest = max(busy)
        stage = by_stage[busy.index(slowest)]
        durations = [tuple(_total(one) for one in each) for each in passes]
        terms: Terms = dict.fromkeys(TERMS, 0.0)
        for one in (one for number in stage for one in passes[number]):
            for name, seconds in one.items():
                terms[name] += microbatches * seconds
        terms["gaps"] += c["step"]
        terms["bubble"] = max(0.0, self._makespan(durations, slowest) - microbatches * slowest)
        terms["data parallelism"] = self._data_parallel(slowest)
        terms["optimizer"] = self._optimizer()
        larger = float(growth(c, self.run.grid.world_size))
        terms = {name: seconds * larger for name, seconds in terms.items()}
        return PricedStep(sum(terms.values()), terms, tuple(durations), self._products(stage))  # type: ignore[arg-type]

    # Passes.

    def _launches(self, stage: int, name: str, unit: str | None = None, microbatch: int = 1) -> list[Launch]:
        """The launches of a pass of a recorded stage, by default of the microbatch that is every other one, without
        those of data parallelism."""
        prefix = f"{name} pass, microbatch {microbatch},"
        launches = self.recorded[stage].launches
        return [
            launch
            for launch, following in zip(launches, (*launches[1:], None))
            if launch.during.startswith(prefix)
            and (unit is None or launch.unit == unit)
            and not (_is_shared(launch) or launch.name.startswith("fsdp::") or _is_copied(launch, following))
        ]

    @cached_property
    def _units(self) -> dict[UnitKind, tuple[Terms, Terms, Terms]]:
        """Seconds of the three passes of a unit of each kind."""
        found = {}
        names = [f"layer {number}" for number in range(len(self.shallow.kinds))]
        passes = [[self.prices.by_term(self._launches(0, one, name)) for one in _PASSES[:2]] for name in names]
        # Deferred weight gradients have no unit: they take time in proportion to the products of the backward pass.
        deferred = self.prices.by_term(self._launches(0, "weight gradients"))
        shares = [backward.get("products", 0.0) for _, backward in passes]
        for kind, (forward, backward), share in zip(self.shallow.kinds, passes, shares):
            weights = {name: seconds * share / sum(shares) for name, seconds in deferred.items()}
            gap = self._constants["layer_gap"] * len(kind.layers) / 3
            forward["gaps"] = forward.get("gaps", 0.0) + gap
            backward["gaps"] = backward.get("gaps", 0.0) + gap * (3 if kind.is_recomputed else 2)
            found[kind] = forward, backward, weights
        return found

    def _end(self, name: str) -> tuple[Terms, Terms, Terms]:
        """The passes of the embedding or the output layer, whose weight gradients are not deferred."""
        stage = 0 if name == "embedding" else -1
        forward, backward = (self.prices.by_term(self._launches(stage, one, name)) for one in _PASSES[:2])
        if name == "output":
            forward, backward = ({"output layer": _total(one)} for one in (forward, backward))
        return forward, backward, {}

    def _virtual_stage(self, number: int) -> tuple[Terms, Terms, Terms]:
        """Seconds of the three passes of a microbatch."""
        parts = [self._units[kind] for kind in self.shallow.virtual_stages[number]]
        stage = virtual_stages(self.run)[number]
        parts += [self._end("embedding")] if stage.has_embedding else []
        parts += [self._end("output")] if stage.has_output_layer else []
        forward, backward, weights = (_sum(part[place] for part in parts) for place in range(3))
        message = {"pipeline messages": self._message()}
        return _sum((forward, message)), _sum((backward, message)), weights

    def _message(self) -> float:
        """The exposed part of a message between two stages."""
        grid, c = self.run.grid, self._constants
        if grid.pp == 1:
            return 0.0
        sends = [one for one in self.recorded[0].launches if one.group is not None and one.group.kind == "send"]
        ranks = [self.run.rank_of_stage(stage) for stage in range(grid.pp)]
        share = c["exposed_interleaved_messages" if self.run.placement.num_chunks > 1 else "exposed_messages"]
        return share * sum(self.prices.message(launch.num_bytes, ranks) for launch in sends) / MICROBATCHES

    def _makespan(self, durations: Sequence[tuple[float, ...]], slowest: float) -> float:
        """Seconds of all passes of the schedule."""
        microbatches, stages = self.run.num_microbatches, self.run.grid.pp
        left_out = max(0, -(-(microbatches - _MOST_MICROBATCHES * stages) // stages)) * stages
        forward, backward, weight = zip(*durations)
        timeline = simulate(self.run.schedule(microbatches - left_out), Durations(forward, backward, weight))
        return timeline.makespan + left_out * slowest

    def _products(self, stage: Sequence[int]) -> tuple[Product, ...]:
        launches = []
        for number in stage:
            names = [f"layer {self.shallow.kinds.index(kind)}" for kind in self.shallow.virtual_stages[number]]
            for name in names:
                launches += [launch for one in _PASSES[:2] for launch in self._launches(0, one, name)]
            if virtual_stages(self.run)[number].has_output_layer:
                launches += [launch for one in _PASSES[:2] for launch in self._launches(-1, one, "output")]
        return self.prices.products(launches, self.run.num_microbatches)

    # Once per step.

    def _data_parallel(self, slowest: float) -> float:
        """The exposed part of the reduction of gradients and of the gathers of weights."""
        each, whole = (self._shared_seconds(microbatch) for microbatch in (1, None))
        once = max(0.0, whole - MICROBATCHES * each)
        c, parallel, microbatches = self._constants, self.run.config.parallel, self.run.num_microbatches
        overlaps = parallel.overlap_grad_reduce
        window = reduction_window(slowest, microbatches, self.run.grid.pp, self.run.placement.num_chunks > 1)
        exposed = exposed_reduction(c, once, window, overlaps)
        if parallel.sharding_strategy == "optim_grads_params":
            if not parallel.overlap_param_gather:
                return float(exposed) + microbatches * each
            contention = c["fsdp2_contention"]
            return float(exposed + microbatches * exposed_sharding(c, each, slowest, contention))
        return float(exposed + microbatches * exposed_reduction(c, each, 0.6 * slowest, overlaps))

    def _shared_seconds(self, microbatch: int | None) -> float:
        """Seconds of the collectives among the ranks that share parameters, of one microbatch or of the shallow step,
        for the parameters of the largest stage."""
        recorded, total = self.recorded[0], 0.0
        for launch in recorded.launches:
            axis = "" if launch.group is None else axis_of(launch.group.axes)
            if axis in ("dp", "edp") and (microbatch is None or f"microbatch {microbatch}," in launch.during):
                total += self.prices.collective(launch) * self._more_parameters(recorded, axis == "edp")
        return total

    def _more_parameters(self, recorded: RecordedStep, of_experts: bool) -> float:
        """Parameters of the largest stage over those of the recorded stage."""
        return self._largest(of_experts) / max(1, _sizes(recorded.parameters, of_experts))

    def _largest(self, of_experts: bool) -> float:
        """Parameters of the largest stage."""
        stages = [0.0] * self.run.grid.pp
        for number, stage in enumerate(virtual_stages(self.run)):
            place = self.run.placement.location(number)[0]
            stages[place] += sum(self._parameters(kind, of_experts) for kind in self.shallow.virtual_stages[number])
            if not of_experts:
                stages[place] += self._parameters_of_ends(stage.has_embedding, stage.has_output_layer)
        return max(stages)

    def _parameters(self, kind: UnitKind, of_experts: bool) -> float:
        """Parameters of a unit."""
        kinds = self.shallow.kinds
        first = sum(len(one.layers) for one in kinds[: kinds.index(kind)])
        names = tuple(f"layers.{layer}." for layer in range(first, first + len(kind.layers)))
        infos = self.recorded[0].parameters
        return sum(_size(info) for info in infos if info.name.startswith(names) and info.is_expert is of_experts)

    def _parameters_of_ends(self, has_embedding: bool, has_output_layer: bool) -> float:
        first, last = self.recorded[0].parameters, self.recorded[-1].parameters
        tables = [info for info in first if info.is_vocabulary and info.name.startswith("embedding")] * has_embedding
        ends = [info for info in last if not info.name.startswith(("layers.", "embedding"))] * has_output_layer
        return sum(_size(info) for info in (*tables, *ends))

    def _optimizer(self) -> float:
        """Seconds of the update of the largest stage."""
        recorded = self.recorded[0]
        between = [one for one in recorded.launches if one.unit == "" and "pass, microbatch" not in one.during]
        more = self._updated(self._largest) / self._updated(lambda of_experts: _sizes(recorded.parameters, of_experts))
        return self.prices.optimizer(between) * more

    def _updated(self, parameters: Callable[[bool], float]) -> float:
        """Of parameters outside of experts (False) and of experts (True) those that the rank updates."""
        grid, is_sharded = self.run.grid, self.run.config.parallel.sharding_strategy != "no_shard"
        ranks = (grid.dp * grid.cp, grid.edp)
        shards = [size / grid.dp_replicas if is_sharded else 1.0 for size in ranks]
        return parameters(False) / shards[0] + parameters(True) / shards[1]


def _is_shared(launch: Launch) -> bool:
    """Whether it is a collective of ranks that share parameters, or of several axes."""
    return launch.group is not None and axis_of(launch.group.axes) in ("dp", "edp", "several")


def _is_copied(launch: Launch, following: Launch | None) -> bool:
    """Whether it copies gradients into the buffer of a reduction: like the copies of FSDP2's gathers it is part of what
    the fitted contention of sharding describes."""
    is_copy = launch.name in ("aten::cat", "aten::_foreach_copy_")
    return is_copy and following is not None and (_is_shared(following) or following.name.startswith("fsdp::"))


def _size(info: ParameterInfo) -> int:
    return int(np.prod(info.local_shape, dtype=np.int64))


def _sizes(infos: Iterable[ParameterInfo], of_experts: bool) -> int:
    return sum(_size(info) for info in infos if info.is_expert is of_experts)


def _total(terms: Terms) -> float:
    return sum(terms.values())


def _sum(parts: Iterable[Terms]) -> Terms:
    total: Terms = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
