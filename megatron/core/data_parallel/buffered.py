"""The strategies with contiguous buffers, and the one place that decides which strategy a model gets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.core.data_parallel.bucket import (
    GradientBucket,
    InFlight,
    ParamGathers,
    ShardedGradientBucket,
    WeightBucket,
    WholeGradientBucket,
)
from megatron.core.data_parallel.buffer import ParameterBuffer, ParamShard
from megatron.core.data_parallel.strategy import DataParallel, LocalParam, ParallelGroups, expert_modules, whole_params
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.parameter import info_of
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology


class BufferedDataParallel(DataParallel):
    """``no_shard``, ``optim`` (ZeRO-1) and ``optim_grads`` (ZeRO-2), in contiguous buffers.

    Without sharding the shard group has one rank, and the reduction is an all-reduce over all data-parallel ranks.
    Each of ``units`` is run as a whole. A rank keeps its shards of FP8 parameters in the master weights' dtype; ``fp8``
    quantises them before every all-gather.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        formats: NumberFormats,
        topology: Topology,
        config: ParallelConfig,
        units: Sequence[nn.Module] = (),
        fp8: Fp8Scaling | None = None,
        has_experts: bool = False,
    ) -> None:
        sharing = ParallelGroups.of(config, topology, has_experts)
        sharing.open()
        self._fp8 = fp8
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        places = {info_of(parameter).name: place for place, parameter in enumerate(trained)}
        num_elements = sum(parameter.numel() for parameter in trained)
        # Parameters of each dtype, and those of experts, have buffers of their own.
        groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in trained:
            groups.setdefault((info_of(parameter).is_expert, parameter.dtype), []).append(parameter)
        self._buffers: list[ParameterBuffer] = []
        gathered: dict[int, WeightBucket] = {}
        """The buckets of weights by the place of their first parameter in the forward pass."""
        holders: dict[str, WeightBucket] = {}
        """The bucket of every parameter, by name."""
        buckets: list[GradientBucket] = []
        param_shards: list[ParamShard] = []
        in_flight = InFlight(2 if config.overlap_grad_reduce else 0)
        for group in groups.values():
            kind = sharing.of_parameter(info_of(group[0]))
            shards = kind.shards
            shard_gradients = config.sharding_strategy == "optim_grads" and shards.size > 1
            bucket_size = config.bucket_size(kind.size, num_elements)
            buffer = ParameterBuffer(group, formats.gradient, shards.size, bucket_size, shard_gradients)
            self._buffers.append(buffer)
            for weights, gradients, bucket_shards in buffer.buckets(shards.rank):
                param_shards += bucket_shards
                if shards.size > 1:
                    weight_bucket = WeightBucket(weights, shards)
                    names = [info.name for info, _, _ in gradients.main_grads]
                    gathered[min(places[name] for name in names)] = weight_bucket
                    holders |= dict.fromkeys(names, weight_bucket)
                if shard_gradients:
                    buckets.append(ShardedGradientBucket(gradients, shards, kind.replicas, in_flight))
                else:
                    buckets.append(WholeGradientBucket(gradients, shards, kind.replicas, config.overlap_grad_reduce))
        self._fp8_shards: dict[str, tuple[Tensor, Tensor, int]] = {}
        """This rank's shard of a weight as master weight and in FP8, and its first element, by the name of the FP8
        layer."""
        for number, shard in enumerate(param_shards):
            if shard.weight.itemsize == 1:
                master = torch.zeros_like(shard.weight, dtype=formats.master)
                self._fp8_shards[shard.info.name.removesuffix(".weight")] = master, shard.weight, shard.start
                param_shards[number] = replace(shard, weight=master)
        splits = [split for buffer in self._buffers for split in buffer.splits]
        infos = [(info_of(parameter), parameter) for parameter in parameters]
        super().__init__(formats, topology, sharing, param_shards, buckets, splits, infos)
        self.local_params = whole_params((parameter for parameter in parameters if parameter.itemsize > 1), sharing)
        self.local_params += [
            LocalParam(shard.info, shard.start, shard.weight, sharing.holders(shard.info, of_shard=True))
            for shard in param_shards
            if shard.info.name.removesuffix(".weight") in self._fp8_shards
        ]
        self._gathers = ParamGathers([gathered[place] for place in sorted(gathered)], config.overlap_param_gather)
        # Each module waits, before its forward pass, for the buckets with its weights.
        for unit in units if config.overlap_param_gather else ():
            # The weights of experts are gathered apart: the dense part of a layer runs before them.
            experts = list(expert_modules(unit))
            dense = [parameter for parameter in unit.parameters() if not info_of(parameter).is_expert]
            for module, waiting in ((unit, dense), *((one, list(one.parameters())) for one in experts)):
                names = [info_of(parameter).name for parameter in waiting]
                mine = tuple({holders[name]: None for name in names if name in holders})
                if mine:
                    module.register_forward_pre_hook(lambda *_, mine=mine: self._gathers.finish(mine))

    @property
    def needs_master_weights(self) -> bool:
        """Whether the model computes in a narrower format."""
        return self.formats.weight != self.formats.master

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for _, parameter, _ in self._parameters)

    def start_param_all_gather(self) -> None:
        if self._fp8 is not None:
            self._fp8.quantize_weights(self._fp8_shards, self.sharing.dense.shards)
        self._gathers.start()

    def finish_skipped_step(self) -> None:
        # FP8 weights have the scales of the next step in every step, so a resumed run is the same.
        if self._fp8 is not None:
            self.start_param_all_gather()

    def finish_param_all_gather(self) -> None:
        self._gathers.finish()

    def memory(self) -> dict[str, int]:
        return {
            "weights": sum(buffer.weights.untyped_storage().nbytes() for buffer in self._buffers)
            + sum(parameter.nbytes for _, parameter, is_trained in self._parameters if not is_trained),
            "gradients": sum(buffer.gradients.untyped_storage().nbytes() for buffer in self._buffers),
        }


class LayeredModel(Protocol):
    """The model as a strategy sees it."""

    @property
    def chunk_units(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """The modules whose forward pass the run calls, each with the modules in it that together hold its parameters,
        in the order of the forward pass. Each of these is run as a whole; one whose attribute
        ``backward_reads_weights`` is False needs no weights in its backward pass."""

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, if not on this rank."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, in the order of the forward pass."""


def shards_weights(config: ParallelConfig, topology: Topology, has_experts: bool) -> bool:
    """Whether a rank keeps a part of the weights alone, so that the model is best built without memory for them."""
    # With one rank FSDP2 shards nothing and still copies.
    is_asked_for = config.sharding_strategy == "optim_grads_params"
    return is_asked_for and ParallelGroups.of(config, topology, has_experts).shards_any


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
    gathered = fp8 if isinstance(fp8, Fp8Scaling) and fp8.config.fp8_param_gather else None
    return BufferedDataParallel(list(model.parameters()), formats, topology, config, units, gathered, model.has_experts)
