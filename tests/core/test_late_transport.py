"""The late transport gives the results of every collective, and shows a missing wait and a changed input."""

import pytest
import torch
import torch.distributed as dist

from tests.core.collectives import Results, assert_results, collectives_of, expected_results, part_of
from tests.late_transport import LateCommunicator
from tests.rank_pool import RankPool


def collectives() -> Results:
    ranks = LateCommunicator(range(dist.get_world_size()), dist.get_rank(), "world")
    return collectives_of(ranks, part_of(ranks.rank, torch.float32))


def test_results_are_those_of_the_definition(four_ranks: RankPool) -> None:
    for rank, results in enumerate(four_ranks.run(collectives, world_size=3)):
        assert_results(results, expected_results(torch.float32, range(3), rank))


def forget_to_wait() -> list[bool]:
    """Whether each output is NaN before its wait."""
    ranks = LateCommunicator(range(2), dist.get_rank(), "world")
    reduced, gathered, scattered = torch.ones(2), torch.ones(4), torch.ones(1)
    works = [
        ranks.start_all_reduce(reduced),
        ranks.start_all_gather(torch.ones(2), gathered),
        ranks.start_reduce_scatter(torch.ones(2), scattered),
    ]
    unseen = [bool(tensor.isnan().all()) for tensor in (reduced, gathered, scattered)]
    for work in works:
        work.wait()
    return [*unseen, *(bool(tensor.isnan().any()) for tensor in (reduced, gathered, scattered))]


def test_without_a_wait_there_is_no_result(four_ranks: RankPool) -> None:
    assert four_ranks.run(forget_to_wait, world_size=2) == [[True] * 3 + [False] * 3] * 2


def change_before_the_wait(of_output: bool) -> str:
    ranks = LateCommunicator(range(2), dist.get_rank(), "world")
    tensor, output = torch.ones(2), torch.zeros(4)
    work = ranks.start_all_gather(tensor, output)
    (output if of_output else tensor).fill_(2.0)
    with pytest.raises(AssertionError) as raised:
        work.wait()
    return str(raised.value)


@pytest.mark.parametrize(("of_output", "told"), [(False, "an input was changed"), (True, "an output was written")])
def test_a_change_before_the_wait_is_seen(four_ranks: RankPool, of_output: bool, told: str) -> None:
    for message in four_ranks.run(change_before_the_wait, of_output, world_size=2):
        assert message.startswith(told)
