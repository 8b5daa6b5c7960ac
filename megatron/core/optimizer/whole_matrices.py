"""Whole matrices from shards, for update rules that are not elementwise.

The shards of a shard group are ranges of elements, cut anywhere. For an update each matrix is sent to one rank,
transformed there, and its shards are sent back. A round transforms one matrix on every rank. Matrices are sorted by
size, so that the ranks of a round have about the same work. A rank needs memory for one matrix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.data_parallel.buffer import ParameterSplit
from megatron.core.parameter import ParameterInfo

Transform = Callable[[ParameterInfo, Tensor], Tensor]
"""From a tensor-parallel rank's matrix to another of the same shape."""


class WholeMatrices:
    """The matrices of ``splits``, which are the same on all ``ranks`` of the shard group.

    ``empty`` has no elements, and the dtype and device of the shards.
    """

    def __init__(self, splits: Sequence[ParameterSplit], ranks: Communicator, empty: Tensor) -> None:
        # The sort is stable, so that all ranks have the same order.
        ordered = sorted(splits, key=lambda split: prod(split.info.local_shape), reverse=True)
        self._rounds = [ordered[start : start + ranks.size] for start in range(0, len(ordered), ranks.size)]
        self._ranks, self._empty = ranks, empty

    def transform(self, shards: Mapping[str, Tensor], transform: Transform) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's shard of every transformed matrix of which this rank has a shard.

        ``shards`` are 1-D, by parameter name. Collective: all ranks must exhaust the iterator.
        """
        for splits in self._rounds:
            if self._ranks.size == 1:
                info = splits[0].info
                yield info.name, transform(info, shards[info.name].view(info.local_shape)).flatten()
            else:
                own = [shards.get(split.info.name, self._empty) for split in splits]
                results = self._round(splits, own, transform)
                yield from ((split.info.name, result) for split, result in zip(splits, results) if result.numel())

    def _round(self, splits: Sequence[ParameterSplit], own: Sequence[Tensor], transform: Transform) -> list[Tensor]:
        """Rank i transforms matrix i; returns this rank's shards of all of them."""
        rank, size, empty = self._ranks.rank, self._ranks.size, self._empty
        absent = [empty] * (size - len(splits))
        results = [torch.empty_like(shard) for shard in own]
        if rank >= len(splits):
            self._ranks.exchange_parts([*own, *absent], [empty] * size)
            self._ranks.exchange_parts([empty] * size, [*results, *absent])
            return results
        info, ranges = splits[rank].info, splits[rank].ranges
        whole = empty.new_empty(prod(info.local_shape))
        self._ranks.exchange_parts([*own, *absent], [whole[start:stop] for start, stop in ranges])
        update = transform(info, whole.view(info.local_shape)).flatten()
        self._ranks.exchange_parts([update[start:stop] for start, stop in ranges], [*results, *absent])
        return results
