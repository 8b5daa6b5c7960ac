"""The optimizer of this rank's shards: clipping by the global norm, master weights, an update rule.

Shards whose weights have the master weights' dtype are their own master weights, unless they are updated in host memory
(:mod:`megatron.core.host_optimizer`). The moving average of the weights (``--ema-decay``) is one of the master weights,
in their dtype and beside them: ``average <- decay average + (1 - decay) weight``.
"""

# A step:
#
#     gradients: sums over the ranks, from the buckets         master weights, moments, average: of this rank's shards
#        |                                                        |
#     squared norms, one all-reduce: the global norm              |
#        |                                                        |
#     finite and accepted? - clip ------------------------> update rule on slices, or on whole matrices
#                                                                 |
#     all-gather of the weights <- the model's weights <- copy, if these are narrower; the average follows

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.buffer import ParameterSplit
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.host_optimizer import HostShards
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.parameter import ParameterInfo, RowDivision, flat_range_boxes
from megatron.core.topology import Topology
from megatron.torch_compat import construct_optimizers_without_compiler
from megatron.update_rules.rule import SLICE, Group, ParameterFacts, Shard, UpdateContext, UpdateRule, build_rule

if TYPE_CHECKING:
    from megatron.update_rules.rule import MatrixUpdates

AVERAGE = "ema"
"""The kind of the state that holds the moving average of the weights."""
HOST = "host memory"

# The optimizer's kernels; optional packages provide others.

SquaredNorm = Callable[[list[Tensor]], Tensor]
"""The sum of the squares of all elements of tensors of one dtype (at least one tensor), in fp64."""

AdamBuilder = Callable[[Sequence[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""An AdamW of parameter groups, with betas and epsilon."""


_ROW = 4096


def torch_squared_norm(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    rest, of_rows = tensors, []
    if tensors[0].device.type == "cpu":
        # There torch adds the elements of a tensor one after the other: in fp32 the norm of 2^28 elements is 4 % too
        # small, and depends on the shards. So of larger tensors only rows are added in fp32. GPUs add in a tree.
        rest = []
        for tensor in tensors:
            rows = tensor.numel() // _ROW if tensor.numel() >= 16 * _ROW else 0
            if rows:
                table = tensor.view(-1)[: rows * _ROW].view(rows, _ROW)
                of_rows.append(torch.linalg.vector_norm(table, dim=1, dtype=wide).double().square().sum())
            rest.append(tensor.view(-1)[rows * _ROW :])
    total = torch.stack(torch._foreach_norm(rest, 2, dtype=wide)).double().square().sum()
    return total + torch.stack(of_rows).sum() if of_rows else total


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose own ``step`` imports torch's compiler, for most of a second, to exclude itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


def torch_adam(groups: Sequence[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> torch.optim.Optimizer:
    construct_optimizers_without_compiler()
    return AdamW(list(groups), lr=0.0, betas=betas, eps=epsilon, fused=True)


@dataclass(frozen=True)
class OptimizerKernels:
    adam: AdamBuilder = torch_adam
    squared_norm: SquaredNorm = torch_squared_norm


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    """Global L2 norm before clipping, of the gradient of the mean loss."""
    is_applied: bool
    """False if the norm was not finite or not accepted: then nothing changed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values for the metrics of the iteration, by name."""


@dataclass(frozen=True)
class UpdatedShard:
    """What this rank updates of a parameter, to be read: elements ``[start, start + numel)`` of its local tensor."""

    info: ParameterInfo
    start: int
    gradient: Tensor
    """The sum over the ranks, before an update, which overwrites it."""
    weight: Tensor
    """The master weights."""
    is_counted: bool
    """Whether this rank adds the shard to sums over the model: one of the ranks that hold it does."""


@dataclass(frozen=True)
class OptimizerState:
    """One tensor of the optimizer's state: ``kind`` of elements ``[start, start + numel)`` of a parameter."""

    kind: str
    info: ParameterInfo
    start: int
    tensor: Tensor
    holders: tuple[int, ...]
    """The ranks that keep the same elements."""
    division: RowDivision | None
    """The division of the parameter's rows, if it is even and each part is on one rank alone."""
    is_on_host: bool = False
    """Whether it is in host memory, beside a device."""


class Optimizer:
    """Updates the shards of ``data_parallel``.

    With ``agrees_on_norms`` all ranks have the bits of the norms of the first replica, also if another replica has
    wrong bits: for policies that decide by a norm. Otherwise each replica computes its own.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        data_parallel: DataParallel,
        topology: Topology,
        kernels: OptimizerKernels | None = None,
        agrees_on_norms: bool = False,
    ) -> None:
        kernels = kernels or OptimizerKernels()
        self._squared_norm = kernels.squared_norm
        self._clip_grad = config.clip_grad
        self._data_parallel = data_parallel
        sharing = data_parallel.sharing
        self._ranks = topology.world if agrees_on_norms else sharing.norm_ranks
        self.has_one_norm = self._ranks.size == topology.world.size
        """Whether all ranks certainly have the same norms."""
        self._param_shards = data_parallel.param_shards
        self.has_master_weights = data_parallel.needs_master_weights
        """Whether master weights differ from the model's weights, and are a state of their own."""
        master_dtype = data_parallel.formats.master
        self._host = HostShards(config, self._param_shards, master_dtype, topology)
        first = self._host.count
        # The same tensor if it has that dtype already.
        self._masters = self._host.masters + [shard.weight.to(master_dtype) for shard in self._param_shards[first:]]
        self.shards = [
            UpdatedShard(
                shard.info, shard.start, shard.gradient, master, sharing.is_counted(shard.info, self.has_one_norm)
            )
            for shard, master in zip(self._param_shards, self._masters)
        ]
        """The shards of this rank, in an order that does not change."""
        self._counted = [shard for shard in self.shards if shard.is_counted]
        self._topology, self._device = topology, topology.device
        self.num_steps = 0
        """Updates so far."""
        self._rule = build_rule(config)
        assert self._rule.is_elementwise or (sharing.experts is None and not first), config.optimizer
        gradients = self._host.gradients + [shard.gradient for shard in self._param_shards[first:]]
        self._shards: list[Shard] = []
        self.averages: list[Tensor] = []
        """The moving average of every shard of the data parallelism; empty without ``--ema-decay``."""
        for number, (shard, master, gradient) in enumerate(zip(self._param_shards, self._masters, gradients)):
            with topology.on_host() if number < first else nullcontext():
                state = self._rule.rule_for(shard.info).state(master)
                self._shards.append(Shard(shard.info, master, gradient, state))
                self.averages += [master.detach().clone()] if config.ema_decay is not None else []
        empty = torch.empty(0, dtype=master_dtype, device=topology.device)
        dense = [split for split in data_parallel.splits if not split.info.is_expert]

        def whole_matrices(belongs: Callable[[ParameterFacts], bool]) -> "MatrixUpdates":
            return WholeMatrices(
                [split for split in dense if belongs(split.info)], sharing.dense.shards, empty
            ).transform

        context = UpdateContext(kernels.adam, topology.tensor_parallel, whole_matrices)
        self._groups: dict[tuple[int, UpdateRule, bool, bool, float], Group] = {}
        """The keys are: 0 on the device, or the group on the host from 1; rule, whether the weights decay, whether they
        are of the vocabulary, the rule's factor of the learning rate."""
        places = {number: place for place, numbers in enumerate(self._host.groups, 1) for number in numbers}
        for number, updated in enumerate(self._shards):
            info = updated.info
            rule = self._rule.rule_for(info)
            factor = rule.learning_rate_factor(info)
            key = places.get(number, 0), rule, info.weight_decay, info.is_vocabulary, factor
            group = self._groups.setdefault(key, Group([], config.weight_decay if info.weight_decay else 0.0))
            group.shards.append(updated)
        self._ema_decay = config.ema_decay
        # Ranks without a shard bind and update as well: a rule may communicate.
        rules = dict.fromkeys(self._rule.rule_for(split.info) for split in data_parallel.splits)
        updates: list[list[Callable[[int], None]]] = []
        for place, numbers in enumerate((range(first, len(self._shards)), *self._host.groups)):
            groups = {key: group for key, group in self._groups.items() if key[0] == place}
            one = replace(context, adam=torch_adam) if place else context
            with topology.on_host() if place else nullcontext():
                updates.append([rule.bind([groups[key] for key in groups if key[1] is rule], one) for rule in rules])
            if config.ema_decay is not None and numbers:
                updates[-1].append(partial(self._follow, numbers, 1.0 - config.ema_decay))
        self._updates, *self._host.updates = updates

    def step(
        self,
        hyperparameters: Hyperparameters,
        gradient_factor: float,
        accepts: Callable[[float], bool] = lambda grad_norm: True,
    ) -> StepResult:
        """Clip and update; overwrites the gradients. Nothing changes if their norm is not finite, or not accepted.

        The gradients times ``gradient_factor`` are the gradients of the mean loss. ``accepts`` receives their finite
        norm, and must return the same on every rank.
        """
        grad_norm = self.global_norm([shard.gradient for shard in self._counted]) * abs(gradient_factor)
        if not math.isfinite(grad_norm) or not accepts(grad_norm):
            return StepResult(grad_norm, is_applied=False)
        factor = gradient_factor * clip_coefficient(grad_norm, self._clip_grad)
        if factor != 1.0 and self._param_shards:
            torch._foreach_mul_([shard.gradient for shard in self._param_shards], factor)
        for (_, _, decays, is_vocabulary, learning_rate_factor), group in self._groups.items():
            group.learning_rate = hyperparameters.learning_rate * learning_rate_factor
            if hyperparameters.vocabulary_learning_rate is not None and is_vocabulary:
                group.learning_rate = hyperparameters.vocabulary_learning_rate
            if hyperparameters.weight_decay is not None and decays:
                group.weight_decay = hyperparameters.weight_decay
        self.num_steps += 1
        self._host.start()
        for update in self._updates:
            update(self.num_steps)
        self._host.publish(self.num_steps)
        self._gather()
        return StepResult(grad_norm, is_applied=True, metrics={"grad_norm": grad_norm})

    def publish(self) -> None:
        """Copy the master weights to the model and start the parameter all-gather."""
        self._host.publish()
        self._gather()

    def _follow(self, numbers: Sequence[int], share: float, step: int) -> None:
        """Let the moving averages of these shards follow an update."""
        averages, masters = ([tensors[number] for number in numbers] for tensors in (self.averages, self._masters))
        torch._foreach_lerp_(averages, masters, share)

    def _gather(self) -> None:
        """Copy the device's master weights to the model and start the parameter all-gather."""
        first = self._host.count
        outdated = [
            (shard.weight, master)
            for shard, master in zip(self._param_shards[first:], self._masters[first:])
            if shard.weight is not master
        ]
        if outdated:
            weights, masters = zip(*outdated)
            torch._foreach_copy_(weights, masters)
        self._data_parallel.start_param_all_gather()

    def reload_master_weights(self) -> None:
        """Copy the model's weights to the master weights, after loading weights to which no saved ones belong."""
        for shard, master in zip(self._param_shards, self._masters):
            if shard.weight is not master:
                master.copy_(shard.weight)

    def reset_average(self) -> None:
        """Let the moving average, if there is one, begin with the current weights."""
        for average, master in zip(self.averages, self._masters):
            average.copy_(master)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in the place of the weights, for an evaluation; a collective.

        After an error the optimizer has its weights again, but not the model: publishing them is a collective.
        """
        assert self._ema_decay is not None

        def exchange() -> None:
            # A slice at a time, which bounds the memory.
            for average, master in zip(self.averages, self._masters):
                for one, other in zip(average.split(SLICE), master.split(SLICE)):
                    kept = one.clone()
                    one.copy_(other)
                    other.copy_(kept)

        exchange()
        try:
            self.publish()
            yield
        finally:
            exchange()
        self.publish()

    def _sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """In fp64, on the device."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for on_device, squared_norm in ((True, self._squared_norm), (False, torch_squared_norm)):
            mine = [tensor for tensor in tensors if (tensor.device.type == self._device.type) == on_device]
            if mine:
                total += squared_norm(mine).to(self._device)
        return total

    def global_norm(self, tensors: Sequence[Tensor]) -> float:
        """L2 norm over the ``tensors`` of all ranks with different shards."""
        return float(self._ranks.all_reduce(self._sum_of_squares(tensors)).sqrt())

    @cached_property
    def parameter_names(self) -> list[str]:
        """The global names of the parameters that are updated, of all stages; a collective when it is first read."""
        # The ranks of a stage have the same names.
        own = self._data_parallel.trained_names if self._topology.stage_ranks.rank == 0 else ()
        return list(dict.fromkeys(chain.from_iterable(self._topology.control.all_gather_object(own))))

    def sums(self, values: Sequence[Tensor | float], group: Callable[[str], str] = str) -> dict[str, float]:
        """The sums over the whole model of ``values``, one for each of :attr:`shards`; a collective.

        Values of parameters whose names have the same ``group`` are added; by default each parameter is alone.
        """
        places = {key: place for place, key in enumerate(dict.fromkeys(map(group, self.parameter_names)))}
        total = torch.zeros(len(places), dtype=torch.float64, device=self._device)
        for shard, value in zip(self.shards, values, strict=True):
            if shard.is_counted:
                total[places[group(shard.info.name)]] += value
        return dict(zip(places, self._ranks.all_reduce(total).tolist()))

    def norms(self, tensors: Sequence[Tensor], group: Callable[[str], str] = str) -> dict[str, float]:
        """The L2 norms over the whole model of ``tensors``, as :meth:`sums` groups them; a collective."""
        squares = self.sums([self._sum_of_squares([tensor]) for tensor in tensors], group)
        return {key: math.sqrt(value) for key, value in squares.items()}

    def weight_norm(self) -> float:
        return self.global_norm([shard.weight for shard in self._counted])

    def count_zeros(self) -> int:
        """Zeros in the gradient of the whole model; to be called before :meth:`step`."""
        zeros = sum(
            end - begin - int(torch.count_nonzero(shard.gradient[begin - shard.start : end - shard.start]))
            for shard in self._counted
            # The vocabulary's padding is in no box.
            for _, begin, end in flat_range_boxes(shard.info, shard.start, shard.start + shard.gradient.numel())
        )
        return int(self._ranks.all_reduce(torch.tensor(zeros, dtype=torch.int64, device=self._device)))

    def state(self) -> Iterator[OptimizerState]:
        """Every tensor of the state; loading writes to them."""
        data_parallel = self._data_parallel
        for number, (updated, shard) in enumerate(zip(self._shards, self._param_shards)):
            tensors = {"master": updated.weight} if self.has_master_weights else {}
            tensors |= updated.state
            if self.averages:
                tensors[AVERAGE] = self.averages[number]
            holders = data_parallel.sharing.holders(shard.info, of_shard=True)
            division = data_parallel.row_division(shard.info)
            for kind, tensor in tensors.items():
                on_host = number < self._host.count
                yield OptimizerState(kind, shard.info, shard.start, tensor, holders, division, on_host)

    def memory(self) -> dict[str, int]:
        """Bytes of master weights, moments and moving average on this rank's device, and of all these and their copies
        in host memory beside it."""
        names = {"master": "master weights", AVERAGE: "moving average"}
        sizes = {"master weights": 0, "moments": 0, "moving average": 0, HOST: self._host.num_bytes}
        for state in self.state():
            # The host's master weights are counted there: of weights in their dtype they are no state.
            if state.kind != "master" or not state.is_on_host:
                sizes[HOST if state.is_on_host else names.get(state.kind, "moments")] += state.tensor.nbytes
        return sizes


def clip_coefficient(grad_norm: float, limit: float) -> float:
    """Factor that brings ``grad_norm`` down to ``limit``; 1 below it, or when ``limit`` is 0 (no clipping)."""
    if limit == 0.0 or grad_norm <= limit:
        return 1.0
    return limit / (grad_norm + 1e-6)


Transform = Callable[[ParameterInfo, Tensor], Tensor]
"""A function of a tensor-parallel rank's matrix that returns another of the same shape."""


class WholeMatrices:
    """Whole matrices from shards, for update rules that are not elementwise.

    The shards of a shard group are ranges of elements, cut anywhere. For an update each matrix is sent to one rank,
    transformed there, and its shards are sent back. A round transforms one matrix on every rank. Matrices are sorted by
    size, so that the ranks of a round have about the same work. A rank needs memory for one matrix.

    ``splits`` are the same on all ``ranks`` of the shard group. ``empty`` has no elements, and the dtype and device of
    the shards.
    """

    def __init__(self, splits: Sequence[ParameterSplit], ranks: Communicator, empty: Tensor) -> None:
        # The sort is stable, so that all ranks have the same order.
        ordered = sorted(splits, key=lambda split: prod(split.info.local_shape), reverse=True)
        self._rounds = [ordered[start : start + ranks.size] for start in range(0, len(ordered), ranks.size)]
        self._ranks, self._empty = ranks, empty

    def transform(self, shards: Mapping[str, Tensor], transform: Transform) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's shard of every transformed matrix of which this rank has a shard.

        ``shards`` are 1-D, by parameter name. Collective: all ranks must exhaust the iterator.
        """
        for splits in self._rounds:
            if self._ranks.size == 1:
                info = splits[0].info
                yield info.name, transform(info, shards[info.name].view(info.local_shape)).flatten()
            else:
                own = [shards.get(split.info.name, self._empty) for split in splits]
                results = self._round(splits, own, transform)
                yield from ((split.info.name, result) for split, result in zip(splits, results) if result.numel())

    def _round(self, splits: Sequence[ParameterSplit], own: Sequence[Tensor], transform: Transform) -> list[Tensor]:
        """Rank i transforms matrix i; returns this rank's shards of all of them."""
        rank, size, empty = self._ranks.rank, self._ranks.size, self._empty
        absent = [empty] * (size - len(splits))
        results = [torch.empty_like(shard) for shard in own]
        if rank >= len(splits):
            self._ranks.exchange_parts([*own, *absent], [empty] * size)
            self._ranks.exchange_parts([empty] * size, [*results, *absent])
            return results
        info, ranges = splits[rank].info, [splits[rank].range_of(one) for one in range(size)]
        whole = empty.new_empty(prod(info.local_shape))
        self._ranks.exchange_parts([*own, *absent], [whole[start:stop] for start, stop in ranges])
        update = transform(info, whole.view(info.local_shape)).flatten()
        self._ranks.exchange_parts([update[start:stop] for start, stop in ranges], [*results, *absent])
        return results
