"""Flags for the parallel layout."""

from dataclasses import dataclass
from math import lcm, prod
from typing import Annotated, Literal

import tyro

from megatron.config.parallel import CONTEXT_PARALLEL_TYPES, ContextParallelType
from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of

RANK_AXES = ("tp", "cp", "ep", "pp", "dp")
"""Axes of the rank grid, in the default order from neighbouring ranks to distant ones."""

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
_TYPES = ", ".join(f"{name} ({spec.summary})" for name, spec in CONTEXT_PARALLEL_TYPES.items())
_CP_COMM_TYPE_HELP = f"Communication of context parallelism: {_TYPES}. One for all layers, or one per layer."


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout. Data-parallel size = number of ranks / (tensor x context x pipeline-parallel size)."""

    tensor_model_parallel_size: int = 1
    """Tensor-parallel size: ranks that share every layer."""
    sequence_parallel: bool = False
    """Shard the activations outside of the tensor-parallel regions along the sequence."""
    tp_comm_overlap: bool = False
    """Overlap the collectives of --sequence-parallel with the adjacent matrix multiplications: with PyTorch's symmetric
    memory where the GPUs of the tensor-parallel ranks can access each other's memory, otherwise with sends and receives
    of shards. --transformer-impl transformer_engine uses its own overlap."""
    pipeline_model_parallel_size: int = 1
    """Pipeline-parallel size: ranks among which the layers are divided; see the pipeline flags."""
    context_parallel_size: int = 1
    """Context-parallel size: ranks that share a sequence. Each holds two of 2 x size chunks, one from either end."""
    cp_comm_type: Annotated[tuple[ContextParallelType, ...], tyro.conf.arg(help=_CP_COMM_TYPE_HELP)] = ("p2p",)
    """Communication of context parallelism:"""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """Sizes of the levels of --cp-comm-type a2a+p2p: ranks per all-to-all group, then number of groups (ranks of a
    ring). Their product is --context-parallel-size."""
    expert_model_parallel_size: int = 1
    """Expert-parallel size: ranks among which the experts of a layer are divided. They are ranks of the same stage, so
    the size multiplies neither the number of ranks nor divides the batch."""
    expert_tensor_parallel_size: int | None = None
    """Tensor-parallel size of the experts: ranks that share every expert (default: --tensor-model-parallel-size). 1 is
    usually faster with small experts."""
    rank_order: str = "-".join(RANK_AXES)
    """Axes of the rank grid, from the fastest-varying rank to the slowest."""
    use_tp_pp_dp_mapping: bool = False
    """Same as --rank-order tp-cp-ep-pp-dp, the default. (Megatron-LM's default is tp-cp-ep-dp-pp.)"""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """Data-parallel sharding: no_shard (default) replicates everything; optim shards master weights and optimizer state
    (ZeRO-1); optim_grads also shards gradients and reduce-scatters them in every microbatch (ZeRO-2);
    optim_grads_params also shards weights and all-gathers them layer by layer (ZeRO-3, with PyTorch FSDP2)."""
    use_distributed_optimizer: bool = False
    """Same as --data-parallel-sharding-strategy optim."""
    use_torch_fsdp2: bool = False
    """Same as --data-parallel-sharding-strategy optim_grads_params."""
    use_megatron_fsdp: bool = False
    """Accepted for Megatron-LM compatibility with --data-parallel-sharding-strategy; no effect beside it: Megatron-LM's
    implementation of the strategies gives the same results as PyTorch's."""
    torch_fsdp2_reshard_after_forward: bool = True
    """optim_grads_params: free the weights of a layer after its forward pass and all-gather them again for its backward
    pass. --no-torch-fsdp2-reshard-after-forward all-gathers them once per step: less communication, above all with
    pipelines and several microbatches, but memory for the unsharded weights."""
    defer_grad_reduce: bool = False
    """optim_grads_params: accumulate unsharded gradients and reduce-scatter them only in the last microbatch."""
    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: shard inside groups of (data-parallel size / this) neighbouring ranks and replicate across the
    groups (with optim_grads_params: HSDP)."""
    overlap_grad_reduce: bool = False
    """Overlap the reduction of gradients with the backward pass: start a bucket when its last gradient is complete."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of updated weights with the next forward pass, bucket by bucket; for sharded strategies.
    With optim_grads_params: prefetch the weights of the next layer, in the forward and the backward pass."""
    ddp_bucket_size: int | None = None
    """Elements per bucket, the unit of gradient reduction and weight all-gather (default: one bucket; with overlap or
    optim_grads the larger of 40 million and 1 million x the ranks with the same weights). With optim_grads_params a
    layer is a bucket."""
    ddp_num_buckets: int | None = None
    """Approximate number of buckets of a rank, instead of --ddp-bucket-size."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Backend of the process groups (default: nccl with GPUs, otherwise gloo, and shared memory between the ranks of
    one host)."""
    distributed_timeout_minutes: float = 10.0
    """Minutes after which an incomplete collective of training ends the run. Ranks that wait while one rank builds an
    index or writes a checkpoint wait for up to 4 hours."""

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        if self.use_torch_fsdp2:
            return "optim_grads_params"
        return "optim" if self.use_distributed_optimizer else "no_shard"

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def data_parallel_replicas(self, data_parallel_size: int) -> int:
        """Number of shard groups."""
        return data_parallel_size if self.sharding_strategy == "no_shard" else self.num_distributed_optimizer_instances

    def bucket_size(self, data_parallel_size: int, num_elements: int) -> int | None:
        """Elements per bucket of a rank with ``num_elements``; None for one bucket."""
        if self.ddp_num_buckets is not None:
            return -(-num_elements // self.ddp_num_buckets)
        uses_buckets = self.overlap_grad_reduce or self.overlap_param_gather or self.sharding_strategy == "optim_grads"
        if self.ddp_bucket_size is not None or not uses_buckets:
            return self.ddp_bucket_size
        # With more ranks, the messages of a bucket are smaller and bound by latency.
        return max(40_000_000, 1_000_000 * data_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one model replica."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def least_world_size(self, has_experts: bool) -> int:
        """The fewest ranks on which the layout is possible."""
        expert_ranks = self.expert_tensor_size * self.expert_model_parallel_size if has_experts else 1
        ranks = lcm(self.tensor_model_parallel_size * self.context_parallel_size, expert_ranks)
        return ranks * self.pipeline_model_parallel_size * self.num_distributed_optimizer_instances

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas on ``world_size`` ranks; raises :class:`ConfigError` if it is not an integer."""
        if world_size % self.model_parallel_size:
            raise ConfigError(
                f"{world_size} processes are not a multiple of "
                f"--tensor-model-parallel-size {self.tensor_model_parallel_size} x "
                f"--pipeline-model-parallel-size {self.pipeline_model_parallel_size} x "
                f"--context-parallel-size {self.context_parallel_size} = {self.model_parallel_size}: "
                "start a multiple of that many processes, or lower a size."
            )
        return world_size // self.model_parallel_size

    def check(self) -> None:
        require_at_least(1, values_of(self, "tensor_model_parallel_size", "pipeline_model_parallel_size"))
        require_at_least(1, values_of(self, "context_parallel_size", "expert_model_parallel_size"))
        require_at_least(1, values_of(self, "expert_tensor_parallel_size"))
        require_at_least(
            1, values_of(self, "num_distributed_optimizer_instances", "ddp_bucket_size", "ddp_num_buckets")
        )
        require_positive(values_of(self, "distributed_timeout_minutes"))
        if sorted(self.rank_order.split("-")) != sorted(RANK_AXES):
            raise ConfigError(
                f"--rank-order {self.rank_order} must name each of {', '.join(RANK_AXES)} once: for example "
                f"{'-'.join(RANK_AXES)}."
            )
        if self.use_tp_pp_dp_mapping and self.rank_order != "-".join(RANK_AXES):
            raise ConfigError(f"--use-tp-pp-dp-mapping contradicts --rank-order {self.rank_order}: remove one.")
        if self.overlap_param_gather and self.sharding_strategy == "no_shard":
            raise ConfigError(
                "--overlap-param-gather needs a sharded strategy: add --use-distributed-optimizer, or remove "
                "--overlap-param-gather."
            )
        self._check_context_parallel_levels()
        self._check_sharding()

    def _check_context_parallel_levels(self) -> None:
        size, sizes = self.context_parallel_size, self.hierarchical_context_parallel_sizes
        flag = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
        of_several_levels = [name for name, spec in CONTEXT_PARALLEL_TYPES.items() if len(spec.levels) > 1]
        named = [name for name in self.cp_comm_type if name in of_several_levels]
        if sizes and not named:
            raise ConfigError(
                f"{flag} needs --cp-comm-type {' or '.join(of_several_levels)}: add it, or remove the flag."
            )
        for name in named if size > 1 or sizes else ():
            levels = len(CONTEXT_PARALLEL_TYPES[name].levels)
            if not sizes:
                raise ConfigError(
                    f"--cp-comm-type {name} needs the sizes of its levels: give --hierarchical-context-parallel-sizes "
                    f"with {levels} numbers whose product is --context-parallel-size {size}."
                )
            if len(sizes) != levels or min(sizes) < 2 or prod(sizes) != size:
                raise ConfigError(
                    f"{flag} does not divide --context-parallel-size {size} into the levels of --cp-comm-type {name}: "
                    f"give {levels} numbers of at least 2 with that product, or use --cp-comm-type p2p."
                )

    def _check_sharding(self) -> None:
        named = self.data_parallel_sharding_strategy
        if self.use_distributed_optimizer and named == "no_shard":
            raise ConfigError(
                "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy no_shard: remove one."
            )
        if self.use_torch_fsdp2 and named not in (None, "optim_grads_params"):
            raise ConfigError(f"--use-torch-fsdp2 contradicts --data-parallel-sharding-strategy {named}: remove one.")
        if self.use_torch_fsdp2 and self.use_distributed_optimizer:
            raise ConfigError(
                "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other; the former also shards the "
                "optimizer state: remove the latter."
            )
        require_flag(
            "--data-parallel-sharding-strategy (in Megatron-LM optim_grads_params by default)",
            named is not None,
            changed_flags(self, "use_megatron_fsdp"),
        )
        is_fully_sharded = self.sharding_strategy == "optim_grads_params"
        dependent = changed_flags(self, "torch_fsdp2_reshard_after_forward", "defer_grad_reduce")
        require_flag("--use-torch-fsdp2", is_fully_sharded, dependent)
        buckets = values_of(self, "ddp_bucket_size", "ddp_num_buckets")
        given = [f"{flag} {value}" for flag, value in buckets.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} exclude each other: remove one of them.")
        if is_fully_sharded and given:
            raise ConfigError(
                f"{given[0]} has no effect with {self.sharding_strategy}, where a layer is a bucket: remove it."
            )
