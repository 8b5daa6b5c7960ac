"""Sizes and counts of splits."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.ops.attention import Tile

SIZES = (1, 2, 3, 4, 8)


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
