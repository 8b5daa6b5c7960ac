"""The rows that run by default are no small choice: every two factors are seen together."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.covering import combinations_of, covering

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
