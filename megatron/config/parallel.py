"""Flags for the parallel layout."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least, require_positive

RANK_AXES = ("tp", "cp", "ep", "pp", "dp")
"""Axes of the rank grid, in the default order from neighbouring ranks to distant ones."""

ContextParallelType = Literal["p2p", "allgather", "a2a"]
ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks divide the model and the batch; data parallelism takes the ranks that are left."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer."""
    sequence_parallel: bool = False
    """Also split the activations between the tensor-parallel regions, along the sequence."""
    tp_comm_overlap: bool = False
    """Run the collectives of --sequence-parallel behind the matrix products beside them: by PyTorch's symmetric memory
    where the GPUs of the tensor-parallel ranks read each other's memory, else part by part. Layers of
    --transformer-impl transformer_engine have an overlap of their own."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers, each holding some of them; see the pipeline flags."""
    context_parallel_size: int = 1
    """Ranks that share a sequence, for long ones; each holds two chunks of it, one from either side."""
    cp_comm_type: tuple[ContextParallelType, ...] = ("p2p",)
    """How context-parallel ranks bring queries and keys together: keys and values travel round a ring behind the
    computation (p2p), every rank gathers them (allgather), or ranks exchange positions for attention heads (a2a). One
    for all layers, or one for each."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts; 1 for now."""
    rank_order: str = "-".join(RANK_AXES)
    """Axes of the rank grid from neighbouring ranks to distant ones."""
    use_tp_pp_dp_mapping: bool = False
    """Another spelling of the default --rank-order, tp-cp-ep-pp-dp. (Megatron-LM's default is tp-cp-ep-dp-pp.)"""
    disable_gloo_process_groups: bool = True
    """States what is so: on GPUs there are no process groups of gloo beside NCCL's."""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """What data-parallel ranks share: no_shard (default) replicates everything, optim divides master weights and
    optimizer state (ZeRO-1), optim_grads also gradients, which are then reduced with every microbatch (ZeRO-2),
    optim_grads_params also weights, which are gathered layer by layer when they are used (ZeRO-3, by PyTorch's
    FSDP2)."""
    use_distributed_optimizer: bool = False
    """The usual spelling of --data-parallel-sharding-strategy optim."""
    use_torch_fsdp2: bool = False
    """The usual spelling of --data-parallel-sharding-strategy optim_grads_params."""
    torch_fsdp2_reshard_after_forward: bool = True
    """optim_grads_params: free a layer's weights after its forward pass and gather them again for its backward pass.
    With --no-torch-fsdp2-reshard-after-forward they are gathered once a step and stay to its end: less
    communication, above all in pipelines and with several microbatches, for the memory of whole weights."""
    defer_grad_reduce: bool = False
    """optim_grads_params: keep whole gradients and reduce them once, with the last microbatch, instead of with each."""
    num_distributed_optimizer_instances: int = 1
    """Shard inside groups of data-parallel size / this many neighbouring ranks, replicate across the groups (with
    optim_grads_params: HSDP)."""
    overlap_grad_reduce: bool = False
    """Start reducing a bucket of gradients over the data-parallel ranks as soon as its last gradient is there, while
    the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather the updated weights, bucket by bucket, while the next forward pass goes on; for sharded strategies. With
    optim_grads_params: gather each layer while the one before it is computed, forward and backward."""
    ddp_bucket_size: int | None = None
    """Elements of a bucket, which is reduced and gathered at once (default: all in one; with overlap or optim_grads
    40 million, or 1 million x data-parallel size where that is more). Under optim_grads_params a layer is a bucket."""
    ddp_num_buckets: int | None = None
    """Cut a rank's weights into about this many buckets, instead of giving --ddp-bucket-size."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Backend of the process groups (default: nccl with GPUs, else gloo)."""
    distributed_timeout_minutes: float = 10.0
    """Time after which a collective that does not complete ends the run."""

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        if self.use_torch_fsdp2:
            return "optim_grads_params"
        return "optim" if self.use_distributed_optimizer else "no_shard"

    def data_parallel_replicas(self, data_parallel_size: int) -> int:
        """Number of shard groups: one for each rank without sharding, else the optimizer instances asked for."""
        return data_parallel_size if self.sharding_strategy == "no_shard" else self.num_distributed_optimizer_instances

    def bucket_size(self, data_parallel_size: int, num_elements: int) -> int | None:
        """Elements of a bucket of a rank with ``num_elements`` in all; None for all in one."""
        if self.ddp_num_buckets is not None:
            return -(-num_elements // self.ddp_num_buckets)
        uses_buckets = self.overlap_grad_reduce or self.overlap_param_gather or self.sharding_strategy == "optim_grads"
        if self.ddp_bucket_size is not None or not uses_buckets:
            return self.ddp_bucket_size
        # More ranks cut a bucket into smaller messages, which are then bound by latency.
        return max(40_000_000, 1_000_000 * data_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model and work on one sample."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among ``world_size`` ranks; raises :class:`ConfigError` if they do not divide."""
        if world_size % self.model_parallel_size:
            raise ConfigError(
                f"{world_size} processes cannot be divided into copies of "
                f"--tensor-model-parallel-size {self.tensor_model_parallel_size} x "
                f"--pipeline-model-parallel-size {self.pipeline_model_parallel_size} x "
                f"--context-parallel-size {self.context_parallel_size} = {self.model_parallel_size} ranks: "
                "start a multiple of that many processes, or lower a size."
            )
        return world_size // self.model_parallel_size

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        sizes = {
            "--tensor-model-parallel-size": self.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
            "--context-parallel-size": self.context_parallel_size,
            "--expert-model-parallel-size": self.expert_model_parallel_size,
            "--num-distributed-optimizer-instances": self.num_distributed_optimizer_instances,
        }
        require_at_least(
            1, sizes | {"--ddp-bucket-size": self.ddp_bucket_size, "--ddp-num-buckets": self.ddp_num_buckets}
        )
        require_positive({"--distributed-timeout-minutes": self.distributed_timeout_minutes})
        if sorted(self.rank_order.split("-")) != sorted(RANK_AXES):
            raise ConfigError(
                f"--rank-order {self.rank_order} must name each of {', '.join(RANK_AXES)} once: for example "
                f"{'-'.join(RANK_AXES)}."
            )
        if self.use_tp_pp_dp_mapping and self.rank_order != "-".join(RANK_AXES):
            raise ConfigError(f"--use-tp-pp-dp-mapping contradicts --rank-order {self.rank_order}: remove one.")
        if not self.disable_gloo_process_groups:
            raise ConfigError(
                "--no-disable-gloo-process-groups asks for process groups that nothing would use: remove it."
            )
        for flag, size in sizes.items():
            if flag.split("-")[2] == "expert" and size > 1:
                raise ConfigError(
                    f"{flag} {size} is not supported yet: use tensor, context, pipeline and data parallelism."
                )
        if self.overlap_param_gather and self.sharding_strategy == "no_shard":
            raise ConfigError(
                "--overlap-param-gather has nothing to gather without sharding: add --use-distributed-optimizer, or "
                "remove it."
            )
        self._check_sharding()

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
                "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other, since the former shards the "
                "optimizer, too: remove the latter."
            )
        is_fully_sharded = self.sharding_strategy == "optim_grads_params"
        for flag, is_given in (
            ("--no-torch-fsdp2-reshard-after-forward", not self.torch_fsdp2_reshard_after_forward),
            ("--defer-grad-reduce", self.defer_grad_reduce),
        ):
            if is_given and not is_fully_sharded:
                raise ConfigError(f"{flag} belongs to --use-torch-fsdp2: add that, or remove {flag}.")
        buckets = {"--ddp-bucket-size": self.ddp_bucket_size, "--ddp-num-buckets": self.ddp_num_buckets}
        given = [f"{flag} {value}" for flag, value in buckets.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} both cut the buckets: remove one of them.")
        if is_fully_sharded and given:
            raise ConfigError(
                f"{given[0]} does not go with {self.sharding_strategy}, which gathers and reduces a layer at a time: "
                "remove it."
            )
