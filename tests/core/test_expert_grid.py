"""Parallel folding: the groups of experts over the ranks of a stage."""

from itertools import combinations, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.config.parallel import RANK_AXES
from megatron.core.topology import EXPERT_AXES, RankGrid, Topology

PARTS = ("etp", "ep", "edp_shard", "edp_replicate")
ORDER_OF_MEGATRON = "tp-cp-ep-dp-pp"


@st.composite
def expert_grids(draw: st.DrawFn, order: str | None = None) -> RankGrid:
    """Any order, and any fold of a stage's ranks."""
    tp, cp, pp, shards, replicas = (draw(st.integers(1, 4)) for _ in range(5))
    stage_size = tp * cp * shards * replicas
    etp = draw(st.sampled_from([size for size in range(1, stage_size + 1) if stage_size % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, stage_size // etp + 1) if stage_size // etp % size == 0]))
    order = order or "-".join(draw(st.permutations(RANK_AXES)))
    return RankGrid(tp=tp, cp=cp, pp=pp, dp=shards * replicas, ep=ep, etp=etp, dp_replicas=replicas, order=order)


def expert_place(grid: RankGrid, rank: int) -> tuple[int, ...]:
    position = grid.coordinates(rank)
    return tuple(position[axis] for axis in EXPERT_AXES)


def megatron_groups(sizes: list[tuple[str, int]], axes: set[str]) -> list[tuple[int, ...]]:
    """Megatron-LM's ``generate_masked_orthogonal_rank_groups`` (parallel_state.py): (axis, size) from the fastest."""
    names = [name for name, _ in reversed(sizes)]
    ranks = np.arange(prod(size for _, size in sizes)).reshape([size for _, size in reversed(sizes)])
    chosen = [number for number, name in enumerate(names) if name in axes]
    others = [number for number in range(len(names)) if number not in chosen]
    rows = ranks.transpose(others + chosen).reshape(-1, prod(ranks.shape[number] for number in chosen))
    return sorted(tuple(sorted(row)) for row in rows.tolist())


@settings(max_examples=60)
@given(expert_grids(), st.sets(st.sampled_from((*EXPERT_AXES, "pp")), min_size=1))
def test_groups_partition_the_ranks(grid: RankGrid, axes: set[str]) -> None:
    groups = list(grid.groups(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    size = prod(getattr(grid, axis) for axis in axes)
    for group in groups:
        assert len(group) == size
        assert list(group) == sorted(group)
        assert all(grid.group(rank, axes) == group for rank in group)


@settings(max_examples=60)
@given(expert_grids())
def test_a_stage_has_every_position_once(grid: RankGrid) -> None:
    for stage in grid.groups(("tp", "cp", "dp")):
        found = sorted(expert_place(grid, rank) for rank in stage)
        assert found == sorted(product(range(grid.etp), range(grid.ep), range(grid.edp)))
        # From neighbouring ranks to distant ones.
        assert [expert_place(grid, rank)[::-1] for rank in stage] == sorted(place[::-1] for place in found)


@settings(max_examples=60)
@given(expert_grids())
def test_a_group_differs_on_its_axes_alone(grid: RankGrid) -> None:
    for number in range(1, 4):
        for axes in combinations(EXPERT_AXES, number):
            for group in grid.groups(axes):
                fixed = {
                    tuple((axis, at) for axis, at in grid.coordinates(rank).items() if axis in (*EXPERT_AXES, "pp"))
                    for rank in group
                }
                kept = {tuple((axis, at) for axis, at in place if axis not in axes) for place in fixed}
                assert len(kept) == 1
                assert len(fixed) == len(group)


@settings(max_examples=60)
@given(expert_grids())
def test_stages_of_a_pipeline_have_equal_positions(grid: RankGrid) -> None:
    for pipeline in grid.groups(("pp",)):
        assert len({expert_place(grid, rank) for rank in pipeline}) == 1
        assert [grid.coordinates(rank)["pp"] for rank in pipeline] == list(range(grid.pp))


@settings(max_examples=60)
@given(expert_grids(ORDER_OF_MEGATRON), st.sets(st.sampled_from((*EXPERT_AXES, "pp")), min_size=1))
def test_groups_equal_those_of_megatron(grid: RankGrid, axes: set[str]) -> None:
    """Its second rank generator: tp is etp, cp is 1, dp is edp."""
    sizes = [("etp", grid.etp), ("cp", 1), ("ep", grid.ep), ("edp", grid.edp), ("pp", grid.pp)]
    assert sorted(grid.groups(axes)) == megatron_groups(sizes, axes)


@settings(max_examples=60)
@given(expert_grids())
def test_shards_are_the_inner_part_of_expert_data_parallelism(grid: RankGrid) -> None:
    assume(grid.edp % grid.dp_replicas == 0)
    shards, replicas = grid.edp // grid.dp_replicas, grid.dp_replicas
    for group in grid.groups(("edp",)):
        table = np.array(group).reshape(replicas, shards)
        for replica, shard in product(range(replicas), range(shards)):
            rank = int(table[replica, shard])
            assert grid.group(rank, ("edp_shard",)) == tuple(table[replica])
            assert grid.group(rank, ("edp_replicate",)) == tuple(table[:, shard])
    # All shards of the model once: norms are summed over these ranks.
    for rank in range(grid.world_size):
        model = grid.group(rank, ("etp", "ep", "edp_shard", "pp"))
        assert len(model) == grid.etp * grid.ep * shards * grid.pp
        assert len({(*expert_place(grid, one), grid.coordinates(one)["pp"]) for one in model}) == len(model)


def test_the_order_decides_how_many_nodes_a_group_touches() -> None:
    """TP2 PP4 DP8 EP8 on nodes of 8 GPUs."""
    grid = RankGrid(tp=2, pp=4, dp=8, ep=8)
    assert grid.order == "tp-cp-ep-pp-dp"
    assert grid.group(0, ("ep",)) == (0, 1, 8, 9, 16, 17, 24, 25)
    grid = RankGrid(tp=2, pp=4, dp=8, ep=8, order=ORDER_OF_MEGATRON)
    assert grid.group(0, ("ep",)) == tuple(range(8))


def test_experts_add_no_ranks_to_the_world() -> None:
    assert RankGrid(tp=2, cp=2, dp=4, ep=8, etp=2).world_size == 16
    with pytest.raises(AssertionError):
        RankGrid(tp=2, dp=2, ep=3)


def test_axes_of_experts_do_not_mix_with_dense_ones() -> None:
    grid = RankGrid(tp=2, dp=2, ep=2)
    for axes in (("tp", "ep"), ("edp", "edp_shard"), ("node",)):
        with pytest.raises(AssertionError):
            grid.group(0, axes)


def test_groups_are_made_at_set_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank makes the same number of groups, also where a group's ranks are those of a dense axis."""
    made: list[tuple[int, ...]] = []

    def make(ranks: tuple[int, ...], **options: object) -> object:
        made.append(ranks)
        return object()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(torch.distributed, "new_group", make)
    grid = RankGrid(tp=2, pp=2, dp=2, ep=2, etp=1)
    for rank in range(8):
        made.clear()
        topology = Topology(grid, rank, torch.device("cpu"), shares_memory=False)
        topology.open(("tp",), ("ep",), ("etp",), ("edp",), ("etp", "ep", "pp"))
        assert made == [grid.group(rank, axes) for axes in (("tp",), ("edp",), ("ep", "pp"))]
