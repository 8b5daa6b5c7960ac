"""The optimizer of this rank's shards: clipping by the global norm, master weights, an update rule.

Shards whose weights have the master weights' dtype are their own master weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.data_parallel.buffer import ParamShard
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.kernels import OptimizerKernels
from megatron.core.optimizer.optimizer import WeightAverage, WholeMatrices
from megatron.core.parameter import ParameterInfo, RowDivision, flat_range_boxes
from megatron.core.topology import Topology
from megatron.update_rules.rule import Group, ParameterFacts, Shard, UpdateContext, UpdateRule, build_rule

if TYPE_CHECKING:
    from megatron.update_rules.rule import MatrixUpdates

AVERAGE = "ema"
"""The kind of the state that holds the moving average of the weights."""


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step."""

    grad_norm: float
    """Global L2 norm before clipping, of the gradient of the mean loss."""
    is_applied: bool
    """False if the norm was not finite or not accepted: then nothing changed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values for the metrics of the iteration, by name."""


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
    """How ranks divide the parameter's rows, if they do so evenly and each part is on one rank alone."""


@dataclass(frozen=True)
class _GroupKey:
    rule: UpdateRule
    decays: bool
    is_vocabulary: bool
    learning_rate_factor: float


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
        """Whether master weights differ from the model's weights."""
        master_dtype = data_parallel.formats.master
        # The same tensor if it has that dtype already.
        self._masters = [shard.weight.to(master_dtype) for shard in self._param_shards]
        counted = [
            number
            for number, shard in enumerate(self._param_shards)
            if sharing.is_counted(shard.info, self.has_one_norm)
        ]
        self._counted_shards = [self._param_shards[number] for number in counted]
        self._counted = [shard.gradient for shard in self._counted_shards]
        self._counted_weights = [self._masters[number] for number in counted]
        self._device = topology.device
        self.num_steps = 0
        """Updates so far."""
        self._rule = build_rule(config)
        assert self._rule.supports_experts or sharing.experts is None, config.optimizer
        self._shards = [
            Shard(shard.info, master, shard.gradient, self._rule.rule_for(shard.info).state(master))
            for shard, master in zip(self._param_shards, self._masters)
        ]
        empty = torch.empty(0, dtype=master_dtype, device=topology.device)
        dense = [split for split in data_parallel.splits if not split.info.is_expert]

        def whole_matrices(belongs: Callable[[ParameterFacts], bool]) -> "MatrixUpdates":
            return WholeMatrices(
                [split for split in dense if belongs(split.info)], sharing.dense.shards, empty
            ).transform

        context = UpdateContext(kernels.adam, topology.tensor_parallel, whole_matrices)
        self._groups = self._grouped(config.weight_decay)
        self._average = None if config.ema_decay is None else WeightAverage(config.ema_decay, self._masters)
        # Ranks without a shard bind and update as well: a rule may communicate.
        rules = dict.fromkeys(self._rule.rule_for(split.info) for split in data_parallel.splits)
        self._updates = [
            rule.bind([group for key, group in self._groups.items() if key.rule is rule], context) for rule in rules
        ]

    def _grouped(self, weight_decay: float) -> "dict[_GroupKey, Group]":
        groups: dict[_GroupKey, Group] = {}
        for shard in self._shards:
            info = shard.info
            rule = self._rule.rule_for(info)
            key = _GroupKey(rule, info.weight_decay, info.is_vocabulary, rule.learning_rate_factor(info))
            group = groups.setdefault(key, Group([], weight_decay if info.weight_decay else 0.0))
            group.shards.append(shard)
        return groups

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
        grad_norm = self.global_norm(self._counted) * abs(gradient_factor)
        if not math.isfinite(grad_norm) or not accepts(grad_norm):
            return StepResult(grad_norm, is_applied=False)
        factor = gradient_factor * clip_coefficient(grad_norm, self._clip_grad)
        if factor != 1.0 and self._param_shards:
            torch._foreach_mul_([shard.gradient for shard in self._param_shards], factor)
        for key, group in self._groups.items():
            group.learning_rate = hyperparameters.learning_rate * key.learning_rate_factor
            if hyperparameters.vocabulary_learning_rate is not None and key.is_vocabulary:
                group.learning_rate = hyperparameters.vocabulary_learning_rate
            if hyperparameters.weight_decay is not None and key.decays:
                group.weight_decay = hyperparameters.weight_decay
        self.num_steps += 1
        for update in self._updates:
            update(self.num_steps)
        if self._average is not None:
            self._average.update()
        self.publish()
        return StepResult(grad_norm, is_applied=True, metrics={"grad_norm": grad_norm})

    def publish(self) -> None:
        """Copy the master weights to the model and start the parameter all-gather."""
        outdated = [
            (shard.weight, master)
            for shard, master in zip(self._param_shards, self._masters)
            if shard.weight is not master
        ]
        if outdated:
            weights, masters = zip(*outdated)
            torch._foreach_copy_(weights, masters)
        self._data_parallel.start_param_all_gather()

    def reload_master_weights(self) -> None:
        """Copy the model's weights to the master weights (after loading a model without optimizer state)."""
        for shard, master in zip(self._param_shards, self._masters):
            if shard.weight is not master:
                master.copy_(shard.weight)

    @property
    def averages(self) -> Sequence[Tensor]:
        """The moving average of every shard of the data parallelism; empty without ``--ema-decay``."""
        return () if self._average is None else self._average.averages

    def reset_average(self) -> None:
        """Let the moving average, if there is one, begin with the current weights."""
        if self._average is not None:
            self._average.reset()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the moving average instead of the weights, for an evaluation; a collective.

        After an error the optimizer has its weights again, but not the model: publishing them is a collective.
        """
        assert self._average is not None
        self._average.exchange()
        try:
            self.publish()
            yield
        finally:
            self._average.exchange()
        self.publish()

    def global_norm(self, tensors: list[Tensor]) -> float:
        """L2 norm over the ``tensors`` of all ranks with different shards."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if tensors:
            total += self._squared_norm(tensors)
        return float(self._ranks.all_reduce(total).sqrt())

    def weight_norm(self) -> float:
        """L2 norm of all weights."""
        return self.global_norm(self._counted_weights)

    def count_zeros(self) -> int:
        """Zeros in the gradient of the whole model; to be called before :meth:`step`."""
        zeros = sum(
            end - begin - int(torch.count_nonzero(shard.gradient[begin - shard.start : end - shard.start]))
            for shard in self._counted_shards
            # The vocabulary's padding is in no box.
            for _, begin, end in flat_range_boxes(shard.info, shard.start, shard.stop)
        )
        return int(self._ranks.all_reduce(torch.tensor(zeros, dtype=torch.int64, device=self._device)))

    def state(self) -> Iterator[OptimizerState]:
        """Every tensor of the state; loading writes to them."""
        for updated, shard in zip(self._shards, self._param_shards):
            if self.has_master_weights:
                yield self._state_of(shard, "master", updated.weight)
            for kind, tensor in updated.state.items():
                yield self._state_of(shard, kind, tensor)
        for shard, average in zip(self._param_shards, self.averages):
            yield self._state_of(shard, AVERAGE, average)

    def _state_of(self, shard: ParamShard, kind: str, tensor: Tensor) -> OptimizerState:
        holders = self._data_parallel.sharing.holders(shard.info, of_shard=True)
        return OptimizerState(
            kind, shard.info, shard.start, tensor, holders, self._data_parallel.row_division(shard.info)
        )

    def memory(self) -> dict[str, int]:
        """Bytes of master weights, moments and moving average on this rank."""
        names = {"master": "master weights", AVERAGE: "moving average"}
        sizes = {"master weights": 0, "moments": 0, "moving average": 0}
        for state in self.state():
            sizes[names.get(state.kind, "moments")] += state.tensor.nbytes
        return sizes


def clip_coefficient(grad_norm: float, limit: float) -> float:
    """Factor that brings ``grad_norm`` down to ``limit``; 1 below it, or when ``limit`` is 0 (no clipping)."""
    if limit == 0.0 or grad_norm <= limit:
        return 1.0
    return limit / (grad_norm + 1e-6)
