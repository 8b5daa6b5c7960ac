"""The interface of data parallelism, and the strategies with contiguous buffers.

A step is the same for every strategy: :meth:`DataParallel.start_grad_accumulation`, backward passes that accumulate
gradients, :meth:`DataParallel.finish_grad_sync`, the optimizer's update of the parameter shards, and
:meth:`DataParallel.start_param_all_gather`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.bucket import (
    GradientBucket,
    GradientConsumer,
    GradientReduction,
    InFlight,
    ParamGathers,
    ShardedGradientBucket,
    WeightBucket,
    WholeGradientBucket,
)
from megatron.core.data_parallel.buffer import ParameterBuffer, ParameterSplit, ParamShard
from megatron.core.data_parallel.strategy import ModelSharing, weight_units
from megatron.core.fp8 import Fp8Scaling
from megatron.core.initialization import initialize_range
from megatron.core.parameter import ParameterInfo, RowDivision, info_of
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology
from megatron.errors import ConfigError


@dataclass(frozen=True)
class LocalParam:
    """Weights that this rank stores: elements ``[start, start + numel)`` of a flattened local parameter."""

    info: ParameterInfo
    start: int
    tensor: Tensor
    """1-D."""
    holders: tuple[int, ...] = ()
    """The ranks that store the same elements; empty if they are not known."""
    division: RowDivision | None = None
    """How ranks divide the parameter's rows, if they do so evenly and each part is on one rank alone."""


def whole_params(parameters: Iterable[nn.Parameter], sharing: ModelSharing | None = None) -> list[LocalParam]:
    """The weights of a model without sharding."""
    infos = [(info_of(parameter), parameter.detach().view(-1)) for parameter in parameters]
    return [
        LocalParam(info, 0, flat, () if sharing is None else sharing.holders(info, of_shard=False))
        for info, flat in infos
    ]


class DataParallel(ABC):
    """A sharding strategy, as the loop, the optimizer and checkpoints see it."""

    formats: NumberFormats
    param_shards: Sequence[ParamShard]
    """The parts of parameters that this rank updates."""
    splits: Sequence[ParameterSplit]
    """How its shard group divides every local parameter."""
    local_params: Sequence[LocalParam]
    """The weights that this rank stores, in the precision that checkpoints need; frozen ones, too."""
    sharing: ModelSharing

    def __init__(
        self,
        formats: NumberFormats,
        topology: Topology,
        sharing: ModelSharing,
        param_shards: Sequence[ParamShard],
        buckets: Sequence[GradientBucket],
        splits: Sequence[ParameterSplit],
        parameters: Sequence[tuple[ParameterInfo, nn.Parameter]],
    ) -> None:
        """``parameters`` are all of the rank; those that are frozen (``requires_grad`` is False) stay so."""
        self._parameters = [(info.name, parameter, parameter.requires_grad) for info, parameter in parameters]
        self.formats, self.param_shards = formats, param_shards
        self.sharing, self.splits = sharing, splits
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

    def row_division(self, info: ParameterInfo) -> RowDivision | None:
        """How ranks divide the rows of a parameter, if they do so evenly and each part is on one rank alone."""
        return None

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of weights and gradients on this rank, measured from the tensors."""

    def initialize(self, seed: int) -> None:
        """Initialise the weights; each rank computes its own shards."""
        own = [(shard.info, shard.start, shard.weight) for shard in self.param_shards]
        names = {name for name, _, is_trained in self._parameters if not is_trained}
        frozen = [(one.info, one.start, one.tensor) for one in self.local_params if one.info.name in names]
        for info, start, weight in own + frozen:
            # In the model's dtype, so that wider weights start from the same values.
            initial = torch.empty(weight.shape, dtype=self.formats.weight, device=weight.device)
            initialize_range(initial, info, start, seed)
            weight.copy_(initial)
        self.start_param_all_gather()
        # A checkpoint may be loaded into the same memory next.
        self.finish_param_all_gather()

    def start_grad_accumulation(self, num_microbatches: int) -> None:
        """Begin a step of ``num_microbatches``. Raises :class:`ConfigError` if a parameter was frozen, or unfrozen,
        after its buffers had been made."""
        for name, parameter, is_trained in self._parameters:
            if parameter.requires_grad != is_trained:
                raise ConfigError(
                    f"requires_grad of {name} was set to {not is_trained} after the run had been built, when its "
                    "gradient buffer and optimizer state were made: name frozen parameters with --freeze-parameters."
                )
        for bucket in self._buckets:
            bucket.expect(num_microbatches)

    @contextmanager
    def gradients_diverted(self, consume: GradientConsumer) -> Iterator[None]:
        """For one microbatch outside of a step: ``consume`` gets every bucket's gradients, which are not reduced."""
        for bucket in self._buckets:
            bucket.divert(consume)
        yield
        for bucket in self._buckets:
            bucket.finish_diverted()

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
    ``units`` are run as a whole, each. Parameters of each dtype, and those of experts, have buffers of their own. A
    rank keeps its shards of FP8 parameters in the master weights' dtype; ``fp8`` quantises them before every
    all-gather.
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
        sharing = ModelSharing.of(config, topology, has_experts)
        sharing.open()
        self._fp8 = fp8
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        places = {info_of(parameter).name: place for place, parameter in enumerate(trained)}
        num_elements = sum(parameter.numel() for parameter in trained)
        self._buffers: list[ParameterBuffer] = []
        gathered: dict[int, WeightBucket] = {}
        """By the place of the bucket's first parameter in the forward pass."""
        holders: dict[str, WeightBucket] = {}
        buckets: list[GradientBucket] = []
        param_shards: list[ParamShard] = []
        in_flight = InFlight(2 if config.overlap_grad_reduce else 0)
        for group in _by_kind_and_dtype(trained):
            kind = sharing.of_parameter(info_of(group[0]))
            shards, reduction = kind.shards, GradientReduction(kind.shards, kind.replicas)
            shard_gradients = config.sharding_strategy == "optim_grads" and shards.size > 1
            bucket_size = config.bucket_size(kind.size, num_elements)
            buffer = ParameterBuffer(group, formats.gradient, shards.size, bucket_size, shard_gradients)
            self._buffers.append(buffer)
            param_shards += buffer.param_shards(shards.rank)
            for view in buffer.buckets(shards.rank):
                if shards.size > 1:
                    weights = WeightBucket(view.weights, shards)
                    names = [info.name for info, _, _ in view.gradients.main_grads]
                    gathered[min(places[name] for name in names)] = weights
                    holders |= dict.fromkeys(names, weights)
                if shard_gradients:
                    buckets.append(ShardedGradientBucket(view.gradients, reduction, in_flight))
                else:
                    buckets.append(WholeGradientBucket(view.gradients, reduction, config.overlap_grad_reduce))
        self._fp8_shards: dict[str, tuple[Tensor, Tensor]] = {}
        """By the name of the FP8 layer: this rank's shard of the weight as master weight, and in FP8."""
        for number, shard in enumerate(param_shards):
            if shard.weight.itemsize == 1:
                master = torch.zeros_like(shard.weight, dtype=formats.master)
                self._fp8_shards[shard.info.name.removesuffix(".weight")] = master, shard.weight
                param_shards[number] = replace(shard, weight=master)
        splits = [split for buffer in self._buffers for split in buffer.splits()]
        infos = [(info_of(parameter), parameter) for parameter in parameters]
        super().__init__(formats, topology, sharing, param_shards, buckets, splits, infos)
        self.local_params = whole_params((parameter for parameter in parameters if parameter.itemsize > 1), sharing)
        self.local_params += [
            LocalParam(shard.info, shard.start, shard.weight, sharing.holders(shard.info, of_shard=True))
            for shard in param_shards
            if shard.info.name.removesuffix(".weight") in self._fp8_shards
        ]
        self._gathers = ParamGathers([gathered[place] for place in sorted(gathered)], config.overlap_param_gather)
        if config.overlap_param_gather:
            _wait_before_use(units, holders, self._gathers)

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


def _by_kind_and_dtype(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """The parameters of each buffer."""
    groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((info_of(parameter).is_expert, parameter.dtype), []).append(parameter)
    return groups.values()


def _wait_before_use(units: Sequence[nn.Module], holders: Mapping[str, WeightBucket], gathers: ParamGathers) -> None:
    """Let each unit wait, before its forward pass, for the buckets with its weights."""
    for unit in weight_units(units):
        names = [info_of(parameter).name for parameter in unit.parameters]
        mine = tuple({holders[name]: None for name in names if name in holders})
        if not mine:
            continue

        def wait(*_: object, mine: Sequence[WeightBucket] = mine) -> None:
            gathers.finish(mine)

        unit.module.register_forward_pre_hook(wait)


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
