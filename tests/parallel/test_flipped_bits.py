"""A flipped bit that is still there at a check is found, and the rank is named; clean runs raise no alarm.

Sampled by default; ``--whole-matrix`` flips every bit, and prints how many of those are found that spread to all
replicas before the check.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.parallel.flip_run import BF16, FP32, Kind, Moment, Outcome, clean_run, every_bit, flips_on_ranks
from tests.parallel.layout_run import Layout, Task
from tests.parallel.tasks import DELAYED, MIX
from tests.rank_pool import RankPool

KINDS: tuple[Kind, ...] = ("weight", "gradient", "exp_avg", "exp_avg_sq")
ALL_MOMENTS: tuple[Moment, ...] = ("before the check", "a step earlier", "before the reduction")
LAYOUTS = {
    "DP": (FP32, Layout(dp=4)),
    "DP in buckets, bf16": (BF16, Layout(dp=4, bucket_size=3000, overlap_grad_reduce=True, microbatches=2)),
    "TP and DP, common tensors": (FP32, Layout(tp=2, dp=2)),
    "TP, common tensors": (FP32, Layout(tp=4, sequence_parallel=True)),
    "CP and DP": (FP32, Layout(cp=2, dp=2)),
    "PP and DP": (FP32, Layout(pp=2, dp=2, microbatches=2)),
    "PP": (FP32, Layout(pp=4, microbatches=4, split="E|t|t|L")),
    "ZeRO-1": (FP32, Layout(dp=4, strategy="optim", overlap_param_gather=True)),
    "ZeRO-1, bf16": (BF16, Layout(dp=4, strategy="optim")),
    "ZeRO-1, 2 instances": (FP32, Layout(dp=4, strategy="optim", instances=2)),
    "ZeRO-2": (FP32, Layout(dp=4, strategy="optim_grads", bucket_size=3000)),
    "FSDP": (FP32, Layout(dp=4, strategy="optim_grads_params")),
    "HSDP": (FP32, Layout(dp=4, strategy="optim_grads_params", instances=2)),
}
SAMPLE = ("TP and DP, common tensors", "PP and DP", "ZeRO-1", "HSDP")


def moments_of(layout: Layout) -> tuple[Moment, ...]:
    """The moments at which a bit can flip. ZeRO-2 and FSDP have no whole gradients when the reduction ends."""
    return ALL_MOMENTS if layout.strategy in ("no_shard", "optim") else ALL_MOMENTS[:2]


def outcomes_of(
    pool: RankPool,
    name: str,
    kinds: Sequence[Kind],
    bits: Sequence[int],
    moments: Sequence[Moment],
    timeout: float = 60.0,
) -> None:
    """Every flip that is there at a check is found, on the right rank, and nothing else is."""
    task, layout = LAYOUTS[name]
    flips = list(every_bit(kinds, bits, moments, common="common" in name))
    by_rank = pool.run(flips_on_ranks, task, layout, flips, 1, world_size=4, timeout=timeout)
    has_replicas = layout.instances > 1 or (layout.strategy == "no_shard" and layout.world_size > layout.pp)
    found: Counter[tuple[str, str, bool]] = Counter()
    for flip, outcomes in zip(flips, zip(*by_rank)):
        check(flip.kind, flip.moment, outcomes)
        if flip.moment == "before the check" and (flip.kind != "gradient" or has_replicas):
            assert outcomes[0].is_present, flip
        one: Outcome = outcomes[0]
        found[flip.kind, flip.moment, one.named is not None] += 1
    for kind in kinds:
        for moment in moments:
            hits, misses = found[kind, moment, True], found[kind, moment, False]
            if hits + misses:
                print(f"{name}: {kind} {moment}: {hits} of {hits + misses} found")


def check(kind: str, moment: str, outcomes: Sequence[Outcome]) -> None:
    """All ranks agree; found if and only if present; the flipped rank is among the named ones."""
    first = outcomes[0]
    assert {outcome.named for outcome in outcomes} == {first.named}, "ranks disagree"
    assert first.is_present == (first.named is not None), (kind, moment, first)
    if first.named is not None:
        assert first.rank in first.named, first
        assert len(first.named) < 4 or moment != "before the check", first
    if first.named is not None and moment == "before the check":
        assert (kind in first.message and f"rank {first.rank}" in first.message) or len(first.named) > 1, first


@pytest.mark.parametrize("name", SAMPLE)
def test_a_flipped_bit_is_found_and_its_rank_named(four_ranks: RankPool, name: str) -> None:
    outcomes_of(four_ranks, name, KINDS[:3], (0, 30), ALL_MOMENTS[:1])


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_flipped_bit_is_found(four_ranks: RankPool, name: str) -> None:
    task, layout = LAYOUTS[name]
    moments = moments_of(layout)
    kinds: tuple[Kind, ...] = (*KINDS, "main parameter") if task.precision.bf16 else KINDS
    outcomes_of(four_ranks, name, [kind for kind in kinds if kind != "weight"], range(32), moments, timeout=600.0)
    bits = range(16 if task.precision.bf16 else 32)
    outcomes_of(four_ranks, name, ["weight"], bits, moments, timeout=600.0)


CLEAN: list[tuple[Task, Layout]] = [
    LAYOUTS["DP in buckets, bf16"],
    (FP32, Layout(tp=2, dp=2, sequence_parallel=True, strategy="optim", microbatches=2)),
    (replace(MIX, precision=FP32.precision), Layout(dp=4, ep=2, strategy="optim")),
    (DELAYED, Layout(dp=4, strategy="optim", fp8_param_gather=True)),
]


@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_a_clean_run_raises_no_alarm(four_ranks: RankPool, number: int) -> None:
    assert four_ranks.run(clean_run, *CLEAN[number], 4, 1, world_size=4) == [4] * 4


@pytest.mark.slow(reason="2,000 steps")
@pytest.mark.parametrize("name", ["DP", "TP and DP, common tensors", "ZeRO-1", "HSDP"])
def test_thousands_of_clean_steps_raise_no_alarm(four_ranks: RankPool, name: str) -> None:
    assert four_ranks.run(clean_run, *LAYOUTS[name], 2000, 1, world_size=4, timeout=500.0) == [2000] * 4
