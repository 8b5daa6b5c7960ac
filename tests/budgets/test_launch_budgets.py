"""A layer and a step launch what ``launches.md`` says, neither more nor less."""

from collections.abc import Iterator

import pytest

from tests.budgets.inductor import InductorKernels
from tests.budgets.launch_budgets import BUDGETS, HEADER, ROWS, Row
from tests.triton_kernels.worker import TritonProcess

UPDATE = "run python -m tests.budgets.launch_budgets and commit tests/budgets/launches.md if this is intended"


@pytest.fixture(scope="module")
def kernels_of() -> Iterator[InductorKernels]:
    with TritonProcess(interprets=False) as process:
        yield InductorKernels(process)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.precision}")
def test_launches_are_the_budget(row: Row, kernels_of: InductorKernels) -> None:
    table = BUDGETS.read_text(encoding="utf-8").splitlines()
    budget = [line for line in table if line.startswith(f"| {row.name} | {row.precision} |")]
    counted = list(row.lines(kernels_of))
    assert len(budget) == len(counted)
    for before, now in zip(budget, counted):
        is_within = all(number <= limit for number, limit in zip(_numbers(now), _numbers(before), strict=True))
        assert is_within, f"more than the budget:\n{before}\n{now}\n{UPDATE}"
        assert now == before, f"less than the budget, so lower it:\n{before}\n{now}\n{UPDATE}"


def test_the_table_has_every_row_once() -> None:
    table = BUDGETS.read_text(encoding="utf-8").splitlines()
    assert tuple(table[:2]) == HEADER
    names = [tuple(line.split(" | ")[:3]) for line in table[2:]]
    assert len(names) == len(set(names)) == 3 * len(ROWS)


def _numbers(line: str) -> list[int]:
    return [int(cell.replace(",", "")) for cell in line.strip("| ").split(" | ")[3:]]
