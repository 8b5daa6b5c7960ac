"""What the launchers of several nodes agree on: nodes that were named, the order of the ranks; and pauses."""

import dataclasses
import json
import os
import random
from itertools import chain
from pathlib import Path

import pytest

from megatron.operation.nodes import NAMED_NODES, Backoff, NamedNodes, Naming, NodeOrder, NodeReport, order_nodes


def naming(host: str, attempt: str, reason: str = "hang", time: float = 0.0) -> Naming:
    return Naming(host, reason, attempt, time)


def test_a_node_is_a_suspect_when_two_attempts_have_named_it(tmp_path: Path) -> None:
    nodes = NamedNodes(tmp_path)
    nodes.name(naming("a", "1"))
    nodes.name(naming("a", "1", "straggler"))  # by another launcher, for the same failure
    nodes.name(naming("b", "1"))
    assert nodes.suspects() == {}
    # The file survives the job, and lines that are damaged do no harm.
    with (tmp_path / NAMED_NODES).open("a") as file:
        file.write('{"host": "b", "reas\n[]\n{"host": 1}\n\0\n')
    later = NamedNodes(tmp_path)
    later.name(naming("a", "2", "silent_corruption", 1.0))
    assert later.suspects() == {"a": ["hang", "silent_corruption"]}
    assert len(NamedNodes(tmp_path).namings) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    nodes = NamedNodes(tmp_path)
    nodes.name(naming("a", "1"))
    assert len(nodes.namings) == 1


def test_ranks_of_suspects_are_the_last(chance: random.Random) -> None:
    """Every rank once, in consecutive numbers on each node, and in the order of the others."""
    reports = [NodeReport(host, chance.randint(1, 4), ()) for host in "abcde"]
    named = NamedNodes()
    named.add(naming(host, attempt) for host in "bd" for attempt in "12")
    first = order_nodes(reports, named).first_ranks
    ranks = [list(range(start, start + report.num_ranks)) for start, report in zip(first, reports)]
    assert sorted(chain.from_iterable(ranks)) == list(range(sum(report.num_ranks for report in reports)))
    assert [report.host for _, report in sorted(zip(first, reports), key=lambda pair: pair[0])] == list("acebd")


def test_launchers_share_what_they_know() -> None:
    """Each has named the node once; together they know that it is a suspect."""
    reports = [NodeReport(host, 2, (naming("a", host),)) for host in ("a", "b")]
    sent = json.loads(json.dumps([dataclasses.asdict(report) for report in reports]))
    order = order_nodes([NodeReport.from_json(one) for one in sent], NamedNodes())
    assert order.first_ranks == (2, 0)
    (sentence,) = order.sentences
    assert "Node a was named 2 times (hang, hang)" in sentence
    assert NodeOrder.from_json(json.loads(json.dumps(dataclasses.asdict(order)))) == order
    assert order_nodes([dataclasses.replace(report, namings=()) for report in reports], NamedNodes()).sentences == ()


def test_pauses() -> None:
    """None before the first restart, then doubling up to a limit; progress starts the count anew."""
    backoff = Backoff()
    assert [backoff.pause_after_failure(False) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.pause_after_failure(True) == 0
    assert [backoff.pause_after_failure(False) for _ in range(3)] == [0, 1, 2]
