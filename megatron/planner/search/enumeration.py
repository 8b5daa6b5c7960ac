"""All layouts that are worth a price: the product of the sizes and choices, pruned by divisibility and by sense."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice, product
from math import gcd, isqrt

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.checks import check_run
from megatron.config.checks.model import (
    check_transformer_engine,
    check_transformer_engine_buffers,
    check_transformer_engine_overlap,
)
from megatron.config.parallel import ShardingStrategy
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.search.layout import Job, Layout, divides_layers
from megatron.planner.step_time.workload import Cluster
from megatron.schedules.catalog import SCHEDULES
from megatron.training.batch_schedule import build_batches

SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
SHORTEST_PART = 2048
"""Tokens of a sequence on a rank below which more context parallelism is not searched: attention of fewer is shorter
than the exchange of its keys and values."""
LONGEST_MICROBATCH = 16384
"""Tokens of a microbatch above which it is one sequence."""
LARGEST_MICROBATCH = 8
"""Sequences."""
MOST_STAGES = 32
"""Pipeline stages above which deeper pipelines are not searched."""
RECOMPUTE = ("none", "layernorm", "mlp_act", "layernorm+mlp_act", "core_attn")
_FARTHEST = 4096
"""Distance from a number of GPUs to which another one is searched."""
_SHARDING = ("data_parallel_sharding_strategy", "use_distributed_optimizer", "use_torch_fsdp2")
_RECOMPUTE_FLAGS = (
    "recompute_granularity",
    "recompute_activations",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
)
_CHUNK_FLAGS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)
_GRADIENT_FLAGS = ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "main_grads_dtype")
LAYOUT_FIELDS = frozenset(
    (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
        "micro_batch_size",
        "pipeline_schedule",
        *_CHUNK_FLAGS,
        *_SHARDING,
    )
)
"""Fields whose flags fix a part of the layout."""


def enumerate_layouts(
    config: RunConfig, architecture: TransformerConfig, num_gpus: int, cluster: Cluster, given: Collection[str] = ()
) -> list[Layout]:
    """The layouts of ``config`` over ``num_gpus`` GPUs of ``cluster``.

    ``given`` are the names of the fields of ``config`` that the user set: constraints, with which every layout agrees.
    Each layout, applied to ``config``, passes :func:`check_run` and divides every global batch of the run.

    Not searched, unless given: tensor parallelism beyond a node, whose all-reduces would be between nodes; context
    parallelism with fewer than ``SHORTEST_PART`` tokens of a sequence on a rank; microbatches of several sequences with
    context parallelism, of more than ``LONGEST_MICROBATCH`` tokens or ``LARGEST_MICROBATCH`` sequences, or fewer than
    pipeline stages; pipelines of more than ``MOST_STAGES`` stages; several chunks on a rank of one layer each;
    interleaving with fewer microbatches than stages; fully sharded weights with pipeline parallelism, which would be
    gathered for every microbatch; tensor parallelism without sequence parallelism; experts that are sharded themselves
    (``etp``); in a node, expert parallelism over fewer ranks than there can be; gradients that are both sharded
    (``optim_grads``) and reduced in bf16; full recompute of other than half or all layers of a chunk.
    """
    return list(_Space(config, architecture, num_gpus, cluster, frozenset(given)).layouts())


def require_layout(job: Job) -> None:
    """Raise :class:`ConfigError` if there is no layout. It takes no longer than to find the first one."""
    if next(_Space.of(job, job.num_gpus).layouts(), None) is None:
        raise no_layout(job)


def no_layout(job: Job) -> ConfigError:
    """Why no layout is possible, and what to change."""
    flags = f"No layout on --num-gpus {job.num_gpus} satisfies the flags"
    batch, size = job.global_batch_size, job.config.micro_batch_size
    if batch % size:
        return ConfigError(f"--global-batch-size {batch} is not divisible by --micro-batch-size {size}: change one.")
    space = _Space.of(job, job.num_gpus)
    first = next((one for variants in space.groups() for one in variants), None)  # valid or not
    if first is not None and (refusal := space.refusal(first)) is not None:
        return ConfigError(f"{flags}: {refusal.sentences[0]}")
    # The nearest numbers of GPUs with a layout, by trying them outwards.
    below = range(job.num_gpus - 1, max(job.num_gpus // 2, job.num_gpus - _FARTHEST, 1) - 1, -1)
    above = range(job.num_gpus + 1, min(2 * job.num_gpus, job.num_gpus + _FARTHEST) + 1)
    possible = ((count for count in counts if any(_Space.of(job, count).layouts())) for counts in (below, above))
    counts = [f"{count:,}" for nearest in possible for count in islice(nearest, 1)]
    other = f"use {' or '.join(counts)} GPUs" if counts else ""
    if job.given & LAYOUT_FIELDS:
        return ConfigError(f"{flags}: remove one that fixes the layout{f', or {other}' if other else ''}.")
    return ConfigError(
        f"--num-gpus {job.num_gpus} has no layout: the tensor-parallel size must divide the "
        f"{job.architecture.num_attention_heads} attention heads, the pipeline size the {job.architecture.num_layers} "
        f"layers, and the data-parallel size --global-batch-size {batch}: {other or 'use another number of GPUs'}."
    )


@dataclass(frozen=True)
class _Space:
    """The layouts of a run under the flags that are ``given``.

    Sizes are chosen from the outside to the inside. A layout is built up on the way::

        tp > pp > cp > ep, etp | schedule, chunks | sharding, replicas | microbatch, recompute, gradients
                               a division of the layers                 | a group, whose first layout is checked
    """

    config: RunConfig
    architecture: TransformerConfig
    num_gpus: int
    cluster: Cluster
    given: frozenset[str]

    @classmethod
    def of(cls, job: Job, num_gpus: int) -> "_Space":
        """The layouts of a job on ``num_gpus`` GPUs."""
        return cls(job.config, job.architecture, num_gpus, job.cluster, job.given)

    @cached_property
    def _base(self) -> Layout:
        """The layout of one GPU."""
        is_parallel = self.config.parallel.sequence_parallel if "sequence_parallel" in self.given else True
        return Layout(1, 1, 1, 1, 1, "1f1b", "optim", 1, "none", sequence_parallel=is_parallel)

    def layouts(self) -> Iterator[Layout]:
        """All valid layouts; the first of a group is checked for all of it."""
        for variants in self.groups():
            first = next(variants, None)
            if first is not None and self.refusal(first) is None:
                yield first
                yield from variants

    def refusal(self, layout: Layout) -> ConfigError | None:
        """What the checks of a run find, and what has no price."""
        if self.architecture.mtp_num_layers and SCHEDULES[layout.schedule].splits_backward:
            return ConfigError(
                f"--pipeline-schedule {layout.schedule} cannot be planned with --mtp-num-layers, whose deferred weight "
                "gradients have no record: use 1f1b or interleaved, or simulate it with --dry-run."
            )
        try:
            check_run(layout.apply(self.config, self.given), self.num_gpus)
        except ConfigError as error:
            return error
        return None

    def groups(self) -> Iterator[Iterator[Layout]]:
        """Groups of layouts that differ in recompute, microbatch and gradient precision alone."""
        for grid in self._grids():
            for piped, longest in self._pipelines(grid):
                for sharding, replicas in self._shardings(grid):
                    sharded = replace(piped, sharding=sharding, replicas=replicas)
                    choices = product(
                        self._micro_batch_sizes(piped), self._recomputes(longest), self._gradient_formats(sharding)
                    )
                    yield (
                        replace(
                            sharded,
                            micro_batch_size=size,
                            recompute=recompute,
                            recompute_layers=layers,
                            reduces_in_bf16=is_narrow,
                        )
                        for size, (recompute, layers), is_narrow in choices
                    )

    def _grids(self) -> Iterator[Layout]:
        """Layouts whose sizes are chosen."""
        parallel = self.config.parallel
        is_piped = not self.given.isdisjoint(("pipeline_model_parallel_size", "pipeline_model_parallel_layout"))
        deepest = self.architecture.num_layers + 2 if is_piped else min(self.architecture.num_layers + 2, MOST_STAGES)
        for tp in self._sizes("tensor_model_parallel_size", parallel.tensor_model_parallel_size, self.num_gpus):
            if not self._allows_tensor_parallel(tp):
                continue
            rest = self.num_gpus // tp
            for pp in self._sizes("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, rest):
                if pp > deepest:
                    continue
                of_stage = rest // pp
                for cp in self._sizes("context_parallel_size", parallel.context_parallel_size, of_stage):
                    dp = of_stage // cp
                    if self._allows_context_parallel(tp, cp) and self._batch % (dp * self._least_microbatch) == 0:
                        grid = replace(self._base, tp=tp, pp=pp, cp=cp, dp=dp)
                        grid = replace(grid, tp_comm_overlap=self._overlaps_tensor_parallel(grid))
                        for ep, etp in self._expert_sizes(tp, of_stage * tp):
                            yield replace(grid, ep=ep, etp=etp)

    def _sizes(self, name: str, value: int, ranks: int) -> list[int]:
        """The given size, if it divides ``ranks``, or all divisors."""
        if name in self.given:
            return [value] if ranks % value == 0 else []
        return _divisors(ranks)

    def _allows_tensor_parallel(self, tp: int) -> bool:
        model = self.architecture
        if tp > self.cluster.node_size and "tensor_model_parallel_size" not in self.given:
            return False
        divided = [model.num_attention_heads, model.num_query_groups]
        if not all(model.moe_layers()):
            # Experts have an expert-tensor-parallel size of their own.
            divided.append(model.ffn_hidden_size)
        if self._base.sequence_parallel:
            divided.append(self.config.seq_length)
        return all(value % tp == 0 for value in divided)

    def _overlaps_tensor_parallel(self, grid: Layout) -> bool:
        """Wherever it hides communication and costs nothing else: with PyTorch's symmetric memory, and in Transformer
        Engine. The overlap by messages, of other GPUs, over nodes, and of FP8 rows, divides the matrix products among
        as many parts as ranks, and copies and adds the parts."""
        if "tp_comm_overlap" in self.given:
            return self.config.parallel.tp_comm_overlap
        if grid.tp == 1 or not self._base.sequence_parallel:
            return False
        if self.config.model.transformer_impl == "local":
            has_symmetric_memory = self.cluster.generation in ("hopper", "blackwell")
            is_in_node = grid.tp <= self.cluster.node_size and self.config.parallel.rank_order.startswith("tp-")
            return has_symmetric_memory and is_in_node and self.config.precision.fp8_format is None
        parallel = replace(self.config.parallel, tensor_model_parallel_size=grid.tp, context_parallel_size=grid.cp)
        run = replace(self.config, parallel=replace(parallel, tp_comm_overlap=True))
        try:
            check_transformer_engine_overlap(run, self.num_gpus)
            check_transformer_engine_buffers(run, self.num_gpus)
        except ConfigError:
            return False
        return True

    def _allows_context_parallel(self, tp: int, cp: int) -> bool:
        length = self.config.seq_length
        if cp > 1 and length // cp < SHORTEST_PART and "context_parallel_size" not in self.given:
            return False
        # A rank has two parts of the sequence, one from each end, so that causal attention is balanced.
        return cp == 1 or (length % (2 * cp) == 0 and (not self._base.sequence_parallel or length % (cp * tp) == 0))

    def _expert_sizes(self, tp: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Expert-parallel and expert-tensor-parallel sizes over the ``ranks`` of a stage."""
        experts, parallel = self.architecture.num_experts, self.config.parallel
        if experts is None:
            yield 1, 1
            return
        etp = (parallel.expert_tensor_parallel_size or tp) if "expert_tensor_parallel_size" in self.given else 1
        sizes = self._sizes("expert_model_parallel_size", parallel.expert_model_parallel_size, experts)
        sizes = [ep for ep in sizes if ranks % (ep * etp) == 0]
        in_node = [ep for ep in sizes if ep * etp <= self.cluster.node_size]
        for ep in sizes:
            # Fewer parts in a node save little of its fast exchange, and cost memory.
            if ep == 1 or ep not in in_node[:-1]:
                yield ep, etp

    @cached_property
    def _batch(self) -> int:
        """What the sequences of one microbatch of all replicas must divide."""
        training = replace(self.config.training, micro_batch_size=1)
        schedule = build_batches(replace(self.config, training=training), 1)
        return gcd(*(size for _, size in schedule.steps), self.config.validation.eval_global_batch_size or 0)

    @property
    def _least_microbatch(self) -> int:
        return self.config.micro_batch_size if "micro_batch_size" in self.given else 1

    def _micro_batch_sizes(self, grid: Layout) -> Iterator[int]:
        given, size = "micro_batch_size" in self.given, self._least_microbatch
        while self._batch % (grid.dp * size) == 0:  # powers of two times the least
            is_small = size <= LARGEST_MICROBATCH and size * self.config.seq_length <= LONGEST_MICROBATCH
            count = self._batch // (grid.dp * size)
            if not given and size > 1 and (grid.cp > 1 or not is_small or count < grid.pp):
                return
            if grid.schedule != "interleaved" or count >= grid.pp or "pipeline_schedule" in self.given:
                yield size
            if given:
                return
            size *= 2

    def _pipelines(self, grid: Layout) -> Iterator[tuple[Layout, int]]:
        """``grid`` with each schedule and division of the layers, and the layers of its longest chunk."""
        if grid.pp == 1:
            yield grid, self.architecture.num_layers
            return
        wanted = self.config.pipeline.pipeline_schedule if "pipeline_schedule" in self.given else None
        for name in (wanted,) if wanted is not None else SEARCHED_SCHEDULES:
            # Whether the flags say how many chunks a rank has.
            has_two = "pipeline_schedule" in self.given and SCHEDULES[name].placement == "v"
            is_fixed = has_two or not self.given.isdisjoint(_CHUNK_FLAGS)
            for vp in self._chunks(name, grid.pp):
                for counts_ends in (False,) if divides_layers(self.given) else (False, True):
                    layout = replace(grid, vp=vp, schedule=name, counts_ends=counts_ends)
                    layers = self._longest_chunk(layout)
                    if layers > 1 or (layers and (vp == 1 or is_fixed)):
                        yield layout, layers
                    if layers:
                        break

    def _chunks(self, schedule: str, pp: int) -> list[int]:
        spec = SCHEDULES[schedule]
        if not self.given.isdisjoint(_CHUNK_FLAGS):
            # The flags say how many; the schedule may not take so many.
            try:
                wanted = self.config.pipeline.num_chunks(self.architecture.num_layers, pp)
            except ConfigError:
                return []
            return [wanted] if spec.allows(wanted) else []
        return [vp for vp in range(1, (self.architecture.num_layers + 2) // pp + 1) if spec.allows(vp)]

    def _longest_chunk(self, layout: Layout) -> int:
        """Layers of the longest chunk; 0 if the layers cannot be divided."""
        try:
            pipeline = layout.apply(self.config, self.given).pipeline
            stages = pipeline.virtual_stages(self.architecture.num_layers, layout.pp)
        except ConfigError:
            return 0
        return max(len(stage.layers) for stage in stages)

    def _shardings(self, grid: Layout) -> Iterator[tuple[ShardingStrategy, int]]:
        """Strategies, each with its copies of a shard."""
        parallel = self.config.parallel
        of_experts = grid.tp * grid.cp * grid.dp // (grid.ep * grid.etp) if self.architecture.num_experts else 1
        strategies: tuple[ShardingStrategy, ...] = ("optim", "optim_grads", "optim_grads_params")
        if not self.given.isdisjoint(_SHARDING):
            strategies = (parallel.sharding_strategy,)
        elif max(grid.cp * grid.dp, of_experts) == 1:
            strategies = ("no_shard",)
        elif grid.pp > 1:
            # Fully sharded weights would be gathered for every microbatch.
            strategies = ("optim", "optim_grads")
        for strategy in strategies:
            if "num_distributed_optimizer_instances" in self.given:
                yield strategy, parallel.num_distributed_optimizer_instances
                continue
            yield strategy, 1
            # Hybrid sharding: a copy of the shards in each node, so that weights are gathered over the fast link.
            nodes = grid.tp * grid.cp * grid.dp // self.cluster.node_size
            if strategy == "optim_grads_params" and nodes > 1 and grid.dp % nodes == 0 and of_experts % nodes == 0:
                yield strategy, nodes

    def _recomputes(self, longest: int) -> Iterator[tuple[str, int]]:
        """What is recomputed, and the layers of a unit; ``longest`` is the number of layers of the longest chunk."""
        activations = self.config.activations
        if not self.given.isdisjoint(_RECOMPUTE_FLAGS):
            if activations.granularity != "full":
                yield "+".join(sorted(activations.modules)) or "none", 0
                return
            if "recompute_num_layers" in self.given:
                method = "uniform" if activations.recompute_method == "uniform" else "full"
                yield method, activations.recompute_num_layers or 1
                return
        else:
            for modules in self._selective_recomputes:
                yield modules, 0
            if not self._supports("full"):
                return
        if activations.recompute_method != "uniform" or "recompute_method" not in self.given:
            for layers in sorted({longest // 2, longest} - {0}):
                yield "full", layers
        else:
            yield "uniform", 1

    @cached_property
    def _selective_recomputes(self) -> tuple[str, ...]:
        # Where they do not even compute without it, the checks of a run say why.
        modules = (modules_in(self.architecture, one) for one in RECOMPUTE)
        return tuple(filter(self._supports, modules)) or RECOMPUTE[:1]

    def _supports(self, recompute: str) -> bool:
        """Whether the layers of ``--transformer-impl`` can recompute that."""
        layout = replace(self._base, recompute=recompute)
        try:
            check_transformer_engine(layout.apply(self.config, self.given), 1)
        except ConfigError:
            return False
        return True

    def _gradient_formats(self, sharding: ShardingStrategy) -> tuple[bool, ...]:
        precision = self.config.precision
        if not self.given.isdisjoint(_GRADIENT_FLAGS) or not precision.bf16 or self.config.kernels.wanted("adam"):
            return (precision.grad_reduce_in_bf16,)
        return (False,) if sharding == "optim_grads" else (False, True)


def modules_in(architecture: TransformerConfig, modules: str) -> str:
    """``modules`` of dense layers as modules of the layers of a model."""
    is_moe = architecture.moe_layers()
    both = {True: "moe_act" if all(is_moe) else "mlp_act+moe_act", False: "mlp_act"}[any(is_moe)]
    return modules.replace("mlp_act", both)


@cache
def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
