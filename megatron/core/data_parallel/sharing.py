"""Which ranks share parameters: the groups of data parallelism, for dense parameters and for those of experts.

Experts are folded over the ranks of a stage (arXiv 2504.14960): what one rank divides with others, and with how many,
differs between the two kinds. Their gradients are sums over the tokens of all ranks of the group, without a factor: a
rank with experts has already received the tokens of the other expert-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator
from megatron.core.parameter import ParameterInfo
from megatron.core.topology import Topology


@dataclass(frozen=True)
class Sharing:
    """The groups of the parameters of one kind."""

    shards: Communicator
    """Ranks that divide weights, gradients or optimizer state; one without sharding."""
    replicas: Communicator
    """Ranks with the same shard."""
    axes: tuple[str, ...]
    """Of the ranks of both: those with the same parameters."""
    replica_axes: tuple[str, ...]

    @classmethod
    def of(cls, config: ParallelConfig, topology: Topology) -> "Sharing":
        """The groups of dense parameters. Context-parallel ranks are part of them: their parts of a sample add to the
        gradient like other samples."""
        if config.sharding_strategy == "no_shard":
            return cls(topology.communicator(), topology.communicator("cp", "dp"), ("cp", "dp"), ("cp", "dp"))
        shards, replicas = ("cp", "dp_shard"), ("dp_replicate",)
        return cls(topology.communicator(*shards), topology.communicator(*replicas), ("cp", "dp"), replicas)

    @classmethod
    def of_experts(cls, config: ParallelConfig, topology: Topology) -> "Sharing":
        """The groups of the parameters of experts."""
        if config.sharding_strategy == "no_shard":
            return cls(topology.communicator(), topology.communicator("edp"), ("edp",), ("edp",))
        shards, replicas = ("edp_shard",), ("edp_replicate",)
        return cls(topology.communicator(*shards), topology.communicator(*replicas), ("edp",), replicas)

    @property
    def size(self) -> int:
        """Ranks over which gradients are summed."""
        return self.shards.size * self.replicas.size


@dataclass(frozen=True)
class ModelSharing:
    """The groups of both kinds of parameters."""

    dense: Sharing
    experts: Sharing | None
    """None in a model without experts."""
    norm_ranks: Communicator
    """Ranks over which norms are summed: the ranks of one replica, or all ranks with experts, as the two kinds have
    different replicas."""
    tensor_parallel: Communicator
    ranks_along: Callable[[tuple[str, ...]], tuple[int, ...]]
    """The ranks that differ from this one on these axes alone."""

    @classmethod
    def of(cls, config: ParallelConfig, topology: Topology, has_experts: bool) -> "ModelSharing":
        """The groups of ``config``'s strategy. ``has_experts`` is equal on all stages."""
        dense = Sharing.of(config, topology)
        tensor_parallel = topology.tensor_parallel
        ranks_along = cache(partial(topology.grid.group, topology.rank))
        if not has_experts:
            # Ranks that together hold every shard once.
            axes = ("tp", "pp") if config.sharding_strategy == "no_shard" else ("tp", "pp", "cp", "dp_shard")
            return cls(dense, None, topology.communicator(*axes), tensor_parallel, ranks_along)
        return cls(dense, Sharing.of_experts(config, topology), topology.world, tensor_parallel, ranks_along)

    def open(self) -> None:
        """Create the groups of both kinds. A stage without experts does not use theirs, but all ranks must create
        process groups in one order."""
        if self.experts is not None:
            for ranks in (self.dense.shards, self.dense.replicas, self.experts.shards, self.experts.replicas):
                ranks.open()

    @property
    def shards_any(self) -> bool:
        """Whether several ranks divide parameters of a kind."""
        return any(kind.shards.size > 1 for kind in (self.dense, self.experts) if kind is not None)

    def of_parameter(self, info: ParameterInfo) -> Sharing:
        """The groups of a parameter."""
        if not info.is_expert:
            return self.dense
        assert self.experts is not None, f"{info.name} in a model without experts"
        return self.experts

    def holders(self, info: ParameterInfo, of_shard: bool) -> tuple[int, ...]:
        """The ranks that hold the same elements of a parameter as this rank: of its shard, or of all that a rank holds
        without sharding."""
        kind = self.of_parameter(info)
        axes = kind.replica_axes if of_shard else kind.axes
        return self.ranks_along(axes if info.is_expert or info.tensor_parallel_sharded else ("tp", *axes))

    def is_counted(self, info: ParameterInfo, over_all_ranks: bool) -> bool:
        """Whether this rank adds its shard of a parameter to norms: one of the ranks that hold it does.

        ``over_all_ranks``: norms are summed over all ranks instead of the ranks of one replica.
        """
        if info.tied_end == "output_layer":
            return False
        if not info.is_expert and not info.tensor_parallel_sharded and self.tensor_parallel.rank > 0:
            return False
        return not over_all_ranks or self.of_parameter(info).replicas.rank == 0
