"""Bytes that a rank sends, by axis of the grid and by link."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.communication import CollectiveRecord, Communicator, Observer

Link = Literal["in node", "across"]

NODE_SIZE = 8
"""Ranks of a node."""

_TWO_ROUNDS, _ONE_ROUND = ("all_reduce",), ("all_gather", "reduce_scatter", "all_to_all", "broadcast")


def bytes_sent(record: CollectiveRecord) -> int:
    """What one rank sends: round a ring twice for an all-reduce, once for what all-gathers, scatters or exchanges; a
    message is sent once, by its sender."""
    share = (record.group_size - 1) / record.group_size
    if record.kind in _TWO_ROUNDS:
        return round(2 * share * record.num_bytes)
    if record.kind in _ONE_ROUND:
        return round(share * record.num_bytes)
    return record.num_bytes if record.kind in ("send", "shift", "exchange") else 0


def is_in_node(ranks: Sequence[int], node_size: int = NODE_SIZE) -> bool:
    """Whether ``ranks`` share a node."""
    return len({rank // node_size for rank in ranks}) == 1


@dataclass
class Traffic:
    """Adds up what a rank sends."""

    rank: int
    records: list[CollectiveRecord] = field(default_factory=list)
    by_axis: Counter[str] = field(default_factory=Counter)
    by_link: Counter[Link] = field(default_factory=Counter)

    def observer(self, communicator: Communicator) -> Observer:
        """Counts the collectives of ``communicator``.

        A collective among ranks of several nodes counts as sent across nodes, all of it: how much of it stays inside
        is the library's choice.
        """
        in_node = is_in_node(communicator.ranks)

        def observe(record: CollectiveRecord) -> None:
            self.records.append(record)
            sent = bytes_sent(record)
            if sent == 0:
                return
            stays = in_node if record.peer is None else is_in_node((self.rank, record.peer))
            self.by_axis[axis_of(record.axes)] += sent
            self.by_link["in node" if stays else "across"] += sent

        return observe

    def taken(self) -> "Traffic":
        """What was counted, which is forgotten here."""
        taken = Traffic(self.rank, list(self.records), self.by_axis.copy(), self.by_link.copy())
        self.clear()
        return taken

    def beyond(self, other: "Traffic", its_count: int, count: int, wanted: int) -> "Traffic":
        """What a step of ``wanted`` microbatches sends, where this is one of ``count`` and ``other`` one of
        ``its_count``: the same for every microbatch, and something once."""

        def extend(mine: Counter[Any], its: Counter[Any]) -> Counter[Any]:
            per_microbatch = {key: (mine[key] - its[key]) // (count - its_count) for key in mine}
            return Counter({key: mine[key] + per_microbatch[key] * (wanted - count) for key in mine})

        return Traffic(self.rank, [], extend(self.by_axis, other.by_axis), extend(self.by_link, other.by_link))

    def clear(self) -> None:
        """Forget what was counted."""
        for counted in (self.records, self.by_axis, self.by_link):
            counted.clear()


def axis_of(axes: str) -> str:
    """The axis whose traffic a group carries: context-parallel ranks share gradients with the data-parallel ones;
    ``several`` are the few numbers that go to all ranks."""
    parts = set(axes.split("x"))
    if axes in ("tp", "cp"):
        return axes
    if axes.startswith("pp "):
        return "pp"
    return "dp" if parts <= {"cp", "dp", "dp_shard", "dp_replicate"} else "several"
