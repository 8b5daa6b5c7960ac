"""Every collective of a communicator."""

import torch
from torch import Tensor

from megatron.core.communication import Communicator


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
