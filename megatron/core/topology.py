"""The rank grid and its communicators.

The grid is arithmetic over rank numbers. A process group is created when a communicator is first used, by its members
alone. (Llama 3 orders ranks [TP, CP, PP, DP] from the fastest link to the slowest: arXiv 2407.21783, section 3.3.2.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import product
from math import prod

import torch

from megatron.config.parallel import RANK_AXES
from megatron.core.communication import Communicator
from megatron.core.control import ControlGroup


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks with one size per axis. The axis ``dp`` consists of ``dp_shard`` (neighbouring ranks, a shard
    group) and ``dp_replicate`` (``dp_replicas`` such groups)."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    dp_replicas: int = 1
    order: str = "-".join(RANK_AXES)

    def __post_init__(self) -> None:
        assert sorted(self.order.split("-")) == sorted(RANK_AXES), self.order
        assert self.dp % self.dp_replicas == 0, (self.dp, self.dp_replicas)

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self._dimensions())

    def _dimensions(self) -> list[tuple[str, int]]:
        """(axis, size) from the fastest-varying axis to the slowest."""
        dimensions = []
        for axis in self.order.split("-"):
            if axis == "dp":
                dimensions += [("dp_shard", self.dp // self.dp_replicas), ("dp_replicate", self.dp_replicas)]
            else:
                dimensions.append((axis, getattr(self, axis)))
        return dimensions

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on every axis, including ``dp`` and its two parts."""
        position = {}
        rest = rank
        for axis, size in self._dimensions():
            rest, position[axis] = divmod(rest, size)
        position["dp"] = position["dp_replicate"] * (self.dp // self.dp_replicas) + position["dp_shard"]
        return position

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axes`` alone, ascending along them."""
        chosen: set[str] = set()
        for axis in axes:
            assert axis in (*RANK_AXES, "dp_shard", "dp_replicate"), axis
            chosen.update(("dp_shard", "dp_replicate") if axis == "dp" else (axis,))
        position = self.coordinates(rank)
        offsets: list[range] = []
        stride = 1
        base = 0
        for axis, size in self._dimensions():
            if axis in chosen:
                offsets.append(range(0, stride * size, stride))
            else:
                base += position[axis] * stride
            stride *= size
        return tuple(base + sum(steps) for steps in product(*reversed(offsets)))

    def levels(self, rank: int, axis: str, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The group of ``rank`` on each level of an axis: ``sizes[0]`` neighbours, then ``sizes[1]`` such groups."""
        ranks = self.group(rank, (axis,))
        assert not sizes or prod(sizes) == len(ranks), (sizes, ranks)
        place = ranks.index(rank)
        strides = [prod(sizes[:level]) for level in range(len(sizes))]
        starts = [place - place // stride % size * stride for stride, size in zip(strides, sizes)]
        return tuple(
            ranks[start : start + size * stride : stride] for start, size, stride in zip(starts, sizes, strides)
        )

    def groups(self, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Every group along ``axes``; together they partition the ranks."""
        names = tuple(axes)
        seen: set[int] = set()
        for rank in range(self.world_size):
            if rank not in seen:
                members = self.group(rank, names)
                seen.update(members)
                yield members


class Topology:
    """The coordinates, the device and the communicators of one rank.

    ``timeout`` applies to each collective of a communicator, but not to :attr:`control`.
    """

    has_memory = True
    """Whether tensors have memory; False in a dry run."""

    def __init__(self, grid: RankGrid, rank: int, device: torch.device, timeout: timedelta | None = None) -> None:
        self.grid = grid
        self.rank = rank
        self.device = device
        self._timeout = timeout
        self.coordinates = grid.coordinates(rank)
        self._communicators: dict[tuple[str | int, ...], Communicator] = {}
        self._channels: dict[tuple[str, bool], Communicator] = {}

    def communicator(self, *axes: str) -> Communicator:
        """This rank's communicator along ``axes``; its process group is created on first use."""
        return self._communicator(axes, self.grid.group(self.rank, axes), "x".join(axes))

    def _communicator(self, key: tuple[str | int, ...], ranks: tuple[int, ...], name: str) -> Communicator:
        if key not in self._communicators:
            # Communicators of the same ranks have their own names for counting and share one process group.
            twin = next((other for other in self._communicators.values() if other.ranks == ranks), None)
            self._communicators[key] = self._connect(ranks, name, twin)
        return self._communicators[key]

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        return Communicator(ranks, self.rank, name, twin, exclusive, self._timeout)

    def pipeline_channel(self, kind: str, source: int, target: int) -> Communicator:
        """The communicator for messages of one ``kind`` from stage ``source`` to stage ``target``.

        NCCL orders all messages of two ranks in one process group, so each kind and direction has its own group. All
        ranks of the pipeline must use them for the first time in the same order.
        """
        key = kind, source < target
        if key not in self._channels:
            name = f"pp {kind} {'down' if source < target else 'up'}"
            ranks = self.grid.group(self.rank, ("pp",))
            self._channels[key] = self._connect(ranks, name, exclusive=True)
        return self._channels[key]

    @property
    def pipeline_parallel(self) -> Communicator:
        """The stages of one replica."""
        return self.communicator("pp")

    @property
    def stage_ranks(self) -> Communicator:
        """Ranks with the same layers: all ranks of one stage."""
        return self.communicator("tp", "cp", "dp")

    @property
    def tensor_parallel(self) -> Communicator:
        return self.communicator("tp")

    @property
    def context_parallel(self) -> Communicator:
        return self.communicator("cp")

    def context_parallel_levels(self, sizes: Sequence[int]) -> tuple[Communicator, ...]:
        """This rank's communicator on each level of the context-parallel axis (:meth:`RankGrid.levels`)."""
        groups = self.grid.levels(self.rank, "cp", sizes)
        return tuple(self._communicator(("cp", *sizes, level), ranks, "cp") for level, ranks in enumerate(groups))

    @property
    def data_parallel(self) -> Communicator:
        """Ranks with the same part of the model and different samples."""
        return self.communicator("dp")

    @property
    def world(self) -> Communicator:
        """All ranks, for tensors."""
        return self.communicator(*RANK_AXES)

    @cached_property
    def control(self) -> ControlGroup:
        """All ranks, for objects and for waits while one rank does long work."""
        return ControlGroup(range(self.grid.world_size), self.rank, self._timeout)


def single_process(device: torch.device | None = None) -> Topology:
    return Topology(RankGrid(), 0, device or torch.device("cpu"))
