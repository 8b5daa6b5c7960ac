"""Context-parallel ranks have equal work in layers whose attention is inside chunks (docs/llama4.md)."""

import pytest
import torch

from megatron.core.context_parallel.split import ContextSplit, ring_tiles
from megatron.core.ops.attention import Tile
from megatron.core.ops.documents import chunked_attention, spans_of

LENGTH = 96


def area(tile: Tile) -> int:
    """Pairs of a query and a key that it may see."""
    queries, keys = (len(range(LENGTH)[part]) for part in (tile.queries, tile.keys))
    return queries * (queries + 1) // 2 if tile.is_causal else queries * keys


def areas(size: int, chunk: int) -> list[int]:
    """What each of ``size`` ranks computes in all steps of the ring."""
    spans = spans_of(chunked_attention(None, chunk, 1, LENGTH, torch.device("cpu")), LENGTH)
    found = []
    for rank in range(size):
        split = ContextSplit(rank, size)
        steps = [ring_tiles(split, source, spans, LENGTH) for source in range(size)]
        found.append(sum(area(tile) for tiles in steps for tile in tiles))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [2, 6, 8, 32, 48, 96])
def test_ranks_are_balanced_if_chunks_divide_the_sequence(size: int, chunk: int) -> None:
    """A rank's positions are their own mirror image, and a query and its mirror image see ``chunk + 1`` keys."""
    assert areas(size, chunk) == [LENGTH * (chunk + 1) // 2 // size] * size


def test_other_chunks_are_not_balanced() -> None:
    assert len(set(areas(4, 40))) > 1
