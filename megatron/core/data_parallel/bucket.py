"""Buckets: the parameters whose gradients are reduced, or whose weights are gathered, at once.

A bucket counts its gradients, so that its reduction starts with the last one in any order of backward passes.
"""

# Two buckets in the backward passes of two microbatches, with overlap; g is the last gradient of a bucket:
#
#     whole gradients (ZeRO-1)      g0  g1  g0 [reduce 0 ....] g1 [reduce 1 ....]      once, after the last microbatch
#     sharded gradients (ZeRO-2)    g0 [reduce 0] g1 [reduce 1] g0 [reduce 0] g1 ...   added to the shard

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from megatron.core.communication import Communicator, Work
from megatron.core.data_parallel.buffer import GradientView


class WeightBucket:
    """Weights that the shard group updates in equal parts, in rank order."""

    def __init__(self, weights: Tensor, shards: Communicator) -> None:
        # Collectives do not support FP8 on every backend.
        self._weights, self._shards = weights.view(torch.uint8) if weights.itemsize == 1 else weights, shards
        self._gathering: Work[Tensor] | None = None

    def start_gather(self) -> None:
        self._gathering = self._shards.start_all_gather(self._shards.own_part(self._weights), self._weights)

    def finish_gather(self) -> None:
        """Wait for the all-gather, if one is under way."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


class ParamGathers:
    """The all-gathers of all buckets of weights, in the order of the forward pass.

    With ``overlap`` the all-gather of the next bucket starts when one is waited for, so that at most two are under way:
    with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) an all-gather that waits for another one blocks the
    computation that is launched after it (:func:`megatron.schedules.simulator.run_launches`).
    """

    def __init__(self, buckets: Sequence[WeightBucket], overlap: bool) -> None:
        self._buckets, self._overlap = buckets, overlap
        self._positions = {bucket: position for position, bucket in enumerate(buckets)}
        self._num_started = len(buckets)

    def start(self) -> None:
        """Start the all-gather of the first bucket; without ``overlap`` complete the all-gathers of all."""
        self._num_started = 0
        self._start_until(1 if self._overlap else len(self._buckets))
        if not self._overlap:
            self.finish()

    def finish(self, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Wait for ``buckets``; without them, for all."""
        for bucket in self._buckets if buckets is None else buckets:
            # The next one starts first: on a GPU it then runs while the caller computes with this one.
            self._start_until(self._positions[bucket] + 2)
            bucket.finish_gather()

    def _start_until(self, stop: int) -> None:
        """Start the buckets before position ``stop`` that have not started."""
        for bucket in self._buckets[self._num_started : stop]:
            bucket.start_gather()
        self._num_started = max(self._num_started, min(stop, len(self._buckets)))


GradientConsumer = Callable[[GradientView, Tensor], None]
"""Gets a bucket and its whole gradients of this rank."""


class GradientBucket(ABC):
    """The gradients of some parameters, which the ranks ``shards`` divide and ``replicas`` have in common; subclasses
    differ in what they keep and when they are reduced."""

    def __init__(self, view: GradientView, shards: Communicator, replicas: Communicator) -> None:
        self.view = view
        self._consume: GradientConsumer | None = None
        self._shards, self._replicas = shards, replicas
        self._uses = sum(info.uses for info, _, _ in view.main_grads)
        self._missing = 0
        self._pending: Work[Tensor] | None = None

    @abstractmethod
    def expect(self, num_microbatches: int) -> None:
        """Begin a step of that many microbatches."""

    @abstractmethod
    def start(self) -> None:
        """Start the reduction if it has not started; no more gradients come in this step."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the shard holds the sum over all data-parallel ranks."""

    def _count(self) -> None:
        """Count a gradient; the last one starts the reduction."""
        assert self._missing > 0, "a gradient arrived after its bucket was reduced"
        self._missing -= 1
        if self._missing == 0:
            self.start()

    def divert(self, consume: GradientConsumer) -> None:
        """Begin one microbatch, outside of a step, whose gradients ``consume`` gets instead of the reduction."""
        self.expect(1)
        self._consume = consume

    @abstractmethod
    def finish_diverted(self) -> None:
        """End the microbatch of :meth:`divert`."""

    def _complete_main_grads(self) -> None:
        for _, main_grad, _ in self.view.main_grads:
            main_grad.complete()

    def _add_replicas(self) -> None:
        if self._replicas.size > 1:
            self._replicas.all_reduce(self.view.shard)


class WholeGradientBucket(GradientBucket):
    """Accumulates all microbatches and is reduced once; with ``overlap`` as soon as the last gradient is in.

    Where the shard group is one rank (``no_shard``), the reduction is one over the replicas.
    """

    def __init__(self, view: GradientView, shards: Communicator, replicas: Communicator, overlap: bool) -> None:
        super().__init__(view, shards, replicas)
        if overlap:
            for _, main_grad, _ in view.main_grads:
                main_grad.on_accumulated = self._count

    def expect(self, num_microbatches: int) -> None:
        self._missing = self._uses * num_microbatches

    def start(self) -> None:
        if self._pending is not None or self._consume is not None:
            return
        self._complete_main_grads()
        gradients = self.view.whole
        assert gradients is not None
        # In place: the shard is a part of the whole gradients.
        if self._shards.size == 1:
            self._pending = self._replicas.start_all_reduce(gradients)
        else:
            self._pending = self._shards.start_reduce_scatter(gradients, self.view.shard)

    def finish_diverted(self) -> None:
        assert self._consume is not None and self.view.whole is not None
        self._complete_main_grads()
        self._consume(self.view, self.view.whole)
        self._consume = None

    def finish(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._shards.size > 1:
            self._add_replicas()


class InFlight:
    """Reductions under way, each of which holds whole gradients: with more than ``limit`` the oldest is completed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: deque[ShardedGradientBucket] = deque()

    def add(self, bucket: "ShardedGradientBucket") -> None:
        self._buckets.append(bucket)
        while len(self._buckets) > self._limit:
            self._buckets[0].collect()

    def remove(self, bucket: "ShardedGradientBucket") -> None:
        self._buckets.remove(bucket)


class ShardedGradientBucket(GradientBucket):
    """Keeps only the rank's shard of the gradients (ZeRO-2).

    Whole gradients are allocated by the first gradient of a microbatch and freed by the reduce-scatter after its last;
    the shard accumulates. With ``defer`` whole gradients accumulate until the last microbatch. ``in_flight`` bounds the
    reduce-scatters that overlap with the backward pass. Every microbatch must use every parameter. ``part_sizes`` are
    given where shards are rows of every parameter, as FSDP2 divides them: the elements of a rank's part of each
    parameter, padding included.
    """

    def __init__(
        self,
        view: GradientView,
        shards: Communicator,
        replicas: Communicator,
        in_flight: InFlight,
        defer: bool = False,
        part_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(view, shards, replicas)
        self._in_flight, self._defer = in_flight, defer
        self._sizes = [size * shards.size for size in part_sizes]
        self._is_filled = False
        self._whole: Tensor | None = None
        for _, main_grad, _ in view.main_grads:
            main_grad.allocate = self._allocate
            main_grad.on_accumulated = self._count

    def expect(self, num_microbatches: int) -> None:
        self._is_filled = False
        self._deliveries = self._uses * (num_microbatches if self._defer else 1)
        self._missing = self._deliveries

    def _allocate(self) -> None:
        # Before that the last microbatch's whole gradients are freed, so that a bucket never has two of them.
        self.collect()
        shard = self.view.shard
        self._whole = whole = torch.empty(self.view.size, dtype=shard.dtype, device=shard.device)
        for info, main_grad, start in self.view.main_grads:
            main_grad.storage = whole[start : start + prod(info.local_shape)].view(info.local_shape)

    def start(self) -> None:
        if self._whole is None:
            return
        assert self._missing == 0, "a parameter of this bucket was not used, or lost its main_grad"
        self._complete_main_grads()
        self._missing = self._deliveries
        for _, main_grad, _ in self.view.main_grads:
            main_grad.storage = None
        if self._consume is not None:
            self._consume(self.view, self._whole)
            self._whole = None
            return
        gradients = self._arranged(self._whole)  # [shards, a rank's shard], flat
        # Where that is a copy, the whole gradients are freed before the sum is allocated.
        self._whole = None
        # The first microbatch's sum needs no copy.
        output = None if self._is_filled else self.view.shard
        self._pending = self._shards.start_reduce_scatter(gradients, output)
        self._in_flight.add(self)

    def finish_diverted(self) -> None:
        assert self._whole is None, "a parameter of this bucket was not used"
        self._consume = None

    def _arranged(self, whole: Tensor) -> Tensor:
        """The gradients in an order in which each rank's shard is contiguous."""
        if len(self._sizes) < 2:
            return whole
        # | p0: rank 0, rank 1 | p1: rank 0, rank 1 |  ->  | rank 0: p0, p1 | rank 1: p0, p1 |
        parameters = whole.split(self._sizes)
        return torch.cat([parameter.view(self._shards.size, -1) for parameter in parameters], dim=1).flatten()

    def collect(self) -> None:
        """Wait for the reduce-scatter under way, if any, and add it to the shard."""
        if self._pending is None:
            return
        summed = self._pending.wait()
        self._pending = None
        self._in_flight.remove(self)
        if self._is_filled:
            self.view.shard.add_(summed)
        self._is_filled = True

    def finish(self) -> None:
        self.collect()
        assert self._is_filled, "this bucket got no gradient"
        self._add_replicas()
