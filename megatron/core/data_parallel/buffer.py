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
from math import prod

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
    """The division of one parameter among the ranks of a shard group: every rank updates the next ``part`` elements,
    padding included."""

    info: ParameterInfo
    origin: int
    """Begin of the first rank's part, counted from the parameter's first element; not positive."""
    part: int

    def range_of(self, rank: int) -> tuple[int, int]:
        """Elements ``[start, stop)`` of the flattened local tensor that ``rank`` updates."""
        size, begin = prod(self.info.local_shape), self.origin + rank * self.part
        start = min(max(0, begin), size)
        return start, max(min(size, begin + self.part), start)


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
        infos = [info_of(parameter) for parameter in self.parameters]
        # A weight with copies has a bucket of its own, so that all stages that hold it divide it in the same way.
        tied = [number for number, info in enumerate(infos) if info.stages]
        self.layout = plan_buffer([parameter.numel() for parameter in self.parameters], shards, bucket_size, tied)
        self.splits = [
            ParameterSplit(info, start - first, (stop - start) // shards)
            for start, stop in self.layout.buckets
            for info, (first, _) in zip(infos, self.layout.parameters)
            if start <= first < stop
        ]
        self._shards, self._shards_gradients = shards, shard_gradients
        first = self.parameters[0]
        self.weights = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        for parameter, (start, stop) in zip(self.parameters, self.layout.parameters):
            view = self.weights[start:stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        # Only now, when the memory that the parameters had is free.
        kept = self.layout.size // shards if shard_gradients else self.layout.size
        self.gradients = torch.zeros(kept, dtype=gradient_dtype, device=first.device)
        self.main_grads: list[MainGrad] = []
        for parameter, (start, stop) in zip(self.parameters, self.layout.parameters):
            main_grad = MainGrad(None if shard_gradients else self.gradients[start:stop].view(parameter.shape))
            attach_main_grad(parameter, main_grad)
            self.main_grads.append(main_grad)

    def buckets(self, rank: int) -> Iterator[tuple[Tensor, GradientView, list[ParamShard]]]:
        """The weights and the gradients of every bucket, and what ``rank`` updates of its parameters, in the order in
        which backward fills the buckets."""
        members = list(zip(self.splits, self.main_grads, self.layout.parameters))
        for (start, stop), (shard_start, shard_stop) in zip(self.layout.buckets, self.layout.shard(rank, self._shards)):
            # If only shards are kept, the shards of earlier buckets lie before this one.
            shift = start // self._shards - shard_start if self._shards_gradients else 0
            main_grads: list[tuple[ParameterInfo, MainGrad, int]] = []
            param_shards: list[ParamShard] = []
            for split, main_grad, (place, _) in members:
                if start <= place < stop:
                    main_grads.append((split.info, main_grad, place - start))
                    begin, end = split.range_of(rank)
                    if begin < end:
                        weight = self.weights[place + begin : place + end]
                        gradient = self.gradients[shift + place + begin : shift + place + end]
                        param_shards.append(ParamShard(split.info, begin, end, weight, gradient))
            whole = None if self._shards_gradients else self.gradients[start:stop]
            shard = self.gradients[shift + shard_start : shift + shard_stop]
            yield self.weights[start:stop], GradientView(stop - start, whole, shard, main_grads), param_shards
