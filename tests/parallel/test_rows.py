"""What the tests over layouts rely on: the rows that run by default show every two factors together, and a case that
fails, hangs or dies does not spoil the next one."""

import os
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import combinations_of, covering
from tests.rank_pool import RankPool

Digits = tuple[int, ...]


def factors(row: Digits) -> dict[str, int]:
    return {str(place): digit for place, digit in enumerate(row)}


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=40), st.integers(1, 4))
def test_all_combinations_of_all_rows_are_in_the_chosen_and_none_is_chosen_in_vain(
    rows: list[Digits], strength: int
) -> None:
    chosen = covering(list(map(factors, rows)), [1.0 + sum(row) for row in rows], strength)
    shown = [combinations_of(factors(rows[place]), strength) for place in chosen]
    assert set().union(*shown) == set().union(*(combinations_of(factors(row), strength) for row in rows))
    for place, mine in enumerate(shown):
        assert mine - set().union(*shown[:place], *shown[place + 1 :])


def test_few_rows_are_chosen_of_a_product() -> None:
    rows = list(product(range(6), range(4), range(2), range(2), range(2)))
    assert 48 <= len(covering(list(map(factors, rows)), [1.0] * len(rows))) < 0.4 * len(rows)


def total() -> float:
    """The sum of rank + 1 over all ranks."""
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    return number.item()


def fail_on_the_last_rank(how: str) -> None:
    """Raise, exit, or do not answer."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    if how == "raises":
        raise ValueError("of this rank")
    if how == "dies":
        os._exit(1)
    threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "error"), [("raises", "ValueError: of this rank"), ("dies", None), ("hangs", "rank 1 did not answer")]
)
def test_a_case_that_fails_does_not_spoil_the_next(tmp_path: Path, how: str, error: str | None) -> None:
    with RankPool(2, tmp_path) as ranks:
        assert ranks.run(total) == [3.0, 3.0]
        with pytest.raises((RuntimeError, EOFError), match=error):
            ranks.run(fail_on_the_last_rank, how, timeout=1.0 if how == "hangs" else 60.0)
        assert ranks.run(total) == [3.0, 3.0]
        assert ranks.run(total, world_size=1) == [1.0]
