"""The dry run of models with experts: rows, memory by load, the load that still fits, and nodes of their ranks."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.commands.pages.dry_run_report import groups
from megatron.core.moe.experts import Experts
from megatron.core.topology import RankGrid, Topology
from megatron.planner import simulated_rank
from megatron.planner.launches import axis_of, expert_placement_advice
from megatron.planner.plan import Plan, Run, largest_fitting_load, make_plan, simulate_rank
from tests.end_to_end.run_process import call_training
from tests.planner.real_step import TINY, config_of, real_step, run_of
from tests.rank_pool import RankPool

pytestmark = pytest.mark.processes

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP4 = f"{EXPERTS} --expert-model-parallel-size 4"
EP2 = f"{EXPERTS} --expert-model-parallel-size 2"
DENSE_FIRST = f"{EP2} --pipeline-model-parallel-size 2 --moe-layer-freq [0]*2+[1]*2 --moe-ffn-hidden-size 384"
WIDE_FIRST = f"{DENSE_FIRST} --ffn-hidden-size 1024"
"""The first stage has no experts, and with an even load its peak is the highest."""
TOKEN_IDS = 3
"""So few that the load is uneven: tokens of an id choose similar experts."""


def rows_during(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result of ``run``, and the rows of every call of the experts."""
    rows: list[int] = []
    forward = Experts.forward

    def counted(experts: Experts, inputs: Tensor, *arguments: Any) -> Tensor:
        rows.append(inputs.shape[0])
        return forward(experts, inputs, *arguments)

    with patch.object(Experts, "forward", counted):
        return run(), rows


@pytest.mark.parametrize("load", [0.5, 1, 1.5])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        ("--expert-model-parallel-size 4", 1),
        (f"{TP2} --expert-model-parallel-size 2", 1),
        (f"{TP2} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 1 / 2),
        ("--context-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2", 1),
    ],
)
def test_experts_of_a_simulated_rank_have_all_rows_of_the_load(
    layout: str, factor: float, dispatcher: str, load: float
) -> None:
    """s b k ETP / (TP CP) times the load. What a fake tensor returns for counts, 1 for each expert, is never used."""
    run = run_of(f"{EXPERTS} {layout} --moe-token-dispatcher-type {dispatcher}").with_expert_load(load)
    _, rows = rows_during(lambda: simulate_rank(run, 0, 2))
    assert set(rows) == {256 * 2 * factor * load}


@pytest.mark.parametrize("flags", [EP4, f"{EP4} --moe-token-dispatcher-type allgather --bf16", DENSE_FIRST])
def test_activations_alone_grow_with_the_load_and_linearly(flags: str) -> None:
    run = run_of(flags)
    rank = run.rank_of_stage(run.grid.pp - 1)
    one, half_more, two = (simulate_rank(run.with_expert_load(load), rank).peak for load in (1, 1.5, 2))
    assert two.total - one.total == pytest.approx(2 * (half_more.total - one.total), rel=1e-3)
    grown = {kind: two.by_kind[kind] - one.by_kind[kind] for kind in two.by_kind}
    # The gradient of the rows and what a backward pass computes of it.
    temporary = grown["working memory"] + grown["communication buffers"]
    assert grown["activations"] > 0.5 * (two.total - one.total)
    assert grown["activations"] + temporary == two.total - one.total


def few_tokens(original: Callable[..., Iterator[dict[str, Tensor]]]) -> Callable[..., Iterator[dict[str, Tensor]]]:
    """Microbatches of :data:`TOKEN_IDS` random token ids, others on every data-parallel rank."""

    def microbatches(config: object, topology: Topology, *more: object) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(topology.coordinates["dp"])
        for microbatch in original(config, topology, *more):
            tokens = torch.randint(0, TOKEN_IDS, microbatch["tokens"].shape, generator=generator)
            yield microbatch | {"tokens": tokens}

    return microbatches


def routed_step(flags: str, num_microbatches: int) -> tuple[int, list[int]]:
    """A real step whose router chooses: the bytes at its peak, and the rows of every call of the experts."""
    with patch.object(simulated_rank, "_microbatches", few_tokens(simulated_rank._microbatches)):
        (peak, *_), rows = rows_during(lambda: real_step(flags, num_microbatches))
    return peak, rows


def test_memory_is_that_of_a_real_step_with_the_measured_load(four_ranks: RankPool) -> None:
    # One MoE layer, since a rank has another load in each.
    flags = f"{EP4} --moe-layer-freq [0]*3+[1] --moe-ffn-hidden-size 768 --use-distributed-optimizer"
    run = run_of(flags)
    loads = []
    for rank, (peak, rows) in enumerate(four_ranks.run(routed_step, flags, run.num_microbatches)):
        assert len(rows) == run.num_microbatches
        # The peak is in the microbatch with the most rows: without a pipeline one is alive at a time.
        loads.append(max(rows) / (256 * 2))
        plan = simulate_rank(run.with_expert_load(loads[-1]), rank, run.num_microbatches)
        assert plan.peak.total == pytest.approx(peak, rel=0.02)
    # Uneven enough: the dry run of an even load misses the memory of the fullest rank.
    fullest = loads.index(max(loads))
    even = simulate_rank(run, fullest, run.num_microbatches)
    assert even.peak.total < 0.96 * simulate_rank(run.with_expert_load(max(loads)), fullest).peak.total


def plan_of(flags: str, limit: int) -> Plan:
    """The plan on GPUs with ``limit`` bytes."""
    config = config_of(f"{flags} --dry-run --num-gpus 4 --gpu-memory-gb {limit / 2**30!r}")
    run = replace(run_of(flags), config=config)
    return make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)])


def most_needed(run: Run, load: float) -> int:
    ranks = map(run.rank_of_stage, range(run.grid.pp))
    return max(simulate_rank(run.with_expert_load(load), rank).needed for rank in ranks)


@pytest.mark.parametrize(("flags", "largest"), [(EP4, 4), (WIDE_FIRST, 2)])
def test_the_largest_load_that_fits_is_found(flags: str, largest: float) -> None:
    even, worst = (most_needed(run_of(flags), load) for load in (1, largest))
    assert even < worst
    plan = plan_of(flags, (even + worst) // 2)
    load = largest_fitting_load(plan)
    assert load is not None and 1 < load < largest
    assert most_needed(plan.run, load) <= plan.limit < most_needed(plan.run, 1.05 * load)
    # The dry run may begin at another load.
    assumed = plan.run.with_expert_load((1 + load) / 2)
    again = largest_fitting_load(make_plan(assumed, [stage.rank for stage in plan.stages]))
    assert again == pytest.approx(load, rel=0.05)
    assert largest_fitting_load(plan_of(flags, worst)) == largest
    assert largest_fitting_load(plan_of(flags, even - 1)) is None
    # Without expert parallelism the load does not matter.
    assert largest_fitting_load(plan_of(EXPERTS, 80 * 2**30)) is None


def test_the_report_says_the_assumed_load_and_the_largest(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    even, worst = (most_needed(run_of(EP2), load) for load in (1, 2))
    flags = f"{TINY} {EP2} --dry-run --num-gpus 4 --dry-run-json {path}".split()
    outcome = call_training([*flags, "--gpu-memory-gb", repr((even + worst) / 2 / 2**30)])
    found = json.loads(path.read_text())
    load = found["largest_fitting_expert_load"]
    assert found["expert_load"] == 1 and 1 < load < 2
    largest = f"{math.floor(100 * load) / 100:g}"
    assert f"assumed expert load: 1, which is balanced; fits up to an expert load of {largest}\n" in outcome.stdout
    assert {"ep", "edp"} <= set(found["bytes_sent"]["0"])
    whole = call_training([*flags, "--dry-run-expert-load", "1.5"])
    assert "assumed expert load: 1.5; fits with every load, at most 2" in whole.stdout
    assert json.loads(path.read_text())["expert_load"] == 1.5
    call_training([*flags, "--gpu-memory-gb", repr((even - 1) / 2**30)])
    assert json.loads(path.read_text())["largest_fitting_expert_load"] is None


# --- nodes of the ranks of experts, and axes of their traffic -------------------------------------------------


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
def test_there_is_advice_only_where_another_order_is_better(grid: RankGrid) -> None:
    assert expert_placement_advice(grid, 8) is None
    # The default order spreads the experts of a pipeline over nodes.
    advice = expert_placement_advice(RankGrid(tp=2, pp=4, dp=8, ep=8), 8)
    assert advice is not None and "0 1 8 9 16 17 24 25" in advice and "--rank-order tp-cp-ep-dp-pp" in advice


@pytest.mark.parametrize(("ep", "etp"), [(8, 1), (4, 2)])
@pytest.mark.parametrize(("node_size", "is_spread"), [(4, False), (8, True), (16, True), (32, False), (72, False)])
def test_the_advice_depends_on_the_size_of_a_node(node_size: int, is_spread: bool, ep: int, etp: int) -> None:
    """Eight experts every second of 32 ranks: they fit in a node of 32, and no order brings them into one of 4."""
    grid = RankGrid(tp=2, pp=4, dp=8, ep=ep, etp=etp)
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
