"""The ranks of each node, which the launchers agree on at the start of an attempt.

The ranks of a node that was named twice are the last, so that they are the first to be spares
(megatron/operation/elastic.py).
"""

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from megatron.operation.nodes import NamedNodes, Naming


@dataclass(frozen=True)
class NodeReport:
    """What a launcher tells the first one."""

    host: str
    num_ranks: int
    namings: tuple[Naming, ...]
    """The nodes that it knows to have been named: the run directory need not be on shared storage."""

    def to_text(self) -> str:
        """The inverse of :meth:`from_text`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "NodeReport":
        values = json.loads(text)
        return NodeReport(values["host"], values["num_ranks"], tuple(Naming(**naming) for naming in values["namings"]))


@dataclass(frozen=True)
class NodeOrder:
    """What the first launcher tells the others."""

    attempt: str
    """A name of the attempt."""
    first_ranks: tuple[int, ...]
    """The global rank of the first process of each node."""
    namings: tuple[Naming, ...]
    """All that any launcher knows."""
    sentences: tuple[str, ...] = ()
    """For the log."""

    def to_text(self) -> str:
        """The inverse of :meth:`from_text`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "NodeOrder":
        values = json.loads(text)
        namings = tuple(Naming(**naming) for naming in values["namings"])
        return NodeOrder(values["attempt"], tuple(values["first_ranks"]), namings, tuple(values["sentences"]))


def order_nodes(reports: Sequence[NodeReport], named: NamedNodes) -> NodeOrder:
    """The order of the nodes, by the reports of all launchers; ``named`` learns what they know."""
    for report in reports:
        named.add(report.namings)
    hosts = {report.host for report in reports}
    suspects = {host: reasons for host, reasons in named.suspects().items() if host in hosts}
    sentences = tuple(
        f"Node {host} was named {len(reasons)} times ({', '.join(reasons)}): its ranks are the last, which wait as "
        "spares if there are any."
        for host, reasons in suspects.items()
    )
    return NodeOrder(secrets.token_hex(8), first_ranks(reports, suspects), tuple(named.namings), sentences)


def first_ranks(nodes: Sequence[NodeReport], suspects: Collection[str]) -> tuple[int, ...]:
    """The global rank of the first process of each node; the ranks of ``suspects`` are the last."""
    order = sorted(range(len(nodes)), key=lambda place: nodes[place].host in suspects)
    starts = accumulate((nodes[place].num_ranks for place in order), initial=0)
    first = dict(zip(order, starts))
    return tuple(first[place] for place in range(len(nodes)))
