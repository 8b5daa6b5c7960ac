"""Optimizer state in host memory (``--optimizer-cpu-offload``): which shards, their copies, and the order of a step."""

# The shards on the host are copied and updated in groups. With --overlap-cpu-optimizer-d2h-h2d and three groups:
#
#     device to host    gradients 0 | gradients 1 | gradients 2 |
#     host                          | update 0    | update 1    | update 2    |
#     host to device                              | weights 0   | weights 1   | weights 2
#
# Gradients, and weights in the dtype of the model, are double-buffered on the host: group 2 overwrites the gradients of
# group 0 after its update, and its weights after their copy to the device.

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


class HostShards:
    """Master weights, gradients and copies of the shards whose optimizer state is in host memory.

    They are the first of ``shards``, in the order of the buffers, that together have at least the fraction of the bytes
    that is asked for; no shard is divided. The choice depends on nothing else, so replicas make the same one. Each has
    a master weight of its own, also where the device's weights have the same dtype. The optimizer has their moments.
    """

    def __init__(
        self, config: OptimizerConfig, shards: Sequence[ParamShard], dtype: torch.dtype, topology: Topology
    ) -> None:
        # All elements have equally many bytes.
        starts = list(accumulate((shard.weight.numel() for shard in shards), initial=0))
        wanted = config.offloaded_fraction * starts[-1]
        self.count = sum(start < wanted for start in starts[:-1])
        """Shards on the host."""
        self._shards, end = shards[: self.count], starts[self.count]
        numbers = groupby(range(self.count), lambda number: _MOST_GROUPS * starts[number] // end)
        self.groups = [list(group) for _, group in numbers]
        """The numbers of the shards of each group."""
        self.updates: Sequence[Sequence[Callable[[int], None]]] = ()
        """By group: the updates of its master weights, functions of their number."""
        self._on_host, device = topology.on_host, topology.device
        overlaps = config.overlap_cpu_optimizer_d2h_h2d and self.count > 0
        self._copies = HostCopies.of(device) if overlaps else HostCopies(device, PlainCopies(), PlainCopies())
        self._arriving: CopyEvent | None = None
        with self._on_host():
            self.masters = [torch.empty(shard.weight.shape, dtype=dtype).copy_(shard.weight) for shard in self._shards]
            self.num_bytes = sum(master.nbytes for master in self.masters)
            """Bytes of all tensors here."""
            self.gradients = self._double_buffered([shard.gradient for shard in self._shards])
            self._weights = self._double_buffered([shard.weight for shard in self._shards])

    def _double_buffered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors like ``tensors``: groups with an even number share one buffer, the others a second one."""
        sizes = [[-(-tensors[shard].nbytes // _ALIGNMENT) * _ALIGNMENT for shard in group] for group in self.groups]
        # Copies are asynchronous from and to pinned memory alone.
        pins = self._copies.device.type == "cuda"
        largest = [max(map(sum, sizes[place::2]), default=0) for place in range(2)]
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pins) for size in largest]
        self.num_bytes += sum(largest)
        parts = [part for place, size in enumerate(sizes) for part in buffers[place % 2][: sum(size)].split(size)]
        return [part[: tensor.nbytes].view(tensor.dtype) for part, tensor in zip(parts, tensors)]

    def start(self, number: int = 0) -> None:
        """Start to copy the gradients of a group to the host, after the computation so far."""
        if number < len(self.groups):
            with self._on_host():
                self._arriving = self._copies.out.copy(
                    [(self.gradients[shard], self._shards[shard].gradient) for shard in self.groups[number]]
                )

    def publish(self, step: int | None = None) -> None:
        """Copy the master weights to the device; for number ``step`` of the optimizer's updates, which follows
        :meth:`start`, after the update of each group."""
        leaving: list[CopyEvent | None] = [None, None]
        for number, group in enumerate(self.groups):
            if step is not None:
                self._update(number, step)
            before = leaving[number % 2]
            if before is not None:
                before.synchronize()
            weights = [self._weights[shard] for shard in group]
            with self._on_host():
                torch._foreach_copy_(weights, [self.masters[shard] for shard in group])
            targets = [self._shards[shard].weight for shard in group]
            leaving[number % 2] = self._copies.back.copy(list(zip(targets, weights)))
        for copy in leaving:
            if copy is not None:
                copy.wait()

    def _update(self, number: int, step: int) -> None:
        arriving = self._arriving
        self.start(number + 1)
        if arriving is not None:
            arriving.synchronize()
        with self._on_host():
            for update in self.updates[number]:
                update(step)
