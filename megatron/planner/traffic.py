"""Bytes that a rank sends, by axis of the grid and by link."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.communication import CollectiveRecord, Communicator, Observer

Link = Literal["in node", "across"]

NODE_SIZE = 8
"""Ranks of a node."""


def bytes_sent(record: CollectiveRecord) -> int:
    """Bytes that one rank of n sends, ring algorithms: 2 (n - 1) / n of the tensor for all-reduce, (n - 1) / n for
    all-gather, reduce-scatter, all-to-all and broadcast. A message counts at its sender."""
    share = (record.group_size - 1) / record.group_size
    match record.kind:
        case "all_reduce":
            return round(2 * share * record.num_bytes)
        case "all_gather" | "reduce_scatter" | "all_to_all" | "broadcast":
            return round(share * record.num_bytes)
        case "send" | "shift" | "exchange":
            return record.num_bytes
    return 0


def is_in_node(ranks: Sequence[int]) -> bool:
    return len({rank // NODE_SIZE for rank in ranks}) == 1


@dataclass
class Traffic:
    """Sums the bytes that a rank sends."""

    rank: int
    records: list[CollectiveRecord] = field(default_factory=list)
    by_axis: Counter[str] = field(default_factory=Counter)
    by_link: Counter[Link] = field(default_factory=Counter)

    def observer(self, communicator: Communicator) -> Observer:
        """An observer that counts the collectives of ``communicator``.

        A collective of ranks on several nodes counts as sent across nodes completely: the part that stays inside is
        the library's choice.
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

    def extrapolate(self, one: "Traffic", count: int, wanted: int) -> "Traffic":
        """The traffic of a step of ``wanted`` microbatches; ``self`` is a step of ``count``, ``one`` a step of one.
        Every microbatch sends equal bytes."""

        def extend(counted: Counter[Any], single: Counter[Any]) -> Counter[Any]:
            per_microbatch = {key: (counted[key] - single[key]) // (count - 1) for key in counted}
            return Counter({key: counted[key] + per_microbatch[key] * (wanted - count) for key in counted})

        return Traffic(self.rank, [], extend(self.by_axis, one.by_axis), extend(self.by_link, one.by_link))

    def clear(self) -> None:
        for counted in (self.records, self.by_axis, self.by_link):
            counted.clear()


def axis_of(axes: str) -> str:
    """The axis of a group's traffic. Gradient groups span ``cp`` and ``dp``; ``several`` is the rest: single numbers
    that all ranks exchange."""
    if axes in ("tp", "cp"):
        return axes
    if axes.startswith("pp "):
        return "pp"
    return "dp" if set(axes.split("x")) <= {"cp", "dp", "dp_shard", "dp_replicate"} else "several"
