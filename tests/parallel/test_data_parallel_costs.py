"""What a data-parallel strategy costs on four ranks: memory per parameter, and bytes sent per step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.config.model import LlamaConfig
from megatron.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.core.communication import CollectiveRecord
from megatron.core.data_parallel.wrap import data_parallel_replicas, wrap_data_parallel
from megatron.core.model.layer import BuildContext
from megatron.core.model.llama import build_model
from megatron.core.ops.attention import choose_attention_kernel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.precision import number_formats
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.topology import RankGrid, Topology
from tests.parallel.layout_run import CPU, Layout, Task, build, grid_of, microbatches, topology_of
from tests.rank_pool import RankPool

RANKS = 4
TWENTY_MILLION = LlamaConfig(
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=64,
    vocab_size=8192,
    padded_vocab_size=8192,
    max_position_embeddings=16,
)
STRATEGIES: dict[ShardingStrategy, float] = {
    "no_shard": 18,
    "optim": 6 + 12 / RANKS,
    "optim_grads": 2 + 16 / RANKS,
}
"""Bytes per parameter in bf16 with fp32 gradients, master weights and moments (ZeRO, arXiv 1910.02054, section 3)."""


def bytes_per_parameter(strategy: ShardingStrategy) -> float:
    config = ParallelConfig(data_parallel_sharding_strategy=strategy)
    grid = RankGrid(dp=RANKS, dp_replicas=data_parallel_replicas(config, RANKS))
    topology = topology_of(grid, dist.get_rank(), dist.group.WORLD)
    kernel = choose_attention_kernel("auto", CPU, torch.bfloat16)
    context = BuildContext(TensorParallel(topology.tensor_parallel), torch.bfloat16, CPU, kernel)
    model = build_model(TWENTY_MILLION, context, seed=1)
    formats = number_formats(PrecisionConfig(bf16=True), OptimizerConfig())
    data_parallel = wrap_data_parallel(model, formats, topology, config)
    optimizer = Optimizer(OptimizerConfig(), data_parallel, topology)
    kept = sum((data_parallel.memory() | optimizer.memory()).values())
    return kept / TWENTY_MILLION.num_parameters()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_that_of_the_formula(four_ranks: RankPool, strategy: ShardingStrategy) -> None:
    assert TWENTY_MILLION.num_parameters() > 20e6
    for measured in four_ranks.run(bytes_per_parameter, strategy):
        assert measured == pytest.approx(STRATEGIES[strategy], rel=0.03)


SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""What a rank sends in a ring, as multiples of (d - 1) / d of the tensor."""


def numbers_sent_per_parameter(layout: Layout) -> float:
    """What this rank sends for data parallelism in a step, per parameter."""
    topology = Topology(grid_of(layout), dist.get_rank(), CPU)
    executor, data_parallel, _ = build(Task(OptimizerConfig()), layout, topology)
    records: list[CollectiveRecord] = []
    for axis in ("dp_shard", "dp_replicate"):
        topology.communicator(axis).observer = records.append
    data_parallel.start_gradients(layout.microbatches)
    executor.train(microbatches(0, layout, topology.data_parallel.rank), layout.microbatches, 1.0)
    data_parallel.finish_gradients()
    data_parallel.publish_parameters()
    data_parallel.wait_for_parameters()
    item = 8  # bytes of a number in fp64
    sent = sum(SENT[one.kind] * one.num_bytes / item * (one.group_size - 1) / one.group_size for one in records)
    (chunk,) = executor.chunks
    assert isinstance(chunk, nn.Module)
    return sent / sum(parameter.numel() for parameter in chunk.parameters())


@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_sends_what_a_ring_must(four_ranks: RankPool, strategy: ShardingStrategy, overlap: bool) -> None:
    """2 (d - 1) / d numbers per parameter, however they are shared; padding of the buckets aside."""
    layout = Layout(
        dp=RANKS,
        strategy=strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and strategy != "no_shard",
    )
    for sent in four_ranks.run(numbers_sent_per_parameter, layout):
        assert sent == pytest.approx(2 * (RANKS - 1) / RANKS, rel=0.02)


def test_sharded_gradients_are_sent_with_every_microbatch(four_ranks: RankPool) -> None:
    """The price of ZeRO-2: M reduce-scatters and one all-gather."""
    for sent in four_ranks.run(numbers_sent_per_parameter, Layout(dp=RANKS, strategy="optim_grads", microbatches=4)):
        assert sent == pytest.approx((4 + 1) * (RANKS - 1) / RANKS, rel=0.02)
