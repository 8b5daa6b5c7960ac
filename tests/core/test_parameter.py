"""The boxes of all ranks cover every element of the global tensor exactly once."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.core.parameter import (
    Box,
    ParameterInfo,
    attach_info,
    columns_box,
    empty_parameter,
    info_of,
    padded_rows_box,
    sharded_boxes,
)

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]]
"""Global shape, local shape, boxes."""


def cells(offset: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every index of a rectangle, one by one."""
    return list(product(*(range(start, start + size) for start, size in zip(offset, shape))))


def assert_partition(ranks: list[Shapes]) -> list[list[tuple[int, ...]]]:
    """All ranks agree on the global tensor, hold each element once, and no local element twice.

    Returns each rank's local elements that no box covers: its padding.
    """
    global_shape = ranks[0][0]
    owners = np.zeros(global_shape, dtype=int)
    padding = []
    for shape, local_shape, boxes in ranks:
        assert shape == global_shape
        assert len(local_shape) == len(global_shape)
        held = np.zeros(local_shape, dtype=int)
        for box in boxes:
            assert len(box.global_offset) == len(box.local_offset) == len(box.shape) == len(global_shape)
            assert prod(box.shape) > 0
            for index in cells(box.global_offset, box.shape):
                owners[index] += 1
            for index in cells(box.local_offset, box.shape):
                held[index] += 1
        assert held.max(initial=0) <= 1
        padding.append([tuple(index) for index in np.argwhere(held == 0).tolist()])
    assert (owners == 1).all()
    return padding


sizes = st.integers(1, 4)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 4), max_size=1), sizes)
def test_sections_divided_over_ranks_cover_a_fused_weight_once(parts: list[int], other: list[int], size: int) -> None:
    sections = [part * size for part in parts]
    ranks = [sharded_boxes(sections, other, rank, size) for rank in range(size)]
    assert not any(assert_partition(ranks))
    for global_shape, local_shape, boxes in ranks:
        assert global_shape == (sum(sections), *other)
        assert local_shape == (sum(parts), *other)
        assert len(boxes) == len(sections)


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 5), sizes)
def test_columns_divided_over_ranks_cover_a_weight_once(rows: int, part: int, size: int) -> None:
    ranks = [columns_box(rows, part * size, rank, size) for rank in range(size)]
    assert not any(assert_partition(ranks))
    assert {local_shape for _, local_shape, _ in ranks} == {(rows, part)}


@settings(max_examples=100)
@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 4), sizes)
def test_padded_rows_cover_the_real_rows_once_and_leave_the_rest_free(
    rows: int, spare: int, columns: int, size: int
) -> None:
    padded_rows = -(-(rows + spare) // size) * size
    ranks = [padded_rows_box(rows, padded_rows, columns, rank, size) for rank in range(size)]
    padding = assert_partition(ranks)
    assert ranks[0][0] == (rows, columns), "padding is no part of the global tensor"
    assert sum(len(free) for free in padding) == (padded_rows - rows) * columns
    for rank, free in enumerate(padding):
        # Free rows are those at the end, globally and locally.
        first = rank * padded_rows // size
        assert all(first + row >= rows for row, _ in free)


@pytest.mark.parametrize(
    "cut",
    [lambda: sharded_boxes([6, 3], [2], 0, 2), lambda: columns_box(2, 3, 0, 2), lambda: padded_rows_box(5, 4, 2, 0, 2)],
)
def test_sizes_that_do_not_divide_are_our_own_mistake(cut: object) -> None:
    assert callable(cut)
    with pytest.raises(AssertionError):
        cut()


def test_a_box_is_a_view_of_the_local_tensor() -> None:
    local = torch.zeros(4, 6)
    Box((10, 20), (1, 2), (2, 3)).view(local).fill_(1.0)
    expected = torch.zeros(4, 6)
    expected[1:3, 2:5] = 1.0
    assert torch.equal(local, expected)


def test_a_parameter_carries_its_facts() -> None:
    info = ParameterInfo("w", *columns_box(4, 6, 1, 2), 0.02, weight_decay=True, tensor_parallel_sharded=True)
    parameter = empty_parameter(info, torch.bfloat16, "cpu")
    assert info_of(parameter) is info
    assert (tuple(parameter.shape), parameter.dtype) == ((4, 3), torch.bfloat16)
    assert not info.gradient_is_partial
    with pytest.raises(AssertionError):
        attach_info(nn.Parameter(torch.zeros(4, 6)), info)
