"""The interface of data parallelism, and the strategies with contiguous buffers.

A step is the same for every strategy: :meth:`DataParallel.start_grad_accumulation`, backward passes that accumulate
gradients, :meth:`DataParallel.finish_grad_sync`, the optimizer's update of the parameter shards, and
:meth:`DataParallel.start_param_all_gather`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.bucket import (
    GradientBucket,
    GradientReduction,
    InFlight,
    ParamGathers,
    ShardedGradientBucket,
    WeightBucket,
    WholeGradientBucket,
)
from megatron.core.data_parallel.buffer import ParameterBuffer, ParameterSplit, ParamShard
from megatron.core.fp8 import Fp8Scaling
from megatron.core.initialization import initialize_range
from megatron.core.parameter import ParameterInfo, info_of
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology


@dataclass(frozen=True)
class LocalParam:
    """Weights that this rank stores: elements ``[start, start + numel)`` of a flattened local parameter."""

    info: ParameterInfo
    start: int
    tensor: Tensor
    """1-D."""


def whole_params(parameters: Iterable[nn.Parameter]) -> list[LocalParam]:
    """The weights of a model without sharding."""
    return [LocalParam(info_of(parameter), 0, parameter.detach().view(-1)) for parameter in parameters]


@dataclass(frozen=True)
class Sharing:
    """The groups of data parallelism. Context-parallel ranks are part of them: their parts of a sample add to the
    gradient like other samples."""

    shards: Communicator
    """Ranks that divide weights, gradients or optimizer state; one without sharding."""
    replicas: Communicator
    """Ranks with the same shard."""
    model_group: Communicator
    """Ranks that together hold every shard of the model once."""

    @classmethod
    def of(cls, config: ParallelConfig, topology: Topology) -> "Sharing":
        """The groups of ``config``'s strategy."""
        shards: tuple[str, ...] = ("cp", "dp_shard")
        replicas: tuple[str, ...] = ("dp_replicate",)
        if config.sharding_strategy == "no_shard":
            shards, replicas = (), ("cp", "dp")
        communicators = (topology.communicator(*axes) for axes in (shards, replicas, ("tp", "pp", *shards)))
        return cls(*communicators)


class DataParallel(ABC):
    """A sharding strategy, as the loop, the optimizer and checkpoints see it."""

    formats: NumberFormats
    param_shards: Sequence[ParamShard]
    """The parts of parameters that this rank updates."""
    splits: Sequence[ParameterSplit]
    """How ``shard_ranks`` divide every local parameter."""
    local_params: Sequence[LocalParam]
    """The weights that this rank stores, in the precision that checkpoints need."""
    shard_ranks: Communicator
    """Ranks that divide the update; one without sharding."""
    model_group: Communicator
    """Ranks whose parameter shards together are the model; norms are summed over them."""

    def __init__(
        self,
        formats: NumberFormats,
        topology: Topology,
        sharing: Sharing,
        param_shards: Sequence[ParamShard],
        buckets: Sequence[GradientBucket],
        splits: Sequence[ParameterSplit],
    ) -> None:
        self.formats, self.param_shards, self.model_group = formats, param_shards, sharing.model_group
        self.shard_ranks, self.splits = sharing.shards, splits
        self._topology, self._buckets = topology, buckets
        self._partial_gradients = [shard.gradient for shard in param_shards if shard.info.gradient_is_partial]
        self._tied_shards = [shard for shard in param_shards if shard.info.tied_end is not None]

    @property
    @abstractmethod
    def needs_master_weights(self) -> bool:
        """Whether the optimizer keeps master weights, because those stored here are narrower."""

    @abstractmethod
    def start_param_all_gather(self) -> None:
        """Start the all-gather of the updated weights."""

    @abstractmethod
    def finish_param_all_gather(self) -> None:
        """Wait for all weights; a forward pass waits by itself for those that it uses."""

    @abstractmethod
    def finish_skipped_step(self) -> None:
        """Call after a step without an update."""

    @property
    def num_parameters(self) -> int:
        """Elements of the weights that this rank stores."""
        return sum(local.tensor.numel() for local in self.local_params)

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of weights and gradients on this rank, measured from the tensors."""

    def initialize(self, seed: int) -> None:
        """Initialise the weights; each rank computes its own shards."""
        for shard in self.param_shards:
            # In the model's dtype, so that wider weights start from the same values.
            initial = torch.empty(shard.weight.shape, dtype=self.formats.weight, device=shard.weight.device)
            initialize_range(initial, shard.info, shard.start, seed)
            shard.weight.copy_(initial)
        self.start_param_all_gather()
        # A checkpoint may be loaded into the same memory next.
        self.finish_param_all_gather()

    def start_grad_accumulation(self, num_microbatches: int) -> None:
        """Begin a step of ``num_microbatches``."""
        for bucket in self._buckets:
            bucket.expect(num_microbatches)

    def finish_grad_sync(self) -> None:
        """Finish the sum over the data-parallel ranks. Then, for this rank's shards only, sum gradients that are
        partial over the tensor-parallel ranks, and those of a tied weight over the first and last stage."""
        for bucket in self._buckets:
            bucket.start()
        for bucket in self._buckets:
            bucket.finish()
        _all_reduce_together(self._partial_gradients, self._topology.tensor_parallel)
        for shard in self._tied_shards:
            _add_other_end(shard, self._topology)


class BufferedDataParallel(DataParallel):
    """``no_shard``, ``optim`` (ZeRO-1) and ``optim_grads`` (ZeRO-2), in contiguous buffers.

    Without sharding the shard group has one rank, and the reduction is an all-reduce over all data-parallel ranks.
    ``modules`` are run as a whole, each. Parameters of each dtype have buffers of their own. A rank keeps its shards of
    FP8 parameters in the master weights' dtype; ``fp8`` quantises them before every all-gather.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        formats: NumberFormats,
        topology: Topology,
        config: ParallelConfig,
        modules: Sequence[nn.Module] = (),
        fp8: Fp8Scaling | None = None,
    ) -> None:
        sharing = Sharing.of(config, topology)
        shards, replicas = sharing.shards, sharing.replicas
        shard_gradients = config.sharding_strategy == "optim_grads"
        bucket_size = config.bucket_size(
            shards.size * replicas.size, sum(parameter.numel() for parameter in parameters)
        )
        self._parameters, self._fp8 = parameters, fp8
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._buffers = [
            ParameterBuffer(group, formats.gradient, shards.size, bucket_size, shard_gradients)
            for group in by_dtype.values()
        ]
        places = {info_of(parameter).name: place for place, parameter in enumerate(parameters)}
        weights: dict[int, WeightBucket] = {}
        buckets: list[GradientBucket] = []
        holders: dict[str, WeightBucket] = {}
        in_flight = InFlight(2 if config.overlap_grad_reduce else 0)
        reduction = GradientReduction(shards, replicas)
        for view in (view for buffer in self._buffers for view in buffer.buckets(shards.rank)):
            gathered = WeightBucket(view.weights, shards)
            names = [info.name for info, _, _ in view.gradients.main_grads]
            weights[min(places[name] for name in names)] = gathered
            holders |= dict.fromkeys(names, gathered)
            if shard_gradients:
                buckets.append(ShardedGradientBucket(view.gradients, reduction, in_flight))
            else:
                buckets.append(WholeGradientBucket(view.gradients, reduction, config.overlap_grad_reduce))
        param_shards = [shard for buffer in self._buffers for shard in buffer.param_shards(shards.rank)]
        self._fp8_shards: dict[str, tuple[Tensor, Tensor]] = {}
        """By the name of the FP8 layer: this rank's shard of the weight as master weight, and in FP8."""
        for number, shard in enumerate(param_shards):
            if shard.weight.itemsize == 1:
                master = torch.zeros_like(shard.weight, dtype=formats.master)
                self._fp8_shards[shard.info.name.removesuffix(".weight")] = master, shard.weight
                param_shards[number] = replace(shard, weight=master)
        splits = [split for buffer in self._buffers for split in buffer.splits()]
        super().__init__(formats, topology, sharing, param_shards, buckets, splits)
        self.local_params = whole_params(parameter for parameter in parameters if parameter.itemsize > 1)
        self.local_params += [
            LocalParam(shard.info, shard.start, shard.weight)
            for shard in param_shards
            if shard.info.name.removesuffix(".weight") in self._fp8_shards
        ]
        in_forward_order = [weights[place] for place in sorted(weights)]
        self._gathers = ParamGathers(in_forward_order if shards.size > 1 else (), config.overlap_param_gather)
        if config.overlap_param_gather and shards.size > 1:
            _wait_before_use(modules, holders, self._gathers)

    @property
    def needs_master_weights(self) -> bool:
        """Whether the model computes in a narrower format."""
        return self.formats.weight != self.formats.master

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    def start_param_all_gather(self) -> None:
        if self._fp8 is not None:
            self._fp8.quantize_weights(self._fp8_shards, self.shard_ranks)
        self._gathers.start()

    def finish_skipped_step(self) -> None:
        # FP8 weights have the scales of the next step in every step, so a resumed run is the same.
        if self._fp8 is not None:
            self.start_param_all_gather()

    def finish_param_all_gather(self) -> None:
        self._gathers.finish()

    def memory(self) -> dict[str, int]:
        return {
            "weights": sum(buffer.weights.untyped_storage().nbytes() for buffer in self._buffers),
            "gradients": sum(buffer.gradients.untyped_storage().nbytes() for buffer in self._buffers),
        }


def _wait_before_use(modules: Sequence[nn.Module], holders: Mapping[str, WeightBucket], gathers: ParamGathers) -> None:
    """Let each of ``modules`` wait, before its forward pass, for the buckets with its weights."""
    for module in modules:
        mine = tuple({holders[info_of(parameter).name]: None for parameter in module.parameters()})

        def wait(*_: object, mine: Sequence[WeightBucket] = mine) -> None:
            gathers.finish(mine)

        module.register_forward_pre_hook(wait)


def _all_reduce_together(tensors: Sequence[Tensor], ranks: Communicator) -> None:
    """Sum small tensors over ``ranks`` in one collective."""
    if ranks.size == 1 or not tensors:
        return
    together = ranks.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def _add_other_end(shard: ParamShard, topology: Topology) -> None:
    """Add the gradient of a tied weight's shard from the stage at the other end of the model.

    It uses the pipeline's channels, whose process groups exist on all stages. One end sends first and the other
    receives first, because the first message between two ranks makes their connection, for which NCCL blocks both.
    """
    first, last = 0, topology.pipeline_parallel.size - 1
    down, up = topology.pipeline_channel("F", first, last), topology.pipeline_channel("B", last, first)
    other = torch.empty_like(shard.gradient)
    if shard.info.tied_end == "embedding":
        down.start_send(shard.gradient, last).wait()
        up.start_receive(other, last).wait()
    else:
        down.start_receive(other, first).wait()
        up.start_send(shard.gradient, first).wait()
    shard.gradient.add_(other)
