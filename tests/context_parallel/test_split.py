"""How a sequence is divided: every pair of a query and a key that it may see is computed once, and work is balanced."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.context_parallel.split import ContextSplit, diagonal_tiles, earlier_tiles, ring_tiles
from megatron.core.ops.documents import Documents, Span, spans_of
from tests.context_parallel.splits import SIZES, counted

CPU = torch.device("cpu")


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, Tensor]:
    """A number of ranks, and where documents begin in a batch of two rows that they divide."""
    size = draw(st.sampled_from(SIZES))
    length = 2 * size * draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=2, max_size=2))
    return size, torch.tensor(rows)


def visible(starts: Tensor) -> Tensor:
    """``[b, query, key]`` by the definition: not later, and of the same document."""
    number = starts.long().index_fill(1, torch.tensor([0]), 0).cumsum(dim=1)
    return (number.unsqueeze(2) == number.unsqueeze(1)).tril()


@given(case=sequences())
def test_the_steps_of_a_ring_compute_every_visible_pair_once(case: tuple[int, Tensor]) -> None:
    size, starts = case
    rows, length = starts.shape
    for spans, expected in spans_and_pairs(starts):
        total = torch.zeros(rows, length, length, dtype=torch.long)
        for rank in range(size):
            split = ContextSplit(rank, size)
            for source in range(size):
                keys = ContextSplit(source, size).positions(length)
                tiles = ring_tiles(split, source, spans, length)
                total += counted(tiles, split.positions(length), keys, rows, length)
        assert torch.equal(total, expected)


@given(case=sequences())
def test_the_diagonal_and_what_lies_before_it_hold_every_visible_pair_once(case: tuple[int, Tensor]) -> None:
    size, starts = case
    rows, length = starts.shape
    for spans, expected in spans_and_pairs(starts):
        total = torch.zeros(rows, length, length, dtype=torch.long)
        for rank in range(size):
            split = ContextSplit(rank, size)
            mine = split.positions(length)
            total += counted(diagonal_tiles(split, spans, length), mine, mine, rows, length)
            total += counted(earlier_tiles(split, spans, length), mine, torch.arange(length), rows, length)
        assert torch.equal(total, expected)


def spans_and_pairs(starts: Tensor) -> Iterable[tuple[Sequence[Span], Tensor]]:
    """With documents and without: the spans, and the pairs that are visible."""
    length = starts.shape[1]
    documents = Documents(starts, masks_attention=True, resets_positions=False, device=CPU)
    yield spans_of(documents.attention, length), visible(starts).long()
    yield spans_of(None, length), visible(torch.zeros_like(starts)).long()


@given(case=sequences())
def test_every_query_is_in_the_first_tiles_once(case: tuple[int, Tensor]) -> None:
    """What merging relies on."""
    size, starts = case
    rows, length = starts.shape
    documents = Documents(starts, masks_attention=True, resets_positions=False, device=CPU)
    spans = spans_of(documents.attention, length)
    for rank in range(size):
        split = ContextSplit(rank, size)
        for tiles in (ring_tiles(split, rank, spans, length), diagonal_tiles(split, spans, length)):
            held = Counter(
                (row, query)
                for tile in tiles
                for row in range(rows)[tile.rows]
                for query in range(length)[tile.queries]
            )
            assert held == Counter((row, query) for row in range(rows) for query in range(length // size))


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_rank_does_the_same_work_in_every_step(size: int) -> None:
    length = 8 * size
    spans = spans_of(None, length)
    half = length // size // 2
    for step in range(size):
        for rank in range(size):
            tiles = list(ring_tiles(ContextSplit(rank, size), (rank - step) % size, spans, length))
            (tile,) = tiles
            pairs = (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            assert pairs == (4 * half * half if step == 0 else 2 * half * half)
            assert tile.is_causal == (step == 0)


@pytest.mark.parametrize("size", SIZES)
def test_parts_come_together_in_the_order_of_the_sequence_and_go_back(size: int) -> None:
    length = 6 * size
    sequence = torch.arange(3 * length).view(length, 3)
    parts = torch.stack([sequence[ContextSplit(rank, size).positions(length)] for rank in range(size)])
    assert sorted(chain.from_iterable(ContextSplit(rank, size).positions(length).tolist() for rank in range(size))) == [
        *range(length)
    ]
    for rank in range(size):
        split = ContextSplit(rank, size)
        assert torch.equal(split.natural(parts), sequence)
        assert torch.equal(split.by_rank(sequence), parts)


@pytest.mark.parametrize(("group_size", "groups"), [(2, 2), (2, 4), (4, 2), (3, 3), (8, 2)])
def test_neighbouring_ranks_together_hold_the_part_of_a_rank_among_fewer(group_size: int, groups: int) -> None:
    """What the levels of a2a+p2p rely on: the ring over groups is split and balanced as one over single ranks."""
    size = group_size * groups
    length = 6 * size
    for group in range(groups):
        members = range(group * group_size, (group + 1) * group_size)
        parts = torch.stack([ContextSplit(rank, size).positions(length) for rank in members])
        together = ContextSplit(0, group_size).natural(parts)
        assert torch.equal(together, ContextSplit(group, groups).positions(length))


def test_a_rank_holds_a_chunk_from_either_side() -> None:
    assert ContextSplit(1, 4).positions(16).tolist() == [2, 3, 12, 13]


@given(case=sequences())
def test_positions_count_from_the_beginning_of_the_document(case: tuple[int, Tensor]) -> None:
    _, starts = case
    positions = Documents(starts, masks_attention=False, resets_positions=True, device=CPU).positions()
    for row, flags in enumerate(starts.tolist()):
        place = 0
        for position, begins in enumerate(flags):
            place = 0 if begins or position == 0 else place + 1
            assert positions[position, row] == place
