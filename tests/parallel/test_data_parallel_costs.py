"""What a data-parallel strategy costs: memory per parameter, bytes sent per step, and when they are sent."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import MoEConfig
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.core.communication import CollectiveRecord
from megatron.core.data_parallel.buffered import wrap_data_parallel
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.models.parallelize import build_experts, build_model
from megatron.core.models.transformer import TransformerChunk, TransformerModel
from megatron.core.moe.layer import ExpertParallel
from megatron.core.optimizer import Optimizer
from megatron.core.parameter import info_of
from megatron.core.precision import number_formats
from megatron.core.topology import RankGrid, Topology
from tests.parallel.layout_run import (
    CPU,
    DEEP_MODEL,
    SEED,
    Layout,
    Task,
    build,
    context,
    grid_of,
    microbatches,
    topology_of,
)
from tests.parallel.rows import identifier
from tests.parallel.tasks import MIX, SGD, full
from tests.rank_pool import RankPool

RANKS = 4
FOUR_MILLION = TransformerConfig(
    num_layers=4, hidden_size=256, ffn_hidden_size=768, num_attention_heads=4, num_query_groups=4,
    kv_channels=64, vocab_size=2048, padded_vocab_size=2048, max_position_embeddings=16,
)  # fmt: skip
WITH_EXPERTS = replace(FOUR_MILLION, num_experts=4, moe_ffn_hidden_size=512)


def bytes_per_parameter(ranks: int) -> dict[ShardingStrategy, float]:
    """In bf16 with fp32 gradients, master weights and moments (ZeRO, arXiv 1910.02054, section 3)."""
    # Under FSDP two less than 18 / ranks: the weights that are sharded are the master weights.
    return {"no_shard": 18, "optim": 6 + 12 / ranks, "optim_grads": 2 + 16 / ranks, "optim_grads_params": 16 / ranks}


STRATEGIES = bytes_per_parameter(RANKS)
BF16 = PrecisionConfig(bf16=True)


def model_on(
    topology: Topology, dtype: torch.dtype, architecture: TransformerConfig, experts: ExpertParallel | None = None
) -> TransformerModel:
    return build_model(architecture, replace(context(topology, Layout(), dtype), experts=experts), SEED)


def bytes_kept(
    strategy: ShardingStrategy, optimizer_config: OptimizerConfig, precision: PrecisionConfig, ep: int = 0
) -> tuple[int, int, int]:
    """Bytes that this rank keeps, and its parameters without sharding: dense ones, and those of experts."""
    config = ParallelConfig(data_parallel_sharding_strategy=strategy)
    topology = topology_of(RankGrid(dp=RANKS, ep=max(ep, 1), dp_replicas=config.data_parallel_replicas(RANKS)))
    experts = build_experts(WITH_EXPERTS, MoEConfig(), topology) if ep else None
    model = model_on(topology, torch.bfloat16, WITH_EXPERTS if ep else FOUR_MILLION, experts)
    sizes = {False: 0, True: 0}
    for parameter in model.parameters():
        sizes[info_of(parameter).is_expert] += parameter.numel()
    data_parallel = wrap_data_parallel(model, number_formats(precision, optimizer_config), topology, config)
    optimizer = Optimizer(optimizer_config, data_parallel, topology)
    return sum((data_parallel.memory() | optimizer.memory()).values()), sizes[False], sizes[True]


def norms_with_wrong_bits(strategy: ShardingStrategy, agrees: bool) -> tuple[float, bool]:
    """The norm of a rank, of gradients that are 1, and 8 on the last rank; whether it is certainly one of all ranks."""
    config = ParallelConfig(data_parallel_sharding_strategy=strategy, tensor_model_parallel_size=2)
    dp = RANKS // 2
    topology = topology_of(RankGrid(tp=2, dp=dp, dp_replicas=config.data_parallel_replicas(dp)))
    model = model_on(topology, torch.float32, FOUR_MILLION)
    data_parallel = wrap_data_parallel(model, number_formats(PrecisionConfig(), OptimizerConfig()), topology, config)
    for shard in data_parallel.param_shards:
        shard.gradient.fill_(8.0 if topology.world.rank == RANKS - 1 else 1.0)
    optimizer = Optimizer(OptimizerConfig(clip_grad=0.0), data_parallel, topology, agrees_on_norms=agrees)
    norm = optimizer.step(Hyperparameters(0.0), 1.0).grad_norm
    return norm, optimizer.has_one_norm


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_agree_on_a_norm_by_which_a_policy_decides(four_ranks: RankPool, strategy: ShardingStrategy) -> None:
    """Each replica computes its own norm. If one of them has wrong bits, its ranks must not decide on their own."""
    norms, certain = zip(*four_ranks.run(norms_with_wrong_bits, strategy, True))
    assert len(set(norms)) == 1 and all(certain)
    own, certain = zip(*four_ranks.run(norms_with_wrong_bits, strategy, False))
    if strategy == "no_shard":
        assert len(set(own)) == 2 and not any(certain)
        assert set(norms) == {min(own)}, "the norm of the first replica"
    else:
        assert own == norms and all(certain)


NARROW = OptimizerConfig(
    adam_beta2=0.95,
    use_precision_aware_optimizer=True,
    main_grads_dtype="bf16",
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="bf16",
)
FORMATS = {
    "fp32 gradients": (OptimizerConfig(), BF16, 0, 0),
    "narrow gradients and moments": (NARROW, BF16, 2, 4),
    "gradients in bf16": (OptimizerConfig(), replace(BF16, grad_reduce_in_bf16=True), 2, 0),
}
"""Flags, and the bytes per parameter that they save in gradients and in moments."""


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_that_of_the_formula(four_ranks: RankPool, strategy: ShardingStrategy, formats: str) -> None:
    optimizer, precision, gradients, moments = FORMATS[formats]
    saved = gradients if strategy in ("no_shard", "optim") else gradients / RANKS
    saved += moments if strategy == "no_shard" else moments / RANKS
    for measured, parameters, _ in four_ranks.run(bytes_kept, strategy, optimizer, precision):
        assert parameters == FOUR_MILLION.num_parameters() > 4e6
        assert measured / parameters == pytest.approx(STRATEGIES[strategy] - saved, rel=0.03)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_are_sharded_over_the_ranks_that_share_them(
    four_ranks: RankPool, strategy: ShardingStrategy, ep: int
) -> None:
    """Two ranks, or one."""
    of_experts = bytes_per_parameter(RANKS // ep)
    for measured, dense, experts in four_ranks.run(bytes_kept, strategy, OptimizerConfig(), BF16, ep):
        assert experts == WITH_EXPERTS.num_layers * 4 * 3 * 256 * 512 // ep
        assert measured == pytest.approx(dense * STRATEGIES[strategy] + experts * of_experts[strategy], rel=0.01)


class Rank:
    """This rank's model in a layout, and the collectives of its data parallelism."""

    def __init__(self, layout: Layout, task: Task) -> None:
        self.layout = layout
        # One that no other case observes.
        self.topology = Topology(grid_of(layout), dist.get_rank(), CPU)
        self.executor, self.data_parallel, self.optimizer = build(task, layout, self.topology)
        (chunk,) = self.executor.chunks
        assert isinstance(chunk, TransformerChunk)
        self.chunk = chunk
        self.records: list[CollectiveRecord] = []
        sharing = self.data_parallel.sharing
        for kind in (sharing.dense, sharing.experts):
            if kind is not None:
                kind.shards.observer = kind.replicas.observer = self.records.append

    def compute_gradients(self) -> None:
        """The passes of a step, and the rest of the reductions."""
        num_microbatches = self.layout.microbatches
        self.data_parallel.start_grad_accumulation(num_microbatches)
        mine = microbatches(0, self.layout, self.topology.data_parallel.rank)
        self.executor.train(mine, num_microbatches, 1.0)
        self.data_parallel.finish_grad_sync()

    @property
    def reductions(self) -> list[CollectiveRecord]:
        """Those of gradients, so far."""
        return [record for record in self.records if record.kind in ("all_reduce", "reduce_scatter")]


def whole_units(overlap: bool) -> tuple[int, int]:
    """Most units that are whole at once in a step under FSDP, seen at the start of every unit's passes; and after."""
    layout = Layout(dp=RANKS, strategy="optim_grads_params", microbatches=2, overlap_param_gather=overlap)
    rank = Rank(layout, Task(OptimizerConfig(), model=DEEP_MODEL))
    units = rank.chunk.units
    counts: list[int] = []

    def count(*_: object) -> None:
        counts.append(sum(not isinstance(next(unit.parameters()), DTensor) for unit in units))

    for unit in units:
        unit.register_forward_pre_hook(count)
        unit.register_full_backward_pre_hook(count)
    rank.compute_gradients()
    assert len(counts) == 2 * 2 * len(units)
    most = max(counts)
    count()
    return most, counts[-1]


@pytest.mark.parametrize("overlap", [False, True], ids=["when used", "ahead"])
def test_one_layer_is_whole_at_a_time_under_fsdp(four_ranks: RankPool, overlap: bool) -> None:
    for most, after in four_ranks.run(whole_units, overlap):
        assert most == 1
        assert after == 0


SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""What a rank sends in a ring, as multiples of (d - 1) / d of the tensor."""


def numbers_sent_per_parameter(layout: Layout) -> tuple[float, float]:
    """What this rank sends for data parallelism in a step, per parameter; and the embedding's share of these."""
    rank = Rank(layout, Task(OptimizerConfig()))
    rank.compute_gradients()
    rank.data_parallel.start_param_all_gather()
    rank.data_parallel.finish_param_all_gather()
    item = 8  # bytes of a number in fp64
    sent = sum(SENT[one.kind] * one.num_bytes / item * (one.group_size - 1) / one.group_size for one in rank.records)
    chunk = rank.chunk
    assert chunk.embedding is not None
    parameters = sum(parameter.numel() for parameter in chunk.parameters())
    return sent / parameters, chunk.embedding.weight.numel() / parameters


FSDP = Layout(dp=RANKS, strategy="optim_grads_params")


def sent_by_layout() -> Iterator[Any]:
    """Layouts, how many times (d - 1) / d numbers per parameter a step sends, and how many of these times all but the
    embedding's, which the backward pass does not read."""
    for strategy, overlap in product(STRATEGIES, (False, True)):
        layout = replace(FSDP, strategy=strategy, overlap_grad_reduce=overlap)
        layout = replace(layout, overlap_param_gather=overlap and strategy != "no_shard")
        # A ring must send them twice; FSDP gathers weights again for the backward pass.
        yield pytest.param(layout, *((3, 1) if strategy == "optim_grads_params" else (2, 0)), id=identifier(layout))
    for reshard, defer in product((True, False), repeat=2):
        # Of four microbatches, all are gathered for twice or one once, and all are reduced or one.
        layout = replace(FSDP, microbatches=4, reshard_after_forward=reshard, defer_grad_reduce=defer)
        gathers, again = (8, 4) if reshard else (1, 0)
        yield pytest.param(layout, gathers + (1 if defer else 4), again, id=identifier(layout))
    # The price of ZeRO-2: M reduce-scatters and one all-gather.
    yield pytest.param(Layout(dp=RANKS, strategy="optim_grads", microbatches=4), 4 + 1, 0, id="ZeRO-2")


@pytest.mark.parametrize(("layout", "times", "without_embedding"), list(sent_by_layout()))
def test_a_step_sends_what_a_ring_must(
    four_ranks: RankPool, layout: Layout, times: int, without_embedding: int
) -> None:
    """Padding of the buckets aside."""
    for sent, embedding in four_ranks.run(numbers_sent_per_parameter, layout):
        assert sent == pytest.approx((times - without_embedding * embedding) * (RANKS - 1) / RANKS, rel=0.02)


def gathers_of(task: Task, layout: Layout) -> tuple[str, list[int]]:
    """What a rank saw of the all-gathers of weights in a step of FSDP: whose weights they were, in turn, of dense
    parameters (d) or of experts (e); and how many had started when each unit ran, and when it went back, before it
    asked for its weights."""
    rank = Rank(layout, task)
    before: list[int] = []

    def groups() -> str:
        return "".join("e" if "edp" in one.axes else "d" for one in rank.records if one.kind == "all_gather")

    def look(*_: object) -> None:
        before.append(len(groups()))

    for unit in rank.chunk.modules():
        if isinstance(unit, FSDPModule) and unit is not rank.chunk:
            unit.register_forward_pre_hook(look)
            unit.register_full_backward_pre_hook(look)
    rank.compute_gradients()
    look()
    return groups(), before


AHEAD, KEPT = replace(FSDP, overlap_param_gather=True), replace(FSDP, reshard_after_forward=False)
RECOMPUTED = replace(FSDP, activations=full("uniform", 2))


@pytest.mark.parametrize(
    ("task", "layout", "groups", "before"),
    [
        (SGD, FSDP, "dddd ddd", [1, 2, 3, 4, 4, 5, 6, 7, 7]),
        (SGD, AHEAD, "dddd ddd", [2, 3, 4, 4, 5, 6, 7, 7, 7]),
        (MIX, FSDP, "d de de d  d de de", [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 11]),
        (MIX, AHEAD, "d de de d  d de de", [2, 4, 4, 6, 6, 6, 7, 8, 10, 10, 11, 11, 11]),
        (MIX, RECOMPUTED, "d d ee d  d d ee", [1, 2, 3, 4, 5, 5, 6, 8, 9, 9, 9, 9, 9]),
        (MIX, KEPT, "d de de d", [1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6, 6]),
    ],
    ids=["when used", "ahead", "experts when used", "experts ahead", "recomputed", "kept"],
)
def test_weights_are_gathered_once_for_each_pass(
    four_ranks: RankPool, task: Task, layout: Layout, groups: str, before: list[int]
) -> None:
    """Embedding, two layers, head; backward without the embedding. A layer's experts follow it. Two layers that are
    recomputed together are one unit, whose experts stay whole from its second forward to its backward pass."""
    for seen in four_ranks.run(gathers_of, task, layout):
        assert seen == (groups.replace(" ", ""), before)


def reduced(strategy: ShardingStrategy, instances: int, in_bf16: bool) -> tuple[int, float]:
    """Bytes of the gradients that are reduced in a step of a bf16 model, and the gradient's global norm."""
    precision = PrecisionConfig(bf16=True, grad_reduce_in_bf16=in_bf16)
    rank = Rank(Layout(dp=RANKS, strategy=strategy, instances=instances), Task(OptimizerConfig(), precision=precision))
    rank.compute_gradients()
    num_bytes = sum(record.num_bytes for record in rank.reductions)
    return num_bytes, rank.optimizer.global_norm([shard.gradient for shard in rank.data_parallel.param_shards])


@pytest.mark.parametrize(
    ("strategy", "instances"),
    [("no_shard", 1), *((strategy, instances) for strategy in list(STRATEGIES)[1:] for instances in (1, 2))],
)
def test_gradients_reduced_in_bf16_are_half_the_bytes_and_nearly_the_same(
    four_ranks: RankPool, strategy: ShardingStrategy, instances: int
) -> None:
    wide, narrow = (four_ranks.run(reduced, strategy, instances, in_bf16) for in_bf16 in (False, True))
    for (wide_bytes, wide_norm), (narrow_bytes, narrow_norm) in zip(wide, narrow):
        assert narrow_bytes * 2 == wide_bytes
        assert narrow_norm == pytest.approx(wide_norm, rel=2**-8)
        assert narrow_norm != wide_norm


def reductions_before_the_first_layer_goes_back(strategy: ShardingStrategy, overlap: bool) -> tuple[int, int]:
    """Of the reductions of a step, how many have started by then; and all."""
    buckets = None if strategy == "optim_grads_params" else 1
    layout = Layout(dp=RANKS, strategy=strategy, bucket_size=buckets, overlap_grad_reduce=overlap)
    rank = Rank(layout, Task(OptimizerConfig()))
    before: list[int] = []
    rank.chunk.layers[0].register_full_backward_pre_hook(lambda *_: before.append(len(rank.reductions)))
    rank.compute_gradients()
    return before[0], len(rank.reductions)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_travel_while_the_backward_pass_goes_on(four_ranks: RankPool, strategy: ShardingStrategy) -> None:
    """Those of the head and the second layer are on their way before the first layer's are computed."""
    for before, in_all in four_ranks.run(reductions_before_the_first_layer_goes_back, strategy, True):
        assert 2 <= before < in_all


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_without_overlap_gradients_wait_for_the_end(four_ranks: RankPool, strategy: ShardingStrategy) -> None:
    for before, in_all in four_ranks.run(reductions_before_the_first_layer_goes_back, strategy, False):
        assert before == 0 < in_all
