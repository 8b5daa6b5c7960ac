"""The tensors of a rank's training state, the ranks that hold the same bits, and digests to compare them.

Data-parallel replicas start from equal weights and apply equal updates, so equal bits are not an approximation: any
difference is an error of the hardware or of the code.

A digest of a tensor is two 64-bit integers. Each is a sum of integers modulo 2^64, so it is the same on every device
and in every order of addition. The first sum is of the 8-byte words of the tensor: a single flipped bit always changes
it. The second sum weights the words by their positions: it also sees words that were exchanged, and changes that cancel
in the first.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.parallel import ShardingStrategy
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.data_parallel.strategy import DataParallel, whole_params
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.moe.routing import ExpertBalance
from megatron.core.optimizer import Optimizer
from megatron.core.parameter import ParameterInfo
from megatron.core.topology import RankGrid, Topology

HolderAxes = tuple[str, ...]
"""The ranks that differ on these axes alone hold the same bits of a tensor."""

HOLDERS: tuple[HolderAxes, ...] = (
    ("cp", "dp"),  # whole dense tensors
    ("tp", "cp", "dp"),  # whole dense tensors that tensor-parallel ranks have in common, such as norms
    ("dp_replicate",),  # shards of dense tensors
    ("tp", "dp_replicate"),  # shards of dense tensors in common
    ("edp",),  # whole tensors of experts
    ("edp_replicate",),  # shards of tensors of experts
)
"""The classes of tensors. A class is compared inside its groups of ranks:

    tp 2 x dp 2      rank 0  rank 1     ("cp", "dp"): ranks 0 and 2, ranks 1 and 3
                     rank 2  rank 3     ("tp", "cp", "dp"): ranks 0 to 3
"""


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

    def tensors(self, with_gradients: bool) -> Iterator[HeldTensor]:
        """The state; ``with_gradients`` after their reduction and before the update."""
        is_sharded = not isinstance(self.data_parallel, BufferedDataParallel)
        weights = list(self.data_parallel.local_params)
        if not is_sharded:
            # With those that are gathered in FP8.
            parameters = {id(one): one for chunk in self.chunks for one in chunk.parameters()}
            weights = whole_params(parameters.values())
        for weight in weights:
            # FP8 weights are quantised again in a skipped step, so they do not rest.
            rests, holders = weight.tensor.itemsize > 1, self._holders(weight.info, is_sharded)
            yield HeldTensor(WEIGHT, weight.info.name, weight.start, weight.tensor, holders, rests)
        for one in self.optimizer.state():
            kind = MASTER if one.kind == "master" else one.kind
            holders = self._holders(one.info, is_sharded=True)
            yield HeldTensor(kind, one.info.name, one.start, one.tensor, holders, rests=True)
        for shard in self.data_parallel.param_shards if with_gradients else ():
            holders = self._holders(shard.info, is_sharded=True)
            yield HeldTensor(GRADIENT, shard.info.name, shard.start, shard.gradient, holders, rests=False)
        # All ranks of a stage have expert biases and FP8 scales in common. Transformer Engine reduces its amaxes at
        # other moments.
        common = ("tp", "cp", "dp")
        for name, bias in self.experts.state().items() if self.experts is not None else ():
            yield HeldTensor(BIAS, name, 0, bias, common, rests=True)
        for name, scale in self.fp8.state().items() if isinstance(self.fp8, Fp8Scaling) else ():
            yield HeldTensor(SCALE, name, 0, scale, common, rests=False)

    def floating(self) -> Iterator[tuple[str, Tensor]]:
        """The numbers that a checkpoint holds, with a label each; all must be finite."""
        for held in self.tensors(with_gradients=False):
            if held.kind != SCALE and held.tensor.itemsize > 1 and held.tensor.numel():
                yield str(held.key), held.tensor

    def _holders(self, info: ParameterInfo, is_sharded: bool) -> HolderAxes:
        is_whole = not is_sharded or self.strategy == "no_shard"
        if info.is_expert:
            return ("edp",) if is_whole else ("edp_replicate",)
        axes = ("cp", "dp") if is_whole else ("dp_replicate",)
        is_common = not info.tensor_parallel_sharded and (info.gradient_is_partial or self.compares_tensor_parallel)
        return ("tp", *axes) if is_common else axes


@cache
def first_holders(grid: RankGrid) -> Tensor:
    """The first holder of what each rank holds, ``[ranks, classes]``."""
    first = torch.arange(grid.world_size).unsqueeze(1).repeat(1, len(HOLDERS))
    for column, axes in enumerate(HOLDERS):
        if axes == ("edp_replicate",) and not grid.divides_experts:
            continue  # without shards of experts, no tensor is in this class
        for group in grid.groups(axes):
            first[list(group), column] = group[0]
    return first


def disagreeing_groups(grid: RankGrid, folds: Tensor) -> list[tuple[HolderAxes, tuple[int, ...]]]:
    """The groups whose digests ``folds`` ``[ranks, classes, 2]`` differ, with their class."""
    differs = (folds != folds.gather(0, first_holders(grid).unsqueeze(2).expand_as(folds))).any(dim=2)
    places = differs.nonzero().tolist()  # [ranks, classes]
    return list(dict.fromkeys((HOLDERS[column], grid.group(rank, HOLDERS[column])) for rank, column in places))


@dataclass(frozen=True)
class StateDigests:
    """The digests of this rank's tensors, on its device."""

    held: Sequence[HeldTensor]
    by_tensor: Tensor  # [tensors, 2]

    @classmethod
    def of(cls, tensors: Iterable[HeldTensor], topology: Topology) -> "StateDigests":
        held = list(tensors)
        empty = torch.zeros((0, 2), dtype=torch.int64, device=topology.device)
        return cls(held, torch.stack([digest(one.tensor).to(topology.device) for one in held]) if held else empty)

    def folds(self) -> Tensor:
        """One digest for each class of :data:`HOLDERS`: ``[classes, 2]``."""
        device = self.by_tensor.device
        keys = torch.tensor([key_of(*one.key) for one in self.held], dtype=torch.int64).to(device)  # [tensors]
        classes = []
        for axes in HOLDERS:
            mine = [number for number, one in enumerate(self.held) if one.holders == axes]
            chosen = torch.tensor(mine, dtype=torch.int64).to(device)
            classes.append(fold(self.by_tensor[chosen], keys[chosen]))
        return torch.stack(classes)

    def changed(self, before: "StateDigests") -> Tensor:
        """Whether each tensor that rests has another digest than ``before``: ``[resting tensors]``."""
        return (self._resting() != before._resting()).any(dim=1)

    @property
    def resting_keys(self) -> list[TensorKey]:
        """The resting tensors, in the order of :meth:`changed`."""
        return [one.key for one in self.held if one.rests]

    def _resting(self) -> Tensor:
        chosen = torch.tensor([number for number, one in enumerate(self.held) if one.rests], dtype=torch.int64)
        return self.by_tensor[chosen.to(self.by_tensor.device)]

    def by_key(self, holders: HolderAxes) -> dict[TensorKey, tuple[int, ...]]:
        """The digests of one class by key; waits for the device."""
        rows = self.by_tensor.tolist()
        return {one.key: tuple(row) for one, row in zip(self.held, rows) if one.holders == holders}


# Words of a row: weights by row and by column need no memory of the size of the tensor.
_ROW = 1024
# Odd factors of the weighted sums of rows and of the tail.
_ROW_FACTOR, _TAIL_FACTOR = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def digest(tensor: Tensor) -> Tensor:
    """The digest ``[2]`` of the bits of a contiguous ``tensor``."""
    body, tail = _words(tensor)
    # A small tensor is one row. A larger one is a matrix of words, whose sums by row and by column are weighted:
    #
    #     w1    w2   ... w1024     row sum x 1
    #     w1025 ...                row sum x 2      and the rest, weighted word by word
    #     x 1   x 2  ... x 1024
    if body.numel() <= 2 * _ROW:
        words = torch.cat((body, tail)) if tail.numel() else body
        return torch.stack((words.sum(), (words * _positions(words)).sum()))
    rows = body[: body.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = torch.cat((body[rows.numel() :], tail))
    by_row, by_column = rows.sum(dim=1), rows.sum(dim=0)
    weighted = (
        (by_row * _positions(by_row)).sum() * _ROW_FACTOR
        + (by_column * _positions(by_column)).sum()
        + (rest * _positions(rest)).sum() * _TAIL_FACTOR
    )
    return torch.stack((by_row.sum() + rest.sum(), weighted))


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The whole 8-byte words of ``tensor``, and its remaining bytes, each as an int64 number."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # a view of 8-byte words must begin at one
    num_words = flat.nbytes // 8
    if num_words * 8 == flat.nbytes:
        return flat.view(torch.int64), flat.new_zeros(0, dtype=torch.int64)
    octets = flat.view(torch.uint8)
    return octets[: num_words * 8].view(torch.int64), octets[num_words * 8 :].to(torch.int64)


def _positions(words: Tensor) -> Tensor:
    """The weights 1, 2, 3 ... of words."""
    return torch.arange(1, words.numel() + 1, device=words.device)


def key_of(*names: Hashable) -> int:
    """An odd number for ``names``, the same in every process: the factor of a tensor's digest in a fold."""
    hashed = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True) | 1


def fold(parts: Tensor, keys: Tensor) -> Tensor:
    """One digest ``[2]`` of the digests ``parts`` ``[tensors, 2]``, each multiplied by its ``keys`` ``[tensors]``.

    The keys are odd, so a change of one part changes the fold.
    """
    return (parts * keys.unsqueeze(1)).sum(dim=0)


@dataclass(frozen=True)
class OddRanks:
    """The ranks of a group that have other bits than the rest."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    """More than half of the group, which agree; none without a majority, and then ``ranks`` are the whole group."""


def find_odd(values: Mapping[int, Hashable]) -> OddRanks | None:
    """The ranks of a group whose value is not the majority's; None if all ``values``, by rank, are equal.

    Without a majority, as among two ranks, all ranks are named.
    """
    if len(set(values.values())) <= 1:
        return None
    (majority, count), *_ = Counter(values.values()).most_common(1)
    ranks = tuple(sorted(values))
    if 2 * count <= len(ranks):
        return OddRanks(ranks, ())
    odd = tuple(rank for rank in ranks if values[rank] != majority)
    return OddRanks(odd, tuple(rank for rank in ranks if rank not in odd))
