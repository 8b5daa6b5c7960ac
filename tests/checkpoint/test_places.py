"""Parts of tensors: which boxes overlap, and what two ranges share."""

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import boxes_are_disjoint, overlap

Box = tuple[tuple[int, int], ...]
"""(start, stop) for every dim."""


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def arrays(boxes: list[Box], dims: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    flat = np.array(boxes, dtype=np.int64).reshape(len(boxes), dims, 2)
    return flat[..., 0], flat[..., 1]


spans = st.tuples(st.integers(0, 5), st.integers(0, 4)).map(lambda span: (span[0], span[0] + span[1]))


def cases(dims: int) -> st.SearchStrategy[tuple[int, list[Box]]]:
    return st.tuples(st.just(dims), st.lists(st.tuples(*[spans] * dims), max_size=6))


@given(st.integers(0, 3).flatmap(cases))
def test_boxes_are_disjoint_where_no_element_is_in_two(case: tuple[int, list[Box]]) -> None:
    dims, boxes = case
    counted = [element for box in boxes for element in elements(box)]
    assert boxes_are_disjoint(*arrays(boxes, dims)) == (len(counted) == len(set(counted)))


def test_boxes_that_no_plane_divides_are_compared_in_pairs() -> None:
    """Four boxes around a hole, like a pinwheel."""
    pinwheel: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1))]
    assert boxes_are_disjoint(*arrays(pinwheel, 2))
    assert not boxes_are_disjoint(*arrays([*pinwheel, ((1, 3), (0, 2))], 2))


def test_many_shards_are_compared_in_little_time() -> None:
    """As many as 16,384 ranks write of one tensor: pair by pair this would take minutes."""
    starts = np.arange(50_000, dtype=np.int64)[:, None]
    assert boxes_are_disjoint(starts, starts + 1)
    assert not boxes_are_disjoint(starts, starts + np.where(starts == 777, 2, 1))


@given(st.integers(0, 9), st.integers(0, 20), st.integers(1, 3), st.integers(0, 9), st.integers(0, 20))
def test_overlap_is_what_two_ranges_share(start: int, length: int, step: int, first: int, size: int) -> None:
    wanted = slice(start, start + length, step)
    taken, inside = overlap(wanted, first, size)
    elements = list(range(wanted.start, wanted.stop, step))
    assert elements[taken] == [element for element in elements if first <= element < first + size]
    assert list(range(first, first + size))[inside] == elements[taken]
