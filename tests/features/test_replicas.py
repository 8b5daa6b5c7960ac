"""Digests see every change of a tensor's bits, votes name the odd rank, and messages say what was found where."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron import errors
from megatron.core.control import ControlGroup
from megatron.core.topology import RankGrid, single_process
from megatron.errors import NotFiniteError, SilentCorruptionError
from megatron.features.known_product.listener import KnownAnswer
from megatron.features.replicas.listener import RankReport, StateCheck, raise_findings
from megatron.features.replicas.state import (
    HOLDERS,
    OddRanks,
    TensorKey,
    digest,
    disagreeing_groups,
    find_odd,
    fold,
    key_of,
)
from megatron.flags import IntervalSchedule
from megatron.operation.failure import list_ranks

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
    assert find_odd(dict(enumerate(values))) == odd


def test_ranks_in_words() -> None:
    assert list_ranks([3]) == "rank 3"
    assert list_ranks([1, 2]) == "ranks 1 and 2"
    assert list_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more"


@pytest.mark.parametrize(
    "interval, saves, is_saving, due",
    [(3, None, False, [3, 6, 9]), (3, 4, True, [3, 4, 6, 8, 9]), (0, 4, True, []), (5, None, True, [5, 10])],
)
def test_the_state_is_checked_at_the_interval_and_at_saves(
    interval: int, saves: int | None, is_saving: bool, due: Sequence[int]
) -> None:
    schedule = None if saves is None else IntervalSchedule(((saves, 0),))
    known = KnownAnswer(ControlGroup((0,), 0), [], 0.0)
    check = StateCheck(single_process(), interval, schedule, is_saving, known)
    assert [iteration for iteration in range(1, 11) if check.is_due(iteration)] == due


def test_replicas_of_experts_are_compared_without_sharding() -> None:
    """Two data-parallel ranks of each expert, four of the dense parameters: no class has four replicas of experts."""
    grid, folds = RankGrid(dp=4, ep=2, dp_replicas=4), torch.zeros((4, len(HOLDERS), 2), dtype=torch.int64)
    assert disagreeing_groups(grid, folds) == []
    folds[2, HOLDERS.index(("edp",))] += 1
    assert disagreeing_groups(grid, folds) == [(("edp",), (0, 2))]


WEIGHT, MOMENT = TensorKey("weight", "layers.0.w", 0), TensorKey("exp_avg", "layers.0.w", 0)
AXES = HOLDERS[0]


def report(host: str, **changes: Any) -> RankReport:
    return RankReport(**{"host": host, "digests": {}, "changed": (), "not_finite": (), **changes})


def differing(*values: int, **changes: Any) -> list[RankReport]:
    """Replicas of a weight on hosts n0, n1, …; ``changed`` names the rank that has noticed a change."""
    changed = changes.get("changed")
    return [
        report(f"n{rank}", digests={AXES: {WEIGHT: (value, 0)}}, changed=(WEIGHT,) if rank == changed else ())
        for rank, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("reports", "words", "ranks"),
    [
        (
            differing(5, 5, 6),
            r"found now: the weight of layers.0.w on rank 2 \(host n2\) differs from ranks 0 and 1\. ",
            (2,),
        ),
        # Without a majority both are named.
        (
            differing(0, 1),
            r"layers.0.w differs between ranks 0 and 1 \(hosts n0, n1\), any of which may be wrong",
            (0, 1),
        ),
        # One of them knows that it had other bits after the update, and is named alone.
        (differing(0, 1, changed=1), r"found now: [^;]* changed since the last update on rank 1 \(host n1\)\. ", (1,)),
    ],
)
def test_a_message_names_tensor_rank_and_host(reports: list[RankReport], words: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(SilentCorruptionError, match=words) as raised:
        raise_findings("now", reports, [(AXES, tuple(range(len(reports))))])
    assert raised.value.ranks == ranks and raised.value.culprit == (ranks[0] if len(ranks) == 1 else None)


def test_of_several_tensors_the_one_that_differs_is_named() -> None:
    reports = [report("a", digests={AXES: {WEIGHT: (1, 1), MOMENT: (2, rank)}}) for rank in (5, 5, 6)]
    with pytest.raises(SilentCorruptionError, match=r"found now: the exp_avg of layers.0.w on rank 2"):
        raise_findings("now", reports, [(AXES, (0, 1, 2))])


def test_a_change_between_updates_and_a_number_that_is_not_finite() -> None:
    with pytest.raises(
        SilentCorruptionError, match=r"the weight of layers.0.w changed since the last update on rank 1"
    ):
        raise_findings("now", [report("a"), report("b", changed=(WEIGHT,))], [])
    with pytest.raises(
        NotFiniteError, match=r"not finite now, which is not written: the weight of w on rank 1 \(host b"
    ):
        raise_findings("now", [report("a"), report("b", not_finite=("the weight of w",))], [])


def test_the_launcher_records_the_rank_that_is_the_cause(tmp_path: Path) -> None:
    """All ranks raise the error; the one that is named ends first, as if it were the only one."""
    error = SilentCorruptionError("the weight of w on rank 1 differs from ranks 0 and 2.", (1,))
    for rank in range(3):
        path = tmp_path / f"{rank}.json"
        with mock.patch("time.sleep") as sleep:
            errors.report(error, rank, str(path))
        assert sleep.called == (rank != 1)
        facts = json.loads(path.read_text())["message"]["extraInfo"]
        assert facts["cause"] == "silent_corruption"
        assert facts["is_local"] == (rank == 1)
