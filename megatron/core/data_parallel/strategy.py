"""The interface of data parallelism, and the strategies that live in contiguous buffers.

The training loop does not know which strategy runs: it calls :meth:`DataParallel.start_gradients`, accumulates
gradients over the microbatches, calls :meth:`DataParallel.finish_gradients`, lets the optimizer update the strategy's
pieces, and calls :meth:`DataParallel.publish_parameters`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.bucket import Bucket, InFlight, ShardedGradientBucket, WholeGradientBucket
from megatron.core.data_parallel.buffer import ParameterBuffer, Piece
from megatron.core.parameter import info_of
from megatron.core.topology import Topology


class LayeredModel(Protocol):
    """What a strategy must know of a model."""

    @property
    def units(self) -> Sequence[nn.Module]:
        """Modules that together hold all parameters, in the order of the forward pass; each is run as a whole."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, in the order of the forward pass."""


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
        """Give every rank the weights that the pieces' owners updated, or start to."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of weights and gradients that stay on this rank, measured from the tensors."""

    @abstractmethod
    def wait_for_parameters(self) -> None:
        """Wait until every weight is there; a forward pass waits by itself for those that it comes to."""


class BufferedDataParallel(DataParallel):
    """``no_shard``, ``optim`` (ZeRO-1) and ``optim_grads`` (ZeRO-2): shard over ``dp_shard``, replicate over
    ``dp_replicate``.

    Without sharding the shard group has one rank, and the reduction is an all-reduce over all data-parallel ranks.
    """

    piece_axes = ("tp", "pp", "dp_shard")

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradient_dtype: torch.dtype,
        topology: Topology,
        config: ParallelConfig,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self._topology = topology
        shards, replicas = topology.communicator("dp_shard"), topology.communicator("dp_replicate")
        self._shards = shards
        shard_gradients = config.sharding_strategy == "optim_grads"
        bucket_size = config.bucket_size(topology.grid.dp)
        buffer = ParameterBuffer(parameters, gradient_dtype, shards.size, bucket_size, shard_gradients)
        self._kept = {"weights": buffer.weights, "gradients": buffer.gradients}
        self.needs_master_weights = buffer.weights.dtype != gradient_dtype
        self.pieces = list(buffer.pieces(shards.rank))
        self._buckets: list[Bucket] = []
        in_flight = InFlight(2 if config.overlap_grad_reduce else 0)
        for view in buffer.buckets(shards.rank):
            if shard_gradients:
                self._buckets.append(ShardedGradientBucket(view, shards, replicas, in_flight))
            else:
                self._buckets.append(WholeGradientBucket(view, shards, replicas, config.overlap_grad_reduce))
        self._partial_gradients = [piece.gradient for piece in self.pieces if piece.info.gradient_is_partial]
        self._tied_pieces = [piece for piece in self.pieces if piece.info.tied_end is not None]
        self._gathers_behind = config.overlap_param_gather
        if config.overlap_param_gather:
            _wait_before_use(modules, self._buckets)

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
        for piece in self._tied_pieces:
            _add_other_end(piece, self._topology)

    def publish_parameters(self) -> None:
        """All-gather the shards of every bucket, in the order in which the forward pass needs them."""
        if self._shards.size == 1:
            return
        for bucket in reversed(self._buckets):
            bucket.start_gather()
        if not self._gathers_behind:
            self.wait_for_parameters()

    def memory(self) -> dict[str, int]:
        """Bytes of the buffers."""
        return {kind: buffer.untyped_storage().nbytes() for kind, buffer in self._kept.items()}

    def wait_for_parameters(self) -> None:
        """Wait for every bucket."""
        for bucket in reversed(self._buckets):
            bucket.finish_gather()


def _wait_before_use(modules: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
    """Have each of ``modules`` wait, before its forward pass, for the buckets that hold its weights."""
    by_name = {info.name: bucket for bucket in buckets for info, _, _ in bucket.view.slots}
    for module in modules:
        mine = {by_name[info_of(parameter).name]: None for parameter in module.parameters()}

        def wait(*_: object, mine: Sequence[Bucket] = tuple(mine)) -> None:
            for bucket in mine:
                bucket.finish_gather()

        module.register_forward_pre_hook(wait)


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
    model: LayeredModel, gradient_dtype: torch.dtype, topology: Topology, config: ParallelConfig
) -> DataParallel:
    """Put ``model`` under the strategy of ``config``, for which ``topology`` has the groups."""
    return BufferedDataParallel(list(model.parameters()), gradient_dtype, topology, config, model.units)
