"""The one place that decides how data-parallel ranks share a model."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.data_parallel.strategy import DataParallel, ModelSharing
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology


class LayeredModel(Protocol):
    """What a strategy must know of a model."""

    @property
    def chunk_units(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Modules whose forward pass the run calls, and for each the modules in it that together hold its parameters,
        in the order of the forward pass; each of these is run as a whole. One with an attribute
        ``backward_reads_weights`` that is False needs no weights in its backward pass."""

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, if not on this rank."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, in the order of the forward pass."""


def shards_weights(config: ParallelConfig, topology: Topology, has_experts: bool) -> bool:
    """Whether a rank keeps a part of the weights alone, so that the model is best built without memory for them."""
    # Among one rank there is nothing to shard, and FSDP2 would only copy.
    return (
        config.sharding_strategy == "optim_grads_params" and ModelSharing.of(config, topology, has_experts).shards_any
    )


def wrap_data_parallel(
    model: LayeredModel,
    formats: NumberFormats,
    topology: Topology,
    config: ParallelConfig,
    fp8: Fp8Layers | None = None,
) -> DataParallel:
    """Put ``model``, with the FP8 layers ``fp8``, under the strategy of ``config``, for which ``topology`` has the
    groups.

    A model whose weights lie on the meta device gets memory for this rank's shards, and must be initialised.
    """
    if shards_weights(config, topology, model.has_experts):
        # Only now: it takes half a second.
        from megatron.core.data_parallel.fully_sharded import FullyShardedDataParallel

        return FullyShardedDataParallel(model.chunk_units, formats, topology, config, model.has_experts)
    units = [unit for _, units in model.chunk_units for unit in units]
    gathered = fp8 if isinstance(fp8, Fp8Scaling) and fp8.gathers_weights else None
    return BufferedDataParallel(list(model.parameters()), formats, topology, config, units, gathered, model.has_experts)
