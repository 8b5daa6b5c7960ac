"""The rank grid and its communicators: the only place that knows degrees and rank order.

The grid is arithmetic over rank numbers; a process group is made when a communicator is first used, by its
members alone, so a grid of 16,384 ranks costs nothing. (Llama 3 orders ranks [TP, CP, PP, DP] from the fastest
link to the slowest: arXiv 2407.21783, section 3.3.2.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from math import prod

import torch

from megatron.config.parallel import RANK_AXES
from megatron.core.communication import Communicator


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks with one size per axis.

    The axis ``dp`` consists of ``dp_shard`` (neighbouring ranks, which may divide optimizer state among them)
    and ``dp_replicate`` (``dp_replicas`` copies of such a group).
    """

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
        """Number of ranks in the grid."""
        return prod(size for _, size in self._dimensions())

    def _dimensions(self) -> list[tuple[str, int]]:
        """(axis, size) from the fastest-varying to the slowest."""
        dimensions = []
        for axis in self.order.split("-"):
            if axis == "dp":
                dimensions += [("dp_shard", self.dp // self.dp_replicas), ("dp_replicate", self.dp_replicas)]
            else:
                dimensions.append((axis, getattr(self, axis)))
        return dimensions

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on every axis, ``dp`` and its two parts included."""
        position = {}
        rest = rank
        for axis, size in self._dimensions():
            rest, position[axis] = divmod(rest, size)
        position["dp"] = position["dp_replicate"] * (self.dp // self.dp_replicas) + position["dp_shard"]
        return position

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axes`` alone, ascending along them."""
        chosen = set(_expand(axes))
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


def _expand(axes: Iterable[str]) -> Iterator[str]:
    for axis in axes:
        assert axis in (*RANK_AXES, "dp_shard", "dp_replicate"), axis
        yield from ("dp_shard", "dp_replicate") if axis == "dp" else (axis,)


class Topology:
    """One rank's place in the grid, its device, and the communicators along the axes.

    ``timeout`` is that of their collectives.
    """

    def __init__(self, grid: RankGrid, rank: int, device: torch.device, timeout: timedelta | None = None) -> None:
        self.grid = grid
        self.rank = rank
        self.device = device
        self._timeout = timeout
        self.coordinates = grid.coordinates(rank)
        self._communicators: dict[tuple[str | int, ...], Communicator] = {}
        self._channels: dict[tuple[str, bool], Communicator] = {}

    has_memory = True
    """Whether tensors have memory; False where a run is only rehearsed."""

    def communicator(self, *axes: str) -> Communicator:
        """The communicator along ``axes`` that this rank belongs to; its process group is made on first use."""
        return self._communicator(axes, self.grid.group(self.rank, axes), "x".join(axes))

    def _communicator(self, key: tuple[str | int, ...], ranks: tuple[int, ...], name: str) -> Communicator:
        if key not in self._communicators:
            # Two communicators of the same ranks are counted under their own names and share one process group.
            twin = next((other for other in self._communicators.values() if other.ranks == ranks), None)
            self._communicators[key] = self._connect(ranks, name, twin)
        return self._communicators[key]

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        return Communicator(ranks, self.rank, name, twin, exclusive, self._timeout)

    def pipeline_channel(self, kind: str, source: int, target: int) -> Communicator:
        """The communicator for messages of one ``kind`` from stage ``source`` to stage ``target``.

        Messages of different kinds, or in different directions, must not wait for each other: NCCL carries what two
        ranks send each other in one process group strictly in order. Hence a group of its own for each; all ranks of
        the pipeline must first use them in the same order.
        """
        key = kind, source < target
        if key not in self._channels:
            name = f"pp {kind} {'down' if source < target else 'up'}"
            ranks = self.grid.group(self.rank, ("pp",))
            self._channels[key] = self._connect(ranks, name, exclusive=True)
        return self._channels[key]

    @property
    def pipeline_parallel(self) -> Communicator:
        """Ranks that hold the stages of one copy of the model."""
        return self.communicator("pp")

    @property
    def loss_ranks(self) -> Communicator:
        """Ranks whose losses add up: the parts of a sequence, and the stages, of which the last has the loss, of all
        copies of the model."""
        return self.communicator("cp", "pp", "dp")

    @property
    def stage_ranks(self) -> Communicator:
        """Ranks that compute with the same layers: all of them but those of other stages."""
        return self.communicator("tp", "cp", "dp")

    @property
    def tensor_parallel(self) -> Communicator:
        """Ranks that share every layer."""
        return self.communicator("tp")

    @property
    def context_parallel(self) -> Communicator:
        """Ranks that share a sequence."""
        return self.communicator("cp")

    def context_parallel_levels(self, sizes: Sequence[int]) -> tuple[Communicator, ...]:
        """This rank's communicator on each level of the context-parallel ranks (:meth:`RankGrid.levels`)."""
        groups = self.grid.levels(self.rank, "cp", sizes)
        return tuple(self._communicator(("cp", *sizes, level), ranks, "cp") for level, ranks in enumerate(groups))

    @property
    def data_parallel(self) -> Communicator:
        """Ranks that hold the same part of the model and see different samples."""
        return self.communicator("dp")

    @property
    def world(self) -> Communicator:
        """All ranks."""
        return self.communicator(*RANK_AXES)


def single_process(device: torch.device | None = None) -> Topology:
    """The topology of a run of one process."""
    return Topology(RankGrid(), 0, device or torch.device("cpu"))
