"""The late transport gives what gloo gives, and shows a missing wait and a changed input."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import Communicator
from tests.late_transport import LateCommunicator
from tests.rank_pool import RankPool


def collectives(late: bool) -> list[Tensor]:
    kind = LateCommunicator if late else Communicator
    return collectives_of(kind(range(dist.get_world_size()), dist.get_rank(), "world"))


def exchanged_rows(ranks: Communicator, dtype: torch.dtype, device: str) -> Tensor:
    """Rank i sends i + 2 j rows to rank j; so rank 0 sends itself none."""
    sent = [ranks.rank + 2 * other for other in range(ranks.size)]
    received = [other + 2 * ranks.rank for other in range(ranks.size)]
    rows = torch.arange(2.0 * sum(sent), device=device).add(100.0 * ranks.rank).view(-1, 2).to(dtype)
    return ranks.start_exchange_rows(rows, sent, received).wait()


def collectives_of(ranks: Communicator, device: str = "cpu") -> list[Tensor]:
    """The result of every collective."""
    size = ranks.size
    own = torch.arange(2.0 * size, device=device).add(100.0 * ranks.rank)
    in_place = torch.zeros(2 * size, device=device)
    part = in_place.chunk(size)[ranks.rank].fill_(ranks.rank + 1.0)
    summed = own.clone()
    results = [
        ranks.all_reduce(own.clone()),
        ranks.all_reduce(own.clone(), "max"),
        ranks.all_gather(own),
        ranks.all_gather(part, in_place).clone(),
        ranks.all_gather(own.to(torch.float8_e4m3fn)).float(),
        ranks.reduce_scatter(own),
        ranks.reduce_scatter(summed, summed.chunk(size)[ranks.rank]).clone(),
        ranks.all_to_all(own),
        ranks.start_shift(own).wait(),
        exchanged_rows(ranks, torch.float64, device),
        exchanged_rows(ranks, torch.float8_e4m3fn, device).float(),
    ]
    if ranks.rank == 0:
        ranks.start_send(own, 1).wait()
    elif ranks.rank == 1:
        results.append(ranks.start_receive(torch.empty_like(own), 0).wait())
    return results


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
