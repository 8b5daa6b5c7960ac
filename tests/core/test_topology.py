"""The rank grid: pure arithmetic, checked against a reshaped and transposed array of rank numbers."""

import time
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.parallel import RANK_AXES
from megatron.core.topology import EXPERT_AXES, RankGrid, Topology, single_process

CPU = torch.device("cpu")
AXES = ("tp", "cp", "pp", "dp")
PARTS = ("tp", "cp", "pp", "dp_shard", "dp_replicate")
LLAMA_405B = RankGrid(tp=8, cp=16, pp=16, dp=8)


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    shards, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = "-".join(draw(st.permutations(RANK_AXES)))
    return RankGrid(**sizes | {"dp": shards * replicas}, dp_replicas=replicas, order=order)


chosen_axes = st.sets(st.sampled_from((*AXES, "dp_shard", "dp_replicate")))


def part_sizes(grid: RankGrid) -> dict[str, int]:
    """Size of every indivisible axis, from the fastest to the slowest."""
    sizes: dict[str, int] = {}
    for axis in grid.order.replace("ep-", "").replace("-ep", "").split("-"):
        if axis == "dp":
            sizes |= {"dp_shard": grid.dp // grid.dp_replicas, "dp_replicate": grid.dp_replicas}
        else:
            sizes[axis] = getattr(grid, axis)
    return sizes


def parts_of(axes: set[str]) -> set[str]:
    return {part for axis in axes for part in (("dp_shard", "dp_replicate") if axis == "dp" else (axis,))}


def slow_groups(grid: RankGrid, axes: set[str]) -> list[list[int]]:
    """Groups along ``axes`` from an array of all ranks with one dimension per axis, the fastest last."""
    sizes = part_sizes(grid)
    names = list(reversed(sizes))
    ranks = np.arange(prod(sizes.values())).reshape([sizes[name] for name in names])
    chosen = [number for number, name in enumerate(names) if name in parts_of(axes)]
    others = [number for number in range(len(names)) if number not in chosen]
    size = prod(sizes[names[number]] for number in chosen)
    return sorted(sorted(group) for group in ranks.transpose(others + chosen).reshape(-1, size).tolist())


@settings(max_examples=60)
@given(grids(), chosen_axes)
def test_groups_equal_those_of_a_reshaped_array(grid: RankGrid, axes: set[str]) -> None:
    assert sorted(list(group) for group in grid.groups(axes)) == slow_groups(grid, axes)


@settings(max_examples=60)
@given(grids(), chosen_axes)
def test_groups_partition_the_ranks_and_every_member_finds_its_own(grid: RankGrid, axes: set[str]) -> None:
    groups = list(grid.groups(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    size = prod(part_sizes(grid)[part] for part in parts_of(axes))
    for group in groups:
        assert len(group) == size
        assert list(group) == sorted(group)
        assert all(grid.group(rank, axes) == group for rank in group)


@settings(max_examples=60)
@given(grids())
def test_coordinates_and_ranks_are_one_to_one(grid: RankGrid) -> None:
    sizes = part_sizes(grid)
    assert grid.world_size == prod(sizes.values()) == grid.tp * grid.cp * grid.pp * grid.dp
    seen = set()
    for rank in range(grid.world_size):
        position = grid.coordinates(rank)
        assert position.keys() == {*AXES, *PARTS, *EXPERT_AXES}
        assert all(0 <= position[part] < size for part, size in sizes.items())
        assert 0 <= position["dp"] < grid.dp
        # Back from the coordinates: the fastest axis counts single ranks.
        stride, back = 1, 0
        for part, size in sizes.items():
            back += position[part] * stride
            stride *= size
        assert back == rank
        seen.add(tuple(position[axis] for axis in AXES))
    assert len(seen) == grid.world_size


@settings(max_examples=30)
@given(grids(), st.sampled_from((*AXES, "dp_shard", "dp_replicate")))
def test_the_place_in_a_group_is_the_coordinate(grid: RankGrid, axis: str) -> None:
    """The loader deals samples by the place in the data-parallel group, the buffers shards by that in its shard."""
    for rank in range(grid.world_size):
        assert grid.group(rank, (axis,)).index(rank) == grid.coordinates(rank)[axis]


def test_the_default_order_puts_tensor_parallel_ranks_side_by_side() -> None:
    grid = RankGrid(tp=4, cp=2, pp=2, dp=2)
    assert grid.order == "tp-cp-ep-pp-dp"
    assert grid.group(5, ("tp",)) == (4, 5, 6, 7)
    assert grid.group(5, ("cp",)) == (1, 5)
    assert grid.group(5, ("pp",)) == (5, 13)
    assert grid.group(5, ("dp",)) == (5, 21)
    assert grid.group(5, ("tp", "cp")) == tuple(range(8))
    assert grid.group(21, ("tp", "pp")) == (20, 21, 22, 23, 28, 29, 30, 31)


def test_another_order_moves_the_axes() -> None:
    grid = RankGrid(tp=2, dp=3, order="dp-tp-cp-ep-pp")
    assert list(grid.groups(("dp",))) == [(0, 1, 2), (3, 4, 5)]
    assert list(grid.groups(("tp",))) == [(0, 3), (1, 4), (2, 5)]


def test_shards_are_neighbours_and_replicas_are_far_apart() -> None:
    grid = RankGrid(tp=2, dp=6, dp_replicas=2)
    assert list(grid.groups(("dp_shard",))) == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert next(grid.groups(("dp_replicate",))) == (0, 6)
    for rank in range(grid.world_size):
        position = grid.coordinates(rank)
        assert position["dp"] == position["dp_replicate"] * 3 + position["dp_shard"]


def test_a_rank_among_16384_finds_its_groups_at_once() -> None:
    """The fastest of three, since other processes may hold the cores."""
    assert LLAMA_405B.world_size == 16384
    seconds = []
    for _ in range(3):
        started = time.process_time()
        topology = Topology(LLAMA_405B, 12345, CPU)
        sizes = [topology.communicator(axis).size for axis in ("tp", "cp", "pp", "dp")]
        assert topology.world.size == 16384
        seconds.append(time.process_time() - started)
        assert sizes == [8, 16, 16, 8]
    assert min(seconds) < 0.1


def test_the_groups_of_16384_ranks_partition_them() -> None:
    for axes in combinations(("tp", "cp", "pp", "dp"), 2):
        groups = list(LLAMA_405B.groups(axes))
        assert sorted(rank for group in groups for rank in group) == list(range(16384))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ranks of every process group that is made, in a world of eight without processes."""
    groups: list[tuple[int, ...]] = []

    def make(ranks: tuple[int, ...], **options: object) -> object:
        groups.append(ranks)
        return object()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch.distributed, "new_group", make)
    return groups


def test_a_process_group_is_made_once_for_the_same_ranks(made: list[tuple[int, ...]]) -> None:
    """A second process group for the same ranks would cost threads and connections."""
    topology = Topology(RankGrid(tp=2, dp=4, dp_replicas=4), 5, CPU)
    replicas = topology.communicator("dp_replicate")
    assert topology.communicator("dp") is topology.data_parallel is not replicas
    assert (topology.data_parallel.name, replicas.name) == ("dp", "dp_replicate")
    assert topology.data_parallel.process_group is replicas.process_group
    assert made == [(1, 3, 5, 7)]
    assert topology.tensor_parallel.ranks == (4, 5)
    assert topology.tensor_parallel.rank == 1
    assert topology.data_parallel.ranks == (1, 3, 5, 7)
    assert topology.data_parallel.rank == topology.coordinates["dp"] == 2
    assert topology.world.ranks == tuple(range(8))
    assert topology.communicator().ranks == (5,)


def test_every_kind_and_direction_of_messages_has_a_process_group_of_its_own(made: list[tuple[int, ...]]) -> None:
    """Even where the stages are all ranks there are, so that no message waits for one of another channel."""
    topology = Topology(RankGrid(pp=8), 3, CPU)
    names = {}
    for kind in "FB":
        for ends in ((3, 4), (4, 3)):
            names[topology.pipeline_channel(kind, *ends).name] = topology.pipeline_channel(kind, *ends).process_group
    assert list(names) == ["pp F down", "pp F up", "pp B down", "pp B up"]
    assert len(set(map(id, names.values()))) == 4
    assert made == [tuple(range(8))] * 4
    # Nor does it wait for what is gathered or reduced among the stages.
    assert topology.pipeline_parallel.process_group is torch.distributed.group.WORLD


def test_a_channel_serves_all_stages(made: list[tuple[int, ...]]) -> None:
    """Of one pipeline; a loop's way back from the last stage to the first is a way up."""
    topology = Topology(RankGrid(tp=2, pp=4), 5, CPU)
    down, up = topology.pipeline_channel("F", 0, 1), topology.pipeline_channel("F", 3, 0)
    assert down is topology.pipeline_channel("F", 2, 3) is topology.pipeline_channel("F", 1, 3)
    assert up is topology.pipeline_channel("F", 1, 0) is not down
    assert (down.ranks, down.rank, down.size) == ((1, 3, 5, 7), 2, 4)
    assert not made, "a group that nobody uses"
    assert down.process_group is not up.process_group
    assert made == [(1, 3, 5, 7)] * 2


@settings(max_examples=30)
@given(grids())
def test_the_place_in_the_pipeline_is_the_stage(grid: RankGrid) -> None:
    grid = replace(grid, cp=1)
    for rank in range(grid.world_size):
        topology = Topology(grid, rank, CPU)
        here = topology.coordinates
        assert topology.pipeline_parallel.rank == here["pp"]
        assert topology.pipeline_parallel.size == grid.pp


def test_a_single_process_needs_no_process_group() -> None:
    topology = single_process()
    assert topology.world.size == topology.tensor_parallel.size == topology.data_parallel.size == 1
    assert topology.pipeline_parallel.size == 1
    assert topology.device == CPU
    assert not torch.distributed.is_initialized()


@settings(max_examples=60)
@given(grids(), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_levels_of_context_parallelism_are_axes_of_its_ranks(grid: RankGrid, sizes: list[int]) -> None:
    grid = replace(grid, cp=prod(sizes))
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
