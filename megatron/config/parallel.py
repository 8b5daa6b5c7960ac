"""Flags for the parallel layout: its sizes, what context-parallel ranks exchange, the sharding of data parallelism, the
pipeline schedule, and which layers each pipeline stage holds."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm, prod
from typing import TYPE_CHECKING, Annotated, Literal

from megatron.errors import ConfigError
from megatron.flags import Argument, changed_flags, flag_of, require_at_least, require_flag, require_positive, values_of
from megatron.schedules.catalog import SCHEDULES, ScheduleName
from megatron.schedules.stages import (
    VirtualStage,
    check_that_no_rank_idles,
    chunks_of_layers,
    split_around_ends,
    split_by_layout,
    split_evenly,
)

Exchange = Literal["p2p", "allgather", "a2a"]


@dataclass(frozen=True)
class ContextParallelSpec:
    """One value of --cp-comm-type."""

    levels: tuple[Exchange, ...]
    """The exchanges, from groups of neighbouring ranks outwards. All but the last are a2a."""
    summary: str
    """For --help."""

    def level_sizes(self, context_parallel_size: int, hierarchical_sizes: Sequence[int]) -> tuple[int, ...]:
        """Ranks of each level."""
        return tuple(hierarchical_sizes) if len(self.levels) > 1 else (context_parallel_size,)

    def head_divisor(self, level_sizes: Sequence[int]) -> int:
        """The number of ranks over which attention heads are divided."""
        return prod(size for level, size in zip(self.levels, level_sizes, strict=True) if level == "a2a")


CONTEXT_PARALLEL_TYPES = {
    "p2p": ContextParallelSpec(("p2p",), "keys and values in a ring, overlapped with attention"),
    "allgather": ContextParallelSpec(("allgather",), "an all-gather of keys and values"),
    "a2a": ContextParallelSpec(("a2a",), "an all-to-all from a shard of the sequence to a shard of the heads"),
    "a2a+p2p": ContextParallelSpec(
        ("a2a", "p2p"),
        "a2a in groups of neighbouring ranks, p2p across groups: --hierarchical-context-parallel-sizes",
    ),
}

if TYPE_CHECKING:
    ContextParallelType = str
else:
    ContextParallelType = Literal[tuple(CONTEXT_PARALLEL_TYPES)]
    """The choices of --cp-comm-type."""


# Axes of the rank grid, in the default order from neighbouring ranks to distant ones.
RANK_AXES = ("tp", "cp", "ep", "pp", "dp")

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
_TYPES = ", ".join(f"{name} ({spec.summary})" for name, spec in CONTEXT_PARALLEL_TYPES.items())
_CP_COMM_TYPE_HELP = f"Communication of context parallelism: {_TYPES}. One for all layers, or one per layer."


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout. Data-parallel size = number of ranks / (tensor x context x pipeline-parallel size)."""

    # Tensor parallelism: tp ranks divide every layer
    tensor_model_parallel_size: int = 1
    """Tensor-parallel size: ranks that share every layer."""
    sequence_parallel: bool = False
    """Shard the activations outside of the tensor-parallel regions along the sequence."""
    tp_comm_overlap: bool = False
    """Overlap the collectives of --sequence-parallel with the adjacent matrix multiplications: with PyTorch's symmetric
    memory where the GPUs of the tensor-parallel ranks can access each other's memory, otherwise with sends and receives
    of shards. --transformer-impl transformer_engine uses its own overlap."""
    # Pipeline parallelism: pp stages of layers
    pipeline_model_parallel_size: int = 1
    """Pipeline-parallel size: ranks among which the layers are divided; see the pipeline flags."""
    # Context parallelism: cp ranks divide a sequence
    context_parallel_size: int = 1
    """Context-parallel size: ranks that share a sequence. Each holds two of 2 x size chunks, one from either end."""
    cp_comm_type: Annotated[tuple[ContextParallelType, ...], Argument(help=_CP_COMM_TYPE_HELP)] = ("p2p",)
    """Communication of context parallelism:"""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """Sizes of the levels of --cp-comm-type a2a+p2p: ranks per all-to-all group, then number of groups (ranks of a
    ring). Their product is --context-parallel-size."""
    # Expert parallelism folds ep x etp out of the ranks of a stage
    expert_model_parallel_size: int = 1
    """Expert-parallel size: ranks among which the experts of a layer are divided. They are ranks of the same stage, so
    the size multiplies neither the number of ranks nor divides the batch."""
    expert_tensor_parallel_size: int | None = None
    """Tensor-parallel size of the experts: ranks that share every expert (default: --tensor-model-parallel-size). 1 is
    usually faster with small experts."""
    # The rank grid
    rank_order: str = "-".join(RANK_AXES)
    """Axes of the rank grid, from the fastest-varying rank to the slowest."""
    use_tp_pp_dp_mapping: bool = False
    """Same as --rank-order tp-cp-ep-pp-dp, the default. (Megatron-LM's default is tp-cp-ep-dp-pp.)"""
    # Data parallelism: dp replicas, and what they shard
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
    # Buckets, and overlap with computation
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
    # Process groups
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
        # The ranks of a stage are tp x cp x dp for dense layers, and etp x ep x edp for experts.
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
        sizes = [field.name for field in fields(self) if field.name.endswith("_parallel_size")]
        buckets = values_of(self, "ddp_bucket_size", "ddp_num_buckets")
        require_at_least(1, values_of(self, *sizes, "num_distributed_optimizer_instances") | buckets)
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


_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_LAYOUT = ("pipeline_model_parallel_layout",)
_GROUP_SIZE = "microbatch_group_size_per_virtual_pipeline_stage"

_EXCLUSIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (_LAYOUT, _CHUNKS + _ENDS + _ACCOUNT, "remove one of them"),
    (_ENDS, _ACCOUNT, "remove one of them"),
    (_ENDS, _CHUNKS[:1], "set the number of chunks with --num-virtual-stages-per-pipeline-rank instead"),
)
_SUMMARIES = ", ".join(f"{name} ({spec.summary})" for name, spec in SCHEDULES.items())
_SCHEDULE_HELP = f"Pipeline schedule. No effect without pipeline parallelism. Choices: {_SUMMARIES}."


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline schedule, and division of the layers among the pipeline stages."""

    # Schedule and chunks of a rank
    pipeline_schedule: Annotated[ScheduleName | None, Argument(help=_SCHEDULE_HELP)] = None
    """Pipeline schedule. No effect without pipeline parallelism."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per model chunk, for --pipeline-schedule interleaved."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks per pipeline rank, instead of --num-layers-per-virtual-pipeline-stage."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Interleaved: consecutive microbatches of a chunk before the next chunk (default and minimum:
    --pipeline-model-parallel-size)."""
    # Division of the layers
    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first pipeline rank, in all its chunks; the others share the remaining layers evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last pipeline rank, in all its chunks; the others share the remaining layers evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer, so that the first stage has one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as a layer, so that the last stage has one layer less."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage as a quoted string: E is the embedding, t a layer, L the output layer with the loss, | ends
    a stage, t*3 and (tt|)*3 repeat: "Et*3|(tt|)*6tL" has 3, six times 2, and 1 layers. The number of stages is the
    number of pipeline ranks, or a multiple of it for several chunks per rank."""
    # Communication
    overlap_p2p_communication: bool = True
    """Overlap receives of activations and gradients with computation."""

    def check(self) -> None:
        require_at_least(1, values_of(self, *_CHUNKS, *_ENDS, _GROUP_SIZE))
        for left, right, remedy in _EXCLUSIONS:
            if (ours := changed_flags(self, *left)) and (others := changed_flags(self, *right)):
                raise ConfigError(f"{ours[0]} and {others[0]} exclude each other: {remedy}.")
        ends = changed_flags(self, *_ENDS)
        if ends and self.pipeline_schedule is not None and SCHEDULES[self.pipeline_schedule].placement == "v":
            raise ConfigError(
                f"{ends[0]} is not supported with --pipeline-schedule {self.pipeline_schedule}, which places both ends "
                "of the model on the first pipeline rank: use --account-for-embedding-in-pipeline-split and "
                "--account-for-loss-in-pipeline-split, or --pipeline-model-parallel-layout."
            )

    def check_stages(self, num_layers: int, num_stages: int) -> None:
        pipelined = changed_flags(self, *_CHUNKS, *_ENDS, *_ACCOUNT, *_LAYOUT, _GROUP_SIZE)
        require_flag("--pipeline-model-parallel-size of 2 or more", num_stages > 1, pipelined[:1])
        schedule, size = self.schedule(num_layers, num_stages), self.microbatch_group_size_per_virtual_pipeline_stage
        if size is not None and not SCHEDULES[schedule].groups_microbatches:
            grouped = " or ".join(name for name, spec in SCHEDULES.items() if spec.groups_microbatches)
            raise ConfigError(
                f"{flag_of(_GROUP_SIZE)} {size} needs --pipeline-schedule {grouped}, but the schedule is {schedule}: "
                "remove it, or use that schedule with --num-virtual-stages-per-pipeline-rank."
            )
        if size is not None and size < num_stages:
            raise ConfigError(
                f"{flag_of(_GROUP_SIZE)} {size} is below --pipeline-model-parallel-size {num_stages}, which would "
                f"deadlock: use {num_stages} or more."
            )
        self.virtual_stages(num_layers, num_stages)

    def num_chunks(self, num_layers: int, num_stages: int) -> int:
        """Model chunks on each of ``num_stages`` pipeline ranks."""
        if num_stages == 1:
            return 1
        if self.pipeline_model_parallel_layout is not None:
            return len(split_by_layout(self.pipeline_model_parallel_layout, num_layers, num_stages)) // num_stages
        if self.num_layers_per_virtual_pipeline_stage is not None:
            layers, wanted = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
            chunks = chunks_of_layers(num_layers, num_stages, layers, *self._account)
            if wanted not in (None, chunks):
                raise ConfigError(
                    f"--num-layers-per-virtual-pipeline-stage {layers} means {chunks} chunks per pipeline rank, but "
                    f"--num-virtual-stages-per-pipeline-rank is {wanted}: remove one of them."
                )
            return chunks
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        needs_two = self.pipeline_schedule is not None and SCHEDULES[self.pipeline_schedule].chunks == "two chunks"
        return 2 if needs_two else 1

    def schedule(self, num_layers: int, num_stages: int) -> str:
        """The effective schedule; raises :class:`ConfigError` if it does not support the number of chunks."""
        if num_stages == 1:
            return "1f1b"  # One rank never waits for another: any other order would only save more activations.
        chunks = self.num_chunks(num_layers, num_stages)
        name = self.pipeline_schedule or ("interleaved" if chunks > 1 else "1f1b")
        if SCHEDULES[name].allows(chunks):
            return name
        remedy = "add --num-virtual-stages-per-pipeline-rank 2, or more"
        asked_by = changed_flags(self, *_LAYOUT, *_CHUNKS)
        if asked_by:
            use = "use --pipeline-schedule interleaved"
            remedy = (
                f"change {asked_by[0]}, or {use if SCHEDULES[name].allows(1) else 'choose another --pipeline-schedule'}"
            )
        raise ConfigError(
            f"--pipeline-schedule {name} needs {SCHEDULES[name].chunks} per pipeline rank, not {chunks}: {remedy}."
        )

    def virtual_stages(self, num_layers: int, num_stages: int) -> tuple[VirtualStage, ...]:
        """The virtual stages in the order of their layers; raises :class:`ConfigError` for an impossible division."""
        if num_stages == 1:
            return split_evenly(num_layers, num_stages)
        if self.pipeline_model_parallel_layout is not None:
            stages = split_by_layout(self.pipeline_model_parallel_layout, num_layers, num_stages)
            shape = SCHEDULES[self.schedule(num_layers, num_stages)].placement
            check_that_no_rank_idles(self.pipeline_model_parallel_layout, stages, num_stages, shape)
            return stages
        # 8 layers, 2 ranks, 2 chunks: rank 0 has virtual stages 0 and 2 (layers 0 1 and 4 5), rank 1 has 1 and 3
        chunks = self.num_chunks(num_layers, num_stages)
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if first is not None or last is not None:
            return split_around_ends(num_layers, num_stages, chunks, first, last)
        return split_evenly(num_layers, num_stages, chunks, *self._account)

    @property
    def _account(self) -> tuple[bool, bool]:
        return self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
