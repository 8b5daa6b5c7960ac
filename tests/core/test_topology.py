"""The rank grid: pure arithmetic, checked against arrays of all ranks with a dimension for each axis; its process
groups."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.parallel import RANK_AXES
from megatron.core.topology import EXPERT_AXES, RankGrid, Topology, single_process
from megatron.torch_compat import fake_store

CPU = torch.device("cpu")
AXES = ("tp", "cp", "pp", "dp")
DP_PARTS = {"dp_shard", "dp_replicate"}
ORDER_OF_MEGATRON = "tp-cp-ep-dp-pp"
LLAMA_405B = RankGrid(tp=8, cp=16, pp=16, dp=8)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    """Any order, and any fold of a stage's ranks."""
    tp, cp, pp, shards, replicas = (draw(st.integers(1, 3)) for _ in range(5))
    stage_size = tp * cp * shards * replicas
    etp = draw(st.sampled_from(divisors(stage_size)))
    ep = draw(st.sampled_from(divisors(stage_size // etp)))
    order = draw(st.just(ORDER_OF_MEGATRON) | st.permutations(RANK_AXES).map("-".join))
    return RankGrid(tp=tp, cp=cp, pp=pp, dp=shards * replicas, ep=ep, etp=etp, dp_replicas=replicas, order=order)


@dataclass(frozen=True)
class Table:
    """All ranks, with a dimension for each axis, the fastest last."""

    axes: tuple[str, ...]
    ranks: Any

    def groups(self, axes: set[str]) -> list[tuple[int, ...]]:
        """As Megatron-LM's ``generate_masked_orthogonal_rank_groups`` (parallel_state.py)."""
        chosen = [number for number, axis in enumerate(self.axes) if axis in axes]
        others = [number for number in range(len(self.axes)) if number not in chosen]
        size = prod(self.ranks.shape[number] for number in chosen)
        return sorted(tuple(sorted(row)) for row in self.ranks.transpose(others + chosen).reshape(-1, size).tolist())


def tables_of(grid: RankGrid) -> list[Table]:
    """By the axes of dense layers; by those of experts, which fold the sorted ranks of every stage."""
    shards, replicas = grid.dp // grid.dp_replicas, grid.dp_replicas
    sizes: dict[str, int] = {}
    for axis in reversed(grid.order.split("-")):
        if axis == "dp":
            sizes |= {"dp_replicate": replicas, "dp_shard": shards}
        elif axis != "ep":
            sizes[axis] = getattr(grid, axis)
    dense = Table(tuple(sizes), np.arange(prod(sizes.values())).reshape(*sizes.values()))
    by_stage = np.moveaxis(dense.ranks, dense.axes.index("pp"), 0)
    folded = Table(("pp", "edp", "ep", "etp"), by_stage.reshape(grid.pp, -1, grid.ep, grid.etp))
    tables = [dense, folded]
    if grid.edp % replicas == 0:
        axes = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
        tables.append(Table(axes, by_stage.reshape(grid.pp, replicas, -1, grid.ep, grid.etp)))
    if grid.order == ORDER_OF_MEGATRON:
        # Its second rank generator: tp is etp, cp is 1, dp is edp.
        assert folded.ranks.flatten().tolist() == list(range(grid.world_size))
    return tables


@settings(max_examples=150)
@given(grids(), st.data())
def test_groups_are_those_of_an_array_of_all_ranks(grid: RankGrid, data: st.DataObject) -> None:
    """So they partition the ranks, and differ on their axes alone; every member finds its own group."""
    for table in tables_of(grid):
        chosen = data.draw(st.sets(st.sampled_from(table.axes)))
        names = chosen - DP_PARTS | {"dp"} if chosen >= DP_PARTS else chosen
        groups = list(grid.groups(names))
        assert sorted(groups) == table.groups(chosen)
        assert all(grid.group(rank, names) == group for group in groups for rank in group)


@settings(max_examples=60)
@given(grids())
def test_coordinates_are_places_in_an_array_of_all_ranks(grid: RankGrid) -> None:
    """The loader deals samples by the place in the data-parallel group, the buffers shards by that in its shard."""
    dense, folded = tables_of(grid)[:2]
    assert grid.world_size == dense.ranks.size == grid.tp * grid.cp * grid.pp * grid.dp
    for rank in range(grid.world_size):
        position = grid.coordinates(rank)
        assert position.keys() == {*AXES, *DP_PARTS, *EXPERT_AXES}
        for table in (dense, folded):
            (place,) = np.argwhere(table.ranks == rank).tolist()
            assert [position[axis] for axis in table.axes] == place
        assert position["dp"] == position["dp_replicate"] * (grid.dp // grid.dp_replicas) + position["dp_shard"]
        assert grid.group(rank, ("dp",)).index(rank) == position["dp"]


def test_the_default_order_puts_tensor_parallel_ranks_side_by_side() -> None:
    grid = RankGrid(tp=4, cp=2, pp=2, dp=2)
    assert grid.order == "tp-cp-ep-pp-dp"
    groups = {"tp": (4, 5, 6, 7), "cp": (1, 5), "pp": (5, 13), "dp": (5, 21)}
    assert {axis: grid.group(5, (axis,)) for axis in groups} == groups


def test_experts_add_no_ranks_to_the_world() -> None:
    assert RankGrid(tp=2, cp=2, dp=4, ep=8, etp=2).world_size == 16
    with pytest.raises(AssertionError):
        RankGrid(tp=2, dp=2, ep=3)


def test_axes_of_experts_do_not_mix_with_dense_ones() -> None:
    grid = RankGrid(tp=2, dp=2, ep=2)
    for axes in (("tp", "ep"), ("edp", "edp_shard"), ("node",)):
        with pytest.raises(AssertionError):
            grid.group(0, axes)


def test_a_rank_among_16384_finds_its_groups_at_once() -> None:
    """The fastest of three, since other processes may hold the cores."""
    assert LLAMA_405B.world_size == 16384
    seconds = []
    for _ in range(3):
        started = time.process_time()
        topology = Topology(LLAMA_405B, 12345, CPU)
        sizes = [topology.communicator(axis).size for axis in AXES]
        assert topology.world.size == 16384
        seconds.append(time.process_time() - started)
        assert sizes == [8, 16, 16, 8]
    assert min(seconds) < 0.1


@contextmanager
def world_of_eight(rank: int) -> Iterator[None]:
    """A process group of eight ranks, of which the others do not exist."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=8)
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups_made() -> list[list[int]]:
    """The ranks of every process group that was made beside the world's."""
    groups = dist.distributed_c10d._world.pg_map
    return [dist.get_process_group_ranks(group) for group in groups if group is not dist.group.WORLD]


def test_a_process_group_is_made_once_for_the_same_ranks() -> None:
    """A second process group for the same ranks would cost threads and connections."""
    topology = Topology(RankGrid(tp=2, dp=4, dp_replicas=4), 5, CPU)
    replicas = topology.communicator("dp_replicate")
    assert topology.communicator("dp") is topology.data_parallel is not replicas
    assert (topology.data_parallel.name, replicas.name) == ("dp", "dp_replicate")
    with world_of_eight(5):
        assert topology.data_parallel.process_group is replicas.process_group
        assert groups_made() == [[1, 3, 5, 7]]
    assert (topology.tensor_parallel.ranks, topology.tensor_parallel.rank) == ((4, 5), 1)
    assert topology.data_parallel.ranks == (1, 3, 5, 7)
    assert topology.data_parallel.rank == topology.coordinates["dp"] == 2
    assert topology.world.ranks == tuple(range(8))
    assert topology.communicator().ranks == (5,)


def test_groups_are_made_at_set_up_in_one_order() -> None:
    """Every rank makes the same number of groups, also where a group's ranks are those of a dense axis."""
    grid = RankGrid(tp=2, pp=2, dp=2, ep=2, etp=1)
    for rank in range(8):
        topology = Topology(grid, rank, CPU, shares_memory=False)
        with world_of_eight(rank):
            topology.open(("tp",), ("ep",), ("etp",), ("edp",), ("etp", "ep", "pp"))
            assert groups_made() == [[*grid.group(rank, axes)] for axes in (("tp",), ("edp",), ("ep", "pp"))]


def test_every_kind_and_direction_of_messages_has_a_process_group_of_its_own() -> None:
    """Even where the stages are all ranks there are, so that no message waits for one of another channel."""
    topology = Topology(RankGrid(pp=8), 3, CPU)
    channels = [topology.pipeline_channel(kind, *ends) for kind in "FB" for ends in ((3, 4), (4, 3))]
    assert [channel.name for channel in channels] == ["pp F down", "pp F up", "pp B down", "pp B up"]
    with world_of_eight(3):
        assert len({id(channel.process_group) for channel in channels}) == 4
        assert groups_made() == [[*range(8)]] * 4
        # Nor does it wait for what is gathered or reduced among the stages.
        assert topology.pipeline_parallel.process_group is dist.group.WORLD


def test_a_channel_serves_all_stages() -> None:
    """Of one pipeline; a loop's way back from the last stage to the first is a way up."""
    topology = Topology(RankGrid(tp=2, pp=4), 5, CPU)
    with world_of_eight(5):
        down, up = topology.pipeline_channel("F", 0, 1), topology.pipeline_channel("F", 3, 0)
        assert down is topology.pipeline_channel("F", 2, 3) is topology.pipeline_channel("F", 1, 3)
        assert up is topology.pipeline_channel("F", 1, 0) is not down
        assert (down.ranks, down.rank, down.size) == ((1, 3, 5, 7), 2, 4)
        assert not groups_made(), "a group that nobody uses"
        assert down.process_group is not up.process_group
        assert groups_made() == [[1, 3, 5, 7]] * 2


def test_a_single_process_needs_no_process_group() -> None:
    topology = single_process()
    groups = (topology.world, topology.tensor_parallel, topology.data_parallel, topology.pipeline_parallel)
    assert [group.size for group in groups] == [1] * 4
    assert topology.device == CPU
    assert not dist.is_initialized()


@settings(max_examples=60)
@given(grids(), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_levels_of_context_parallelism_are_axes_of_its_ranks(grid: RankGrid, sizes: list[int]) -> None:
    grid = replace(grid, cp=prod(sizes), ep=1, etp=1)
    for cp_ranks in grid.groups(("cp",)):
        expected = np.array(cp_ranks).reshape(sizes[::-1])
        for rank in cp_ranks:
            place = np.argwhere(expected == rank)[0]
            communicators = Topology(grid, rank, CPU).context_parallel_levels(sizes)
            assert [communicator.size for communicator in communicators] == sizes
            for level, communicator in enumerate(communicators):
                axis = len(sizes) - 1 - level
                index = tuple(slice(None) if number == axis else at for number, at in enumerate(place))
                assert communicator.ranks == tuple(expected[index])
