"""What the dry run says about experts: nodes of their ranks, axes of their traffic, and flags with which they fit."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.topology import RankGrid
from megatron.planner.report import groups
from megatron.planner.suggestions import candidates
from megatron.planner.traffic import axis_of, expert_placement_advice


def test_the_default_order_spreads_the_experts_of_a_pipeline_over_nodes() -> None:
    grid = RankGrid(tp=2, pp=4, dp=8, ep=8)
    advice = expert_placement_advice(grid, 8)
    assert advice is not None
    assert "0 1 8 9 16 17 24 25" in advice
    assert "--rank-order tp-cp-ep-dp-pp" in advice


@pytest.mark.parametrize(
    "grid",
    [
        RankGrid(tp=2, pp=4, dp=8, ep=8, order="tp-cp-ep-dp-pp"),
        RankGrid(tp=2, pp=4, dp=8, ep=8, order="dp-tp-cp-ep-pp"),
        RankGrid(dp=64, ep=8),
        RankGrid(pp=2, dp=4, ep=4),
        RankGrid(tp=2, pp=4, dp=8, etp=2),
        RankGrid(tp=8, pp=8, dp=8),
        RankGrid(pp=4, dp=32, ep=16),
    ],
    ids=["ordered", "another order", "no pipeline", "one node", "pairs", "dense", "larger than a node"],
)
def test_there_is_no_advice_where_no_order_is_better(grid: RankGrid) -> None:
    assert expert_placement_advice(grid, 8) is None


def test_expert_tensor_parallel_ranks_count() -> None:
    grid = RankGrid(tp=2, pp=4, dp=8, ep=4, etp=2)
    assert expert_placement_advice(grid, 8) is not None


@pytest.mark.parametrize(("node_size", "is_spread"), [(4, False), (8, True), (16, True), (32, False), (72, False)])
def test_the_advice_depends_on_the_size_of_a_node(node_size: int, is_spread: bool) -> None:
    """Eight experts every second of 32 ranks: they fit in a node of 32, and no order brings them into one of 4."""
    grid = RankGrid(tp=2, pp=4, dp=8, ep=8)
    assert (expert_placement_advice(grid, node_size) is not None) == is_spread


def test_the_layout_says_whether_all_groups_stay_in_a_node() -> None:
    """With three stages, those of the first are 0 1 6 7 12 13 18 19 …: the second EP group is on two nodes."""
    grid = RankGrid(tp=2, pp=3, dp=8, ep=4)
    assert grid.group(0, ("ep",)) == (0, 1, 6, 7)
    architecture = SimpleNamespace(num_experts=4)
    plan: Any = SimpleNamespace(
        run=SimpleNamespace(grid=grid, architecture=architecture, node_size=8), stages=[SimpleNamespace(rank=0)]
    )
    layout = groups(plan)
    assert layout["ep"] == {"size": 4, "groups": 12, "ranks": [0, 1, 6, 7], "in_node": False}
    assert layout["tp"]["in_node"] and layout["etp"]["in_node"] and not layout["edp"]["in_node"]
    architecture.num_experts = None
    assert list(groups(plan)) == ["tp", "cp", "pp", "dp"]


@pytest.mark.parametrize(
    ("axes", "axis"),
    [("ep", "ep"), ("etp", "etp"), ("etpxep", "ep"), ("edp", "edp"), ("edp_shard", "edp"), ("edp_replicate", "edp")],
)
def test_the_traffic_of_experts_has_axes_of_its_own(axes: str, axis: str) -> None:
    assert axis_of(axes) == axis


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--model tiny", {"mlp", "mlp_act"}),
        ("--model tiny-moe", {"moe", "moe_act"}),
        ("--model tiny-moe --moe-layer-freq 2", {"mlp", "mlp_act", "moe", "moe_act"}),
    ],
)
def test_suggestions_recompute_what_the_layers_have(flags: str, parts: set[str]) -> None:
    words = f"{flags} --mock-data --vocab-size 99 --seq-length 64 --micro-batch-size 1 --train-iters 1 --lr 1"
    suggested = list(candidates(parse_command_line(words.split())))
    for config in suggested:
        check_run(config, 16)
    modules = {module for config in suggested for module in config.activations.modules}
    assert modules == {"core_attn", "layernorm"} | parts
    sizes = {config.parallel.expert_model_parallel_size for config in suggested}
    assert sizes == ({1, 2} if "moe" in flags else {1})
