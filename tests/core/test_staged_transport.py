"""The staged transport gives the results of every collective, and an output has its result only after its wait."""

import torch
import torch.distributed as dist

from megatron.core.communication import Communicator
from megatron.core.topology import RankGrid
from tests.core.collectives import Results, assert_results, collectives_of, expected_results, part_of
from tests.rank_pool import RankPool
from tests.staged_transport import StagedTopology


def collectives(device: str) -> Results:
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = StagedTopology(RankGrid(dp=size), rank, torch.device(device)).data_parallel
    return collectives_of(ranks, part_of(rank, torch.float32, device=device))


def test_results_are_those_of_the_definition(four_ranks: RankPool, device_name: str) -> None:
    for rank, results in enumerate(four_ranks.run(collectives, device_name, world_size=3)):
        assert_results(results, expected_results(torch.float32, range(3), rank))


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
