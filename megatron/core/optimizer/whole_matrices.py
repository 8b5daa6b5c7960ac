"""Whole matrices out of shards, for update rules that are not elementwise.

The ranks of a shard group hold ranges of elements of every parameter, cut anywhere. For an update each matrix is sent
to one rank, transformed there, and its parts are sent back. A round transforms one matrix on every rank. Matrices come
in order of size, so that the ranks of a round have about the same work. A rank needs memory for one matrix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.data_parallel.buffer import ParameterSplit
from megatron.core.parameter import ParameterInfo

Transform = Callable[[ParameterInfo, Tensor], Tensor]
"""From a matrix, as tensor parallelism leaves it to a rank, to another of its shape."""


class WholeMatrices:
    """The matrices of ``splits``, which ``ranks`` divide; all of them make it with the same splits."""

    def __init__(self, splits: Sequence[ParameterSplit], ranks: Communicator) -> None:
        # The sort is stable, so that all ranks have the same order.
        ordered = sorted(splits, key=lambda split: prod(split.info.local_shape), reverse=True)
        self._rounds = [ordered[start : start + ranks.size] for start in range(0, len(ordered), ranks.size)]
        self._ranks = ranks

    def transform(
        self, parts: Mapping[str, Tensor], transform: Transform, empty: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's part of every transformed matrix of which this rank has a part.

        ``parts`` are these by the name of the parameter, 1-D; ``empty`` has no elements, and their format and device.
        All ranks call it together and take all that it yields.
        """
        for splits in self._rounds:
            if self._ranks.size == 1:
                info = splits[0].info
                yield info.name, transform(info, parts[info.name].view(info.local_shape)).flatten()
            else:
                mine = [parts.get(split.info.name, empty) for split in splits]
                results = self._round(splits, mine, transform, empty)
                yield from ((split.info.name, one) for split, one in zip(splits, results) if one.numel())

    def _round(
        self, splits: Sequence[ParameterSplit], mine: Sequence[Tensor], transform: Transform, empty: Tensor
    ) -> list[Tensor]:
        """Rank i transforms matrix i; this rank's parts of all of them."""
        rank, size = self._ranks.rank, self._ranks.size
        absent = [empty] * (size - len(splits))
        results = [torch.empty_like(part) for part in mine]
        if rank >= len(splits):
            self._ranks.exchange_parts([*mine, *absent], [empty] * size)
            self._ranks.exchange_parts([empty] * size, [*results, *absent])
            return results
        info, ranges = splits[rank].info, splits[rank].ranges
        whole = empty.new_empty(prod(info.local_shape))
        self._ranks.exchange_parts([*mine, *absent], [whole[start:stop] for start, stop in ranges])
        update = transform(info, whole.view(info.local_shape)).flatten()
        self._ranks.exchange_parts([update[start:stop] for start, stop in ranges], [*results, *absent])
        return results
