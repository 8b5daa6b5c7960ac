"""The rank grid and its communicators.

The grid is arithmetic over rank numbers. A process group is created when a communicator is first used, by its members
alone. (Llama 3 orders ranks [TP, CP, PP, DP] from the fastest link to the slowest: arXiv 2407.21783, section 3.3.2.)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any

import torch

from megatron.config.parallel import RANK_AXES
from megatron.core.communication import Communicator
from megatron.core.control import ControlGroup

EXPERT_AXES = ("etp", "ep", "edp")
_EXPERT_PARTS = ("edp_shard", "edp_replicate")


@dataclass(frozen=True)
class RankGrid:
    """The axes of a run's ranks.

    Dense layers: every rank of a stage has a position on ``tp``, ``cp`` and ``dp``. The axis ``dp`` consists of
    ``dp_shard`` (neighbouring ranks, a shard group) and ``dp_replicate`` (``dp_replicas`` such groups).

    Experts: the same ranks of the stage are folded into ``etp``, ``ep`` and ``edp``, from neighbouring ranks to distant
    ones, whatever the ``order`` (parallel folding, arXiv 2504.14960; equal to Megatron-LM's groups for the order
    tp-cp-ep-dp-pp). ``edp`` consists of ``edp_shard`` and ``edp_replicate``, again ``dp_replicas`` groups. So
    tp x cp x dp = etp x ep x edp, and ``ep`` in ``order`` has no effect.
    """

    # TP2 PP2 DP2 in the default order, experts folded as EP2:
    #
    #     rank    0  1  2  3  4  5  6  7
    #     tp      0  1  0  1  0  1  0  1
    #     pp      0  0  1  1  0  0  1  1
    #     dp      0  0  0  0  1  1  1  1
    #     ep      0  1  0  1  0  1  0  1      of the ranks 0 1 4 5 of stage 0, and 2 3 6 7 of stage 1
    #     edp     0  0  0  0  1  1  1  1

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    dp_replicas: int = 1
    order: str = "-".join(RANK_AXES)

    def __post_init__(self) -> None:
        assert sorted(self.order.split("-")) == sorted(RANK_AXES), self.order
        assert self.dp % self.dp_replicas == 0, (self.dp, self.dp_replicas)
        assert self.stage_size % (self.etp * self.ep) == 0, (self.stage_size, self.etp, self.ep)

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Ranks with the same part of the experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def divides_experts(self) -> bool:
        """Whether ``edp`` has its two parts. Without sharding ``dp_replicas`` is ``dp``, which may exceed ``edp``."""
        return self.edp % self.dp_replicas == 0

    def _dense_dimensions(self) -> list[tuple[str, int]]:
        """(axis, size) of a stage's ranks from the fastest-varying axis to the slowest, for dense parameters."""
        dimensions = []
        for axis in self.order.split("-"):
            if axis == "dp":
                dimensions += [("dp_shard", self.dp // self.dp_replicas), ("dp_replicate", self.dp_replicas)]
            elif axis not in ("pp", "ep"):
                dimensions.append((axis, getattr(self, axis)))
        return dimensions

    def _expert_dimensions(self, in_parts: bool = False) -> list[tuple[str, int]]:
        """(axis, size) of a stage's ranks for experts; ``in_parts`` divides ``edp``."""
        folded = [("etp", self.etp), ("ep", self.ep)]
        if not in_parts:
            return [*folded, ("edp", self.edp)]
        assert self.divides_experts, (self.edp, self.dp_replicas)
        return [*folded, ("edp_shard", self.edp // self.dp_replicas), ("edp_replicate", self.dp_replicas)]

    @cached_property
    def _stage_stride(self) -> int:
        """Distance of the ranks of neighbouring stages."""
        faster = self.order.split("-")[: self.order.split("-").index("pp")]
        return prod(getattr(self, axis) for axis in faster if axis != "ep")

    def _place(self, rank: int) -> tuple[int, int]:
        """The stage of ``rank``, and its place among the sorted ranks of that stage."""
        rest, low = divmod(rank, self._stage_stride)
        high, stage = divmod(rest, self.pp)
        return stage, high * self._stage_stride + low

    def _rank_at(self, stage: int, place: int) -> int:
        high, low = divmod(place, self._stage_stride)
        return (high * self.pp + stage) * self._stage_stride + low

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on every axis, including ``dp`` and its two parts."""
        stage, place = self._place(rank)
        position = {"pp": stage}
        for dimensions in (self._dense_dimensions(), self._expert_dimensions()):
            rest = place
            for axis, size in dimensions:
                rest, position[axis] = divmod(rest, size)
        position["dp"] = position["dp_replicate"] * (self.dp // self.dp_replicas) + position["dp_shard"]
        return position

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axes`` alone, ascending. Axes of experts occur with ``pp`` only."""
        chosen: set[str] = set()
        for axis in axes:
            chosen.update(("dp_shard", "dp_replicate") if axis == "dp" else (axis,))
        stage, place = self._place(rank)
        stages = range(self.pp) if "pp" in chosen else (stage,)
        chosen.discard("pp")
        if chosen & {*EXPERT_AXES, *_EXPERT_PARTS}:
            dimensions = self._expert_dimensions(bool(chosen & set(_EXPERT_PARTS)))
        else:
            dimensions = self._dense_dimensions()
        assert chosen <= {axis for axis, _ in dimensions}, axes
        places = [place]
        stride = 1
        for axis, size in dimensions:
            if axis in chosen:
                start = place // stride % size * stride
                places = [one - start + step for one in places for step in range(0, stride * size, stride)]
            stride *= size
        return tuple(sorted(self._rank_at(stage, place) for stage in stages for place in places))

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

    ``timeout`` applies to each collective of a communicator, but not to :attr:`control`; ``shares_memory`` is that of
    :class:`~megatron.core.communication.Communicator`.
    """

    has_memory = True
    """Whether tensors have memory; False in a dry run."""
    simulated_overlap: Callable[[Communicator], Any] | None = None
    """Makes the overlap of tensor-parallel collectives in a dry run; a run chooses one for its GPUs."""

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        shares_memory: bool = True,
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.device = device
        self._timeout = timeout
        self._shares_memory = shares_memory
        self.coordinates = grid.coordinates(rank)
        self._communicators: dict[tuple[str | int, ...], Communicator] = {}
        self._channels: dict[tuple[str, bool], Communicator] = {}

    def communicator(self, *axes: str) -> Communicator:
        """This rank's communicator along ``axes``; its process group is created on first use."""
        return self._communicator(axes, self.grid.group(self.rank, axes), "x".join(axes))

    def open(self, *groups: Sequence[str]) -> None:
        """Create the process groups of these communicators now, each given by its axes. Collective.

        torch counts process groups (:attr:`Communicator.process_group`), and a stage without experts never uses those
        of experts: so all ranks of the world call this at set-up with the same groups.
        """
        for axes in groups:
            self.communicator(*axes).open()

    def _communicator(self, key: tuple[str | int, ...], ranks: tuple[int, ...], name: str) -> Communicator:
        if key not in self._communicators:
            # Communicators of the same ranks have their own names for counting and share one process group.
            twin = next((other for other in self._communicators.values() if other.ranks == ranks), None)
            self._communicators[key] = self._connect(ranks, name, twin)
        return self._communicators[key]

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        return Communicator(ranks, self.rank, name, twin, exclusive, self._timeout, self._shares_memory)

    def on_host(self) -> AbstractContextManager[None]:
        """What is allocated inside is in host memory, beside a device: a dry run does not count it as the device's."""
        return nullcontext()

    @property
    def communicators(self) -> list[Communicator]:
        """Those that were asked for so far, with the channels of the pipeline."""
        return [*self._communicators.values(), *self._channels.values()]

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
        return self.communicator("tp", "cp", "pp", "dp")

    @cached_property
    def control(self) -> ControlGroup:
        """All ranks, for objects and for waits while one rank does long work."""
        return ControlGroup(range(self.grid.world_size), self.rank, self._timeout)


def single_process(device: torch.device | None = None) -> Topology:
    return Topology(RankGrid(), 0, device or torch.device("cpu"))
