"""Optimizer state in host memory (``--optimizer-cpu-offload``): which shards, their copies, and the order of a step."""

# The shards on the host are copied and updated in groups. With --overlap-cpu-optimizer-d2h-h2d and three groups:
#
#     device to host    gradients 0 | gradients 1 | gradients 2 |
#     host                          | update 0    | update 1    | update 2    |
#     host to device                              | weights 0   | weights 1   | weights 2
#
# Gradients, and weights in the dtype of the model, are in two memories in turn: those of group 2 may be overwritten
# when the update, or the copy back, of group 0 is complete.

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.core.activations import CopyEvent, HostCopies, PlainCopies
from megatron.core.data_parallel.buffer import ParamShard
from megatron.core.topology import Topology

_MOST_GROUPS = 16
_ALIGNMENT = 64


def num_offloaded(sizes: Sequence[int], fraction: float) -> int:
    """The number of shards whose state is on the host, of shards with these numbers of elements.

    They are the first ones, in the order of the buffers, that together have at least ``fraction`` of the bytes: all
    elements have equally many. No shard is divided. The choice depends on nothing else, so replicas make the same one.
    """
    wanted = fraction * sum(sizes)
    return sum(start < wanted for start in accumulate(sizes[:-1], initial=0)) if sizes else 0


class HostShards:
    """Master weights, gradients and copies of the first of ``shards``; the optimizer keeps moments and averages beside
    them. Every shard has a master weight of its own here, also where the device's weights have the same dtype."""

    def __init__(
        self, config: OptimizerConfig, shards: Sequence[ParamShard], dtype: torch.dtype, topology: Topology
    ) -> None:
        sizes = [shard.weight.numel() for shard in shards]
        self.count = num_offloaded(sizes, config.offloaded_fraction)
        """Shards on the host."""
        self._shards, sizes = shards[: self.count], sizes[: self.count]
        total = sum(sizes)
        places = [_MOST_GROUPS * start // total for start in accumulate(sizes[:-1], initial=0)] if sizes else []
        self.groups = [[number for number, _ in group] for _, group in groupby(enumerate(places), lambda pair: pair[1])]
        """The numbers of the shards of each group."""
        self.updates: Sequence[Sequence[Callable[[int], None]]] = ()
        """By group: what updates its master weights, functions of the number of the step."""
        self._on_host = topology.on_host
        device = topology.device
        overlaps = config.overlap_cpu_optimizer_d2h_h2d and self.count > 0
        self._copies = HostCopies.of(device) if overlaps else HostCopies(device, PlainCopies(), PlainCopies())
        self._bytes_in_turn = 0
        self._arriving: CopyEvent | None = None
        self._leaving: list[CopyEvent | None] = [None, None]
        with self._on_host():
            self.masters = [torch.empty(shard.weight.shape, dtype=dtype).copy_(shard.weight) for shard in self._shards]
            # Copies are asynchronous from and to pinned memory alone.
            pins = device.type == "cuda"
            self.gradients = self._in_turn([shard.gradient for shard in self._shards], pins)
            self._weights = self._in_turn([shard.weight for shard in self._shards], pins)

    @property
    def num_bytes(self) -> int:
        """Bytes of master weights, gradients and weights."""
        return sum(master.nbytes for master in self.masters) + self._bytes_in_turn

    def _in_turn(self, tensors: Sequence[Tensor], pins: bool) -> list[Tensor]:
        """Host tensors like ``tensors``, for which two memories serve the groups in turn."""
        starts, ends = [0] * self.count, [0, 0]
        for number, group in enumerate(self.groups):
            end = 0
            for shard in group:
                starts[shard], end = end, end + -(-tensors[shard].nbytes // _ALIGNMENT) * _ALIGNMENT
            ends[number % 2] = max(ends[number % 2], end)
        self._bytes_in_turn += sum(ends)
        memories = [torch.empty(end, dtype=torch.uint8, pin_memory=pins) for end in ends]
        return [
            memories[number % 2][starts[shard] : starts[shard] + tensors[shard].nbytes].view(tensors[shard].dtype)
            for number, group in enumerate(self.groups)
            for shard in group
        ]

    def start(self, number: int = 0) -> None:
        """Start to copy the gradients of a group to the host, after the computation so far."""
        if number < len(self.groups):
            pairs = [(self.gradients[shard], self._shards[shard].gradient) for shard in self.groups[number]]
            with self._on_host():
                self._arriving = self._copies.out.copy(pairs)

    def update(self, step: int, follow: Callable[[Sequence[int]], None]) -> None:
        """Update all groups, after :meth:`start`, and copy their weights back; ``follow`` is called with the shards of
        each group that is updated."""
        for number, group in enumerate(self.groups):
            arriving = self._arriving
            self.start(number + 1)
            if arriving is not None:
                arriving.synchronize()
            with self._on_host():
                for update in self.updates[number]:
                    update(step)
                follow(group)
            self._send(number)
        self._finish()

    def publish(self) -> None:
        """Copy the master weights to the device."""
        for number in range(len(self.groups)):
            self._send(number)
        self._finish()

    def _send(self, number: int) -> None:
        """Start to copy the weights of a group to the device."""
        leaving = self._leaving[number % 2]
        if leaving is not None:
            leaving.synchronize()
        group = self.groups[number]
        with self._on_host():
            torch._foreach_copy_([self._weights[shard] for shard in group], [self.masters[shard] for shard in group])
        pairs = [(self._shards[shard].weight, self._weights[shard]) for shard in group]
        self._leaving[number % 2] = self._copies.back.copy(pairs)

    def _finish(self) -> None:
        for leaving in self._leaving:
            if leaving is not None:
                leaving.wait()
        self._leaving = [None, None]
