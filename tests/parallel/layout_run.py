"""A short training run in any layout, by default in fp64, and everything about it that a layout must not change.

A later parallelism adds fields to :class:`Layout` and rows to the matrix, not files.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.activations import ActivationConfig
from megatron.config.model import MoEConfig, TokenDispatcherType
from megatron.config.parallel import ContextParallelType, ParallelConfig, ShardingStrategy
from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.core.activations import HostCopies
from megatron.core.auxiliary_losses import AuxiliaryLosses
from megatron.core.backends.transformer_engine import TransformerEngineFp8, TransformerEngineProvider
from megatron.core.context_parallel import ContextParallel, ContextSplit
from megatron.core.data_parallel.buffered import wrap_data_parallel
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.models.layer import BuildContext, LocalProvider, TransformerLayer
from megatron.core.models.parallelize import build_executor, build_experts, build_model, chunks_of_stage, freeze
from megatron.core.models.transformer import TransformerModel
from megatron.core.moe.layer import Router
from megatron.core.moe.routing import ExpertBalance, Routing, route
from megatron.core.ops.attention import CAUSAL, AttentionMask, hardest_mask
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.ops.documents import Documents
from megatron.core.ops.fp8 import BlockQuantization, Fp8Kernels, scaled_gemm_reference
from megatron.core.ops.matmul import InPlaceWeightGradient
from megatron.core.optimizer import Optimizer, StepResult
from megatron.core.parameter import Box, ParameterInfo, flat_range_boxes
from megatron.core.pipeline_parallel import PipelineExecutor
from megatron.core.precision import build_loss_scaler, number_formats
from megatron.core.tensor_parallel.collectives import P2POverlap, TensorParallel, TPOverlap
from megatron.core.topology import RankGrid, Topology
from megatron.data.gpt_dataset import add_future_tokens
from megatron.data.loader import Microbatch
from megatron.metrics.timers import Timers
from megatron.schedules.catalog import ScheduleName, build_schedule, placement_of
from megatron.schedules.stages import split_by_layout, split_evenly
from megatron.training.context import TrainModule
from megatron.training.loop.step import StepOutcome, train_step
from tests.late_transport import LateTopology, late_host_copies
from tests.parallel.symmetric_memory import symmetric_memory_overlap_on_cpu
from tests.staged_transport import StagedTopology
from tests.stand_ins import transformer_engine

CPU = torch.device("cpu")
MODEL = TransformerConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=8, num_query_groups=4,
    kv_channels=4, vocab_size=90, padded_vocab_size=96, max_position_embeddings=16, use_rope_scaling=True,
)  # fmt: skip
TIED_MODEL = replace(MODEL, untie_embeddings_and_output_weights=False)
DEEP_MODEL = replace(MODEL, num_layers=8)
DEEP_TIED_MODEL = replace(TIED_MODEL, num_layers=8)
TensorParallelOverlap = Literal["pipelined", "symmetric memory"]
KEEP_ALL = ActivationConfig()
SEQUENCE, BATCH, STEPS, SEED = 16, 16, 2, 7
FP64 = PrecisionConfig(fp64=True)
NO_BALANCE = MoEConfig()


@dataclass(frozen=True)
class Layout:
    """How the run is divided; the default is one process with the whole batch at once."""

    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    strategy: ShardingStrategy = "no_shard"
    instances: int = 1
    microbatches: int = 1
    pp: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int | None = None
    split: str | None = None
    overlap_p2p: bool = True
    bucket_size: int | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    fp8_param_gather: bool = False
    offload: float = 0.0
    """The share of the optimizer state in host memory; not of muon."""
    reshard_after_forward: bool = True
    defer_grad_reduce: bool = False
    cp: int = 1
    cp_comm_type: tuple[ContextParallelType, ...] = ("p2p",)
    cp_sizes: tuple[int, ...] = ()
    """Ranks of each level of a hierarchical type."""
    order: str = "tp-cp-ep-pp-dp"
    activations: ActivationConfig = KEEP_ALL
    tp_overlap: TensorParallelOverlap | None = None
    transformer_engine: bool = False
    """Linear layers are those of the stand-in for Transformer Engine."""
    attention: str = "auto"
    """``--attention-backend``: the reference (``unfused``) computes all documents in one varlen call."""
    late: bool = False
    """Collectives and copies to the host give their results only with their wait, as on GPUs."""
    ep: int = 1
    etp: int = 1
    dispatcher: TokenDispatcherType = "alltoall"
    staged: bool = False
    """Collectives are copied to and from host buffers, by which ranks share one device."""
    device: str = "cpu"

    @property
    def topology_class(self) -> type[Topology]:
        return StagedTopology if self.staged else LateTopology if self.late else Topology

    @property
    def world_size(self) -> int:
        """Ranks needed."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True)
class Task:
    """What is trained, in every layout the same."""

    optimizer: OptimizerConfig
    model: TransformerConfig = MODEL
    learning_rate: float = 1e-2
    steps: int = STEPS
    batch: int = BATCH
    precision: PrecisionConfig = FP64
    masks_documents: bool = False
    resets_positions: bool = False
    fp8: PrecisionConfig | None = None
    """Quantise as these flags say; the products of quantised numbers are computed in fp64, too."""
    moe: MoEConfig = NO_BALANCE
    z_loss_multiplier: float | None = None
    mtp_loss_scaling_factor: float = 0.3
    auxiliary_losses: tuple[str, ...] = ()
    """Names of the losses that ``build_layer`` adds."""
    build_layer: Callable[[int, TransformerConfig, BuildContext], nn.Module] = TransformerLayer
    frozen: tuple[str, ...] = ()
    """``--freeze-parameters``."""

    @property
    def marks_documents(self) -> bool:
        """Whether it matters where documents begin."""
        return self.masks_documents or self.resets_positions


Choices = tuple[int, int, int, tuple[int, ...]]
"""Layer, sample, position in the sequence, and the experts of this token in ascending order."""

LocalTensor = tuple[str, tuple[int, ...], Box, Tensor]
"""Name, global shape, and one box of a global tensor."""


@dataclass
class Trace:
    """One rank's record of every step."""

    losses: list[float] = field(default_factory=list)
    auxiliary: list[Mapping[str, float]] = field(default_factory=list)
    """The z-loss, the losses of multi-token prediction and those that layers add."""
    grad_norms: list[float] = field(default_factory=list)
    weight_norms: list[float] = field(default_factory=list)
    """After the step."""
    zeros: list[int] = field(default_factory=list)
    """In the gradient of the whole model."""
    loss_scales: list[float] = field(default_factory=list)
    """After the step."""
    gradients: list[list[LocalTensor]] = field(default_factory=list)
    weights: list[list[LocalTensor]] = field(default_factory=list)
    averages: list[list[LocalTensor]] = field(default_factory=list)
    """The moving averages of the weights after each step, if there are any."""
    balance: list[Mapping[str, float]] = field(default_factory=list)
    """Losses and loads of experts."""
    choices: list[list[Choices]] = field(default_factory=list)
    """The experts of this rank's tokens."""
    biases: list[dict[str, Tensor]] = field(default_factory=list)
    """Of the experts of each layer, after the step."""
    is_near_tie: bool = False
    """Whether little noise of the logits changes the experts of a token."""


class RecordingOptimizer(Optimizer):
    """Notes the gradient of the mean loss before clipping touches it."""

    trace: Trace
    model: TransformerModel
    fp8: Fp8Layers | None
    """The scales that are to be updated with the weights."""
    experts: ExpertBalance | None

    def step(
        self,
        hyperparameters: Hyperparameters,
        gradient_factor: float,
        accepts: Callable[[float], bool] = lambda grad_norm: True,
    ) -> StepResult:
        """Record, then step."""
        shards = self._data_parallel.param_shards
        self.trace.gradients.append(boxes_of((one.info, one.start, one.gradient * gradient_factor) for one in shards))
        self.trace.zeros.append(self.count_zeros())
        result = super().step(hyperparameters, gradient_factor, accepts)
        self.trace.weight_norms.append(self.weight_norm())
        return result


def boxes_of(parts: Iterable[tuple[ParameterInfo, int, Tensor]]) -> list[LocalTensor]:
    """Of parts of flattened local parameters: the facts, the place of the first element, and the elements."""
    return [
        (info.name, info.global_shape, box, part[begin - start : end - start].to("cpu", copy=True).view(box.shape))
        for info, start, part in parts
        for box, begin, end in flat_range_boxes(info, start, start + part.numel())
    ]


def sample(index: int) -> dict[str, Tensor]:
    """Sample number ``index``: ids, and a mask whose density differs widely (every fifth sample has no loss).

    The samples repeat, so that the loss falls.
    """
    index %= BATCH
    generator = torch.Generator().manual_seed(1000 + index)
    text = torch.randint(0, MODEL.vocab_size, (SEQUENCE + 1,), generator=generator)
    mask = torch.rand(SEQUENCE, generator=generator) < (index % 5) / 4
    starts = torch.rand(SEQUENCE, generator=generator) < (index % 4) / 4
    return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask.float(), "document_starts": starts}


def first_sample(step: int, microbatch: int, layout: Layout, data_parallel_rank: int, batch: int) -> int:
    """The number of the first sample of a microbatch."""
    size = batch // (layout.dp * layout.microbatches)
    return step * batch + (microbatch * layout.dp + data_parallel_rank) * size


def microbatches(
    step: int,
    layout: Layout,
    data_parallel_rank: int,
    context_parallel_rank: int = 0,
    batch: int = BATCH,
    task: "Task | None" = None,
) -> Iterator[Microbatch]:
    """This rank's microbatches of a step, dealt out as the loader deals them."""
    size = batch // (layout.dp * layout.microbatches)
    positions = ContextSplit(context_parallel_rank, layout.cp).positions(SEQUENCE)
    for number in range(layout.microbatches):
        first = first_sample(step, number, layout, data_parallel_rank, batch)
        samples = [with_future(sample(index), task) for index in range(first, first + size)]
        stacked = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        yield {name: whole if name == "document_starts" else whole[..., positions] for name, whole in stacked.items()}


def with_future(one: dict[str, Tensor], task: "Task | None") -> dict[str, Tensor]:
    """A sample as the loader completes it for the model of a task."""
    depths = 0 if task is None else task.model.mtp_num_layers
    if task is None or not depths:
        return one
    arrays = {name: tensor.numpy() for name, tensor in one.items() if name != "document_starts" or task.marks_documents}
    future = add_future_tokens(arrays, depths)
    return one | {name: torch.from_numpy(future[name]) for name in ("future_labels", "future_mask")}


def grid_of(layout: Layout) -> RankGrid:
    """The rank grid of a layout."""
    return RankGrid(
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        etp=layout.etp,
        dp_replicas=layout.dp if layout.strategy == "no_shard" else layout.instances,
        order=layout.order,
    )


FP8_SCALES = torch.tensor([2.0**6, 2.0**12, 2.0**21])
"""About right for input, weight and output gradient."""


def start_scales(fp8: Fp8Layers) -> None:
    """Let delayed scaling begin with scales that are the same in every layout. The first ones of a run come from each
    rank's own tensors, which a layout divides."""
    fp8.load({name: FP8_SCALES for name in fp8.state() if name.endswith("/scale")})


def overlap_of(topology: Topology, layout: Layout) -> TPOverlap | None:
    """How the layout's layers multiply at the edges of tensor-parallel regions, if not one after the other."""
    if layout.tp_overlap is None:
        return None
    ranks = topology.tensor_parallel
    return P2POverlap(ranks) if layout.tp_overlap == "pipelined" else symmetric_memory_overlap_on_cpu(ranks)


def context(
    topology: Topology,
    layout: Layout,
    dtype: torch.dtype = torch.float64,
    precision: PrecisionConfig | None = None,
    mask: AttentionMask = CAUSAL,
    needs_log_sum_exp: bool = False,
) -> BuildContext:
    """What a model of the layout is built in, with FP8 as in ``precision``."""
    parallel = TensorParallel(topology.tensor_parallel, layout.sequence_parallel, overlap_of(topology, layout))
    merges = needs_log_sum_exp or topology.grid.cp > 1 or layout.activations.cpu_offloading_num_layers > 0
    kernel = choose_attention_kernel(layout.attention, topology.device, dtype, merges, mask)
    context_parallel = ContextParallel(
        topology.context_parallel, layout.cp_comm_type, topology.context_parallel_levels(layout.cp_sizes)
    )
    fp8: Fp8Layers | None = None
    if precision is not None and layout.transformer_engine:
        fp8 = TransformerEngineFp8(transformer_engine(), precision, topology.stage_ranks)
    elif precision is not None:
        keeps_weights = layout.strategy != "optim_grads_params"
        # Blocks that divide the widths of a rank's shards.
        eager = replace(Fp8Kernels.eager(scaled_gemm_reference), blocks=BlockQuantization(size=4))
        fp8 = Fp8Scaling(precision, topology.stage_ranks, topology.device, keeps_weights, eager)
    return BuildContext(
        parallel,
        dtype,
        topology.device,
        kernel,
        context_parallel=context_parallel,
        fp8=fp8,
        provider=TransformerEngineProvider(transformer_engine()) if layout.transformer_engine else LocalProvider(),
        # As a run has it in fp64.
        weight_gradient=InPlaceWeightGradient() if dtype == torch.float64 else None,
    )


def build(task: Task, layout: Layout, topology: Topology) -> tuple[PipelineExecutor, DataParallel, RecordingOptimizer]:
    """Pipeline, strategy and optimizer of one rank."""
    formats = number_formats(task.precision, task.optimizer)
    schedule = partial(build_schedule, layout.schedule, layout.pp, num_chunks=layout.chunks)
    placement = placement_of(layout.schedule, layout.pp, layout.chunks)
    layers = task.model.num_layers
    if layout.split is None:
        virtual_stages = split_evenly(layers, layout.pp, placement.num_chunks)
    else:
        virtual_stages = split_by_layout(layout.split, layers, layout.pp)
    mine = chunks_of_stage(virtual_stages, placement, topology.pipeline_parallel.rank)
    fp8_flags = task.fp8 and replace(task.fp8, fp8_param_gather=layout.fp8_param_gather)
    has_sinks = task.model.softmax_type != "vanilla"
    built_in = context(topology, layout, formats.weight, fp8_flags, hardest_mask(task.model), has_sinks)
    moe = replace(task.moe, moe_token_dispatcher_type=layout.dispatcher)
    built_in = replace(built_in, experts=build_experts(task.model, moe, topology), build_layer=task.build_layer)
    built_in = replace(built_in, auxiliary_losses=AuxiliaryLosses(task.auxiliary_losses))
    late_copies = mock.patch.object(HostCopies, "of", late_host_copies) if layout.late else nullcontext()
    with late_copies:
        model = build_model(task.model, built_in, SEED, mine, layout.activations)
    freeze(model, task.frozen, topology)
    fp8 = model.context.fp8
    if fp8 is not None:
        start_scales(fp8)
    micro_batch_size = task.batch // (layout.dp * layout.microbatches)
    documents = partial(
        Documents, masks_attention=task.masks_documents, resets_positions=task.resets_positions, device=CPU
    )
    executor = build_executor(
        model,
        topology,
        schedule,
        SEQUENCE,
        micro_batch_size,
        layout.overlap_p2p,
        documents if task.marks_documents else None,
        task.z_loss_multiplier,
        task.mtp_loss_scaling_factor,
    )
    config = ParallelConfig(
        data_parallel_sharding_strategy=layout.strategy,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        torch_fsdp2_reshard_after_forward=layout.reshard_after_forward,
        defer_grad_reduce=layout.defer_grad_reduce,
        ddp_bucket_size=layout.bucket_size,
    )
    data_parallel = wrap_data_parallel(model, formats, topology, config, fp8)
    if layout.fp8_param_gather:
        # The initial weights of the model were rounded to FP8.
        data_parallel.initialize(SEED)
    offloads = layout.offload > 0 and task.optimizer.optimizer != "muon"
    flags = replace(
        task.optimizer,
        optimizer_cpu_offload=offloads,
        optimizer_offload_fraction=layout.offload,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    with late_copies:
        optimizer = RecordingOptimizer(flags, data_parallel, topology)
    optimizer.model, optimizer.fp8 = model, fp8
    optimizer.experts = model.expert_balance
    return executor, data_parallel, optimizer


@lru_cache(maxsize=1)
def topologies_in(world: object) -> dict[tuple[RankGrid, type[Topology], str], Topology]:
    """The topologies of all cases in one ``world``, so that the process groups of a grid are made once. Topologies of
    the last world are dropped, because the threads of their groups end only then."""
    return {}


def topology_of(grid: RankGrid, kind: type[Topology] = Topology, device: str = "cpu") -> Topology:
    """The topology of a grid of all ranks that have joined."""
    is_joined = torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.group.WORLD) if is_joined else (0, None)
    topologies = topologies_in(world)
    if (grid, kind, device) not in topologies:
        topologies[grid, kind, device] = kind(grid, rank, torch.device(device))
    return topologies[grid, kind, device]


def place_in(layout: Layout) -> Topology:
    """This rank's place in the grid of a layout."""
    return topology_of(grid_of(layout), layout.topology_class, layout.device)


class ChoiceRecorder:
    """Records which experts the routers of this rank choose for each token, and whether a choice is near a tie."""

    def __init__(self, task: Task, layout: Layout, topology: Topology, chunks: Iterable[nn.Module]) -> None:
        self.task, self.layout, self.topology = task, layout, topology
        self.choices: list[Choices] = []
        self.is_near_tie = False
        self._step = 0
        self._microbatches: Counter[int] = Counter()
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, Router):
                module.register_forward_hook(self.record)

    def start_step(self, step: int) -> None:
        self._step, self.choices = step, []
        self._microbatches.clear()

    def record(self, router: nn.Module, arguments: tuple[Tensor, int], routing: Routing) -> None:
        assert isinstance(router, Router)
        if not torch.is_grad_enabled():
            return  # recomputed later
        tokens, batch = arguments
        layer = router.balance.layer
        first = first_sample(
            self._step, self._microbatches[layer], self.layout, self.topology.data_parallel.rank, self.task.batch
        )
        self._microbatches[layer] += 1
        positions = ContextSplit(self.topology.context_parallel.rank, self.layout.cp).positions(SEQUENCE)
        if self.layout.sequence_parallel:
            positions = positions.chunk(self.layout.tp)[self.topology.tensor_parallel.rank]
        rows = routing.experts.view(len(positions), batch, -1).sort(dim=-1).values
        self.choices += [
            (layer, first + sample, int(position), tuple(rows[place, sample].tolist()))
            for place, position in enumerate(positions)
            for sample in range(batch)
        ]
        with torch.no_grad():
            logits = tokens.double() @ router.weight.double().t()
            noisy = logits + 1e-7 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            chosen = (route(one, router.rule, router.balance.expert_bias).experts for one in (logits, noisy))
        first_choice, second = (experts.sort(dim=1).values for experts in chosen)
        self.is_near_tie = self.is_near_tie or not torch.equal(first_choice, second)


def zero_routers(executor: PipelineExecutor, topology: Topology) -> None:
    """All scores are equal: every token chooses the experts with the lowest ids, and the others have no tokens."""
    for router in routers_of(executor):
        router.weight.data.zero_()


def equal_rows(executor: PipelineExecutor, topology: Topology) -> None:
    """Two experts have equal scores for every token."""
    for router in routers_of(executor):
        router.weight.data[5] = router.weight.data[2]


def routers_of(executor: PipelineExecutor) -> Iterator[Router]:
    for chunk in executor.chunks:
        assert isinstance(chunk, nn.Module)
        yield from (module for module in chunk.modules() if isinstance(module, Router))


def train(task: Task, layout: Layout, disturb: Callable[[PipelineExecutor, Topology], None] | None = None) -> Trace:
    """Train the task's steps on this rank, whose executor ``disturb`` may tamper with first."""
    topology = place_in(layout)
    executor, data_parallel, optimizer = build(task, layout, topology)
    if disturb is not None:
        disturb(executor, topology)
    return make_steps(task, layout, topology, executor, data_parallel, optimizer, range(task.steps))


def make_steps(
    task: Task,
    layout: Layout,
    topology: Topology,
    executor: PipelineExecutor,
    data_parallel: DataParallel,
    optimizer: RecordingOptimizer,
    steps: range,
) -> Trace:
    """Train the steps with these numbers on this rank."""
    loss_scaler = build_loss_scaler(task.precision)
    trace = optimizer.trace = Trace()
    module = TrainModule(executor, data_parallel, optimizer, loss_scaler, topology, optimizer.fp8, optimizer.experts)
    chunks = [chunk for chunk in executor.chunks if isinstance(chunk, nn.Module)]
    recorder = ChoiceRecorder(task, layout, topology, chunks)
    for step in steps:
        recorder.start_step(step)
        outcome = make_step(module, task, layout, step)
        trace.losses.append(outcome.loss)
        names = executor.auxiliary_losses.names
        trace.auxiliary.append({name: outcome.metrics[name] for name in names})
        trace.grad_norms.append(outcome.grad_norm)
        trace.loss_scales.append(loss_scaler.scale)
        trace.choices.append(recorder.choices)
        if optimizer.experts is not None:
            trace.balance.append(
                {name: value for name, value in outcome.metrics.items() if name not in ("grad_norm", *names)}
            )
            trace.biases.append({name: bias.clone() for name, bias in optimizer.experts.state().items()})
        shards = data_parallel.param_shards
        averages = zip(shards, optimizer.averages)
        trace.averages.append(boxes_of((shard.info, shard.start, average) for shard, average in averages))
        trace.weights.append(boxes_of((shard.info, shard.start, shard.weight) for shard in shards))
    data_parallel.finish_param_all_gather()
    trace.is_near_tie = recorder.is_near_tie
    return trace


def make_step(module: TrainModule, task: Task, layout: Layout, step: int, **options: Any) -> StepOutcome:
    """Train the step with this number on this rank."""
    ranks = module.topology
    return train_step(
        module,
        microbatches(step, layout, ranks.data_parallel.rank, ranks.context_parallel.rank, task.batch, task),
        Hyperparameters(task.learning_rate),
        num_microbatches=layout.microbatches,
        expected_tokens=task.batch * SEQUENCE,
        timers=Timers(0),
        **options,
    )


def overflow_on_last_rank(at_call: int, executor: PipelineExecutor, topology: Topology) -> None:
    """Have the gradient of one token overflow on the last rank alone, in the microbatch number ``at_call`` of all."""
    plain = executor.token_losses
    if topology.rank != topology.grid.world_size - 1:
        return
    assert plain is not None
    calls = count(1)

    def overflow(gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        gradient.view(-1)[gradient.view(-1).nonzero()[0]] = math.inf
        return gradient

    def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
        losses = plain(logits, labels)
        if next(calls) == at_call:
            losses.register_hook(overflow)
        return losses

    executor.token_losses = token_losses


def assemble(parts: list[LocalTensor]) -> dict[str, Tensor]:
    """Global tensors from all ranks' boxes; replicas must agree, and every element must be there."""
    tensors: dict[str, Tensor] = {}
    for name, shape, box, local in parts:
        whole = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        target = whole[tuple(slice(start, start + size) for start, size in zip(box.global_offset, box.shape))]
        seen = ~target.isnan()
        assert torch.allclose(target[seen], local[seen], rtol=1e-12, atol=1e-15), f"replicas of {name} differ"
        target.copy_(local)
    for name, whole in tensors.items():
        assert not whole.isnan().any(), f"{name} has elements that no rank holds"
    return tensors
