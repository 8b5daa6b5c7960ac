"""The collectives to measure: kinds, sizes and groups of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.communication import Communicator

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
