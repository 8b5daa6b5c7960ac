"""A layer and a step launch what ``launches.md`` says, neither more nor less."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.planner.launches import Launch, LaunchRecorder
from tests.budgets.launch_budgets import BUDGETS, HEADER, ROWS, Row

UPDATE = "run python -m tests.budgets.launch_budgets and commit tests/budgets/launches.md if this is intended"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.precision}")
def test_launches_are_the_budget(row: Row) -> None:
    table = BUDGETS.read_text(encoding="utf-8").splitlines()
    budget = [line for line in table if line.startswith(f"| {row.name} | {row.precision} |")]
    counted = list(row.lines())
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


META = torch.device("meta")
MATRIX = 4 * 8 * 16
"""Bytes of :func:`matrix`."""


def matrix() -> Tensor:
    return torch.empty(8, 16, device=META)


def kinds_and_bytes(launches: Sequence[Launch]) -> list[tuple[str, int]]:
    return [(launch.kind, launch.num_bytes) for launch in launches]


def test_views_allocations_and_work_on_the_host_launch_nothing() -> None:
    with LaunchRecorder() as recorder:
        matrix().t().unflatten(0, (4, 4))[:, 1].detach()
        (torch.ones(5) + 1).tolist()
        torch.zeros(0, device=META)
    assert recorder.launches == []


def test_bytes_are_those_of_the_elements_read_and_written() -> None:
    with LaunchRecorder() as recorder:
        one, other = matrix(), matrix()
        one + other
        one.mul_(2)
        one.copy_(other)
        one + one[:1].expand(8, 16)
        one[:4].zero_()
    expected = (3 * MATRIX, 2 * MATRIX, 2 * MATRIX, 2 * MATRIX + MATRIX // 8, MATRIX // 2)
    assert kinds_and_bytes(recorder.launches) == [("elementwise", size) for size in expected]


def test_lookups_read_what_they_write() -> None:
    with LaunchRecorder() as recorder:
        rows = torch.empty(3, dtype=torch.int64, device=META)
        found = matrix()[rows]  # [3, 16]
        matrix().index_add_(0, rows, found)
    assert [launch.num_bytes for launch in recorder.launches] == [24 + 2 * 4 * 48, 24 + 3 * 4 * 48]


def test_gemms_and_attention_are_apart() -> None:
    with LaunchRecorder() as recorder:
        matrix() @ matrix().t()
        heads = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device=META)
        torch.ops.aten._scaled_dot_product_cudnn_attention(heads, heads, heads, None, True, 0.0, True)
    assert [launch.kind for launch in recorder.launches] == ["gemm", "attention"]


def test_a_fused_kernel_is_one_launch() -> None:
    def scale_and_add(into: Tensor, summand: Tensor, unused: Tensor) -> Tensor:
        into.mul_(2).add_(summand.exp())
        return into.sum(dim=1)

    with LaunchRecorder() as recorder:
        recorder.fused(scale_and_add, matrix(), matrix(), matrix())
    # Read: into and summand. Written: into and the sums of eight rows.
    assert kinds_and_bytes(recorder.launches) == [("elementwise", 3 * MATRIX + 32)]


def test_host_syncs_are_what_the_host_waits_for() -> None:
    with LaunchRecorder() as recorder:
        numbers = matrix()
        numbers[0].tolist()
        float(numbers.sum())
        torch.ones(4).to(META)
        torch.ones(4).to(META, non_blocking=True)
        numbers.nonzero()
    kinds = [launch.kind for launch in recorder.launches]
    assert kinds == ["host sync", "elementwise", "host sync", "host sync", "host copy", "elementwise", "host sync"]
