"""The tensors of a rank's training state, and the ranks that hold the same bits.

Data-parallel replicas start from equal weights and apply equal updates, so equal bits are not an approximation: any
difference is an error of the hardware or of the code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.parallel import ShardingStrategy
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.data_parallel.strategy import DataParallel, whole_params
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.moe.balance import ExpertBalance
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import ParameterInfo
from megatron.core.topology import RankGrid, Topology
from megatron.features.replicas.state import digests, fold, key_of

HolderAxes = tuple[str, ...]
"""The ranks that differ on these axes alone hold the same bits of a tensor."""

HOLDERS: tuple[HolderAxes, ...] = (
    ("cp", "dp"),
    ("tp", "cp", "dp"),
    ("dp_replicate",),
    ("tp", "dp_replicate"),
    ("edp",),
    ("edp_replicate",),
)
"""Whole dense tensors, those that tensor-parallel ranks have in common, shards of both, and the same of experts."""


class TensorKey(NamedTuple):
    """A tensor, the same on all ranks that hold it."""

    kind: str
    name: str
    start: int

    def __str__(self) -> str:
        return f"the {self.kind} of {self.name}"


WEIGHT, GRADIENT, MASTER, BIAS, SCALE = "weight", "gradient", "main parameter", "expert bias", "FP8 scale"


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that this rank holds: elements from ``start`` of the flattened local tensor ``name``."""

    kind: str
    name: str
    start: int
    tensor: Tensor
    holders: HolderAxes
    rests: bool
    """Whether nothing may change it between an update and the next one."""

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.kind, self.name, self.start)


@dataclass(frozen=True)
class TrainingState:
    """The parts of a rank that hold its training state.

    ``compares_tensor_parallel``: whether tensor-parallel ranks compute equal bits for what they have in common. Where
    kernels add in varying order they do so only if the gradient is summed over them.
    """

    chunks: Sequence[nn.Module]
    data_parallel: DataParallel
    optimizer: Optimizer
    fp8: Fp8Layers | None
    experts: ExpertBalance | None
    strategy: ShardingStrategy
    compares_tensor_parallel: bool

    def tensors(self, with_gradients: bool) -> list[HeldTensor]:
        """The state; ``with_gradients`` after their reduction and before the update."""
        return [
            *self._weights(),
            *self._optimizer_state(),
            *(self._gradients() if with_gradients else ()),
            *self._same_on_stage(),
        ]

    def floating(self) -> Iterator[tuple[str, Tensor]]:
        """The numbers that a checkpoint holds, with a label each; all must be finite."""
        for held in self.tensors(with_gradients=False):
            if held.kind != SCALE and held.tensor.itemsize > 1 and held.tensor.numel():
                yield str(held.key), held.tensor

    def _weights(self) -> Iterator[HeldTensor]:
        is_sharded = not isinstance(self.data_parallel, BufferedDataParallel)
        weights = list(self.data_parallel.local_params)
        if not is_sharded:
            # Also those that are gathered in FP8.
            parameters = {id(one): one for chunk in self.chunks for one in chunk.parameters()}
            weights = whole_params(parameters.values())
        for weight in weights:
            holders = self._holders(weight.info, is_sharded)
            # FP8 weights are quantised again in a skipped step.
            rests = weight.tensor.itemsize > 1
            yield HeldTensor(WEIGHT, weight.info.name, weight.start, weight.tensor, holders, rests)

    def _optimizer_state(self) -> Iterator[HeldTensor]:
        for state in self.optimizer.state():
            kind = MASTER if state.kind == "master" else state.kind
            yield HeldTensor(
                kind, state.info.name, state.start, state.tensor, self._holders(state.info, is_sharded=True), True
            )

    def _gradients(self) -> Iterator[HeldTensor]:
        for shard in self.data_parallel.param_shards:
            holders = self._holders(shard.info, is_sharded=True)
            yield HeldTensor(GRADIENT, shard.info.name, shard.start, shard.gradient, holders, False)

    def _same_on_stage(self) -> Iterator[HeldTensor]:
        """What all ranks with the same layers have in common."""
        if self.experts is not None:
            for name, bias in self.experts.state().items():
                yield HeldTensor(BIAS, name, 0, bias, ("tp", "cp", "dp"), True)
        if isinstance(self.fp8, Fp8Scaling):
            # Transformer Engine reduces its amaxes at other moments.
            for name, state in self.fp8.state().items():
                yield HeldTensor(SCALE, name, 0, state, ("tp", "cp", "dp"), False)

    def _holders(self, info: ParameterInfo, is_sharded: bool) -> HolderAxes:
        is_whole = not is_sharded or self.strategy == "no_shard"
        if info.is_expert:
            return ("edp",) if is_whole else ("edp_replicate",)
        axes = ("cp", "dp") if is_whole else ("dp_replicate",)
        is_common = not info.tensor_parallel_sharded and (info.gradient_is_partial or self.compares_tensor_parallel)
        return ("tp", *axes) if is_common else axes


class HolderGroups:
    """Which ranks hold the same bits, for every class of :data:`HOLDERS`."""

    def __init__(self, grid: RankGrid) -> None:
        self._grid = grid

    @cached_property
    def first_holders(self) -> Tensor:
        """The first holder of what each rank holds, ``[ranks, classes]``."""
        first = torch.arange(self._grid.world_size).unsqueeze(1).repeat(1, len(HOLDERS))
        for column, axes in enumerate(HOLDERS):
            if axes == ("edp_replicate",) and not self._grid.divides_experts:
                continue  # Without shards of experts, no tensor is in this class.
            for group in self._grid.groups(axes):
                first[list(group), column] = group[0]
        return first

    def disagreeing(self, folds: Tensor) -> list[tuple[HolderAxes, tuple[int, ...]]]:
        """The groups whose digests ``folds`` ``[ranks, classes, 2]`` differ, with their class."""
        expected = folds.gather(0, self.first_holders.unsqueeze(2).expand_as(folds))
        differs = (folds != expected).any(dim=2)  # [ranks, classes]
        if not bool(differs.any()):
            return []
        found = dict.fromkeys(
            (HOLDERS[column], self._grid.group(rank, HOLDERS[column])) for rank, column in differs.nonzero().tolist()
        )
        return list(found)


@dataclass(frozen=True)
class StateDigests:
    """The digests of this rank's tensors, on its device."""

    held: Sequence[HeldTensor]
    by_tensor: Tensor
    """``[tensors, 2]``"""

    @classmethod
    def of(cls, held: Sequence[HeldTensor], topology: Topology) -> "StateDigests":
        return cls(held, digests([one.tensor for one in held], topology.device))

    def folds(self) -> Tensor:
        """One digest for each class of :data:`HOLDERS`: ``[classes, 2]``."""
        device = self.by_tensor.device
        keys = torch.tensor([key_of(*one.key) for one in self.held], dtype=torch.int64).to(device)
        classes = []
        for axes in HOLDERS:
            mine = [number for number, one in enumerate(self.held) if one.holders == axes]
            chosen = torch.tensor(mine, dtype=torch.int64).to(device)
            classes.append(fold(self.by_tensor[chosen], keys[chosen]))
        return torch.stack(classes)

    def changed(self, before: "StateDigests") -> Tensor:
        """Which tensors that rest have other digests than ``before``: ``[tensors that rest]``."""
        return (self._resting() != before._resting()).any(dim=1)

    def _resting(self) -> Tensor:
        chosen = torch.tensor([number for number, one in enumerate(self.held) if one.rests], dtype=torch.int64)
        return self.by_tensor[chosen.to(self.by_tensor.device)]

    def resting_keys(self, chosen: Sequence[bool]) -> tuple[TensorKey, ...]:
        """Those tensors that rest which are ``chosen``, as :meth:`changed` returns them."""
        resting = [one.key for one in self.held if one.rests]
        return tuple(key for key, is_chosen in zip(resting, chosen, strict=True) if is_chosen)

    def by_key(self, holders: HolderAxes) -> dict[TensorKey, tuple[int, ...]]:
        """The digests of one class by key; waits for the device."""
        rows = self.by_tensor.tolist()
        return {one.key: tuple(row) for one, row in zip(self.held, rows) if one.holders == holders}
