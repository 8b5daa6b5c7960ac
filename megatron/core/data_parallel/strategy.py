"""The interface of data parallelism, and the groups of ranks that share parameters."""

# A step is the same for every strategy:
#
#     start_grad_accumulation - backward passes - finish_grad_sync - update of the shards - start_param_all_gather
#             |                        |                 |                                          |
#     buckets expect gradients   last gradient of   the rest is reduced             a forward pass waits for the
#                                a bucket: reduce                                   weights that it uses

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.bucket import GradientBucket, GradientConsumer
from megatron.core.data_parallel.buffer import ParameterSplit, ParamShard
from megatron.core.parameter import ParameterInfo, RowDivision, info_of, initialize_range
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology
from megatron.errors import ConfigError


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of the parameters of one kind: dense ones, or those of experts.

    Experts are folded over the ranks of a stage (arXiv 2504.14960), so the two kinds have different groups. Gradients
    are sums over the tokens of all ranks of the groups, without a factor: a rank with experts has already received the
    tokens of the other expert-parallel ranks.
    """

    shards: Communicator
    """Ranks that divide weights, gradients or optimizer state; one without sharding."""
    replicas: Communicator
    """Ranks with the same shard."""
    axes: tuple[str, ...]
    """Axes along which the parameters are replicated or sharded, such as ``("cp", "dp")``."""
    replica_axes: tuple[str, ...]
    """Axes along which a shard is replicated."""

    @classmethod
    def of(cls, config: ParallelConfig, topology: Topology, is_expert: bool = False) -> "ReplicaGroups":
        """The groups of ``config``'s strategy. Context-parallel ranks are part of the groups of dense parameters: their
        parts of a sample add to the gradient like other samples."""
        axes: tuple[str, ...] = ("edp",) if is_expert else ("cp", "dp")
        shards: tuple[str, ...] = ("edp_shard",) if is_expert else ("cp", "dp_shard")
        replicas: tuple[str, ...] = ("edp_replicate",) if is_expert else ("dp_replicate",)
        if config.sharding_strategy == "no_shard":
            shards, replicas = (), axes
        return cls(topology.communicator(*shards), topology.communicator(*replicas), axes, replicas)

    @property
    def size(self) -> int:
        """Ranks over which gradients are summed."""
        return self.shards.size * self.replicas.size


@dataclass(frozen=True)
class ParallelGroups:
    dense: ReplicaGroups
    experts: ReplicaGroups | None
    """None in a model without experts."""
    norm_ranks: Communicator
    """Ranks over which norms are summed: the ranks of one replica, or all ranks with experts, as the two kinds have
    different replicas."""
    tensor_parallel: Communicator
    ranks_along: Callable[[tuple[str, ...]], tuple[int, ...]]
    """The ranks that differ from this one on these axes alone."""

    @classmethod
    def of(cls, config: ParallelConfig, topology: Topology, has_experts: bool) -> "ParallelGroups":
        """The groups of ``config``'s strategy; ``has_experts`` is equal on all stages."""
        dense = ReplicaGroups.of(config, topology)
        tensor_parallel = topology.tensor_parallel
        ranks_along = cache(partial(topology.grid.group, topology.rank))
        if not has_experts:
            # Ranks that together hold every shard once.
            axes = ("tp", "pp") if config.sharding_strategy == "no_shard" else ("tp", "pp", "cp", "dp_shard")
            return cls(dense, None, topology.communicator(*axes), tensor_parallel, ranks_along)
        experts = ReplicaGroups.of(config, topology, is_expert=True)
        return cls(dense, experts, topology.world, tensor_parallel, ranks_along)

    def open(self) -> None:
        """Create the groups of both kinds. A stage without experts does not use theirs, but all ranks must create
        process groups in one order."""
        if self.experts is not None:
            for ranks in (self.dense.shards, self.dense.replicas, self.experts.shards, self.experts.replicas):
                ranks.open()

    @property
    def shards_any(self) -> bool:
        """Whether any parameter, dense or of experts, is sharded over more than one rank."""
        return any(kind.shards.size > 1 for kind in (self.dense, self.experts) if kind is not None)

    def of_parameter(self, info: ParameterInfo) -> ReplicaGroups:
        if not info.is_expert:
            return self.dense
        assert self.experts is not None, f"{info.name} in a model without experts"
        return self.experts

    def holders(self, info: ParameterInfo, of_shard: bool) -> tuple[int, ...]:
        """The ranks that hold the same elements of a parameter as this rank: the same shard, or the same whole
        parameter where nothing is sharded."""
        kind = self.of_parameter(info)
        axes = kind.replica_axes if of_shard else kind.axes
        return self.ranks_along(axes if info.is_expert or info.tensor_parallel_sharded else ("tp", *axes))

    def is_counted(self, info: ParameterInfo, over_all_ranks: bool) -> bool:
        """Whether this rank adds its shard of a parameter to norms: one of the ranks that hold it does.

        ``over_all_ranks``: norms are summed over all ranks instead of the ranks of one replica.
        """
        if info.is_copy:
            return False
        if not info.is_expert and not info.tensor_parallel_sharded and self.tensor_parallel.rank > 0:
            return False
        return not over_all_ranks or self.of_parameter(info).replicas.rank == 0


def expert_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in ``module`` whose parameters all belong to experts; they must be run as a whole."""
    kinds = {info_of(parameter).is_expert for parameter in module.parameters()}
    if kinds == {True}:
        yield module
    elif True in kinds:
        assert not any(info_of(one).is_expert for one in module.parameters(recurse=False)), "mixed with dense weights"
        for child in module.children():
            yield from expert_modules(child)


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
    """The division of the parameter's rows, if it is even and each part is on one rank alone."""


def whole_params(parameters: Iterable[nn.Parameter], sharing: ParallelGroups | None = None) -> list[LocalParam]:
    """The weights of a model without sharding."""
    params = []
    for parameter in parameters:
        info = info_of(parameter)
        holders = () if sharing is None else sharing.holders(info, of_shard=False)
        params.append(LocalParam(info, 0, parameter.detach().view(-1), holders))
    return params


class DataParallel(ABC):
    """A sharding strategy, as the loop, the optimizer and checkpoints see it."""

    formats: NumberFormats
    param_shards: Sequence[ParamShard]
    """The parts of parameters that this rank updates."""
    splits: Sequence[ParameterSplit]
    """The division of every local parameter among its shard group."""
    local_params: Sequence[LocalParam]
    """The weights that this rank stores, in the precision that checkpoints need; frozen ones, too."""
    sharing: ParallelGroups

    def __init__(
        self,
        formats: NumberFormats,
        topology: Topology,
        sharing: ParallelGroups,
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
        self._copied_shards = [shard for shard in param_shards if shard.info.stages]

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

    @property
    def trained_names(self) -> list[str]:
        """The names of this rank's parameters that are not frozen, in the order of the forward pass."""
        return [name for name, _, is_trained in self._parameters if is_trained]

    def row_division(self, info: ParameterInfo) -> RowDivision | None:
        """The division of a parameter's rows, if it is even and each part is on one rank alone."""
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
        partial over the tensor-parallel ranks, and those of weights with copies on several stages."""
        for bucket in self._buckets:
            bucket.start()
        for bucket in self._buckets:
            bucket.finish()
        partial, tensor_parallel = self._partial_gradients, self._topology.tensor_parallel
        if partial and tensor_parallel.size > 1:
            # They are small, such as the gains of norms: one collective for all of them.
            together = tensor_parallel.all_reduce(torch.cat(partial))
            torch._foreach_copy_(partial, together.split([tensor.numel() for tensor in partial]))
        for shard in self._copied_shards:
            _add_copies(shard, self._topology)


def _add_copies(shard: ParamShard, topology: Topology) -> None:
    """Sum the gradients of all copies of a weight's shard in its home, which sends the sum to the other stages.

    It uses the pipeline's channels, whose process groups exist on all stages. Each message is waited for, because the
    first one between two ranks makes their connection, for which NCCL blocks both.
    """
    home, *others = (stage % topology.pipeline_parallel.size for stage in shard.info.stages)
    if shard.info.is_copy:
        own = topology.pipeline_parallel.rank
        topology.pipeline_channel("B", own, home).start_send(shard.gradient, home).wait()
        shard.gradient.copy_(
            topology.pipeline_channel("F", home, own).start_receive(torch.empty_like(shard.gradient), home).wait()
        )
        return
    for other in others:
        channel = topology.pipeline_channel("B", other, home)
        shard.gradient.add_(channel.start_receive(torch.empty_like(shard.gradient), other).wait())
    for other in others:
        topology.pipeline_channel("F", home, other).start_send(shard.gradient, other).wait()
