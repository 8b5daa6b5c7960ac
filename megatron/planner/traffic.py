"""Bytes that a rank sends, by axis of the grid and by link."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron.core.communication import CollectiveRecord, Communicator, Observer
from megatron.core.topology import RankGrid

Link = Literal["in node", "across"]

EXPERTS_IN_NODE = "tp-cp-ep-dp-pp"
"""The order in which the ranks of a stage are neighbours."""


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


def expert_placement_advice(grid: RankGrid, node_size: int) -> str | None:
    """A sentence if groups of expert-parallel ranks span nodes and another order of the ranks avoids it, else None.

    Tokens are exchanged in every MoE layer. They stay in a node if the ranks of a pipeline stage are neighbours.
    """
    # The ranks with a copy of the experts, where they are not on one node, in the given and in the better order.
    given, better = (
        [group for group in one.groups(("etp", "ep")) if not is_in_node(group, node_size)]
        for one in (grid, replace(grid, order=EXPERTS_IN_NODE))
    )
    if not given or better:
        return None
    return (
        f"expert-parallel ranks are on several nodes (such as {' '.join(map(str, given[0]))}): add --rank-order "
        f"{EXPERTS_IN_NODE}, which keeps them in a node"
    )


def is_in_node(ranks: Sequence[int], node_size: int) -> bool:
    """Whether all ``ranks`` are on one node of ``node_size`` ranks."""
    return len({rank // node_size for rank in ranks}) == 1


@dataclass
class Traffic:
    """Sums the bytes that a rank sends."""

    rank: int
    node_size: int
    records: list[CollectiveRecord] = field(default_factory=list)
    by_axis: Counter[str] = field(default_factory=Counter)
    by_link: Counter[Link] = field(default_factory=Counter)

    def observer(self, communicator: Communicator) -> Observer:
        """An observer that counts the collectives of ``communicator``.

        A collective of ranks on several nodes counts as sent across nodes completely: the part that stays inside is
        the library's choice.
        """
        in_node = is_in_node(communicator.ranks, self.node_size)

        def observe(record: CollectiveRecord) -> None:
            self.records.append(record)
            sent = bytes_sent(record)
            if sent == 0:
                return
            # Messages have a peer of their own; a collective stays in a node with all of its ranks.
            stays = in_node if record.peer is None else is_in_node((self.rank, record.peer), self.node_size)
            self.by_axis[axis_of(record.axes)] += sent
            self.by_link["in node" if stays else "across"] += sent

        return observe

    def extrapolate(self, one: "Traffic", count: int, wanted: int) -> "Traffic":
        """The traffic of a step of ``wanted`` microbatches; ``self`` is a step of ``count``, ``one`` a step of one.
        Every microbatch sends equal bytes."""

        # sent(m) = constant + m * per microbatch; steps of 1 and of ``count`` microbatches determine both.
        def extend(counted: Counter[Any], single: Counter[Any]) -> Counter[Any]:
            per_microbatch = {key: (counted[key] - single[key]) // (count - 1) for key in counted}
            return Counter({key: counted[key] + per_microbatch[key] * (wanted - count) for key in counted})

        by_axis, by_link = extend(self.by_axis, one.by_axis), extend(self.by_link, one.by_link)
        return Traffic(self.rank, self.node_size, [], by_axis, by_link)

    def clear(self) -> None:
        for counted in (self.records, self.by_axis, self.by_link):
            counted.clear()


def axis_of(axes: str) -> str:
    """The axis of a group's traffic. Gradient groups span ``cp`` and ``dp``, of experts ``edp``; tokens are gathered
    over ``etp`` and ``ep``, which counts as ``ep``. ``several`` is the rest: single numbers that all ranks exchange."""
    if axes in ("tp", "cp", "etp", "ep"):
        return axes
    if axes.startswith("pp "):
        return "pp"
    parts = set(axes.split("x"))
    if parts == {"etp", "ep"}:
        return "ep"
    if parts <= {"edp", "edp_shard", "edp_replicate"}:
        return "edp"
    return "dp" if parts <= {"cp", "dp", "dp_shard", "dp_replicate"} else "several"
