"""A replay names the replica that computes other bits, and runs where two passes give the same."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron.config.training import TrainingConfig
from megatron.core.topology import RankGrid
from megatron.features.replay.listener import RankReplay, judge, neighbour, neighbour_distance, why_not_replayed
from megatron.training.context import RunContext, TrainModule


def test_replays_need_kernels_that_repeat_their_bits_and_scales_that_they_do_not_change() -> None:
    delayed, current = SimpleNamespace(is_delayed=True), SimpleNamespace(is_delayed=False)
    for allowed in (why("cpu", False), why("cuda", True), why("cuda", True, "transformer_engine", current)):
        assert allowed is None
    assert why("cuda", True, "local", delayed) is None, "our own FP8 keeps the scales of a step"
    assert "--deterministic-mode" in str(why("cuda", False))
    assert "--fp8-recipe" in str(why("cuda", True, "transformer_engine", delayed))


def why(
    device: str, is_deterministic: bool, implementation: str = "local", fp8: SimpleNamespace | None = None
) -> str | None:
    training = TrainingConfig(deterministic_mode=is_deterministic)
    config = SimpleNamespace(training=training, model=SimpleNamespace(transformer_impl=implementation))
    context = SimpleNamespace(topology=SimpleNamespace(device=torch.device(device)), config=config)
    return why_not_replayed(cast(RunContext, context), cast(TrainModule, SimpleNamespace(fp8=fp8)))


GRIDS = [
    RankGrid(dp=2),
    RankGrid(dp=5),
    RankGrid(tp=2, dp=3),
    RankGrid(tp=2, pp=2, dp=4),
    RankGrid(cp=2, dp=3, order="tp-cp-ep-dp-pp"),
    RankGrid(dp=8, ep=2),
    RankGrid(tp=2, dp=4, ep=4),
]


def replays_of(grid: RankGrid, distance: int, wrong: set[int], flickers: bool = False) -> list[RankReplay]:
    """The digests where the replicas of the ranks in ``wrong`` always compute other bits, or with ``flickers`` only in
    the second pass."""
    replicas = {grid.group(rank, ("tp", "cp", "pp")) for rank in wrong}
    is_wrong = [any(rank in ranks for ranks in replicas) for rank in range(grid.world_size)]

    def digest_of(rank: int, source: int, is_second: bool = False) -> tuple[int, int]:
        return source * 10 + (rank + 1 if is_wrong[rank] and (is_second or not flickers) else 0), 0

    before = {neighbour(grid, rank, distance): rank for rank in range(grid.world_size)}
    return [
        RankReplay(digest_of(rank, rank), digest_of(rank, rank, True), digest_of(rank, before[rank]))
        for rank in range(grid.world_size)
    ]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_replay_names_the_replica_that_computes_other_bits(grid: RankGrid) -> None:
    distance = neighbour_distance(grid)
    assert distance is not None
    assert judge(grid, distance, replays_of(grid, distance, set())).kind == "data"
    for rank in range(grid.world_size):
        replica = grid.group(rank, ("tp", "cp", "pp"))
        for flickers in (False, True):
            verdict = judge(grid, distance, replays_of(grid, distance, {rank}, flickers))
            assert verdict.kind == ("transient" if flickers else "persistent")
            assert set(replica) <= set(verdict.ranks)
            replicas = len({one for one in range(grid.dp) if (distance * one) % grid.dp == 0})
            assert len(verdict.ranks) == len(replica) or grid.dp // replicas == 2


def test_expert_parallel_ranks_move_together_or_not_at_all() -> None:
    assert neighbour_distance(RankGrid(dp=1)) is None
    assert neighbour_distance(RankGrid(dp=8, ep=2)) == 2
    assert neighbour_distance(RankGrid(dp=4, ep=4)) is None
    assert neighbour_distance(RankGrid(tp=2, dp=4, ep=4)) == 2


def test_without_a_neighbour_only_transient_errors_are_found() -> None:
    same, other = (1, 0), (2, 0)
    assert judge(RankGrid(), None, [RankReplay(same, same, None)]).kind == "data"
    assert judge(RankGrid(), None, [RankReplay(same, other, None)]).kind == "transient"
    assert not judge(RankGrid(), None, [RankReplay((1, 1), (1, 1), None)]).is_finite
