"""The division of a sequence: every pair of a query and a key that it may see is computed once, and work is balanced.
Attention in tiles and over ranks, forward and backward, against its definition in fp64 with a dense mask.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.parallel import ContextParallelType, Exchange
from megatron.core.communication import Communicator
from megatron.core.context_parallel import (
    AllGatherAttention,
    ContextParallel,
    ContextSplit,
    RingAttention,
    UlyssesAttention,
    diagonal_tiles,
    earlier_tiles,
    ring_tiles,
)
from megatron.core.ops.attention import (
    CAUSAL,
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionOutput,
    Gradients,
    LocalAttention,
    Tile,
    TiledAttention,
    TiledGradients,
)
from megatron.core.ops.attention_kernels import CpuFlashAttention, ReferenceAttention, TorchAttention
from megatron.core.ops.documents import AttentionSpans, Documents, Span, chunked_attention, spans_of
from megatron.core.topology import RankGrid, Topology
from tests.llama4_definition import token_positions, visible_pairs
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 4, 8)
LENGTH = 96


Marks = tuple[bool, bool] | None
"""Whether documents mask attention, and whether they reset positions; None: the run does not mark documents."""
MARKS: list[Marks] = [None, (False, False), (True, False), (False, True), (True, True)]


def attention_spans(starts: Tensor, marks: Marks, chunk: int | None) -> AttentionSpans | None:
    """Of a batch ``[b, s]`` whose documents begin at ``starts``."""
    documents = None if marks is None else Documents(starts, *marks, device=CPU)
    if chunk is None:
        return None if documents is None else documents.attention
    rows, length = starts.shape
    return chunked_attention(documents, chunk, rows, length, CPU)


Limits = tuple[int | None, int | None]
"""The size of a chunk, and the window."""


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, Limits, Tensor, Marks]:
    """A number of ranks, the limits of attention, and where documents begin in a batch of two rows."""
    size = draw(st.sampled_from(SIZES))
    length = 2 * size * draw(st.integers(1, 4))
    chunk = draw(st.none() | st.integers(1, length + 2))
    # Documents are seldom shorter than a chunk if few tokens begin one.
    rare = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, rare).map(lambda number: number == 0), min_size=length, max_size=length)
    window = draw(st.none() | st.integers(0, length))
    return (
        size,
        (chunk, window),
        torch.tensor(draw(st.lists(row, min_size=2, max_size=2))),
        draw(st.sampled_from(MARKS)),
    )


def spans_and_pairs(limits: Limits, starts: Tensor, marks: Marks) -> tuple[Sequence[Span], Tensor]:
    """The spans, and the visible pairs ``[b, query, key]`` by the definition, as counts."""
    chunk, window = limits
    expected = visible_pairs(starts, *(marks or (False, False)), chunk, window).long()
    return spans_of(attention_spans(starts, marks, chunk), starts.shape[1]), expected


def counted(tiles: Iterable[Tile], queries: Tensor, keys: Tensor, rows: int, length: int) -> Tensor:
    """How often the tiles hold each pair ``[b, query, key]``; positions of queries and keys by local place."""
    counts = torch.zeros(rows, length, length, dtype=torch.long)
    for tile in tiles:
        mine, theirs = queries[tile.queries], keys[tile.keys]
        assert len(mine) and len(theirs)
        assert not tile.mask.is_causal or len(mine) == len(theirs)
        block = torch.ones(len(mine), len(theirs), dtype=torch.long)
        for query in range(len(mine)):
            for key in range(len(theirs)):
                # The last query is at the last key.
                distance = query + len(theirs) - len(mine) - key
                is_before = tile.mask.window is not None and distance > tile.mask.window
                block[query, key] = not is_before and not (tile.mask.is_causal and distance < 0)
        assert block.any(dim=0).all() and block.any(dim=1).all(), "a query or a key that the tile does not need"
        for row in range(rows)[tile.rows]:
            counts[row, mine.unsqueeze(1), theirs] += block
    return counts


@settings(max_examples=250)
@given(case=sequences())
def test_spans_hold_every_visible_pair_once_and_no_other(case: tuple[int, Limits, Tensor, Marks]) -> None:
    _, (chunk, _), starts, marks = case
    spans, expected = spans_and_pairs((chunk, None), starts, marks)
    counts = torch.zeros_like(expected)
    for span in spans:
        size = span.stop - span.start
        assert 0 < size <= (chunk or size)
        counts[span.rows, span.start : span.stop, span.start : span.stop] += torch.ones(size, size).tril().long()
    assert torch.equal(counts, expected)


@settings(max_examples=250)
@given(case=sequences())
def test_tiles_of_all_ranks_hold_every_visible_pair_once_and_no_other(
    case: tuple[int, Limits, Tensor, Marks],
) -> None:
    """Ring (also over the groups of two levels, whose split is that of as many ranks) and all-gather."""
    size, limits, starts, marks = case
    rows, length = starts.shape
    spans, expected = spans_and_pairs(limits, starts, marks)
    mask = AttentionMask(window=limits[1])
    ring, gathered = torch.zeros_like(expected), torch.zeros_like(expected)
    for rank in range(size):
        split = ContextSplit(rank, size)
        mine = split.positions(length)
        for source in range(size):
            keys = ContextSplit(source, size).positions(length)
            ring += counted(ring_tiles(split, source, spans, length, mask), mine, keys, rows, length)
        gathered += counted(diagonal_tiles(split, spans, length, mask), mine, mine, rows, length)
        gathered += counted(earlier_tiles(split, spans, length, mask), mine, torch.arange(length), rows, length)
    assert torch.equal(ring, expected)
    assert torch.equal(gathered, expected)


@given(case=sequences())
def test_every_query_is_in_the_causal_tiles_once_and_first(case: tuple[int, Limits, Tensor, Marks]) -> None:
    """What merging relies on."""
    size, limits, starts, marks = case
    rows, length = starts.shape
    spans, _ = spans_and_pairs(limits, starts, marks)
    mask = AttentionMask(window=limits[1])
    every_query = Counter((row, query) for row in range(rows) for query in range(length // size))
    for rank in range(size):
        split = ContextSplit(rank, size)
        for tiles in (ring_tiles(split, rank, spans, length, mask), diagonal_tiles(split, spans, length, mask)):
            of_rank = list(tiles)
            causal = [tile for tile in of_rank if tile.mask.is_causal]
            assert causal == of_rank[: len(causal)]
            held = Counter(
                (row, query)
                for tile in causal
                for row in range(rows)[tile.rows]
                for query in range(length)[tile.queries]
            )
            assert held == every_query


@given(case=sequences())
def test_positions_count_from_the_beginning_of_the_document(case: tuple[int, Limits, Tensor, Marks]) -> None:
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
            (tile,) = ring_tiles(ContextSplit(rank, size), (rank - step) % size, spans, length, CAUSAL)
            pairs = (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            assert pairs == (4 * half * half if step == 0 else 2 * half * half)
            assert tile.mask.is_causal == (step == 0)


def area(tile: Tile) -> int:
    """Pairs of a query and a key that it may see."""
    queries, keys = (len(range(LENGTH)[part]) for part in (tile.queries, tile.keys))
    return queries * (queries + 1) // 2 if tile.mask.is_causal else queries * keys


def areas(size: int, chunk: int) -> list[int]:
    """What each of ``size`` ranks computes in all steps of the ring, in chunked layers (docs/llama4.md)."""
    spans = spans_of(attention_spans(torch.zeros(1, LENGTH), None, chunk), LENGTH)
    steps = [
        [ring_tiles(ContextSplit(rank, size), source, spans, LENGTH, CAUSAL) for source in range(size)]
        for rank in range(size)
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


KERNELS = [ReferenceAttention(), CpuFlashAttention()]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
Shape = tuple[int, int, int, int, int]
"""Batch, query heads, key-value heads, length, head size."""


@dataclass(frozen=True)
class Case:
    """A batch whose documents begin at ``places`` in the first row, and one later in every further row."""

    shape: Shape
    places: tuple[int, ...] = ()
    marks: Marks = None
    chunk: int | None = None
    mask: AttentionMask = CAUSAL

    @property
    def starts(self) -> Tensor:
        starts = torch.zeros(self.shape[0], self.shape[3], dtype=torch.bool)
        for row in range(self.shape[0]):
            for place in self.places:
                starts[row, min(place + row, self.shape[3] - 1)] = True
        return starts

    def inputs(self, dtype: torch.dtype, positions: Tensor | None = None) -> tuple[AttentionInputs, Tensor]:
        """The inputs at these positions, and the gradient of their output."""
        positions = torch.arange(self.shape[3]) if positions is None else positions
        query, key, value, grad = (tensor[:, :, positions].to(dtype) for tensor in self.tensors())
        spans = attention_spans(self.starts, self.marks, self.chunk)
        return AttentionInputs(query, key, value, spans, self.mask), grad

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and the gradient of the output, in fp64."""
        batch, heads, groups, length, size = self.shape
        generator = torch.Generator().manual_seed(0)
        query, key, value, grad = (
            torch.randn(batch, number, length, size, dtype=torch.float64, generator=generator)
            for number in (heads, groups, groups, heads)
        )
        return query, key, value, grad

    def definition(self, dtype: torch.dtype) -> tuple[Tensor, Gradients]:
        """Output and gradients of inputs that are rounded to ``dtype``, by autograd on the whole matrix of scores with
        a mask that is built pair by pair."""
        _, heads, groups, _, size = self.shape
        visible = visible_pairs(self.starts, *(self.marks or (False, False)), self.chunk, self.mask.window)[:, None]
        query, key, value, grad = (tensor.to(dtype).double() for tensor in self.tensors())
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        keys, values = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in leaves[1:])
        scores = query @ keys.transpose(-1, -2) / math.sqrt(size)
        if self.mask.soft_cap is not None:
            scores = self.mask.soft_cap * (scores / self.mask.soft_cap).tanh()
        output = scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ values
        grad_query, grad_key, grad_value = torch.autograd.grad(output, leaves, grad)
        return output.detach(), (grad_query, grad_key, grad_value)


def assert_all_close(
    found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], dtype: torch.dtype, positions: Tensor
) -> None:
    """Compare with ``expected`` at ``positions``. Errors count relative to inputs, which are of the order of 1:
    differences of them may be much smaller."""
    for one, whole in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        wanted = whole[:, :, positions]
        assert one.shape == wanted.shape
        error = (one.double() - wanted).abs().max() / max(1.0, float(wanted.abs().max()))
        assert error < TOLERANCE[dtype], f"off by {error:.1e}"


@settings(max_examples=60)
@given(
    kernel=st.sampled_from(KERNELS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 4),
    length=st.integers(2, 40),
    size=st.sampled_from([2, 8, 16]),
    cut=st.floats(0.01, 0.99),
)
def test_attention_to_some_keys_and_then_to_others_is_attention_to_all(
    kernel: AttentionKernel,
    dtype: torch.dtype,
    batch: int,
    groups: int,
    repeats: int,
    length: int,
    size: int,
    cut: float,
) -> None:
    case = Case((batch, groups * repeats, groups, length, size))
    whole, grad = case.inputs(dtype)
    key, value = whole.key, whole.value
    middle = max(1, min(length - 1, int(cut * length)))
    rows, early, late = slice(None), slice(0, middle), slice(middle, length)
    diagonal = [Tile(rows, early, early, CAUSAL), Tile(rows, late, late, CAUSAL)]
    before = [Tile(rows, late, early, AttentionMask(is_causal=False))]
    tiled = TiledAttention(kernel, whole)
    tiled.add(diagonal, key, value)
    tiled.add(before, key, value)
    grads = TiledGradients(kernel, grad, tiled.result())
    grad_key, grad_value = (torch.zeros_like(tensor, dtype=grads.dtype) for tensor in (key, value))
    grads.add([*diagonal, *before], key, value, grad_key, grad_value)
    assert_all_close(
        (tiled.output, (grads.query, grad_key, grad_value)), case.definition(dtype), dtype, torch.arange(length)
    )


IN_DOCUMENTS = (True, False)
CHUNKED: Shape = (2, 8, 4, 48, 4)
CASES = [
    Case((1, 4, 4, 16, 2)),
    Case((2, 8, 4, 24, 8)),
    # A document across every boundary between chunks of 3, of four ranks and of two; short ones; one that is a chunk.
    Case((2, 8, 4, 24, 8), (2, 4, 8, 10, 14, 16, 20), IN_DOCUMENTS),
    Case((1, 4, 4, 24, 4), (0, 6, 12, 18), IN_DOCUMENTS),
    Case((3, 4, 4, 40, 4), (1, 2, 3, 37), IN_DOCUMENTS),
    Case((2, 8, 8, 48, 16), (5, 31), IN_DOCUMENTS),
    *(
        Case(CHUNKED, (3, 7, 12, 30), marks, chunk)
        # Ranks have parts of 12 or 6 on either side: borders lie on the edge of a part, inside it, or beyond the
        # sequence.
        for chunk, marks in [
            *((1, None), (5, (True, True)), (5, (False, True)), (6, None), (13, None), (13, IN_DOCUMENTS)),
            *((24, (False, False)), (24, (True, True)), (47, (False, True)), (60, IN_DOCUMENTS), (60, None)),
        ]
    ),
]
WINDOWS = [
    # Windows of the own key alone, inside a part of a rank (6 of 48, or 12), over its border, over several parts.
    *(Case((2, 8, 4, 48, 8), mask=AttentionMask(window=window)) for window in (0, 3, 5, 6, 7, 12, 20, 46, 47)),
    Case((1, 4, 4, 160, 8), mask=AttentionMask(window=50)),
    Case(CHUNKED, (3, 7, 12, 30), IN_DOCUMENTS, mask=AttentionMask(window=6)),
    Case(CHUNKED, (3, 7, 12, 30), (True, True), 13, AttentionMask(window=4)),
]
CAPPED = [
    Case((2, 8, 4, 48, 8), mask=AttentionMask(soft_cap=0.7)),
    Case(CHUNKED, (3, 7, 12, 30), IN_DOCUMENTS, mask=AttentionMask(window=6, soft_cap=1.5)),
]
ALONE = [Case((1, 1, 1, 8, 2), (1, 4, 5, 7), IN_DOCUMENTS), Case((1, 6, 2, 40, 16), (1, 4, 5, 7), IN_DOCUMENTS)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", [*KERNELS, TorchAttention()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("case", [*CASES, *ALONE, *WINDOWS, *CAPPED], ids=str)
def test_one_rank_attends_inside_documents_chunks_and_windows(
    kernel: AttentionKernel, case: Case, dtype: torch.dtype
) -> None:
    """The reference computes all spans in one varlen call, the other kernels a tile for each."""
    if not kernel.supports_mask(case.mask):
        pytest.skip("the kernel does not compute this mask, and is not chosen")
    attention, (whole, grad) = LocalAttention(kernel), case.inputs(dtype)
    attended = attention.forward(whole)
    found = attended.output, attention.backward(grad, attended)
    assert_all_close(found, case.definition(dtype), dtype, torch.arange(case.shape[3]))


def on_ranks(
    kind: ContextParallelType, sizes: tuple[int, ...], cases: Sequence[Case], dtype: torch.dtype
) -> tuple[list[tuple[Tensor, Gradients]], list[str]]:
    """This rank's parts of the outputs and of the gradients, and the collectives that they took."""
    size = dist.get_world_size()
    topology = Topology(RankGrid(cp=size), dist.get_rank(), CPU)
    ranks, levels = topology.context_parallel, topology.context_parallel_levels(sizes)
    kinds: list[str] = []
    for communicator in (ranks, *levels):
        communicator.observer = lambda record: kinds.append(record.kind)
    results = []
    for case in cases:
        kernel = CpuFlashAttention() if case.mask.soft_cap is None else ReferenceAttention()
        attention = ContextParallel(ranks, (kind,), levels).attention(0, kernel)
        mine, grad = case.inputs(dtype, ContextSplit(ranks.rank, size).positions(case.shape[3]))
        attended = attention.forward(mine)
        assert attended.output.dtype == dtype
        results.append((attended.output, attention.backward(grad, attended)))
    return results, kinds


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes"), [*((kind, (ranks,)) for ranks in (2, 4) for kind in get_args(Exchange)), ("a2a+p2p", (2, 2))]
)
def test_ranks_that_share_a_sequence_attend_as_one(
    four_ranks: RankPool, kind: ContextParallelType, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    ranks = math.prod(sizes)
    cases = [*CASES, *WINDOWS, *CAPPED]
    by_rank = four_ranks.run(on_ranks, kind, sizes, cases, dtype, world_size=ranks)
    for number, case in enumerate(cases):
        expected = case.definition(dtype)
        for rank, (results, _) in enumerate(by_rank):
            assert_all_close(results[number], expected, dtype, ContextSplit(rank, ranks).positions(case.shape[3]))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Keys move on in all steps but the last, forward and backward; their gradients in every step, home at last.
        ("p2p", ["shift"] * 3 + ["shift"] * 3 + ["shift"] * 4),
        ("allgather", ["all_gather", "all_gather", "reduce_scatter"]),
        ("a2a", ["all_to_all"] * 4),
        ("a2a+p2p", ["all_to_all"] * 4 + ["shift"] + ["shift"] + ["shift"] * 2),
    ],
)
def test_what_is_sent(four_ranks: RankPool, kind: ContextParallelType, expected: list[str]) -> None:
    for _, kinds in four_ranks.run(on_ranks, kind, (2, 2), CASES[:1], torch.float64):
        assert sorted(kinds) == sorted(expected)


def order_of_events() -> list[str]:
    """Collectives and tiles of a forward pass, as they start."""
    ranks = Communicator(range(4), dist.get_rank(), "cp")
    events: list[str] = []
    ranks.observer = lambda record: events.append(record.kind)
    kernel = CpuFlashAttention()
    forward = kernel.forward

    def noted(*arguments: Any, **options: Any) -> AttentionOutput:
        events.append("attend")
        return forward(*arguments, **options)

    kernel.forward = noted  # type: ignore[method-assign]
    mine, _ = CASES[0].inputs(torch.float64, torch.arange(4))
    ContextParallel(ranks, ("allgather",)).attention(0, kernel).forward(mine)
    return events


def test_what_is_gathered_travels_behind_the_computation(four_ranks: RankPool) -> None:
    """The ring's messages do so in ``pipeline/test_launch_order.py``."""
    for events in four_ranks.run(order_of_events):
        assert events[:3] == ["all_gather", "attend", "attend"]


def test_layers_may_attend_in_different_ways() -> None:
    ranks = Communicator((0, 1), 0)
    kinds = {"p2p": RingAttention, "a2a": UlyssesAttention, "allgather": AllGatherAttention}
    each = ContextParallel(ranks, ("p2p", "a2a", "allgather"))
    assert [type(each.attention(layer, ReferenceAttention())) for layer in range(3)] == [*kinds.values()]
    one = ContextParallel(ranks, ("a2a",))
    assert {type(one.attention(layer, ReferenceAttention())) for layer in range(3)} == {UlyssesAttention}
    alone = ContextParallel(Communicator((0,), 0), ("a2a",))
    assert type(alone.attention(0, ReferenceAttention())) is LocalAttention
