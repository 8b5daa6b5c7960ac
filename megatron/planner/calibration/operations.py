"""What a calibration measures: products of a model, its attention, copies, collectives, and whole training steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.kernels.selection import build_kernels
from megatron.core.models.parallelize import parallelize
from megatron.core.ops.attention import AttentionInputs, AttentionKernel
from megatron.core.ops.matmul import InPlaceWeightGradient, linear
from megatron.core.topology import Topology
from megatron.metrics.timers import Timers
from megatron.planner.rehearsal.price import PlannedStep, attention_kind
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.step_time.workload import Cluster
from megatron.training.context import TrainModule
from megatron.training.initialize import rank_grid
from megatron.training.loop.step import train_step


@dataclass(frozen=True)
class ProductShape:
    """A product ``[rows, depth] x [depth, columns]``."""

    rows: int
    columns: int
    depth: int
    is_weight_gradient: bool = False
    """Whether it is added to fp32 main gradients."""


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention of ``batch`` sequences, forward and backward."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def forward_flops(self) -> float:
        """Causal FLOPs of the forward pass."""
        return 2.0 * self.batch * self.length**2 * self.heads * self.head_size


def product_shapes(model: TransformerConfig, seq_length: int, batches: Sequence[int]) -> list[ProductShape]:
    """The products of a layer and of the output layer: forward, input gradient, weight gradient. On one rank for every
    number of sequences in ``batches``, and on one of two tensor-parallel ranks for the largest."""
    shapes = []
    for batch, tp in [*((batch, 1) for batch in batches), (max(batches), 2)]:
        tokens = batch * seq_length
        for inputs, outputs in _linears(model, tp):
            shapes += [
                ProductShape(tokens, outputs, inputs),  # forward
                ProductShape(tokens, inputs, outputs),  # input gradient
                ProductShape(inputs, outputs, tokens, is_weight_gradient=True),
            ]
    return list(dict.fromkeys(shapes))


def _linears(model: TransformerConfig, tp: int) -> Sequence[tuple[int, int]]:
    """(inputs, outputs) of a tensor-parallel rank's linear layers; sizes that do not divide are left whole."""
    h, qkv = model.hidden_size, model.query_size + 2 * model.key_value_size
    sizes = (qkv, model.query_size, 2 * model.ffn_hidden_size, model.ffn_hidden_size, model.padded_vocab_size)
    qkv, query, up, ffn, vocab = (size // tp if size % tp == 0 else size for size in sizes)
    return (h, qkv), (query, h), (h, up), (ffn, h), (h, vocab)


def _random(dtype: torch.dtype, device: torch.device, *size: int) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def product_action(shape: ProductShape, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """The product as our linear layers compute it."""
    random = partial(_random, dtype, device)
    if not shape.is_weight_gradient:
        inputs, weight = random(shape.rows, shape.depth), random(shape.columns, shape.depth)
        return lambda: linear(inputs, weight)
    inputs, grad_outputs = random(shape.depth, shape.rows), random(shape.depth, shape.columns)
    main_grad, kernel = torch.zeros(shape.columns, shape.rows, device=device), InPlaceWeightGradient()
    return lambda: kernel.write(main_grad, grad_outputs, inputs, accumulate=True)


def attention_shapes(model: TransformerConfig, seq_length: int, batch: int) -> list[AttentionShape]:
    """Three lengths up to ``seq_length`` with equally many tokens."""
    heads, kv_heads = model.num_attention_heads, model.num_query_groups
    return [
        AttentionShape(batch * 2**halvings, seq_length // 2**halvings, heads, kv_heads, model.kv_channels)
        for halvings in (2, 1, 0)
    ]


def attention_action(
    shape: AttentionShape, kernel: AttentionKernel, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    # [b, heads, s, d]
    query, grad, key, value = (
        _random(dtype, device, shape.batch, heads, shape.length, shape.head_size)
        for heads in (shape.heads, shape.heads, shape.kv_heads, shape.kv_heads)
    )
    inputs = AttentionInputs(query, key, value)
    return lambda: kernel.backward(grad, kernel.forward(inputs))


def copy_action(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """A copy, which reads and writes ``num_bytes``."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "message"]
KINDS: tuple[Kind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "message")


@dataclass(frozen=True)
class CollectiveShape:
    """A collective of a tensor of ``num_bytes``: the largest one, which is the output of an all-gather."""

    kind: Kind
    num_bytes: int
    ranks: int
    spans_nodes: bool

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, ring algorithms; of a message, its size."""
        if self.kind == "message":
            return self.num_bytes
        share = (self.ranks - 1) / self.ranks
        return (2 if self.kind == "all-reduce" else 1) * share * self.num_bytes


@dataclass(frozen=True)
class Groups:
    """Divides the ranks into groups of one size; all groups communicate at once, as in training."""

    size: int
    spans_nodes: bool

    def ranks_of(self, rank: int, local_size: int) -> tuple[int, ...]:
        """The group of ``rank``: neighbours inside a node, or ranks with the same place in every node."""
        if self.spans_nodes:
            return tuple(rank % local_size + node * local_size for node in range(self.size))
        first = rank - rank % self.size
        return tuple(range(first, first + self.size))


def groups_of(world_size: int, local_size: int) -> list[Groups]:
    """Powers of two that divide the ranks of a node, the node, and all nodes."""
    sizes = {size for size in (2, 4, 8, 16, 32, local_size) if size > 1 and local_size % size == 0}
    found = [Groups(size, spans_nodes=False) for size in sorted(sizes)]
    nodes = world_size // local_size
    return found + ([Groups(nodes, spans_nodes=True)] if nodes > 1 else [])


def collective_shapes(groups: Sequence[Groups], sizes: Sequence[int]) -> list[CollectiveShape]:
    """Every kind and size; messages between pairs of ranks only."""
    return [
        CollectiveShape(kind, size - size % (4 * group.size), group.size, group.spans_nodes)
        for group in groups
        for kind in KINDS
        for size in sizes
        if kind != "message" or group.size == 2
    ]


def collective_action(shape: CollectiveShape, group: Communicator, device: torch.device) -> Callable[[], object]:
    """The collective; a message goes to the other rank and back, so it is two messages."""
    whole = torch.zeros(shape.num_bytes // 4, device=device)
    part = torch.zeros(shape.num_bytes // 4 // shape.ranks, device=device)
    match shape.kind:
        case "all-reduce":
            return lambda: group.all_reduce(whole)
        case "all-gather":
            return lambda: group.all_gather(part)
        case "reduce-scatter":
            return lambda: group.reduce_scatter(whole)
        case "message":
            return lambda: _there_and_back(group, whole)


def _there_and_back(group: Communicator, tensor: torch.Tensor) -> None:
    other = 1 - group.rank
    for sender in (0, 1):
        if group.rank == sender:
            group.start_send(tensor, other).wait()
        else:
            group.start_receive(torch.empty_like(tensor), other).wait()


def build_step(config: RunConfig, topology: Topology, vocab_size: int, num_microbatches: int) -> Callable[[], None]:
    """A training step of this rank on random tokens. Collective."""
    kernels = build_kernels(config, topology, vocab_size)
    parallel = parallelize(config, topology, vocab_size, kernels)
    parallel.data_parallel.initialize(config.training.seed)
    module = TrainModule.of(config, topology, parallel, kernels)
    expected_tokens = num_microbatches * config.micro_batch_size * config.seq_length * topology.grid.dp

    def step() -> None:
        train_step(
            module,
            _microbatches(config, topology, vocab_size),
            Hyperparameters(learning_rate=1e-6),
            num_microbatches=num_microbatches,
            expected_tokens=expected_tokens,
            timers=Timers(0),
        )

    return step


def _microbatches(config: RunConfig, topology: Topology, vocab_size: int) -> Iterator[dict[str, Tensor]]:
    """Microbatches without end, of the same tokens for ranks that share them."""
    shape = config.micro_batch_size, config.seq_length // topology.grid.cp
    random = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, vocab_size, shape, generator=random)
        yield {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(shape)}


def planned_step(
    config: RunConfig, num_ranks: int, vocab_size: int, num_microbatches: int, cluster: Cluster
) -> PlannedStep:
    """The step of :func:`build_step`, to be priced."""
    grid = rank_grid(config.parallel, num_ranks)
    device = torch.device("cpu" if cluster.generation == "cpu" else "cuda")
    records = UnitRecords(vocab_size, attention_kind(config, cluster), device)
    return PlannedStep(UnitsOfRun(records, config, grid), config.micro_batch_size * num_microbatches * grid.dp)


def with_layers(config: RunConfig, num_layers: int, micro_batch_size: int) -> RunConfig:
    """``config`` with another depth and microbatch."""
    model = replace(config.model, num_layers=num_layers)
    training = replace(config.training, micro_batch_size=micro_batch_size)
    return replace(config, model=model, training=training)
