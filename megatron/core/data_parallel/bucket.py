"""A bucket: the parameters whose gradients are reduced, and whose weights are gathered, at once.

A bucket counts the gradients that are delivered to it, so it knows when the last one is there, in whatever order a
schedule runs the backward passes.
"""

from abc import ABC, abstractmethod
from collections import deque
from math import prod

import torch
from torch import Tensor

from megatron.core.communication import Communicator, Pending
from megatron.core.data_parallel.buffer import BucketView


class Bucket(ABC):
    """What all buckets do; subclasses differ in what is kept of the gradients and when they are reduced.

    ``shards`` are the ranks that divide the bucket, ``replicas`` those with the same shard.
    """

    def __init__(self, view: BucketView, shards: Communicator, replicas: Communicator) -> None:
        self.view = view
        self._shards, self._replicas = shards, replicas
        self._uses = sum(info.uses for info, _, _ in view.slots)
        self._gathering: Pending | None = None

    @abstractmethod
    def expect(self, num_microbatches: int) -> None:
        """Begin a step of that many microbatches."""

    @abstractmethod
    def start(self) -> None:
        """Start to reduce what is not yet under way; no more gradients will come in this step."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the shard holds the sum over all data-parallel ranks."""

    def start_gather(self) -> None:
        """Start to give every rank of the shard group the others' weights."""
        weights = self.view.weights
        self._gathering = self._shards.start_all_gather(weights.chunk(self._shards.size)[self._shards.rank], weights)

    def finish_gather(self) -> None:
        """Wait for the weights, if they are under way."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _complete_slots(self) -> None:
        for _, slot, _ in self.view.slots:
            slot.complete()


class WholeGradientBucket(Bucket):
    """Accumulates all microbatches and is reduced once, in place; with ``overlap`` as soon as the last gradient is in.

    Where the shard group is one rank (``no_shard``), the reduction is one over the replicas.
    """

    def __init__(self, view: BucketView, shards: Communicator, replicas: Communicator, overlap: bool) -> None:
        super().__init__(view, shards, replicas)
        self._missing = 0
        self._pending: Pending | None = None
        if overlap:
            for _, slot, _ in view.slots:
                slot.on_delivery = self._count

    def expect(self, num_microbatches: int) -> None:
        """Know how many gradients are the last."""
        self._missing = self._uses * num_microbatches

    def _count(self) -> None:
        assert self._missing > 0, "a gradient arrived after its bucket was reduced"
        self._missing -= 1
        if self._missing == 0:
            self.start()

    def start(self) -> None:
        """Start the reduction."""
        if self._pending is None:
            self._complete_slots()
            assert self.view.gradients is not None
            if self._shards.size > 1:
                self._pending = self._shards.start_reduce_scatter(self.view.gradients, self.view.gradient_shard)
            else:
                self._pending = self._replicas.start_all_reduce(self.view.gradients)

    def finish(self) -> None:
        """Wait for the shard's sum, then add up the replicas'."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._shards.size > 1:
            self._replicas.all_reduce(self.view.gradient_shard)


class InFlight:
    """Reductions under way, of which the oldest is waited for when there are more than a few, to bound the memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: deque[ShardedGradientBucket] = deque()

    def add(self, bucket: "ShardedGradientBucket") -> None:
        """Count in ``bucket``, whose reduction has just started."""
        self._buckets.append(bucket)
        while len(self._buckets) > self._limit:
            self._buckets[0].collect()

    def remove(self, bucket: "ShardedGradientBucket") -> None:
        """Count out ``bucket``, whose reduction is over."""
        self._buckets.remove(bucket)


class ShardedGradientBucket(Bucket):
    """Keeps the rank's shard of the gradients alone (ZeRO-2).

    Whole gradients live from the first delivery of a microbatch until the reduce-scatter that follows its last; the
    shard accumulates. ``in_flight`` bounds how many reduce-scatters go on behind the backward pass.
    """

    def __init__(self, view: BucketView, shards: Communicator, replicas: Communicator, in_flight: InFlight) -> None:
        super().__init__(view, shards, replicas)
        self._in_flight = in_flight
        self._delivered = 0
        self._is_filled = False
        self._whole: Tensor | None = None
        self._pending: Pending | None = None
        for _, slot, _ in view.slots:
            slot.provide_with(self._provide)
            slot.on_delivery = self._count

    def expect(self, num_microbatches: int) -> None:
        """The shard holds nothing of this step yet."""
        self._is_filled = False

    def _provide(self) -> None:
        """Make room for whole gradients."""
        self.collect()
        shard = self.view.gradient_shard
        self._whole = whole = torch.empty(self.view.weights.shape, dtype=shard.dtype, device=shard.device)
        for info, slot, start in self.view.slots:
            slot.lend(whole[start : start + prod(info.local_shape)].view(info.local_shape))

    def _count(self) -> None:
        self._delivered += 1
        if self._delivered == self._uses:
            self.start()

    def start(self) -> None:
        """Start to reduce the whole gradients that are there."""
        if self._whole is None:
            return
        self._complete_slots()
        self._delivered = 0
        for _, slot, _ in self.view.slots:
            slot.reclaim()
        self._pending = self._shards.start_reduce_scatter(self._whole)
        self._whole = None
        self._in_flight.add(self)

    def collect(self) -> None:
        """Wait for the reduce-scatter under way, if any, and add it to the shard."""
        if self._pending is None:
            return
        summed = self._pending.wait()
        self._pending = None
        self._in_flight.remove(self)
        if self._is_filled:
            self.view.gradient_shard.add_(summed)
        else:
            self.view.gradient_shard.copy_(summed)
        self._is_filled = True

    def finish(self) -> None:
        """Wait for the shard's sum, then add up the replicas'."""
        self.collect()
        if not self._is_filled:
            self.view.gradient_shard.zero_()
        self._replicas.all_reduce(self.view.gradient_shard)
