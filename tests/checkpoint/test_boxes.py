"""Boxes: which overlap, what two ranges share, and a rank's pieces of a global tensor."""

import itertools
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint.boxes import BoxedTensor, boxes_are_disjoint, overlap
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from tests.checkpoint.models import PARTS, rank_part

Extent = tuple[tuple[int, int], ...]
"""(start, stop) for every dim."""


def elements(box: Extent) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def arrays(boxes: list[Extent], dims: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    flat = np.array(boxes, dtype=np.int64).reshape(len(boxes), dims, 2)
    return flat[..., 0], flat[..., 1]


spans = st.tuples(st.integers(0, 5), st.integers(0, 4)).map(lambda span: (span[0], span[0] + span[1]))


def lists_of_boxes(dims: int) -> st.SearchStrategy[tuple[int, list[Extent]]]:
    return st.tuples(st.just(dims), st.lists(st.tuples(*[spans] * dims), max_size=6))


@given(st.integers(0, 3).flatmap(lists_of_boxes))
def test_boxes_are_disjoint_where_no_element_is_in_two(case: tuple[int, list[Extent]]) -> None:
    dims, boxes = case
    counted = [element for box in boxes for element in elements(box)]
    assert boxes_are_disjoint(*arrays(boxes, dims)) == (len(counted) == len(set(counted)))


def test_boxes_that_no_plane_divides_are_compared_in_pairs() -> None:
    """Four boxes around a hole, like a pinwheel."""
    pinwheel: list[Extent] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1))]
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


# --- a rank's pieces of a global tensor ---------------------------------------------------------------------


def numbered(shape: tuple[int, ...]) -> Tensor:
    """A global tensor whose every element is its own flat index."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def half(kind: str, rank: int) -> tuple[ParameterInfo, Tensor]:
    """The facts and the local tensor of ``rank`` of two."""
    return rank_part(kind, numbered(PARTS[kind]), rank, 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", PARTS)
def test_boxes_of_every_flat_range_hold_exactly_its_elements(kind: str, rank: int) -> None:
    info, local = half(kind, rank)
    flat, whole = local.flatten(), numbered(info.global_shape)
    for start, stop in combinations_with_replacement(range(flat.numel() + 1), 2):
        found: list[int] = []
        for box, begin, end in flat_range_boxes(info, start, stop):
            place = tuple(slice(first, first + size) for first, size in zip(box.global_offset, box.shape))
            assert torch.equal(whole[place].flatten(), flat[begin:end])
            assert torch.equal(box.view(local).flatten(), flat[begin:end])
            found += range(begin, end)
        assert found == list(range(start, stop))


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_a_flat_range_of_a_matrix_is_at_most_three_boxes(kind: str) -> None:
    info, local = half(kind, 1)
    ranges = combinations_with_replacement(range(local.numel() + 1), 2)
    assert max(len(list(flat_range_boxes(info, start, stop))) for start, stop in ranges) == 3


@pytest.mark.parametrize("kind", PARTS)
def test_pieces_of_a_flat_range_are_views_at_their_global_place(kind: str) -> None:
    info, local = half(kind, 1)
    flat = local.flatten()[2:-1].clone()
    boxed = BoxedTensor.from_flat_range(info, flat, start=2)
    whole = numbered(info.global_shape)
    for offset, piece in boxed.boxes:
        place = tuple(slice(first, first + size) for first, size in zip(offset, piece.shape))
        assert torch.equal(piece, whole[place])
        piece.fill_(-1)
    assert (flat == -1).all()


def test_it_looks_like_the_global_tensor_but_does_not_compute() -> None:
    boxed = BoxedTensor.from_boxes((4, 6), torch.bfloat16, [((0, 2), torch.zeros(4, 2, dtype=torch.bfloat16))])
    assert (boxed.size(), boxed.dtype, boxed.device.type) == (torch.Size([4, 6]), torch.bfloat16, "cpu")
    assert repr(boxed) == "BoxedTensor([4, 6], torch.bfloat16, boxes: [4, 2] at [0, 2])"
    with pytest.raises(TypeError, match="compute with the boxes"):
        boxed.sum()


def test_a_rank_may_hold_nothing() -> None:
    info, local = half("rows", 0)
    boxed = BoxedTensor.from_flat_range(info, local.flatten()[:0], start=4)
    assert boxed.size() == torch.Size([12, 6])
    assert boxed.boxes == []
    assert boxed.__create_write_items__("weight", boxed) == []
    assert boxed.__create_chunk_list__() == []


def test_a_piece_is_found_by_its_offset_whatever_the_hint() -> None:
    pieces = [((0, 0), torch.zeros(1, 2)), ((1, 0), torch.ones(1, 2))]
    boxed = BoxedTensor.from_boxes((2, 2), torch.float32, pieces)
    for hint in (None, 0, 1, 17):
        assert boxed.__get_tensor_shard__(MetadataIndex("weight", (1, 0), hint)).sum() == 2


@pytest.mark.parametrize(
    "pieces",
    [
        [((0,), torch.zeros(1, 2))],
        [((0, 0), torch.zeros(2))],
        [((3, 0), torch.zeros(2, 2))],
        [((0, 0), torch.zeros(2, 2, dtype=torch.float64))],
        [((0, 0), torch.zeros(1, 2)), ((0, 0), torch.zeros(2, 2))],
    ],
    ids=["other dims of the offset", "other dims of the piece", "out of bounds", "another dtype", "two at one place"],
)
def test_pieces_that_are_not_of_this_tensor_are_refused(pieces: list[tuple[tuple[int, ...], Tensor]]) -> None:
    with pytest.raises(AssertionError):
        BoxedTensor.from_boxes((4, 2), torch.float32, pieces)
