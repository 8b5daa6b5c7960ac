"""Chunked attention, undivided and over context-parallel ranks, against masks that are built pair by pair."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.context_parallel import ContextParallelType, Exchange
from megatron.core.context_parallel.attention import ContextParallel
from megatron.core.context_parallel.split import ContextSplit, diagonal_tiles, earlier_tiles, ring_tiles
from megatron.core.ops.attention import AttentionInputs, LocalAttention
from megatron.core.ops.attention_interface import AttentionKernel, Gradients
from megatron.core.ops.attention_kernels import CpuFlashAttention, ReferenceAttention
from megatron.core.ops.documents import AttentionSpans, Documents, Span, chunked_attention, spans_of
from megatron.core.topology import RankGrid, Topology
from tests.context_parallel.definition import Shape, assert_close, begins, definition, inputs
from tests.context_parallel.splits import SIZES, counted
from tests.llama4_definition import token_positions, visible_pairs
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
Marks = tuple[bool, bool] | None
"""Whether documents mask attention, and whether they reset positions; None: the run does not mark documents."""
MARKS: list[Marks] = [None, (False, False), (True, False), (False, True), (True, True)]


@st.composite
def chunked_sequences(draw: st.DrawFn) -> tuple[int, int, Tensor, Marks]:
    """A number of ranks, the size of a chunk, and where documents begin in a batch of two rows."""
    size = draw(st.sampled_from(SIZES))
    length = 2 * size * draw(st.integers(1, 4))
    chunk = draw(st.integers(1, length + 2))
    # Documents are seldom shorter than a chunk if few tokens begin one.
    rare = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, rare).map(lambda number: number == 0), min_size=length, max_size=length)
    return size, chunk, torch.tensor(draw(st.lists(row, min_size=2, max_size=2))), draw(st.sampled_from(MARKS))


def documents_of(starts: Tensor, marks: Marks) -> Documents | None:
    return None if marks is None else Documents(starts, *marks, device=CPU)


def chunks_of(starts: Tensor, marks: Marks, chunk: int) -> AttentionSpans | None:
    rows, length = starts.shape
    return chunked_attention(documents_of(starts, marks), chunk, rows, length, CPU)


def chunk_spans(starts: Tensor, marks: Marks, chunk: int) -> Sequence[Span]:
    return spans_of(chunks_of(starts, marks, chunk), starts.shape[1])


def wanted(starts: Tensor, marks: Marks, chunk: int) -> Tensor:
    return visible_pairs(starts, *(marks or (False, False)), chunk_size=chunk).long()


@given(case=chunked_sequences())
def test_spans_hold_every_visible_pair_once_and_no_other(case: tuple[int, int, Tensor, Marks]) -> None:
    _, chunk, starts, marks = case
    rows, length = starts.shape
    counts = torch.zeros(rows, length, length, dtype=torch.long)
    for span in chunk_spans(starts, marks, chunk):
        size = span.stop - span.start
        assert 0 < size <= chunk
        counts[span.rows, span.start : span.stop, span.start : span.stop] += torch.ones(size, size).tril().long()
    assert torch.equal(counts, wanted(starts, marks, chunk))


@given(case=chunked_sequences())
def test_tiles_of_all_ranks_hold_every_visible_pair_once_and_no_other(case: tuple[int, int, Tensor, Marks]) -> None:
    """Ring (also over the groups of two levels, whose split is that of as many ranks) and all-gather."""
    size, chunk, starts, marks = case
    rows, length = starts.shape
    spans, expected = chunk_spans(starts, marks, chunk), wanted(starts, marks, chunk)
    ring, gathered = torch.zeros_like(expected), torch.zeros_like(expected)
    everything = torch.arange(length)
    for rank in range(size):
        split = ContextSplit(rank, size)
        mine = split.positions(length)
        for source in range(size):
            keys = ContextSplit(source, size).positions(length)
            ring += counted(ring_tiles(split, source, spans, length), mine, keys, rows, length)
        gathered += counted(diagonal_tiles(split, spans, length), mine, mine, rows, length)
        gathered += counted(earlier_tiles(split, spans, length), mine, everything, rows, length)
    assert torch.equal(ring, expected)
    assert torch.equal(gathered, expected)


@given(case=chunked_sequences())
def test_every_query_is_in_the_first_tiles_once(case: tuple[int, int, Tensor, Marks]) -> None:
    size, chunk, starts, marks = case
    rows, length = starts.shape
    spans = chunk_spans(starts, marks, chunk)
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


@given(case=chunked_sequences())
def test_positions_are_those_of_the_definition(case: tuple[int, int, Tensor, Marks]) -> None:
    _, _, starts, _ = case
    found = Documents(starts, masks_attention=False, resets_positions=True, device=CPU).positions()
    assert torch.equal(found.t(), token_positions(starts, resets_positions=True))


SHAPE: Shape = (2, 8, 4, 48, 4)
CASES: list[tuple[int, Marks]] = [
    # Ranks have parts of 12 or 6 on either side: borders lie on the edge of a part, inside it, or beyond the sequence.
    (1, None),
    (5, (True, True)),
    (5, (False, True)),
    (6, None),
    (13, None),
    (13, (True, False)),
    (24, (False, False)),
    (24, (True, True)),
    (47, (False, True)),
    (60, (True, False)),
    (60, None),
]


def case_inputs(chunk: int, marks: Marks, positions: Tensor, starts: Tensor) -> tuple[AttentionInputs, Tensor]:
    """The inputs at these positions, and the gradient of their output."""
    query, key, value, grad = (tensor[:, :, positions] for tensor in inputs(SHAPE))
    return AttentionInputs(query, key, value, chunks_of(starts, marks, chunk)), grad


def attend_on_ranks(
    kind: ContextParallelType, sizes: tuple[int, ...], starts: Tensor
) -> list[tuple[Tensor, Gradients]]:
    """This rank's part of the output and of the gradients, for all cases."""
    size = dist.get_world_size()
    topology = Topology(RankGrid(cp=size), dist.get_rank(), CPU)
    ranks, levels = topology.context_parallel, topology.context_parallel_levels(sizes)
    attention = ContextParallel(ranks, (kind,), levels).attention(0, CpuFlashAttention())
    results = []
    for chunk, marks in CASES:
        mine, grad = case_inputs(chunk, marks, ContextSplit(ranks.rank, size).positions(SHAPE[3]), starts)
        attended = attention.forward(mine)
        results.append((attended.output, attention.backward(grad, mine, attended)))
    return results


@pytest.mark.parametrize(
    ("kind", "sizes"), [*((kind, (ranks,)) for ranks in (2, 4) for kind in get_args(Exchange)), ("a2a+p2p", (2, 2))]
)
def test_ranks_attend_inside_the_chunks_of_the_sequence(
    four_ranks: RankPool, kind: ContextParallelType, sizes: tuple[int, ...]
) -> None:
    ranks, starts = math.prod(sizes), begins(SHAPE, 3, 7, 12, 30)
    by_rank = four_ranks.run(attend_on_ranks, kind, sizes, starts, world_size=ranks)
    for place, (chunk, marks) in enumerate(CASES):
        expected, expected_grads = definition(SHAPE, None, visible=wanted(starts, marks, chunk).bool())
        for rank, results in enumerate(by_rank):
            output, grads = results[place]
            positions = ContextSplit(rank, ranks).positions(SHAPE[3])
            assert_close(output, expected[:, :, positions], torch.float64)
            for found, gradient in zip(grads, expected_grads):
                assert_close(found, gradient[:, :, positions], torch.float64)


@pytest.mark.parametrize(("chunk", "marks"), CASES)
@pytest.mark.parametrize("kernel", [ReferenceAttention(), CpuFlashAttention()], ids=lambda kernel: kernel.name)
def test_one_rank_attends_inside_chunks(kernel: AttentionKernel, chunk: int, marks: Marks) -> None:
    """The reference computes all chunks in one varlen call, the other kernel a tile for each."""
    starts, attention = begins(SHAPE, 3, 7, 12, 30), LocalAttention(kernel)
    expected, expected_grads = definition(SHAPE, None, visible=wanted(starts, marks, chunk).bool())
    whole, grad = case_inputs(chunk, marks, torch.arange(SHAPE[3]), starts)
    attended = attention.forward(whole)
    assert_close(attended.output, expected, torch.float64)
    for found, gradient in zip(attention.backward(grad, whole, attended), expected_grads):
        assert_close(found, gradient, torch.float64)
