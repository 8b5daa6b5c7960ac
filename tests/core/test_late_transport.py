"""The late transport gives what gloo gives, and shows a missing wait and a changed input."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import Communicator
from tests.core.collectives import collectives_of
from tests.late_transport import LateCommunicator
from tests.rank_pool import RankPool


def collectives(late: bool) -> list[Tensor]:
    kind = LateCommunicator if late else Communicator
    return collectives_of(kind(range(dist.get_world_size()), dist.get_rank(), "world"))


def test_results_are_those_of_gloo(four_ranks: RankPool) -> None:
    for late, plain in zip(*(four_ranks.run(collectives, late, world_size=3) for late in (True, False)), strict=True):
        assert len(late) >= 11
        for found, wanted in zip(late, plain, strict=True):
            assert torch.equal(found, wanted)


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
