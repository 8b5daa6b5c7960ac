"""How a sequence is divided: every pair of a query and a key that it may see is computed once, and work is balanced."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.context_parallel.attention import ContextSplit, diagonal_tiles, earlier_tiles, ring_tiles
from megatron.core.ops.attention import Tile
from megatron.core.ops.documents import Documents, Span, spans_of
from tests.context_parallel.spans import MARKS, Marks, attention_spans
from tests.llama4_definition import token_positions, visible_pairs

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 4, 8)
LENGTH = 96


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int | None, Tensor, Marks]:
    """A number of ranks, the size of a chunk, and where documents begin in a batch of two rows."""
    size = draw(st.sampled_from(SIZES))
    length = 2 * size * draw(st.integers(1, 4))
    chunk = draw(st.none() | st.integers(1, length + 2))
    # Documents are seldom shorter than a chunk if few tokens begin one.
    rare = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, rare).map(lambda number: number == 0), min_size=length, max_size=length)
    return size, chunk, torch.tensor(draw(st.lists(row, min_size=2, max_size=2))), draw(st.sampled_from(MARKS))


def spans_and_pairs(chunk: int | None, starts: Tensor, marks: Marks) -> tuple[Sequence[Span], Tensor]:
    """The spans, and the visible pairs ``[b, query, key]`` by the definition, as counts."""
    expected = visible_pairs(starts, *(marks or (False, False)), chunk_size=chunk).long()
    return spans_of(attention_spans(starts, marks, chunk), starts.shape[1]), expected


def counted(tiles: Iterable[Tile], queries: Tensor, keys: Tensor, rows: int, length: int) -> Tensor:
    """How often the tiles hold each pair ``[b, query, key]``; positions of queries and keys by local place."""
    counts = torch.zeros(rows, length, length, dtype=torch.long)
    for tile in tiles:
        mine, theirs = queries[tile.queries], keys[tile.keys]
        assert len(mine) and len(theirs)
        block = torch.ones(len(mine), len(theirs), dtype=torch.long)
        if tile.is_causal:
            assert len(mine) == len(theirs)
            block = block.tril()
        for row in range(rows)[tile.rows]:
            counts[row, mine.unsqueeze(1), theirs] += block
    return counts


@settings(max_examples=250)
@given(case=sequences())
def test_spans_hold_every_visible_pair_once_and_no_other(case: tuple[int, int | None, Tensor, Marks]) -> None:
    _, chunk, starts, marks = case
    spans, expected = spans_and_pairs(chunk, starts, marks)
    counts = torch.zeros_like(expected)
    for span in spans:
        size = span.stop - span.start
        assert 0 < size <= (chunk or size)
        counts[span.rows, span.start : span.stop, span.start : span.stop] += torch.ones(size, size).tril().long()
    assert torch.equal(counts, expected)


@settings(max_examples=250)
@given(case=sequences())
def test_tiles_of_all_ranks_hold_every_visible_pair_once_and_no_other(
    case: tuple[int, int | None, Tensor, Marks],
) -> None:
    """Ring (also over the groups of two levels, whose split is that of as many ranks) and all-gather."""
    size, chunk, starts, marks = case
    rows, length = starts.shape
    spans, expected = spans_and_pairs(chunk, starts, marks)
    ring, gathered = torch.zeros_like(expected), torch.zeros_like(expected)
    for rank in range(size):
        split = ContextSplit(rank, size)
        mine = split.positions(length)
        for source in range(size):
            keys = ContextSplit(source, size).positions(length)
            ring += counted(ring_tiles(split, source, spans, length), mine, keys, rows, length)
        gathered += counted(diagonal_tiles(split, spans, length), mine, mine, rows, length)
        gathered += counted(earlier_tiles(split, spans, length), mine, torch.arange(length), rows, length)
    assert torch.equal(ring, expected)
    assert torch.equal(gathered, expected)


@given(case=sequences())
def test_every_query_is_in_the_first_tiles_once(case: tuple[int, int | None, Tensor, Marks]) -> None:
    """What merging relies on."""
    size, chunk, starts, marks = case
    rows, length = starts.shape
    spans, _ = spans_and_pairs(chunk, starts, marks)
    every_query = Counter((row, query) for row in range(rows) for query in range(length // size))
    for rank in range(size):
        split = ContextSplit(rank, size)
        for tiles in (ring_tiles(split, rank, spans, length), diagonal_tiles(split, spans, length)):
            held = Counter(
                (row, query)
                for tile in tiles
                for row in range(rows)[tile.rows]
                for query in range(length)[tile.queries]
            )
            assert held == every_query


@given(case=sequences())
def test_positions_count_from_the_beginning_of_the_document(case: tuple[int, int | None, Tensor, Marks]) -> None:
    _, _, starts, _ = case
    found = Documents(starts, masks_attention=False, resets_positions=True, device=CPU).positions()
    assert torch.equal(found.t(), token_positions(starts, resets_positions=True))


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_rank_does_the_same_work_in_every_step(size: int) -> None:
    length = 8 * size
    spans = spans_of(None, length)
    half = length // size // 2
    for step in range(size):
        for rank in range(size):
            (tile,) = ring_tiles(ContextSplit(rank, size), (rank - step) % size, spans, length)
            pairs = (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            assert pairs == (4 * half * half if step == 0 else 2 * half * half)
            assert tile.is_causal == (step == 0)


def area(tile: Tile) -> int:
    """Pairs of a query and a key that it may see."""
    queries, keys = (len(range(LENGTH)[part]) for part in (tile.queries, tile.keys))
    return queries * (queries + 1) // 2 if tile.is_causal else queries * keys


def areas(size: int, chunk: int) -> list[int]:
    """What each of ``size`` ranks computes in all steps of the ring, in chunked layers (docs/llama4.md)."""
    spans = spans_of(attention_spans(torch.zeros(1, LENGTH), None, chunk), LENGTH)
    steps = [
        [ring_tiles(ContextSplit(rank, size), source, spans, LENGTH) for source in range(size)] for rank in range(size)
    ]
    return [sum(area(tile) for tiles in of_rank for tile in tiles) for of_rank in steps]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [2, 6, 8, 32, 48, 96])
def test_ranks_are_balanced_if_chunks_divide_the_sequence(size: int, chunk: int) -> None:
    """A rank's positions are their own mirror image, and a query and its mirror image see ``chunk + 1`` keys."""
    assert areas(size, chunk) == [LENGTH * (chunk + 1) // 2 // size] * size


def test_other_chunks_are_not_balanced() -> None:
    assert len(set(areas(4, 40))) > 1


@pytest.mark.parametrize("size", SIZES)
def test_parts_come_together_in_the_order_of_the_sequence_and_go_back(size: int) -> None:
    length = 6 * size
    sequence = torch.arange(3 * length).view(length, 3)
    positions = [ContextSplit(rank, size).positions(length) for rank in range(size)]
    assert sorted(chain.from_iterable(one.tolist() for one in positions)) == [*range(length)]
    parts = torch.stack([sequence[one] for one in positions])
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
