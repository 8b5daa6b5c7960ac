"""Every collective on real ranks, against the computation that it stands for."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import CollectiveRecord, Communicator, Work
from megatron.core.topology import RankGrid, Topology
from tests.core.collectives import (
    SHAPE,
    Results,
    assert_results,
    collectives_of,
    everyone,
    expected_results,
    part_of,
    rows_between,
)
from tests.rank_pool import RankPool

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
WORLDS = [2, 3, 4]
WIDE_SHAPE = (24, 3)


def over_gloo() -> Communicator:
    return Communicator(range(dist.get_world_size()), dist.get_rank(), "all", shares_memory=False)


def evens_or_odds() -> Communicator:
    """Of four ranks: the even ones and the odd ones."""
    rank = dist.get_rank()
    return Communicator((rank % 2, rank % 2 + 2), rank, "half")


# Cases: what every rank of the pool does


def run_collectives(dtype: torch.dtype, group: Callable[[], Communicator]) -> Results:
    return collectives_of(group(), part_of(dist.get_rank(), dtype))


def run_overlapping(group: Callable[[], Communicator]) -> Results:
    """Several collectives under way on one communicator at once, waited for in another order."""
    ranks = group()
    mine, wide = (part_of(ranks.rank, torch.float32, shape) for shape in (SHAPE, WIDE_SHAPE))
    works = {
        "first": ranks.start_reduce_scatter(mine.clone()),
        "second": ranks.start_reduce_scatter(wide.clone()),
        "third": ranks.start_all_gather(mine.clone()),
        "fourth": ranks.start_all_reduce(wide.clone()),
        "fifth": ranks.start_all_gather(wide.clone()),
    }
    return {name: works[name].wait() for name in ("fifth", "second", "fourth", "first", "third")}


def run_rounding(seed: int) -> tuple[Tensor, Tensor]:
    """A reduce-scatter and an all-reduce of numbers whose sum depends on the order of additions."""
    ranks = everyone()
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(ranks.size, 64, generator=generator) * torch.logspace(0, 6, 64)
    return ranks.reduce_scatter(parts[ranks.rank].clone()), ranks.all_reduce(parts[ranks.rank].clone())


def run_observed() -> list[CollectiveRecord]:
    ranks = everyone()
    records: list[CollectiveRecord] = []
    ranks.observer = records.append
    mine = part_of(ranks.rank, torch.float64)
    ranks.all_reduce(mine.clone())
    ranks.start_all_gather(mine).wait()
    ranks.all_gather(mine.to(torch.float8_e4m3fn))
    ranks.reduce_scatter(mine.bfloat16())
    ranks.broadcast(mine.clone())
    sent = [rows_between(ranks.rank, other) for other in range(ranks.size)]
    received = [rows_between(other, ranks.rank) for other in range(ranks.size)]
    ranks.start_exchange_rows(torch.zeros(sum(sent), 2), sent, received).wait()
    neighbours = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    sending = ranks.start_send(mine.bfloat16(), neighbours[0])
    ranks.start_receive(mine.bfloat16(), neighbours[1]).wait()
    sending.wait()
    return records


def message(sender: int, number: int) -> Tensor:
    """The message ``number`` of ``sender``: no two are alike."""
    return torch.arange(6, dtype=torch.float64) + 100 * sender + 10 * number


def run_messages(receive_first: bool, group: Callable[[], Communicator] = everyone) -> list[Tensor]:
    """Three messages round the ring of the group, all under way at once; what came, in order."""
    ranks = group()
    source, target = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size

    def start_receives() -> list[Work[Tensor]]:
        return [ranks.start_receive(torch.zeros(6, dtype=torch.float64), source) for _ in range(3)]

    receiving = start_receives() if receive_first else []
    sending = [ranks.start_send(message(dist.get_rank(), number), target) for number in range(3)]
    if not receive_first:
        # All that was sent has to wait for somebody who asks for it.
        dist.barrier()
        receiving = start_receives()
    received = [pending.wait() for pending in receiving]
    assert [pending.wait().tolist() for pending in sending] == [
        message(dist.get_rank(), number).tolist() for number in range(3)
    ]
    return received


def run_channels() -> dict[str, list[Tensor]]:
    """Two stages send each other two messages on every channel, and take them channel by channel in another order."""
    topology = Topology(RankGrid(pp=2), dist.get_rank(), torch.device("cpu"))
    me, other = topology.rank, 1 - topology.rank
    for kind in "FB":
        for ends in ((0, 1), (1, 0)):
            topology.pipeline_channel(kind, *ends).open()
    order = [(kind, number) for number in range(2) for kind in "FB"]
    sending = [
        topology.pipeline_channel(kind, me, other).start_send(message(me, number + 5 * (kind == "B")), other)
        for kind, number in order
    ]
    received: dict[str, list[Tensor]] = {}
    for kind in "BF" if me == 0 else "FB":
        channel = topology.pipeline_channel(kind, other, me)
        empty = [torch.zeros(6, dtype=torch.float64) for _ in range(2)]
        received[kind] = [channel.start_receive(tensor, other).wait() for tensor in empty]
    for pending in sending:
        pending.wait()
    return received


def run_completion(group: Callable[[], Communicator]) -> tuple[bool, list[float]]:
    """Whether a message that was taken says so to its sender, who does not wait for it; and what was taken."""
    ranks = group()
    tensor = message(ranks.rank, 1)
    if ranks.rank == 1:
        received = ranks.start_receive(torch.zeros_like(tensor), 0).wait()
        dist.barrier()
        return True, received.tolist()
    sending = ranks.start_send(tensor, 1)
    dist.barrier()
    deadline = time.monotonic() + 60.0
    while not sending.is_complete and time.monotonic() < deadline:
        time.sleep(0.001)
    return sending.is_complete, sending.wait().tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("group", [everyone, over_gloo])
def test_collectives_equal_the_computation_they_stand_for(
    four_ranks: RankPool, world_size: int, dtype: torch.dtype, group: Callable[[], Communicator]
) -> None:
    for rank, results in enumerate(four_ranks.run(run_collectives, dtype, group, world_size=world_size)):
        assert_results(results, expected_results(dtype, range(world_size), rank))


def test_collectives_of_a_part_of_the_ranks_stay_among_them(four_ranks: RankPool) -> None:
    """Two groups at work at once; a mix-up of global ranks and places in the group would show here."""
    for rank, results in enumerate(four_ranks.run(run_collectives, torch.float32, evens_or_odds, world_size=4)):
        assert_results(results, expected_results(torch.float32, [rank % 2, rank % 2 + 2], rank // 2))


@pytest.mark.parametrize("group", [everyone, over_gloo])
def test_collectives_under_way_at_once_do_not_mix(four_ranks: RankPool, group: Callable[[], Communicator]) -> None:
    mine, wide = ([part_of(rank, torch.float32, shape) for rank in range(4)] for shape in (SHAPE, WIDE_SHAPE))
    summed, summed_wide = torch.stack(mine).sum(0), torch.stack(wide).sum(0)
    for rank, results in enumerate(four_ranks.run(run_overlapping, group, world_size=4)):
        parts = {"first": summed.chunk(4)[rank], "second": summed_wide.chunk(4)[rank]}
        whole = {"third": torch.cat(mine), "fourth": summed_wide, "fifth": torch.cat(wide)}
        assert_results(results, parts | whole)


def test_a_sum_does_not_depend_on_who_arrives_first(four_ranks: RankPool) -> None:
    """Bit for bit the sum in rank order, on every rank."""
    scattered, reduced = zip(*four_ranks.run(run_rounding, 3, world_size=4))
    parts = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(0, 6, 64)
    in_rank_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    in_reverse = ((parts[3] + parts[2]) + parts[1]) + parts[0]
    assert torch.equal(torch.cat(scattered), in_rank_order)
    assert all(torch.equal(one, in_rank_order) for one in reduced)
    assert not torch.equal(in_rank_order, in_reverse), "the numbers do not tell the orders apart"


def test_an_observer_sees_every_collective(four_ranks: RankPool) -> None:
    """FP8 has a byte for each number; of rows only those count that go to other ranks."""
    elements = SHAPE[0] * SHAPE[1]
    for rank, records in enumerate(four_ranks.run(run_observed, world_size=4)):
        rows = sum(rows_between(rank, other) for other in range(4) if other != rank)
        assert records == [
            CollectiveRecord("all_reduce", "all", 4, elements * 8),
            CollectiveRecord("all_gather", "all", 4, 4 * elements * 8),
            CollectiveRecord("all_gather", "all", 4, 4 * elements),
            CollectiveRecord("reduce_scatter", "all", 4, elements * 2),
            CollectiveRecord("broadcast", "all", 4, elements * 8),
            CollectiveRecord("exchange", "all", 4, rows * 2 * 4),
            CollectiveRecord("send", "all", 4, elements * 2),
            CollectiveRecord("receive", "all", 4, elements * 2),
        ]


@pytest.mark.parametrize("receive_first", [True, False], ids=["received ahead", "sent ahead"])
@pytest.mark.parametrize(("group", "distance"), [(everyone, 1), (over_gloo, 1), (evens_or_odds, 2)])
def test_messages_arrive_in_the_order_of_sending(
    four_ranks: RankPool, receive_first: bool, group: Callable[[], Communicator], distance: int
) -> None:
    """Also between the two even and the two odd ranks, whose places in the group are not their global ranks."""
    for rank, received in enumerate(four_ranks.run(run_messages, receive_first, group, world_size=4)):
        wanted = [message((rank - distance) % 4, number).tolist() for number in range(3)]
        assert [tensor.tolist() for tensor in received] == wanted


def test_messages_of_one_channel_wait_for_no_other(four_ranks: RankPool) -> None:
    """Whoever takes the gradients first gets gradients, although activations were sent before them."""
    for rank, received in enumerate(four_ranks.run(run_channels, world_size=2)):
        for kind, first in (("F", 0), ("B", 5)):
            wanted = [message(1 - rank, number + first).tolist() for number in range(2)]
            assert [tensor.tolist() for tensor in received[kind]] == wanted, f"rank {rank}, {kind}"


@pytest.mark.parametrize("group", [everyone, over_gloo])
def test_a_message_that_has_been_taken_says_so(four_ranks: RankPool, group: Callable[[], Communicator]) -> None:
    """Without a wait, so that a sender keeps nothing longer than it must (gloo itself tells only those who wait)."""
    assert four_ranks.run(run_completion, group, world_size=2) == [(True, message(0, 1).tolist())] * 2


def test_a_single_rank_communicates_nothing() -> None:
    """Nor does it copy or need torch.distributed; its observer hears nothing."""
    alone = Communicator((5,), rank=5)
    records: list[CollectiveRecord] = []
    alone.observer = records.append
    tensor = part_of(0, torch.float32)
    for result in (
        alone.all_reduce(tensor),
        alone.all_reduce(tensor, "max"),
        alone.start_all_reduce(tensor).wait(),
        alone.all_gather(tensor),
        alone.reduce_scatter(tensor),
        alone.broadcast(tensor),
        alone.start_exchange_rows(tensor, [12], [12]).wait(),
    ):
        assert result is tensor
    assert torch.equal(tensor, part_of(0, torch.float32))
    for collective in (alone.all_gather, alone.reduce_scatter):
        output = torch.zeros(SHAPE)
        assert collective(tensor, output=output) is output
        assert torch.equal(output, tensor)
        assert collective(tensor, output=tensor) is tensor
    assert not records
    assert not dist.is_initialized()


@pytest.mark.parametrize(("ranks", "stride"), [((5,), None), ((1, 3, 5), 2), ((0, 1, 4), None), ((2, 10), 8)])
def test_neighbours_of_a_group_may_be_equally_far_apart(ranks: tuple[int, ...], stride: int | None) -> None:
    assert Communicator(ranks, ranks[-1]).stride == stride


def test_several_ranks_need_torch_distributed() -> None:
    with pytest.raises(AssertionError, match=r"needs torch\.distributed"):
        Communicator((0, 1), rank=0).all_reduce(torch.zeros(1))
