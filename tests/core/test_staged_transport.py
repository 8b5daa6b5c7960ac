"""The staged transport gives what gloo gives, and an output has its result only after its wait."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.topology import RankGrid, Topology
from tests.core.collectives import collectives_of
from tests.rank_pool import RankPool
from tests.staged_transport import StagedTopology


def collectives(kind: type[Topology], device: str) -> list[Tensor]:
    """The result of every collective of a communicator, on the host."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = kind(RankGrid(dp=size), rank, torch.device(device)).data_parallel
    results = collectives_of(ranks, device)
    results.append(ranks.broadcast(torch.full((3,), float(rank), device=device), source=1))
    received = [torch.zeros(1 + rank, device=device) for _ in range(size)]
    ranks.exchange_parts([torch.full((1 + other,), 10.0 * rank, device=device) for other in range(size)], received)
    return [result.cpu() for result in (*results, *received)]


def test_results_are_those_of_gloo(four_ranks: RankPool, device_name: str) -> None:
    staged = four_ranks.run(collectives, StagedTopology, device_name, world_size=3)
    for found, wanted in zip(staged, four_ranks.run(collectives, Topology, "cpu", world_size=3), strict=True):
        assert len(found) >= 15
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def before_the_wait(device: str) -> list[float]:
    """An output before and after its wait, and the input, which may change once the collective has started."""
    ranks: Communicator = StagedTopology(RankGrid(dp=2), dist.get_rank(), torch.device(device)).data_parallel
    own, output = torch.ones(1, device=device), torch.full((2,), -1.0, device=device)
    work = ranks.start_all_gather(own, output)
    before = output[0].item()
    work.wait()
    return [before, output[0].item()]


def test_an_output_has_its_result_after_its_wait(four_ranks: RankPool, device_name: str) -> None:
    assert four_ranks.run(before_the_wait, device_name, world_size=2) == [[-1.0, 1.0]] * 2
