"""Every collective of a communicator, and what each must give.

The inputs are small integers, so that sums are exact in every precision and arrival order cannot show.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import Communicator

SHAPE = (12, 5)
"""Divisible by two, three and four ranks along dim 0."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Results = dict[str, Tensor]


def everyone(timeout: float | None = None) -> Communicator:
    """All ranks, which wait ``timeout`` seconds for each other."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    return Communicator(range(dist.get_world_size()), dist.get_rank(), "all", timeout=limit)


def part_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, device: str = "cpu") -> Tensor:
    """What ``rank`` brings."""
    numbers = torch.arange(torch.Size(shape).numel()) * 7 + rank * 13
    return (numbers % 17 - 8).view(shape).to(device, dtype)


def rows_between(sender: int, receiver: int) -> int:
    """Some pairs of ranks exchange nothing, and the last of four ranks receives nothing at all."""
    return 0 if receiver == 3 else (sender * 2 + receiver * 3) % 4


def row_block(sender: int, receiver: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The rows of ``sender`` for ``receiver``."""
    return part_of(3 * sender + 5 * receiver, dtype, (rows_between(sender, receiver), 2), device)


def collectives_of(ranks: Communicator, mine: Tensor) -> Results:
    """The result of every collective on this rank, which brings ``mine``."""
    dtype, device, size = mine.dtype, mine.device.type, ranks.size
    results = {}
    tensor = mine.clone()
    assert ranks.all_reduce(tensor) is tensor, "all_reduce is in place"
    results["all_reduce sum"] = tensor
    results["all_reduce max"] = ranks.all_reduce(mine.clone(), "max")

    results["all_gather"] = ranks.all_gather(mine.clone())
    output = torch.full((size * SHAPE[0], *SHAPE[1:]), 99, dtype=dtype, device=device)
    assert ranks.all_gather(mine.clone(), output=output) is output
    results["all_gather into output"] = output
    whole = torch.full_like(output, 99)
    results["all_gather in place"] = ranks.all_gather(ranks.own_part(whole).copy_(mine), output=whole)
    results["all_gather of a transposed view"] = ranks.all_gather(mine.t().contiguous().t())

    results["reduce_scatter"] = ranks.reduce_scatter(mine.clone())
    output = torch.full((SHAPE[0] // size, *SHAPE[1:]), 99, dtype=dtype, device=device)
    assert ranks.reduce_scatter(mine.clone(), output=output) is output
    results["reduce_scatter into output"] = output
    whole = mine.clone()
    own = ranks.own_part(whole)
    assert ranks.reduce_scatter(whole, output=own) is own
    results["reduce_scatter in place"] = own
    results["reduce_scatter of a transposed view"] = ranks.reduce_scatter(mine.t().contiguous().t())
    flat = mine.flatten().clone()
    results["reduce_scatter of a flat bucket"] = ranks.reduce_scatter(flat, output=ranks.own_part(flat)).view(
        output.shape
    )

    results["all_to_all"] = ranks.all_to_all(mine.clone())
    results["shift"] = ranks.start_shift(mine.clone()).wait()
    results["broadcast"] = ranks.broadcast(mine.clone(), source=1)
    sent = [rows_between(ranks.rank, other) for other in range(size)]
    received = [rows_between(other, ranks.rank) for other in range(size)]
    for one in (dtype, *FP8):
        results[f"all_gather {one}"] = ranks.all_gather(mine.to(one))
        rows = torch.cat([row_block(ranks.rank, other, one, device) for other in range(size)])
        arrived = ranks.start_exchange_rows(rows, sent, received).wait()
        results[f"rows {one}"] = arrived
        results[f"rows back {one}"] = ranks.start_exchange_rows(arrived, received, sent).wait()
    turned = torch.cat([row_block(ranks.rank, other, dtype, device) for other in range(size)]).t().contiguous().t()
    results["rows of a transposed view"] = ranks.start_exchange_rows(turned, sent, received).wait()
    parts = [torch.zeros(1 + ranks.rank, dtype=dtype, device=device) for _ in range(size)]
    ranks.exchange_parts([mine.flatten()[: 1 + other].clone() for other in range(size)], parts)
    results["parts"] = torch.cat(parts)
    if ranks.rank == 0:
        ranks.start_send(mine, 1).wait()
    elif ranks.rank == 1:
        results["message"] = ranks.start_receive(torch.empty_like(mine), 0).wait()
    return {name: result.cpu() for name, result in results.items()}


def expected_results(dtype: torch.dtype, members: Sequence[int], place: int) -> Results:
    """The results of :func:`collectives_of` on the rank ``place`` of a group of the global ranks ``members``."""
    parts, size = [part_of(member, dtype) for member in members], len(members)
    total = torch.stack(parts).double().sum(0).to(dtype)
    share, gathered = total.chunk(size)[place], torch.cat(parts)
    expected = {"all_reduce sum": total, "all_reduce max": torch.stack(parts).amax(0)}
    expected |= {f"all_gather{how}": gathered for how in ("", " into output", " in place", " of a transposed view")}
    forms = ("", " into output", " in place", " of a transposed view", " of a flat bucket")
    expected |= {f"reduce_scatter{how}": share for how in forms}
    expected["all_to_all"] = torch.cat([part.chunk(size)[place] for part in parts])
    expected["shift"], expected["broadcast"] = parts[place - 1], parts[1]
    for one in (dtype, *FP8):
        expected[f"all_gather {one}"] = gathered.to(one)
        expected[f"rows {one}"] = torch.cat([row_block(other, place, one) for other in range(size)])
        expected[f"rows back {one}"] = torch.cat([row_block(place, other, one) for other in range(size)])
    expected["rows of a transposed view"] = expected[f"rows {dtype}"]
    expected["parts"] = torch.cat([part.flatten()[: 1 + place] for part in parts])
    if place == 1:
        expected["message"] = parts[0]
    return expected


def assert_results(found: Results, expected: Results) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].double(), tensor.double()), f"{name}: {found[name]} instead of {tensor}"
