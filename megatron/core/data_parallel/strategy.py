"""The interface of data parallelism, and the strategies that live in contiguous buffers.

The training loop does not know which strategy runs: it calls :meth:`DataParallel.start_gradients`, accumulates
gradients over the microbatches, calls :meth:`DataParallel.finish_gradients`, lets the optimizer update the strategy's
pieces, and calls :meth:`DataParallel.publish_parameters`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator, Pending
from megatron.core.data_parallel.buffer import ParameterBuffer, Piece
from megatron.core.gradient import GradientSlot
from megatron.core.parameter import ParameterInfo
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
    def start_gradients(self, num_microbatches: int) -> None:
        """Begin a step: every parameter will be delivered the gradients of ``num_microbatches``."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Sum gradients over all ranks that contributed; afterwards every piece's gradient is complete."""

    @abstractmethod
    def publish_parameters(self) -> None:
        """Give every rank the weights that the pieces' owners updated."""


class _Bucket:
    """Part of the gradient buffer that is reduced at once, as soon as all its gradients are there."""

    def __init__(
        self,
        gradients: Tensor,
        slots: Sequence[tuple[ParameterInfo, GradientSlot]],
        shards: Communicator,
        replicas: Communicator,
        overlap: bool,
    ) -> None:
        self._gradients = gradients
        self._shard = gradients.chunk(shards.size)[shards.rank]
        self._shards, self._replicas = shards, replicas
        self._slots = [slot for _, slot in slots]
        self._uses = sum(info.uses for info, _ in slots)
        self._missing = 0
        self._pending: Pending | None = None
        if overlap:
            for slot in self._slots:
                slot.on_delivery = self._count

    def expect(self, num_microbatches: int) -> None:
        """Begin a step of that many microbatches."""
        self._missing = self._uses * num_microbatches

    def _count(self) -> None:
        assert self._missing > 0, "a gradient arrived after its bucket was reduced"
        self._missing -= 1
        if self._missing == 0:
            self.start()

    def start(self) -> None:
        """Start the reduction over the shard group, or where that is one rank over the replicas."""
        if self._pending is None:
            for slot in self._slots:
                slot.complete()
            if self._shards.size > 1:
                self._pending = self._shards.start_reduce_scatter(self._gradients, output=self._shard)
            else:
                self._pending = self._replicas.start_all_reduce(self._gradients)

    def finish(self) -> None:
        """Wait for the sum over all data-parallel ranks."""
        self.start()
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._shards.size > 1:
            self._replicas.all_reduce(self._shard)


class BufferedDataParallel(DataParallel):
    """``no_shard`` and ``optim`` (ZeRO-1): shard over ``dp_shard``, replicate over ``dp_replicate``.

    Without sharding the shard group has one rank, and the reduction is an all-reduce over all data-parallel ranks.
    With ``overlap_grad_reduce`` a bucket is reduced as soon as its last gradient of the step is there.
    """

    piece_axes = ("tp", "pp", "dp_shard")

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradient_dtype: torch.dtype,
        topology: Topology,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = False,
    ) -> None:
        self._topology = topology
        self._shards = shards = topology.communicator("dp_shard")
        self._buffer = ParameterBuffer(parameters, gradient_dtype, shards.size, bucket_size)
        self.needs_master_weights = self._buffer.weights.dtype != gradient_dtype
        self.pieces = list(self._buffer.pieces(shards.rank, shards.size))
        replicas = topology.communicator("dp_replicate")
        self._buckets = [
            _Bucket(self._buffer.gradients[start:stop], slots, shards, replicas, overlap_grad_reduce)
            for (start, stop), slots in self._buffer.bucket_slots()
        ]
        self._partial_gradients = [piece.gradient for piece in self.pieces if piece.info.gradient_is_partial]
        self._tied_gradients = [piece for piece in self.pieces if piece.info.tied_end is not None]

    def start_gradients(self, num_microbatches: int) -> None:
        """Tell the buckets how many gradients make them complete."""
        for bucket in self._buckets:
            bucket.expect(num_microbatches)

    def finish_gradients(self) -> None:
        """Reduce what is not reduced yet over the data-parallel ranks; then sum what other ranks' parts of the same
        parameters contribute, which by then is the rank's own shard alone."""
        for bucket in self._buckets:
            bucket.start()
        for bucket in self._buckets:
            bucket.finish()
        _all_reduce_together(self._partial_gradients, self._topology.tensor_parallel)
        for piece in self._tied_gradients:
            _add_other_end(piece, self._topology)

    def publish_parameters(self) -> None:
        """All-gather the shards of every bucket."""
        if self._shards.size == 1:
            return
        for start, stop in self._buffer.layout.buckets:
            bucket = self._buffer.weights[start:stop]
            self._shards.all_gather(bucket.chunk(self._shards.size)[self._shards.rank], output=bucket)


def _all_reduce_together(tensors: Sequence[Tensor], ranks: Communicator) -> None:
    """Sum small tensors over ``ranks`` in one collective."""
    if ranks.size == 1 or not tensors:
        return
    together = ranks.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def _add_other_end(piece: Piece, topology: Topology) -> None:
    """Add the gradient that the stage at the other end of the model has of the same piece of a tied weight.

    Over the pipeline's own channels, whose process groups exist on all its stages. One end sends first and the other
    receives first: the first message between two ranks makes their connection, for which NCCL holds up both.
    """
    first, last = 0, topology.pipeline_parallel.size - 1
    down, up = topology.pipeline_channel("F", first, last), topology.pipeline_channel("B", last, first)
    other = torch.empty_like(piece.gradient)
    if piece.info.tied_end == "embedding":
        down.start_send(piece.gradient, last).wait()
        up.start_receive(other, last).wait()
    else:
        down.start_receive(other, first).wait()
        up.start_send(piece.gradient, first).wait()
    piece.gradient.add_(other)


def data_parallel_replicas(config: ParallelConfig, data_parallel_size: int) -> int:
    """Number of shard groups: one for each rank without sharding, else the optimizer instances asked for."""
    if config.sharding_strategy == "no_shard":
        return data_parallel_size
    return config.num_distributed_optimizer_instances


def wrap_data_parallel(
    model: nn.Module,
    gradient_dtype: torch.dtype,
    topology: Topology,
    bucket_size: int | None = None,
    overlap_grad_reduce: bool = False,
) -> DataParallel:
    """Put ``model`` under the strategy that the grid of ``topology`` stands for."""
    return BufferedDataParallel(list(model.parameters()), gradient_dtype, topology, bucket_size, overlap_grad_reduce)
