"""All layouts that are worth a price: the product of the sizes and choices, pruned by divisibility and by sense."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.checks import check_run
from megatron.config.parallel import ShardingStrategy
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.search.layout import Layout, divides_layers
from megatron.schedules.registry import SCHEDULES
from megatron.training.batch_schedule import build_batch_schedule

SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
SHORTEST_PART = 2048
"""Tokens of a sequence on a rank below which more context parallelism is not searched: attention of fewer is shorter
than the exchange of its keys and values."""
LONGEST_MICROBATCH = 16384
"""Tokens of a microbatch above which it is one sequence."""
LARGEST_MICROBATCH = 8
"""Sequences."""
_RECOMPUTE = ("layernorm", "mlp_act", "layernorm+mlp_act", "core_attn")
_FARTHEST = 1024
"""How far from a number of GPUs another one is searched."""
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
    config: RunConfig, architecture: TransformerConfig, num_gpus: int, node_size: int, given: Collection[str] = ()
) -> list[Layout]:
    """The layouts of ``config`` over ``num_gpus`` GPUs in nodes of ``node_size``.

    ``given`` are the names of the fields of ``config`` that the user set: constraints, with which every layout agrees.
    Each layout, applied to ``config``, passes :func:`check_run` and divides every global batch of the run.

    Not searched, unless given: tensor parallelism beyond a node, whose all-reduces would be between nodes; context
    parallelism with fewer than ``SHORTEST_PART`` tokens of a sequence on a rank; microbatches of several sequences with
    context parallelism, of more than ``LONGEST_MICROBATCH`` tokens or ``LARGEST_MICROBATCH`` sequences, or fewer than
    pipeline stages; interleaving with fewer microbatches than stages; fully sharded weights with pipeline parallelism,
    which would be gathered for every microbatch; tensor parallelism without sequence parallelism; sharded experts
    (``etp``) with expert parallelism, and over other than the tensor-parallel ranks; gradients that are both sharded
    (``optim_grads``) and reduced in bf16; full recompute of other than half or all layers of a chunk.
    """
    space = _Space(config, architecture, num_gpus, node_size, frozenset(given))
    return [layout for sizes in space.grids() for layout in space.layouts(sizes)]


def nearest_counts(
    config: RunConfig, architecture: TransformerConfig, num_gpus: int, node_size: int, given: Collection[str] = ()
) -> list[int]:
    """The next lower and the next higher number of GPUs with a layout, as far as there is one."""

    def has_layout(count: int) -> bool:
        space = _Space(config, architecture, count, node_size, frozenset(given))
        return any(True for sizes in space.grids() for _ in space.layouts(sizes))

    lower = next(filter(has_layout, range(num_gpus - 1, max(num_gpus - _FARTHEST, 1) - 1, -1)), None)
    higher = next(filter(has_layout, range(num_gpus + 1, num_gpus + _FARTHEST)), None)
    return [count for count in (lower, higher) if count is not None]


@dataclass(frozen=True)
class _Grid:
    """The sizes of the axes, and the division of the layers."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class _Pipeline:
    schedule: str
    vp: int
    counts_ends: bool
    layers: int
    """Of the longest chunk."""


@dataclass(frozen=True)
class _Space:
    config: RunConfig
    architecture: TransformerConfig
    num_gpus: int
    node_size: int
    given: frozenset[str]

    def grids(self) -> Iterator[_Grid]:
        parallel = self.config.parallel
        for tp in self._sizes("tensor_model_parallel_size", parallel.tensor_model_parallel_size, self.num_gpus):
            if not self._allows_tensor_parallel(tp):
                continue
            rest = self.num_gpus // tp
            for pp in self._sizes("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, rest):
                if pp > self.architecture.num_layers + 2:
                    continue
                of_stage = rest // pp
                for cp in self._sizes("context_parallel_size", parallel.context_parallel_size, of_stage):
                    dp = of_stage // cp
                    if self._allows_context_parallel(tp, cp) and self._batch % dp == 0:
                        for ep, etp in self._expert_sizes(tp, of_stage * tp):
                            yield _Grid(tp, pp, cp, dp, ep, etp)

    def layouts(self, grid: _Grid) -> Iterator[Layout]:
        """The layouts of one grid. The first of those that differ in recompute, microbatch and gradient precision is
        checked for all."""
        for pipeline in self._pipelines(grid.pp):
            for sharding, replicas in self._shardings(grid):
                checked = False
                for size, recompute, narrow in product(
                    self._micro_batch_sizes(grid, pipeline),
                    self._recomputes(pipeline),
                    self._gradient_formats(sharding),
                ):
                    layout = self._layout(grid, pipeline, sharding, replicas, size, recompute, narrow)
                    if not checked and not self._is_valid(layout):
                        break
                    checked = True
                    yield layout

    def _layout(
        self,
        grid: _Grid,
        pipeline: _Pipeline,
        sharding: ShardingStrategy,
        replicas: int,
        micro_batch_size: int,
        recompute: tuple[str, int],
        reduces_in_bf16: bool,
    ) -> Layout:
        return Layout(
            tp=grid.tp,
            pp=grid.pp,
            cp=grid.cp,
            dp=grid.dp,
            ep=grid.ep,
            etp=grid.etp,
            vp=pipeline.vp,
            schedule=pipeline.schedule,
            counts_ends=pipeline.counts_ends,
            sharding=sharding,
            replicas=replicas,
            micro_batch_size=micro_batch_size,
            recompute=recompute[0],
            recompute_layers=recompute[1],
            reduces_in_bf16=reduces_in_bf16,
            sequence_parallel=self._sequence_parallel,
        )

    def _is_valid(self, layout: Layout) -> bool:
        try:
            check_run(layout.apply(self.config, self.given), self.num_gpus)
        except ConfigError:
            return False
        return True

    @property
    def _sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel if "sequence_parallel" in self.given else True

    def _sizes(self, name: str, value: int, ranks: int) -> list[int]:
        """The given size, if it divides ``ranks``, or all divisors."""
        if name in self.given:
            return [value] if ranks % value == 0 else []
        return [size for size in range(1, ranks + 1) if ranks % size == 0]

    def _allows_tensor_parallel(self, tp: int) -> bool:
        model = self.architecture
        if tp > self.node_size and "tensor_model_parallel_size" not in self.given:
            return False
        divided = [model.num_attention_heads, model.num_query_groups]
        if not all(model.moe_layers()):
            divided.append(model.ffn_hidden_size)
        if self._sequence_parallel:
            divided.append(self.config.seq_length)
        return all(value % tp == 0 for value in divided)

    def _allows_context_parallel(self, tp: int, cp: int) -> bool:
        length = self.config.seq_length
        if cp > 1 and length // cp < SHORTEST_PART and "context_parallel_size" not in self.given:
            return False
        return cp == 1 or (length % (2 * cp) == 0 and (not self._sequence_parallel or length % (cp * tp) == 0))

    def _expert_sizes(self, tp: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Expert-parallel and expert-tensor-parallel sizes over the ``ranks`` of a stage."""
        experts, parallel = self.architecture.num_experts, self.config.parallel
        if experts is None:
            yield 1, 1
            return
        is_given = "expert_tensor_parallel_size" in self.given
        for ep in self._sizes("expert_model_parallel_size", parallel.expert_model_parallel_size, experts):
            divided = {1, tp} if ep == 1 else {1}
            for etp in (parallel.expert_tensor_parallel_size or tp,) if is_given else sorted(divided):
                if ranks % (ep * etp) == 0:
                    yield ep, etp

    @cached_property
    def _batch(self) -> int:
        """What the sequences of one microbatch of all replicas must divide."""
        training = self.config.training
        schedule = build_batch_schedule(
            micro_batch_size=1,
            data_parallel_size=1,
            global_batch_size=training.global_batch_size,
            rampup_batch_size=training.rampup_batch_size,
            step_batch_size_schedule=training.step_batch_size_schedule,
            seq_length=self.config.seq_length,
        )
        return gcd(*(size for _, size in schedule.steps), self.config.validation.eval_global_batch_size or 0)

    def _num_microbatches(self, grid: _Grid, size: int) -> int:
        return self._batch // (grid.dp * size)

    def _micro_batch_sizes(self, grid: _Grid, pipeline: _Pipeline) -> Iterator[int]:
        given = "micro_batch_size" in self.given
        size = self.config.micro_batch_size if given else 1
        while self._batch % (grid.dp * size) == 0:
            is_small = size <= LARGEST_MICROBATCH and size * self.config.seq_length <= LONGEST_MICROBATCH
            count = self._num_microbatches(grid, size)
            if not given and size > 1 and (grid.cp > 1 or not is_small or count < grid.pp):
                return
            if pipeline.schedule != "interleaved" or count >= grid.pp or "pipeline_schedule" in self.given:
                yield size
            if given:
                return
            size *= 2

    def _pipelines(self, pp: int) -> Iterator[_Pipeline]:
        if pp == 1:
            yield _Pipeline("1f1b", 1, False, self.architecture.num_layers)
            return
        pipeline = self.config.pipeline
        wanted = pipeline.pipeline_schedule if "pipeline_schedule" in self.given else None
        for name in (wanted,) if wanted is not None else SEARCHED_SCHEDULES:
            for vp in self._chunks(name, pp):
                for counts_ends in (False,) if divides_layers(self.given) else (False, True):
                    layers = self._longest_chunk(pp, vp, name, counts_ends)
                    if layers:
                        yield _Pipeline(name, vp, counts_ends, layers)
                        break

    def _chunks(self, schedule: str, pp: int) -> list[int]:
        spec = SCHEDULES[schedule]
        if not self.given.isdisjoint(_CHUNK_FLAGS):
            try:
                wanted = self.config.pipeline.num_chunks(self.architecture.num_layers, pp)
            except ConfigError:
                return []
            return [wanted] if spec.allows(wanted) else []
        return [vp for vp in range(1, (self.architecture.num_layers + 2) // pp + 1) if spec.allows(vp)]

    def _longest_chunk(self, pp: int, vp: int, schedule: str, counts_ends: bool) -> int:
        """Layers of the longest chunk; 0 if the layers cannot be divided."""
        layout = self._layout(
            _Grid(1, pp, 1, 1, 1, 1), _Pipeline(schedule, vp, counts_ends, 0), "optim", 1, 1, ("none", 0), False
        )
        try:
            pipeline = layout.apply(self.config, self.given).pipeline
            stages = pipeline.virtual_stages(self.architecture.num_layers, pp)
        except ConfigError:
            return 0
        return max(len(stage.layers) for stage in stages)

    def _shardings(self, grid: _Grid) -> Iterator[tuple[ShardingStrategy, int]]:
        """Strategies, each with its copies of a shard."""
        parallel = self.config.parallel
        of_experts = grid.tp * grid.cp * grid.dp // (grid.ep * grid.etp) if self.architecture.num_experts else 1
        strategies: tuple[ShardingStrategy, ...] = ("optim", "optim_grads", "optim_grads_params")
        if not self.given.isdisjoint(_SHARDING):
            strategies = (parallel.sharding_strategy,)
        elif max(grid.cp * grid.dp, of_experts) == 1:
            strategies = ("no_shard",)
        elif grid.pp > 1:
            strategies = ("optim", "optim_grads")
        for strategy in strategies:
            if "num_distributed_optimizer_instances" in self.given:
                yield strategy, parallel.num_distributed_optimizer_instances
                continue
            yield strategy, 1
            nodes = grid.tp * grid.cp * grid.dp // self.node_size
            if strategy == "optim_grads_params" and nodes > 1 and grid.dp % nodes == 0 and of_experts % nodes == 0:
                yield strategy, nodes

    def _recomputes(self, pipeline: _Pipeline) -> Iterator[tuple[str, int]]:
        activations = self.config.activations
        if not self.given.isdisjoint(_RECOMPUTE_FLAGS):
            if activations.granularity != "full":
                yield "+".join(sorted(activations.modules)) or "none", 0
                return
            if "recompute_num_layers" in self.given:
                yield (
                    "uniform" if activations.recompute_method == "uniform" else "full",
                    (activations.recompute_num_layers or 1),
                )
                return
        else:
            yield "none", 0
            for modules in _RECOMPUTE:
                yield self._in_these_layers(modules), 0
        if activations.recompute_method != "uniform" or "recompute_method" not in self.given:
            for layers in sorted({pipeline.layers // 2, pipeline.layers} - {0}):
                yield "full", layers
        else:
            yield "uniform", 1

    def _in_these_layers(self, modules: str) -> str:
        """``modules`` of dense layers as modules of the layers of this model."""
        is_moe = self.architecture.moe_layers()
        both = {True: "moe_act" if all(is_moe) else "mlp_act+moe_act", False: "mlp_act"}[any(is_moe)]
        return modules.replace("mlp_act", both)

    def _gradient_formats(self, sharding: ShardingStrategy) -> tuple[bool, ...]:
        precision = self.config.precision
        if not self.given.isdisjoint(_GRADIENT_FLAGS) or not precision.bf16 or self.config.kernels.wanted("adam"):
            return (precision.grad_reduce_in_bf16,)
        return (False,) if sharding == "optim_grads" else (False, True)
