"""How many ranks train when nodes are missing, and which nodes are left out."""

import dataclasses
import os
import random
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.operation.elastic import usable_world_size
from megatron.operation.named_nodes import FILE, NamedNodes, Naming, read
from megatron.operation.node_order import NodeOrder, NodeReport, first_ranks, order_nodes
from megatron.training.batch_schedule import check_batches
from tests.end_to_end.run_process import TINY_RUN, FlagValue, words_of
from tests.messages import assert_helpful


def config_of(**changes: FlagValue) -> RunConfig:
    return parse_command_line(words_of({**TINY_RUN, "mock_data": True, "vocab_size": 384, **changes}))


def usable(world_size: int, **changes: FlagValue) -> int:
    config = config_of(**changes)
    return usable_world_size(config, world_size, partial(check_batches, config))


TENSOR_AND_PIPELINE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 4, "global_batch_size": 32}
RAMP: dict[str, FlagValue] = {"rampup_batch_size": [4, 4, 100], "global_batch_size": 16}
STEPS: dict[str, FlagValue] = {"step_batch_size_schedule": "0:12 1K:24", "global_batch_size": None}


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        # Eight sequences in microbatches of two: four replicas at most.
        ({}, {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 100: 4}),
        ({"global_batch_size": 12}, {2: 2, 3: 3, 4: 3, 5: 3, 6: 6}),
        (TENSOR_AND_PIPELINE, {4: 4, 7: 4, 8: 8, 15: 8, 16: 16, 20: 16}),
        ({"context_parallel_size": 2}, {2: 2, 3: 2, 5: 4, 6: 4}),
        # Experts need whole groups of ranks, too.
        (EXPERTS, {4: 4, 6: 4, 7: 4, 8: 8, 15: 8, 16: 16}),
        # Every batch of a ramp and of a schedule.
        (RAMP, {2: 2, 3: 2, 4: 2, 8: 2}),
        (STEPS, {3: 3, 4: 3, 5: 3, 6: 6, 12: 6}),
        # The batch stays the same, although the flag allows a smaller one.
        ({"decrease_batch_size_if_needed": True}, {3: 2, 5: 4}),
        ({"eval_global_batch_size": 4}, {4: 2}),
        ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}, {2: 2, 3: 2, 4: 4}),
    ],
)
def test_the_largest_data_parallel_size_with_which_the_run_is_valid(
    flags: dict[str, FlagValue], sizes: dict[int, int]
) -> None:
    assert {world_size: usable(world_size, **flags) for world_size in sizes} == sizes


@pytest.mark.parametrize(
    ("world_size", "flags", "named"),
    [
        (3, TENSOR_AND_PIPELINE, "--nnodes"),
        (3, {"global_batch_size": 7}, "--global-batch-size"),
        (3, {"global_batch_size": None}, "--global-batch-size"),
        (2, {"lr": None}, "--lr"),
    ],
)
def test_where_no_size_is_valid(world_size: int, flags: dict[str, FlagValue], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        usable(world_size, **flags)
    assert_helpful(str(caught.value), named)


# --- nodes that were named -----------------------------------------------------------------------------------


def naming(host: str, attempt: str, reason: str = "hang", time: float = 0.0) -> Naming:
    return Naming(host, reason, attempt, time)


def test_a_node_is_a_suspect_when_two_attempts_have_named_it(tmp_path: Path) -> None:
    nodes = NamedNodes(tmp_path)
    nodes.name(naming("a", "1"), tmp_path)
    nodes.name(naming("a", "1", "straggler"), tmp_path)  # by another launcher, for the same failure
    nodes.name(naming("b", "1"), tmp_path)
    assert nodes.suspects() == {}
    # The file survives the job, and lines that are damaged do no harm.
    with (tmp_path / FILE).open("a") as file:
        file.write('{"host": "b", "reas\n[]\n{"host": 1}\n\0\n')
    later = NamedNodes(tmp_path)
    later.name(naming("a", "2", "silent_corruption", 1.0), tmp_path)
    assert later.suspects() == {"a": ["hang", "silent_corruption"]}
    assert len(read(tmp_path / FILE)) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    nodes = NamedNodes(tmp_path)
    nodes.name(naming("a", "1"), tmp_path)
    assert len(nodes.namings) == 1


def test_ranks_of_suspects_are_the_last(chance: random.Random) -> None:
    """Every rank once, in consecutive numbers on each node, and in the order of the others."""
    reports = [NodeReport(host, chance.randint(1, 4), ()) for host in "abcde"]
    suspects = {"b", "d"}
    first = first_ranks(reports, suspects)
    ranks = [list(range(start, start + report.num_ranks)) for start, report in zip(first, reports)]
    assert sorted(chain.from_iterable(ranks)) == list(range(sum(report.num_ranks for report in reports)))
    assert [report.host for _, report in sorted(zip(first, reports), key=lambda pair: pair[0])] == list("acebd")


def test_launchers_share_what_they_know() -> None:
    """Each has named the node once; together they know that it is a suspect."""
    reports = [NodeReport(host, 2, (naming("a", host),)) for host in ("a", "b")]
    texts = [report.to_text() for report in reports]
    order = order_nodes([NodeReport.from_text(text) for text in texts], NamedNodes())
    assert order.first_ranks == (2, 0)
    (sentence,) = order.sentences
    assert "Node a was named 2 times (hang, hang)" in sentence
    assert NodeOrder.from_text(order.to_text()) == order
    assert order_nodes([dataclasses.replace(report, namings=()) for report in reports], NamedNodes()).sentences == ()
