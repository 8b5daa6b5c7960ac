"""A model of dense and expert parameters whose gradients need no communication in the forward pass.

The gradient of a parameter is a sum over tokens of a known tensor and a multiple of the weight. A rank adds up the
tokens that it would process: of dense weights its own samples, of experts those that the other ranks of its
expert-parallel group would send to it. So one process has the same gradients, and only data parallelism is tested.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.data_parallel.wrap import shards_weights, wrap_data_parallel
from megatron.core.gradient import accumulate_main_grad
from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import Box, ParameterInfo, columns_box, empty_parameter, flat_range_boxes, sharded_boxes
from megatron.core.precision import NumberFormats
from megatron.core.recompute import LayerGroup, Recomputed
from megatron.core.topology import RankGrid, Topology
from tests.parallel.layout_run import LocalTensor, _boxes, topology_of

HIDDEN, WIDTH, EXPERTS = 6, 8, 4
TOKENS, MICROBATCHES, LAYERS = 8, 2, 3
"""Tokens of a microbatch of all ranks; layer 0 has no experts."""
SEED, RATE = 5, 0.1


@dataclass(frozen=True)
class Folding:
    """A layout of the toy; ``pp`` 2 puts layer 0 alone on the first stage."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1
    strategy: ShardingStrategy = "no_shard"
    instances: int = 1
    overlap: bool = False
    order: str = "tp-cp-ep-pp-dp"
    recompute: bool = False
    """Layers 1 and 2 are one recomputed unit."""
    reshard: bool = True
    in_flight: bool = False
    """All forward passes run before the first backward pass."""

    @property
    def world_size(self) -> int:
        """Ranks needed."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def config(self) -> ParallelConfig:
        """The flags of data parallelism."""
        return ParallelConfig(
            data_parallel_sharding_strategy=self.strategy,
            num_distributed_optimizer_instances=self.instances,
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap and self.strategy != "no_shard",
            ddp_bucket_size=100 if self.overlap and self.strategy != "optim_grads_params" else None,
            torch_fsdp2_reshard_after_forward=self.reshard,
        )

    def topology(self) -> Topology:
        """This rank's place."""
        replicas = self.config.data_parallel_replicas(self.dp)
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "etp": self.etp, "ep": self.ep}
        return topology_of(RankGrid(**sizes, dp_replicas=replicas, order=self.order))


def known_numbers(name: str, shape: Sequence[int], token: int) -> Tensor:
    """The part of the gradient of a global tensor that ``token`` adds and that does not depend on the weights."""
    key = int.from_bytes(blake2b(f"{name}/{token}".encode(), digest_size=6).digest())
    return torch.randn(*shape, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def expert_of(token: int) -> int:
    """The expert that processes ``token``; the last one gets none."""
    return token * 7 % 5 % (EXPERTS - 1)


def token_gradient(info: ParameterInfo, weight: Tensor, token: int) -> Tensor:
    """What ``token`` adds to the gradient of the local tensor ``weight``."""
    whole = known_numbers(info.name, info.global_shape, token)
    if info.is_expert:
        rows = torch.arange(info.global_shape[0]) // (info.global_shape[0] // EXPERTS) == expert_of(token)
        whole = whole * rows.unsqueeze(1)
    local = torch.zeros(info.local_shape, dtype=torch.float64)
    for box in info.boxes:
        place = tuple(slice(start, start + size) for start, size in zip(box.global_offset, box.shape))
        has_token = whole[place] != 0
        box.view(local).copy_(whole[place] + has_token * box.view(weight) * (0.1 + token % 3))
    return local


class _Use(Function):
    """The identity of ``inputs``, whose backward pass adds the gradient of ``weight`` from ``tokens``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, info: ParameterInfo, tokens: Sequence[int]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.weight, ctx.info, ctx.tokens = weight, info, tokens
        return inputs + 0 * weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = torch.zeros(ctx.info.local_shape, dtype=torch.float64)
        for token in ctx.tokens:
            gradient += token_gradient(ctx.info, ctx.saved_tensors[0], token)
        return gradients[0], accumulate_main_grad(ctx.weight, gradient * gradients[0].item()), None, None


class Weight(nn.Module):
    """One parameter, of which a rank processes the tokens of the places ``tokens_of`` in its stage."""

    def __init__(self, info: ParameterInfo, places: Sequence[int], num_places: int, device: str) -> None:
        super().__init__()
        self.info, self.places, self.num_places = info, places, num_places
        self.weight = empty_parameter(info, torch.float64, device)

    def forward(self, inputs: Tensor, microbatch: int) -> Tensor:
        """``inputs``."""
        part = TOKENS // self.num_places
        tokens = [microbatch * TOKENS + place * part + number for place in self.places for number in range(part)]
        output: Tensor = _Use.apply(inputs, self.weight, self.info, tokens)
        return output


class Sequential(nn.Module):
    """Modules in a row."""

    last_linear = None

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, inputs: Tensor, microbatch: int) -> Tensor:
        """Through all of them."""
        for part in self.parts:
            inputs = part(inputs, microbatch)
        return inputs


class Toy(nn.Module):
    """This rank's layers; as a stage of a pipeline, but no activations are sent."""

    has_experts = True

    def __init__(self, folding: Folding, topology: Topology, device: str) -> None:
        super().__init__()
        self._topology, self._device = topology, device
        first_stage = topology.coordinates["pp"] == 0
        numbers = range(LAYERS) if folding.pp == 1 else range(1) if first_stage else range(1, LAYERS)
        layers: list[nn.Module] = [self._layer(number) for number in numbers]
        if folding.recompute:
            layers = [*layers[:-2], Recomputed(LayerGroup(layers[-2:]))]
        self.chunk = Sequential(layers)

    def _weight(self, info: ParameterInfo, *axes: str) -> Weight:
        """A weight for which the ranks along ``axes`` send their tokens to this one."""
        stage = self._topology.grid.group(self._topology.rank, ("tp", "cp", "dp"))
        senders = self._topology.grid.group(self._topology.rank, axes)
        return Weight(info, [stage.index(rank) for rank in senders], len(stage), self._device)

    def _layer(self, number: int) -> Sequential:
        tp, name = self._topology.tensor_parallel, f"layers.{number}"
        gain = sharded_boxes([HIDDEN], (), 0, 1)
        linear = sharded_boxes([WIDTH, WIDTH], (HIDDEN,), tp.rank, tp.size)
        parts: list[nn.Module] = [
            # As under sequence parallelism.
            self._weight(ParameterInfo(f"{name}.norm.weight", *gain, None, False, False, gradient_is_partial=True)),
            self._weight(ParameterInfo(f"{name}.linear.weight", *linear, 0.02, True, True), "tp"),
        ]
        if number > 0:
            router = sharded_boxes([EXPERTS], (HIDDEN,), 0, 1)
            parts.append(
                self._weight(
                    ParameterInfo(f"{name}.router.weight", *router, 0.02, True, False, gradient_is_partial=True)
                )
            )
            parts.append(Sequential(self._weight(info, "etp", "ep") for info in self._experts(name)))
        return Sequential(parts)

    def _experts(self, name: str) -> Iterable[ParameterInfo]:
        etp, ep = (self._topology.communicator(axis) for axis in ("etp", "ep"))
        local = EXPERTS // ep.size
        _, (rows, columns), boxes = sharded_boxes([WIDTH] * 2 * local, (HIDDEN,), etp.rank, etp.size)
        first = ep.rank * local * 2 * WIDTH
        boxes = tuple(Box((first + box.global_offset[0], 0), box.local_offset, box.shape) for box in boxes)
        shapes = (EXPERTS * 2 * WIDTH, HIDDEN), (rows, columns), boxes
        yield ParameterInfo(f"{name}.experts.linear_fc1.weight", *shapes, 0.02, True, True, is_expert=True)
        _, (rows, columns), (box,) = columns_box(local * HIDDEN, WIDTH, etp.rank, etp.size)
        box = Box((ep.rank * rows, box.global_offset[1]), (0, 0), box.shape)
        shapes = (EXPERTS * HIDDEN, WIDTH), (rows, columns), (box,)
        yield ParameterInfo(f"{name}.experts.linear_fc2.weight", *shapes, 0.02, True, True, is_expert=True)

    @property
    def chunk_units(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """The layers."""
        return [(self.chunk, list(self.chunk.parts))]


@dataclass
class Record:
    """What a rank saw of some steps."""

    norms: list[float] = field(default_factory=list)
    weight_norms: list[float] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    gradients: list[list[LocalTensor]] = field(default_factory=list)
    weights: list[list[LocalTensor]] = field(default_factory=list)
    """All weights that the rank stores, also those that others update."""


@dataclass
class ToyRun:
    """A toy in a layout with its optimizer."""

    toy: Toy
    data_parallel: DataParallel
    optimizer: Optimizer


def build_toy(folding: Folding, config: OptimizerConfig) -> ToyRun:
    """The toy with initial weights."""
    topology = folding.topology()
    toy = Toy(folding, topology, "meta" if shards_weights(folding.config, topology, has_experts=True) else "cpu")
    data_parallel = wrap_data_parallel(toy, NumberFormats.uniform(torch.float64), topology, folding.config)
    data_parallel.initialize(SEED)
    return ToyRun(toy, data_parallel, Optimizer(config, data_parallel, topology))


def accumulate(run: ToyRun, step: int, in_flight: bool = False, num_microbatches: int = MICROBATCHES) -> None:
    """The gradients of a step, summed over the data-parallel ranks."""
    run.data_parallel.start_grad_accumulation(num_microbatches)
    losses = []
    for microbatch in range(num_microbatches):
        inputs = torch.ones((), dtype=torch.float64, requires_grad=True)
        losses.append(run.toy.chunk(inputs, step * MICROBATCHES + microbatch))
        if not in_flight:
            losses.pop().backward()
    for loss in losses:
        loss.backward()
    run.data_parallel.finish_grad_sync()


def train_toy(run: ToyRun, steps: Iterable[int], in_flight: bool = False) -> Record:
    """Some steps."""
    record = Record()
    for step in steps:
        accumulate(run, step, in_flight)
        shards = run.data_parallel.param_shards
        record.gradients.append(_boxes([(shard, shard.gradient) for shard in shards]))
        record.zeros.append(run.optimizer.count_zeros())
        record.norms.append(run.optimizer.step(Hyperparameters(RATE), 0.5).grad_norm)
        record.weight_norms.append(run.optimizer.weight_norm())
        run.data_parallel.finish_param_all_gather()
        record.weights.append(stored_weights(run.data_parallel))
    return record


def stored_weights(data_parallel: DataParallel) -> list[LocalTensor]:
    """The weights that this rank stores."""
    return [
        (
            info.name,
            info.global_shape,
            box,
            stored.tensor[begin - stored.start : end - stored.start].view(box.shape).clone(),
        )
        for stored in data_parallel.local_params
        for info in (stored.info,)
        for box, begin, end in flat_range_boxes(info, stored.start, stored.start + stored.tensor.numel())
    ]


def run_folding(folding: Folding, config: OptimizerConfig, steps: int) -> Record:
    """On every rank: train from the start."""
    return train_toy(build_toy(folding, config), range(steps), folding.in_flight)
