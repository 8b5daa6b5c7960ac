"""The time of a training step of this project in closed form: layers of :mod:`megatron.planner.step_time.own_layer`,
the pipeline, the reduction of gradients, and the optimizer.

Sources: the bubble of 1F1B is (p - 1) / v passes (arXiv 2104.04473, section 2.2). Zero-bubble schedules
(arXiv 2401.10241) have no such formula for few microbatches: their actions are followed one by one, for all runs of one
schedule at once.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron.planner.step_time.constants import Constants
from megatron.planner.step_time.own_layer import OwnLayer, Pass
from megatron.planner.step_time.prices import (
    between_pods,
    exposed_reduction,
    exposed_sharding,
    growth,
    message_rate,
    optimizer_seconds,
    reduction_window,
    ring_rate,
)
from megatron.planner.step_time.workload import TERMS, Array, Mask, StepTime, Workload
from megatron.schedules.registry import build_schedule, placement_of
from megatron.schedules.schedule import Result
from megatron.schedules.simulator import execution_order

_CLOSED = ("1f1b", "interleaved")
"""Schedules whose bubble has a formula."""
_MOST_MICROBATCHES = 3
"""Times the pipeline's stages that are followed; further microbatches take as long as the slowest stage."""


class OwnStepModel:
    """Prices runs of this project, all of a workload."""

    def __init__(self, workload: Workload) -> None:
        w = workload
        self.layer = OwnLayer(w)
        self.machines, self.tp, self.cp = self.layer.machines, self.layer.tp, self.layer.cp
        self.pp, self.vp, self.dp, self.gpus = w.number("pp"), w.number("vp"), w.number("dp"), w.number("gpus")
        self.microbatches = w.number("global_batch_size") / (w.number("micro_batch_size") * self.dp)
        self.schedules = [run.own.pipeline_schedule for run in w.runs if run.own is not None]
        self.layers = [w.number(f"{place}_layers") for place in ("first", "inner", "last")]  # of virtual stages
        recomputed = w.number("recomputed_layers")
        self.recomputed = [np.minimum(recomputed, layers) for layers in self.layers]
        strategy = {
            name: w.where("sharding_strategy", name)
            for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")
        }
        self.is_sharded, self.is_fully_sharded = ~strategy["no_shard"], strategy["optim_grads_params"]
        self.reduces_each = strategy["optim_grads"]
        self.replicas = w.number("replicas")
        groups = ("shards", "replicas", "expert_shards")
        self.in_node = {group: w.number(f"{group}_in_node") for group in groups}
        self.in_pod = {group: w.number(f"{group}_in_pod") for group in groups}
        self.sends_in_node, self.stages_in_pod = w.where("sends_in_node"), w.number("stages_in_pod")
        self.overlaps_reduction, self.overlaps_gathers = w.where("overlaps_data_parallel"), w.where("overlaps_gathers")
        self.keeps_gathered, self.defers_reduction = w.where("keeps_weights_gathered"), w.where("defers_reduction")

    def price(self, c: Constants) -> StepTime:
        """The time of every run."""
        forward, backward, weights = self.layer.passes(c)
        each, whole = self.layer.recomputed(c, forward)
        gap = c["layer_gap"] / 3
        layer = [_total(forward) + gap, _total(backward) + each + 2 * gap, _total(weights)]
        again = whole + gap
        embedding, head, message = self.layer.embedding(c), self.layer.head(c), self._message(c)
        passes = self._virtual_stages(layer, again, embedding, head, message)
        stages = self._stages(passes)
        busiest = np.argmax(stages, axis=0)
        slowest = np.take_along_axis(stages, busiest[None], axis=0)[0]
        makespan = self._makespan(passes, slowest, busiest)
        layers, recomputed, has_embedding, has_head = (
            np.take_along_axis(of_stage, busiest[None], axis=0)[0] for of_stage in self._contents()
        )
        m = self.microbatches
        terms: Pass = dict.fromkeys(TERMS, np.zeros_like(m))
        for one in (forward, backward, weights):
            for name, seconds in one.items():
                terms[name] = terms[name] + m * layers * seconds
        for one in embedding:
            for name, seconds in one.items():
                terms[name] = terms[name] + m * has_embedding * seconds
        terms["recompute"] = m * (layers * each + recomputed * whole)
        terms["gaps"] = m * gap * (3 * layers + recomputed) + c["step"]
        terms["output layer"] = m * has_head * (head[0] + head[1])
        terms["pipeline messages"] = m * 2 * self.vp * message
        terms["bubble"] = np.maximum(makespan - m * slowest, 0.0)
        terms["data parallelism"] = self._data_parallel(c, slowest)
        terms["optimizer"] = self._optimizer(c)
        larger = growth(c, self.gpus)
        terms = {name: np.asarray(seconds * larger) for name, seconds in terms.items()}
        return StepTime(np.asarray(sum(terms.values())), terms, passes)

    # The pipeline.

    def _virtual_stages(
        self, layer: Sequence[Array], again: Array, embedding: Sequence[Pass], head: Sequence[Array], message: Array
    ) -> list[list[Array]]:
        """Forward, backward and weight-gradient seconds of the first, an inner and the last virtual stage. With one
        virtual stage the first is also the last."""
        found = []
        is_whole = self.pp * self.vp == 1
        for place, (layers, recomputed) in enumerate(zip(self.layers, self.recomputed)):
            times = [layers * one for one in layer]
            times[1] = times[1] + recomputed * again
            is_last = is_whole if place == 0 else place == 2
            for number in range(2):
                end = np.where(is_last, head[number], 0.0) + (_total(embedding[number]) if place == 0 else 0.0)
                times[number] = times[number] + end + message
            found.append(times)
        return found

    @property
    def _is_v(self) -> Mask:
        """Whether the first stage holds both ends of the model."""
        return np.array([placement_of(name, 2, None).shape == "v" for name in self.schedules])

    def _shares(self) -> Array:
        """How many first, inner and last virtual stages the first, an inner and the last pipeline stage have:
        ``[stage, kind, runs]``."""
        is_v, is_whole, one = self._is_v & (self.pp > 1), self.pp * self.vp == 1, np.ones_like(self.pp)
        none = np.zeros_like(one)
        inner_of_ends = np.where(is_v, 0.0, self.vp - 1)
        first = (one, inner_of_ends, np.where(is_v & ~is_whole, 1.0, 0.0))
        inner_exists = (self.pp > 2) | is_v
        inner = (none, np.where(inner_exists, self.vp, 0.0), none)
        last = (none, np.where(is_v | is_whole, 0.0, self.vp - 1), np.where(is_v | is_whole, 0.0, 1.0))
        return np.array([first, inner, last])

    def _stages(self, passes: Sequence[Sequence[Array]]) -> Array:
        """Seconds of a microbatch on the first, an inner and the last stage, ``[3, runs]``."""
        totals = np.array([sum(times) for times in passes])
        return np.einsum("skr,kr->sr", self._shares(), totals)

    def _contents(self) -> tuple[Array, Array, Array, Array]:
        """Layers, recomputed layers, embeddings and output layers of the three stages, each ``[3, runs]``."""
        shares = self._shares()
        is_whole = self.pp * self.vp == 1
        layers = np.einsum("skr,kr->sr", shares, np.array(self.layers))
        recomputed = np.einsum("skr,kr->sr", shares, np.array(self.recomputed))
        return layers, recomputed, shares[:, 0], np.where(is_whole, shares[:, 0], shares[:, 2])

    def _bubble(self, passes: Sequence[Sequence[Array]], slowest: Array, busiest: Array) -> Array:
        """The idle time of the slowest stage under 1F1B, interleaved or not.

        With one chunk it waits for one microbatch on all other stages. With several, for the first chunks of the stages
        before it; of equal inner stages the last one is meant.
        """
        first, inner, last = (sum(times) for times in passes)
        count = self.pp * self.vp
        others = np.where(count == 1, first, first + (count - 2) * inner + last) - slowest
        before = first + np.maximum(self.pp - np.where(busiest == 2, 2, 3), 0) * inner
        return np.where((self.vp > 1) & (busiest > 0), before, others / self.vp)

    def _makespan(self, passes: Sequence[Sequence[Array]], slowest: Array, busiest: Array) -> Array:
        """Seconds from the first to the last pass."""
        found = np.array(self.microbatches * slowest + self._bubble(passes, slowest, busiest))
        keys = list(zip(self.schedules, self.pp.astype(int), self.vp.astype(int), self.microbatches.astype(int)))
        for key in dict.fromkeys(key for key in keys if key[0] not in _CLOSED and key[1] > 1):
            runs = np.array([other == key for other in keys])
            chosen = [[times[runs] for times in stage] for stage in passes]
            found[runs] = followed_makespan(*key, chosen, slowest[runs])
        return found

    def _message(self, c: Constants) -> Array:
        """The exposed part of a message between two stages: of every tensor-parallel rank."""
        pods = between_pods(self.machines, self.stages_in_pod, self.stages_in_pod < self.pp)
        rate = message_rate(self.machines, c, self.sends_in_node, pods)
        size = self.layer.element * self.layer.tokens * self.layer.residual
        share = np.where(self.vp > 1, c["exposed_interleaved_messages"], c["exposed_messages"])
        return np.where(self.pp > 1, size / rate * share, 0.0)

    # Data parallelism and the optimizer.

    def _parameters(self) -> Array:
        """Parameters of the largest stage of a rank, without experts."""
        layer, hidden = self.layer, self.layer.hidden
        mlp = layer.dense * 3 * hidden * layer.ffn
        of_layer = 2 * hidden * (layer.query + layer.key) + mlp + 2 * hidden
        of_layer = of_layer + np.where(layer.has_qkv_bias, layer.query + 2 * layer.key, 0.0)
        moe = layer.experts.dense_parameters / np.maximum(layer.experts.layers / layer.experts.pp, 1e-9)
        layers, _, embeddings, heads = self._contents()
        table = layer.vocab * hidden
        stages = layers * (of_layer + moe) + (embeddings + heads) * table + heads * hidden
        return np.asarray(stages.max(axis=0))

    def _expert_parameters(self) -> Array:
        """Those of experts."""
        experts = self.layer.experts
        per_layer = experts.share * experts.local_experts * 3 * experts.hidden * experts.ffn / experts.etp
        return np.asarray(self._contents()[0].max(axis=0) * per_layer)

    def _moved(self, c: Constants, gathered: Array, reduced: Array, copied: Array) -> Array:
        """Seconds to gather ``gathered`` and reduce ``reduced`` bytes of each parameter of the largest stage among its
        shards, and ``copied`` among their replicas."""
        dense = self._collectives(c, gathered, reduced, copied, self.dp * self.cp, "shards")
        experts = self._collectives(c, gathered, reduced, copied, self.layer.experts.edp, "expert_shards")
        experts = np.where(self.layer.experts.is_moe, self._expert_parameters() * experts, 0.0)
        return self._parameters() * dense + experts

    def _collectives(
        self, c: Constants, gathered: Array, reduced: Array, copied: Array, ranks: Array, group: str
    ) -> Array:
        """The same for one parameter that ``ranks`` share: gathers and reduce-scatters in groups of shards, an
        all-reduce of each shard among its replicas, or of everything without shards."""
        shards = np.where(self.is_sharded, ranks / self.replicas, 1.0)
        replicas = ranks / shards
        ring = (shards - 1) / shards / self._rate(c, self.in_node[group], self.in_pod[group], shards)
        in_node = np.where(self.is_sharded, self.in_node["replicas"], self.in_node[group])
        in_pod = np.where(self.is_sharded, self.in_pod["replicas"], self.in_pod[group])
        rate = self._rate(c, in_node, in_pod, replicas)
        return (gathered + reduced) * ring + 2 * (replicas - 1) / replicas * copied / shards / rate

    def _rate(self, c: Constants, in_node: Array, in_pod: Array, ranks: Array) -> Array:
        """Bytes per second of a ring of ``ranks``."""
        share = between_pods(self.machines, in_pod, in_pod < ranks)
        return ring_rate(self.machines, c, in_node, in_node >= ranks, share)

    def _data_parallel(self, c: Constants, slowest: Array) -> Array:
        """The exposed part of the reduction of gradients and of the gathers of weights."""
        m, gradient, none = self.microbatches, self.layer.gradient_bytes, np.zeros_like(self.microbatches)
        weight = self.layer.element * np.ones_like(none)
        gathers = np.where(self.keeps_gathered, none, 2 * weight)
        reduces = np.where(self.defers_reduction, none, gradient)
        is_each = self.is_fully_sharded | self.reduces_each
        each = self._moved(c, np.where(self.is_fully_sharded, gathers, none), np.where(is_each, reduces, none), none)
        gathered_once = np.where(self.is_fully_sharded, np.where(self.keeps_gathered, weight, none), weight)
        gathered_once = np.where(self.is_sharded, gathered_once, none)
        once = self._moved(c, gathered_once, np.where(is_each, gradient - reduces, gradient), gradient)
        window = reduction_window(slowest, m, self.pp, self.vp > 1)
        exposed = exposed_reduction(c, once, window, self.overlaps_reduction)
        sharded = exposed_sharding(c, each, slowest, c["fsdp2_contention"])
        sharded = np.where(self.overlaps_gathers, sharded, each)
        one_window = reduction_window(slowest, m, self.pp, False)
        reduced = exposed_reduction(c, each, one_window, self.overlaps_reduction)
        return np.asarray(exposed + m * np.where(self.is_fully_sharded, sharded, reduced))

    def _optimizer(self, c: Constants) -> Array:
        """The norm of the gradients and their scaling, the update of main weights and two moments, and the cast to the
        dtype of the model."""
        ranks, experts = self.dp * self.cp, self.layer.experts
        shards = np.where(self.is_sharded, self.replicas, ranks)
        dense = self._parameters() * shards / ranks
        of_experts = self._expert_parameters() * np.where(self.is_sharded, self.replicas, experts.edp) / experts.edp
        parameters = dense + np.where(experts.is_moe, of_experts, 0.0)
        gradient, weight = self.layer.gradient_bytes, self.layer.element
        moved = 3 * gradient + 24 + 2 * gradient + np.where(weight < 4, 4 + weight, 0.0)
        return optimizer_seconds(self.machines, c, parameters * moved)


def _total(one: Pass) -> Array:
    return np.asarray(sum(one.values()))


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


def followed_makespan(
    name: str, stages: int, chunks: int, microbatches: int, passes: Sequence[Sequence[Array]], slowest: Array
) -> Array:
    """The makespan of a schedule for many runs; ``passes`` are those of the first, an inner and the last virtual
    stage."""
    left_out = max(0, -(-(microbatches - _MOST_MICROBATCHES * stages) // stages)) * stages
    program = _program(name, stages, chunks, microbatches - left_out)
    splits = any(kind == 2 for _, _, kind, _ in program)
    last = stages * chunks - 1
    ends: list[Array] = []
    free = [np.zeros_like(slowest) for _ in range(stages)]
    for stage, virtual_stage, kind, needs in program:
        times = passes[0 if virtual_stage == 0 else 2 if virtual_stage == last else 1]
        duration = times[kind] if splits or kind == 0 else times[1] + times[2]
        start = free[stage]
        for need in needs:
            start = np.maximum(start, ends[need])
        free[stage] = start + duration
        ends.append(free[stage])
    return np.maximum.reduce(free) + left_out * slowest
