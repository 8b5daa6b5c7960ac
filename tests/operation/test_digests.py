"""Digests see every change of a tensor's bits, votes name the odd rank, a known product is exact."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.topology import RankGrid
from megatron.errors import SilentCorruptionError, report
from megatron.features.known_product.listener import KnownProduct
from megatron.features.replay.listener import RankReplay, judge, neighbour, neighbour_distance
from megatron.features.replicas.state import OddRanks, digest, find_odd, fold, key_of, list_ranks

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
SIZES = st.one_of(st.integers(1, 40), st.sampled_from((1023, 2048, 2049, 5000, 9217)))


def random_bits(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


@given(st.sampled_from(DTYPES), SIZES, st.data())
def test_a_flipped_bit_changes_the_digest(dtype: torch.dtype, size: int, data: Any) -> None:
    tensor = random_bits(size, dtype)
    before = digest(tensor)
    octets = tensor.view(torch.uint8)
    place = data.draw(st.integers(0, octets.numel() - 1))
    octets[place] ^= 1 << data.draw(st.integers(0, 7))
    after = digest(tensor)
    assert after[0] != before[0]
    keys = torch.tensor([key_of("one"), key_of("other")])
    assert fold(torch.stack((after, before)), keys).tolist() != fold(torch.stack((before, before)), keys).tolist()


@given(st.sampled_from((torch.float64, torch.float32)), SIZES, st.data())
def test_exchanged_words_change_the_digest(dtype: torch.dtype, size: int, data: Any) -> None:
    words = random_bits(size * 8 // dtype.itemsize, dtype).view(torch.int64)
    places = st.integers(0, words.numel() - 1)
    one, other = data.draw(places), data.draw(places)
    before = digest(words).tolist()
    words[[one, other]] = words[[other, one]]
    assert (digest(words).tolist() != before) == (words[one] != words[other]).item()


@given(st.sampled_from(DTYPES), SIZES, st.integers(1, 9))
def test_a_digest_does_not_depend_on_the_place_in_memory(dtype: torch.dtype, size: int, offset: int) -> None:
    tensor = random_bits(size, dtype)
    moved = torch.cat((random_bits(offset, dtype, seed=1), tensor))[offset:]
    assert moved.storage_offset() == offset
    assert digest(moved).tolist() == digest(tensor).tolist()


def test_a_digest_is_a_sum_of_words() -> None:
    assert digest(torch.tensor([3, 5, 7])).tolist() == [15, 3 + 2 * 5 + 3 * 7]
    assert digest(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist() == [6, 1 + 4 + 9]


def test_keys_are_odd_and_the_same_in_every_process() -> None:
    assert key_of("weight", "layers.0", 0) == key_of("weight", "layers.0", 0) != key_of("weight", "layers.0", 1)
    assert all(key_of(number) % 2 for number in range(100))
    assert key_of("a") == 6272302100373100519


@pytest.mark.parametrize(
    "values, odd",
    [
        ([1, 1, 1], None),
        ([1, 2, 1], OddRanks((1,), (0, 2))),
        ([1, 2, 3, 1, 1], OddRanks((1, 2), (0, 3, 4))),
        ([1, 2], OddRanks((0, 1), ())),
        ([1, 1, 2, 2], OddRanks((0, 1, 2, 3), ())),
        ([1], None),
    ],
)
def test_the_odd_ranks_are_named_by_vote(values: list[int], odd: OddRanks | None) -> None:
    found = find_odd(dict(enumerate(values)))
    assert found == odd
    assert found is None or found.is_by_vote == bool(odd and odd.others)


def test_ranks_in_words() -> None:
    assert list_ranks([3]) == "rank 3"
    assert list_ranks([1, 2]) == "ranks 1 and 2"
    assert list_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_known_product_is_exact_and_one_wrong_bit_is_counted(dtype: torch.dtype) -> None:
    product = KnownProduct(CPU, dtype)
    assert product.count_errors() == 0
    result = product.expected.clone()
    assert product.count_wrong(result) == 0
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    result.view(integers)[5, 6] ^= 1
    assert product.count_wrong(result) == 1


def test_the_launcher_records_the_rank_that_is_the_cause(tmp_path: Path) -> None:
    """All ranks raise the error; the one that is named ends first, as if it were the only one."""
    error = SilentCorruptionError("the weight of w on rank 1 differs from ranks 0 and 2.", (1,))
    for rank in range(3):
        path = tmp_path / f"{rank}.json"
        with mock.patch("time.sleep") as sleep:
            report(error, rank, str(path))
        assert sleep.called == (rank != 1)
        facts = json.loads(path.read_text())["message"]["extraInfo"]
        assert facts["cause"] == "silent_corruption"
        assert facts["is_local"] == (rank == 1)


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
