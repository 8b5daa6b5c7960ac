"""Modules with one weight each, which is a bucket, over communicators that send nothing."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.core.communication import Communicator
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.parameter import ParameterInfo, empty_parameter, sharded_boxes
from megatron.core.precision import NumberFormats
from megatron.core.topology import RankGrid, Topology

NUMBERS = 128
"""Of a weight."""


class Unit(nn.Module):
    """A module with one weight, which calls ``run`` with its name."""

    def __init__(self, name: str, run: Callable[[str], None]) -> None:
        super().__init__()
        info = ParameterInfo(name, *sharded_boxes([NUMBERS], (), 0, 1), None, True, False)
        self.weight, self.name, self.run = empty_parameter(info, torch.float32, "cpu"), name, run

    def forward(self) -> None:
        """Only say that it runs."""
        self.run(self.name)


def build_buckets(
    strategy: ShardingStrategy, overlap: bool, modules: Sequence[nn.Module], grid: RankGrid, **groups: Communicator
) -> BufferedDataParallel:
    """``groups`` communicate for the shards of ``dense`` weights and of ``experts``."""
    topology = Topology(grid, 0, torch.device("cpu"))
    topology._communicators["cp", "dp_shard"] = groups["dense"]
    if "experts" in groups:
        topology._communicators["edp_shard",] = groups["experts"]
    for ranks in topology._communicators.values():
        ranks.open = lambda: None  # type: ignore[method-assign]
    config = ParallelConfig(
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        ddp_bucket_size=NUMBERS,
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    formats = NumberFormats.uniform(torch.float32)
    return BufferedDataParallel(parameters, formats, topology, config, modules, has_experts="experts" in groups)
