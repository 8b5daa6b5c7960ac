"""What the lessons' tools draw, against definitions with numbers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.explorer.explorer_cases import run

RANKS = 4
# [rank, chunk]: a power of ten of the rank times a digit of the chunk, so that a sum says what it consists of.
VALUES = np.array([[10**rank * (chunk + 1) for chunk in range(RANKS)] for rank in range(RANKS)])
OWN, EVERYTHING = np.diag(np.diag(VALUES)), np.ones((RANKS, 1), dtype=int)
ROOT = np.eye(RANKS, dtype=int)[:, :1]  # only rank 0
DEFINITIONS: dict[str, tuple[Any, Any]] = {
    "broadcast": (ROOT * VALUES[:1], EVERYTHING * VALUES[:1]),
    "scatter": (ROOT * VALUES[:1], np.diag(VALUES[0])),
    "gather": (OWN, ROOT * np.diag(VALUES)),
    "all-gather": (OWN, EVERYTHING * np.diag(VALUES)),
    "reduce-scatter": (VALUES, np.diag(VALUES.sum(axis=0))),
    "all-reduce": (VALUES, EVERYTHING * VALUES.sum(axis=0)),
    "all-to-all": (VALUES, VALUES.T),
}


def value_of(cell: dict[str, Any] | None) -> int:
    return 0 if cell is None else sum(10**rank * (cell["chunk"] + 1) for rank in cell["from"])


def test_collectives_are_those_of_their_definitions() -> None:
    found = run(None, f"(data, name) => collective(name, {RANKS})", list(DEFINITIONS))
    for (name, wanted), states in zip(DEFINITIONS.items(), found, strict=True):
        for cells, values in zip(states, wanted, strict=True):
            assert [[value_of(cell) for cell in of_rank] for of_rank in cells] == values.tolist(), name


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_ring_sends_one_chunk_to_the_next_rank_and_ends_with_the_sum(ranks: int) -> None:
    steps = run(None, f"(data, step) => ringAfter({ranks}, step)", list(range(2 * ranks - 1)))
    for number, (before, after) in enumerate(pairwise(steps)):
        for rank in range(ranks):
            sender = (rank - 1) % ranks
            chunk = before["sends"][sender]
            for place in range(ranks):
                mine, sent = (set(before["holds"][who][place]["from"]) for who in (rank, sender))
                received = (mine | sent if number < ranks - 1 else sent) if place == chunk else mine
                assert number >= ranks - 1 or place != chunk or not mine & sent, "nothing is added twice"
                assert set(after["holds"][rank][place]["from"]) == received
    whole = list(range(ranks))
    assert all(cell["from"] == whole for cells in steps[-1]["holds"] for cell in cells)
    assert steps[-1]["sends"] is None


def test_shares_of_the_triangle_and_bytes_of_zero() -> None:
    def work(ranks: int, rank_of: Callable[[int], int]) -> list[float]:
        rows = 240 * ranks  # each sees the keys up to half of its own
        seen = [0.0] * ranks
        for row in range(rows):
            seen[rank_of(row * 2 * ranks // rows)] += (row + 0.5) / (rows * rows / 2)
        return seen

    for ranks, neighbours, balanced in run(
        None, "(data, ranks) => [ranks, contextShares(ranks, false), contextShares(ranks, true)]", [2, 3, 8]
    ):
        assert neighbours == pytest.approx(work(ranks, lambda part: part // 2))
        assert balanced == pytest.approx([1 / ranks] * ranks)
    stages = run(None, "(data, stage) => Object.values(zeroBytes(7.5e9, 64, stage, 2))", [0, 1, 2, 3])
    assert [sum(parts) / 1e9 for parts in stages] == pytest.approx([120, 31.40625, 16.640625, 1.875])  # ZeRO, figure 1
