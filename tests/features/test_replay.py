"""A replay changes nothing of training, names the ranks that compute other bits, and runs where two passes give the
same."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.core.topology import RankGrid
from megatron.features.replay.listener import (
    RankReplay,
    Replay,
    Verdict,
    judge,
    neighbour,
    neighbour_distance,
    why_not_replayed,
)
from megatron.training.context import RunContext, TrainModule
from tests.parallel.flip_run import FP32, Run, bits_of
from tests.parallel.layout_run import SEQUENCE, Layout, Task, microbatches
from tests.parallel.tasks import DELAYED, MIX, MIX_MODEL, TIED
from tests.rank_pool import RankPool


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


# Real ranks

FP64 = Task(OptimizerConfig(weight_decay=0.1))
WITH_BIASES = replace(
    MIX,
    model=replace(MIX_MODEL, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    moe=replace(MIX.moe, moe_router_bias_update_rate=1e-2),
)
CASES: dict[str, tuple[Task, Layout]] = {
    "DP, overlap": (FP64, Layout(dp=4, microbatches=2, bucket_size=3000, overlap_grad_reduce=True)),
    "ZeRO-1, overlap": (FP32, Layout(dp=4, strategy="optim", overlap_param_gather=True)),
    "ZeRO-2, overlap": (FP64, Layout(dp=4, strategy="optim_grads", bucket_size=3000, overlap_grad_reduce=True)),
    "FSDP": (FP64, Layout(dp=4, strategy="optim_grads_params", microbatches=2)),
    "FSDP, deferred reduction": (FP64, Layout(dp=4, strategy="optim_grads_params", defer_grad_reduce=True)),
    "PP and DP, tied": (TIED, Layout(pp=2, dp=2, microbatches=2)),
    "zero bubble": (FP64, Layout(pp=2, dp=2, schedule="zb-h1", microbatches=4)),
    "TP and DP": (FP64, Layout(tp=2, dp=2, sequence_parallel=True)),
    "CP and DP": (FP64, Layout(cp=2, dp=2)),
    "experts": (WITH_BIASES, Layout(dp=4, ep=2, strategy="optim")),
    "FP8 with delayed scales": (DELAYED, Layout(dp=4, strategy="optim", fp8_param_gather=True)),
}
SAMPLE = ("DP, overlap", "ZeRO-2, overlap", "FSDP", "PP and DP, tied", "experts", "FP8 with delayed scales")


def replay_once(run: Run, replay: Replay) -> Verdict:
    """Replay the first microbatch of the next step."""
    ranks = run.topology
    own = microbatches(
        run.progress.iteration, run.layout, ranks.data_parallel.rank, ranks.context_parallel.rank, run.task.batch
    )
    reads = bool(run.module.executor.readers)
    return replay.run(run.module, [next(own)] if reads else [], 1, run.task.batch * SEQUENCE)


def trained(task: Task, layout: Layout, replays: bool) -> tuple[list[str], list[Verdict]]:
    """The bits of the state after three steps, and the verdicts of replays before each."""
    run = Run(task, layout)
    replay = Replay(run.topology)
    verdicts = []
    for _ in range(3):
        if replays:
            verdicts.append(replay_once(run, replay))
        torch.rand(1)  # as a user's code may
        assert run.step()
    return [bits_of(held.tensor) for held in run.tensors()] + [bits_of(torch.rand(4))], verdicts


def seeded(case: Any, *arguments: Any) -> Any:
    torch.manual_seed(1)
    return case(*arguments)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.whole_matrix) for name in CASES]
)
def test_a_replay_changes_nothing(four_ranks: RankPool, name: str) -> None:
    task, layout = CASES[name]
    without = four_ranks.run(seeded, trained, task, layout, False, world_size=4)
    with_replays = four_ranks.run(seeded, trained, task, layout, True, world_size=4)
    for (expected, _), (bits, verdicts) in zip(without, with_replays):
        assert bits == expected
        assert verdicts == [Verdict("data")] * 3


class FaultyProduct:
    """Linear layers of a rank whose products have a wrong bit: always, or in one product of many."""

    def __init__(self, bit: int, once_in: int = 1) -> None:
        self.bit, self.once_in, self.count = bit, once_in, 0
        self.original = torch.nn.functional.linear

    def __call__(self, inputs: Tensor, weight: Tensor) -> Tensor:
        product = self.original(inputs, weight).clone()
        self.count += 1
        if self.count % self.once_in == 0:
            product.view(-1)[:1].view(torch.int64).bitwise_xor_(1 << self.bit)
        return product


def with_faulty_product(
    task: Task, layout: Layout, rank: int, bit: int, once_in: int, steps: int, interval: int
) -> tuple[int, Verdict] | None:
    """The step after which a replay finds that the products of ``rank`` are wrong, and its verdict."""
    run = Run(task, layout, interval=0)
    replay = Replay(run.topology)
    faulty = mock.patch("torch.nn.functional.linear", FaultyProduct(bit, once_in))
    with faulty if run.topology.rank == rank else nullcontext():
        for step in range(1, steps + 1):
            run.step()
            if step % interval == 0:
                verdict = replay_once(run, replay)
                if verdict.kind != "data":
                    return step, verdict
    return None


@pytest.mark.parametrize(
    "name, rank, expected", [("DP, overlap", 2, (2,)), ("FSDP", 3, (3,)), ("TP and DP", 1, (0, 1, 2, 3))]
)
def test_a_persistently_wrong_product_is_found_within_an_interval(
    four_ranks: RankPool, name: str, rank: int, expected: tuple[int, ...]
) -> None:
    """Also its lowest bit. Two replicas can only accuse each other."""
    task, layout = CASES[name]
    for bit in (8, 51):
        for found in four_ranks.run(with_faulty_product, task, layout, rank, bit, 1, 4, 2, world_size=4):
            assert found == (2, Verdict("persistent", expected))
    for found in four_ranks.run(with_faulty_product, task, layout, rank, 0, 1, 4, 2, world_size=4):
        # Where rounding absorbs the bit in one of the two microbatches that the rank computes, it shares the blame.
        assert found is not None and (found[0], found[1].kind) == (2, "persistent")
        assert rank in found[1].ranks and len(found[1].ranks) <= max(2, len(expected))


def test_a_product_that_is_wrong_now_and_then_is_transient(four_ranks: RankPool) -> None:
    task, layout = CASES["ZeRO-2, overlap"]
    found = four_ranks.run(with_faulty_product, task, layout, 1, 30, 19, 6, 1, world_size=4)
    assert len(set(found)) == 1 and found[0] is not None
    _, verdict = found[0]
    assert verdict.kind == "transient" and verdict.ranks == (1,)
