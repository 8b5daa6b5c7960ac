"""The rows that run by default are no small choice: every three factors are seen together."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.registry import SCHEDULES
from tests.parallel.covering import combinations_of, covering
from tests.parallel.layout_run import Layout
from tests.parallel.test_layouts import (
    PRODUCTS,
    Case,
    data_parallel_matrix,
    default_places,
    factors_of,
    pipeline_matrix,
    pipeline_product,
)

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


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_three_factors_of_a_product_are_in_the_rows_that_run_by_default(name: str) -> None:
    rows = factors_of(list(PRODUCTS[name]()))
    wanted = set().union(*(combinations_of(row, 3) for row in rows))
    assert set().union(*(combinations_of(rows[place], 3) for place in default_places(name))) == wanted


def test_the_whole_pipeline_product_is_that_of_all_schedules_stages_ranks_and_microbatches() -> None:
    found = [(one.schedule, one.pp, one.tp, one.dp, one.microbatches) for _, one in pipeline_product()]
    assert found == list(product(SCHEDULES, (2, 4), (1, 2), (1, 2), (1, 2, 4, 8)))


def test_every_schedule_runs_by_default_with_each_other_way_to_divide() -> None:
    """Tensor, data and sequence parallelism, and each of the strategies."""
    every = list(pipeline_product())
    rows: list[Case] = [
        *(every[place] for place in default_places("pipeline")),
        *pipeline_matrix(),
        *data_parallel_matrix(),
    ]
    for schedule in SCHEDULES:
        layouts: list[Layout] = [layout for _, layout in rows if layout.pp > 1 and layout.schedule == schedule]
        for of in ("tp", "dp"):
            assert {1, 2} <= {getattr(layout, of) for layout in layouts}, (schedule, of)
        assert {layout.sequence_parallel for layout in layouts} == {False, True}, schedule
        assert {layout.strategy for layout in layouts if layout.dp > 1} >= {
            "no_shard",
            "optim",
            "optim_grads",
            "optim_grads_params",
        }, schedule
