"""Contiguous buffers that hold all parameters, and all gradients, of a rank as views.

A buffer is divided into buckets, the unit of communication, and every bucket evenly among the ranks of the shard group.
Source: ZeRO (arXiv 1910.02054), as laid out by Megatron-LM.
"""

# Four parameters in two buckets, divided among two ranks:
#
#     parameters    | p3        | p2      |pad| p1    | p0              |pad|
#     buckets       | bucket 0                | bucket 1                    |
#     shards        | rank 0     | rank 1     | rank 0       | rank 1       |
#
# The last parameter comes first, because the backward pass completes its gradient first: bucket 0 is reduced while the
# gradients of bucket 1 are computed. A shard may begin and end inside a parameter. With sharded gradients (ZeRO-2) rank
# 1 keeps only its shards, one after another, and a bucket allocates whole gradients for a microbatch:
#
#     gradients     | bucket 0, rank 1 | bucket 1, rank 1 |

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.parameter import ParameterInfo, info_of

# Elements to which a rank's share of a bucket is padded: 128 bytes of bf16, a favourable size for NCCL.
_ALIGNMENT = 64


@dataclass(frozen=True)
class BufferLayout:
    """``[start, stop)`` of parameters and buckets, in elements."""

    parameters: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Elements in the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def shard(self, rank: int, shards: int) -> Iterator[tuple[int, int]]:
        """The part of every bucket that belongs to ``rank`` of ``shards``."""
        for start, stop in self.buckets:
            part = (stop - start) // shards
            yield start + rank * part, start + (rank + 1) * part

    def ranges(self, number: int, shards: int) -> "ShardRanges":
        """Elements of a parameter that lie in each of ``shards`` ranks' part of its bucket."""
        first, last = self.parameters[number]
        start, stop = next(bucket for bucket in self.buckets if bucket[0] <= first < bucket[1])
        return ShardRanges(last - first, start - first, (stop - start) // shards, shards)


@dataclass(frozen=True)
class ShardRanges(Sequence[tuple[int, int]]):
    """Elements ``[start, stop)`` of a flattened parameter by rank of the shard group, computed when they are read: a
    rank needs a few of them, and all are parameters times ranks."""

    size: int
    """Elements of the parameter."""
    origin: int
    """Begin of the first rank's part, counted from the parameter's start; not positive."""
    part: int
    """Elements of a rank's part."""
    shards: int

    def __len__(self) -> int:
        return self.shards

    @overload
    def __getitem__(self, rank: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[int, int], ...]: ...

    def __getitem__(self, rank: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        if isinstance(rank, slice):
            return tuple(self[one] for one in range(*rank.indices(self.shards)))
        if not 0 <= rank < self.shards:
            raise IndexError(rank)
        begin = self.origin + rank * self.part
        low = min(max(0, begin), self.size)
        return low, max(min(self.size, begin + self.part), low)


def plan_buffer(
    sizes: Sequence[int], shards: int, bucket_size: int | None = None, alone: Collection[int] = ()
) -> BufferLayout:
    """Lay parameters of ``sizes`` elements side by side, closing a bucket once it holds ``bucket_size``.

    A bucket ends at a parameter's end and is padded so that ``shards`` ranks divide it evenly. ``None`` makes one
    bucket. The parameters numbered ``alone`` get a bucket of their own.
    """
    unit = shards * _ALIGNMENT
    parameters, buckets = [], []
    bucket_start = position = 0
    for number, size in enumerate(sizes):
        parameters.append((position, position + size))
        position += size
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        if is_full or number == len(sizes) - 1 or number in alone or number + 1 in alone:
            position = bucket_start + -(-(position - bucket_start) // unit) * unit
            buckets.append((bucket_start, position))
            bucket_start = position
    return BufferLayout(tuple(parameters), tuple(buckets))


@dataclass(frozen=True)
class ParameterSplit:
    """The division of one parameter among the ranks of a shard group."""

    info: ParameterInfo
    ranges: Sequence[tuple[int, int]]
    """Elements ``[start, stop)`` of the flattened local tensor that each rank updates, in rank order."""


@dataclass(frozen=True)
class ParamShard:
    """The part of one parameter that this rank updates: elements ``[start, stop)`` of the flattened local tensor."""

    info: ParameterInfo
    start: int
    stop: int
    weight: Tensor
    """1-D view of the weights that this rank stores."""
    gradient: Tensor
    """1-D view of the gradients of the same elements."""


@dataclass(frozen=True)
class GradientView:
    """The gradients of one bucket, as one rank of the shard group sees them."""

    size: int
    """Elements in the bucket, padding included."""
    whole: Tensor | None
    """None where only shards of the gradients are kept."""
    shard: Tensor
    """The rank's shard of the gradients; a part of ``whole`` if whole gradients are kept."""
    main_grads: Sequence[tuple[ParameterInfo, MainGrad, int]]
    """The bucket's parameters, their main gradients, and where each begins in the bucket."""


class ParameterBuffer:
    """Moves ``parameters`` (of one dtype) into one buffer and attaches main gradients.

    Gradients have a buffer of the same layout; with ``shard_gradients`` only for this rank's shard, and the buckets
    allocate whole gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradient_dtype: torch.dtype,
        shards: int,
        bucket_size: int | None = None,
        shard_gradients: bool = False,
    ) -> None:
        # The backward pass fills the buckets from the last layer to the first.
        self.parameters = tuple(reversed(parameters))
        # A tied weight has a bucket of its own, so that both stages that hold it divide it in the same way.
        tied = [number for number, parameter in enumerate(self.parameters) if info_of(parameter).tied_end]
        self.layout = plan_buffer([parameter.numel() for parameter in self.parameters], shards, bucket_size, tied)
        self._shards, self._shards_gradients = shards, shard_gradients
        first = self.parameters[0]
        self.weights = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        kept = self.layout.size // shards if shard_gradients else self.layout.size
        self.gradients = torch.zeros(kept, dtype=gradient_dtype, device=first.device)
        self.main_grads: list[MainGrad] = []
        for parameter, (start, stop) in zip(self.parameters, self.layout.parameters):
            view = self.weights[start:stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            main_grad = MainGrad(None if shard_gradients else self.gradients[start:stop].view(parameter.shape))
            attach_main_grad(parameter, main_grad)
            self.main_grads.append(main_grad)

    def _shards_of(self, rank: int) -> Iterator[tuple[int, int, int, int, Tensor]]:
        """Start and stop of every bucket, start and stop of its shard of ``rank``, and the gradients of the shard."""
        for (start, stop), (first, last) in zip(self.layout.buckets, self.layout.shard(rank, self._shards)):
            # If only shards are kept, the shards of earlier buckets lie before this one.
            place = start // self._shards if self._shards_gradients else first
            yield start, stop, first, last, self.gradients[place : place + last - first]

    def buckets(self, rank: int) -> Iterator[tuple[Tensor, GradientView]]:
        """The weights and the gradients of every bucket, in the order in which backward fills them."""
        members = list(zip(self.parameters, self.main_grads, self.layout.parameters))
        for start, stop, _, _, shard in self._shards_of(rank):
            main_grads = [
                (info_of(parameter), main_grad, first - start)
                for parameter, main_grad, (first, _) in members
                if start <= first < stop
            ]
            whole = None if self._shards_gradients else self.gradients[start:stop]
            yield self.weights[start:stop], GradientView(stop - start, whole, shard, main_grads)

    def splits(self) -> list[ParameterSplit]:
        return [
            ParameterSplit(info_of(parameter), self.layout.ranges(number, self._shards))
            for number, parameter in enumerate(self.parameters)
        ]

    def param_shards(self, rank: int) -> Iterator[ParamShard]:
        for _, _, shard_start, shard_stop, gradients in self._shards_of(rank):
            for parameter, (first, last) in zip(self.parameters, self.layout.parameters):
                # What of the parameter lies in the shard, in elements of the buffer.
                start, stop = max(first, shard_start), min(last, shard_stop)
                if start < stop:
                    gradient = gradients[start - shard_start : stop - shard_start]
                    weight = self.weights[start:stop]
                    yield ParamShard(info_of(parameter), start - first, stop - first, weight, gradient)
