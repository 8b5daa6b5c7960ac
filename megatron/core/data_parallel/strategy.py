"""The interface of data parallelism, and the strategies that live in contiguous buffers.

The training loop does not know which strategy runs: it accumulates gradients over the microbatches, calls
:meth:`DataParallel.finish_gradients`, lets the optimizer update the strategy's pieces, and calls
:meth:`DataParallel.publish_parameters`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.buffer import ParameterBuffer, Piece
from megatron.core.parameter import info_of
from megatron.core.topology import Topology


class DataParallel(ABC):
    """What a strategy does for the loop and the optimizer."""

    pieces: Sequence[Piece]
    """What this rank updates."""
    piece_axes: tuple[str, ...]
    """Axes along which ranks hold different pieces of the whole model; a norm over all pieces is summed there."""

    needs_master_weights: bool
    """Whether gradients are wider than the model's weights, so that the optimizer keeps weights of its own."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Sum gradients over all ranks that contributed; afterwards every piece's gradient is complete."""

    @abstractmethod
    def publish_parameters(self) -> None:
        """Give every rank the weights that the pieces' owners updated."""


class BufferedDataParallel(DataParallel):
    """``no_shard`` and ``optim`` (ZeRO-1): shard over ``dp_shard``, replicate over ``dp_replicate``.

    Without sharding the shard group has one rank, and the reduction is an all-reduce over all data-parallel ranks.
    """

    piece_axes = ("tp", "pp", "dp_shard")

    def __init__(self, parameters: Sequence[nn.Parameter], gradient_dtype: torch.dtype, topology: Topology) -> None:
        self._shards = topology.communicator("dp_shard")
        self._replicas = topology.communicator("dp_replicate")
        self._tensor_parallel = topology.tensor_parallel
        self._buffer = ParameterBuffer(parameters, gradient_dtype, self._shards.size)
        self.needs_master_weights = self._buffer.weights.dtype != gradient_dtype
        self.pieces = list(self._buffer.pieces(self._shards.rank, self._shards.size))
        self._partial_gradients = [
            slot.buffer
            for parameter, slot in zip(self._buffer.parameters, self._buffer.slots)
            if info_of(parameter).gradient_is_partial
        ]

    def finish_gradients(self) -> None:
        """Sum over tensor-parallel ranks where needed, reduce-scatter over shards, all-reduce over replicas."""
        for slot in self._buffer.slots:
            slot.complete()
        _all_reduce_together(self._partial_gradients, self._tensor_parallel)
        for start, stop in self._buffer.layout.buckets:
            bucket = self._buffer.gradients[start:stop]
            shard = bucket.chunk(self._shards.size)[self._shards.rank]
            self._shards.reduce_scatter(bucket, output=shard)
            self._replicas.all_reduce(shard)

    def publish_parameters(self) -> None:
        """All-gather the shards of every bucket."""
        if self._shards.size == 1:
            return
        for start, stop in self._buffer.layout.buckets:
            bucket = self._buffer.weights[start:stop]
            self._shards.all_gather(bucket.chunk(self._shards.size)[self._shards.rank], output=bucket)


def _all_reduce_together(tensors: Sequence[torch.Tensor], ranks: Communicator) -> None:
    """Sum small tensors over ``ranks`` in one collective."""
    if ranks.size == 1 or not tensors:
        return
    together = ranks.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def data_parallel_replicas(config: ParallelConfig, data_parallel_size: int) -> int:
    """Number of shard groups: one for each rank without sharding, else the optimizer instances asked for."""
    if config.sharding_strategy == "no_shard":
        return data_parallel_size
    return config.num_distributed_optimizer_instances


def wrap_data_parallel(model: nn.Module, gradient_dtype: torch.dtype, topology: Topology) -> DataParallel:
    """Put ``model`` under the strategy that the grid of ``topology`` stands for."""
    return BufferedDataParallel(list(model.parameters()), gradient_dtype, topology)
