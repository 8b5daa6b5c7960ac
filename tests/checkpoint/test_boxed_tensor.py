"""A rank's pieces of a global tensor: where they lie, whatever cut the tensor."""

from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint.boxes import BoxedTensor
from megatron.core.parameter import Box, ParameterInfo, columns_box, flat_range_boxes, sharded_boxes


def info_of(parts: tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]]) -> ParameterInfo:
    global_shape, local_shape, boxes = parts
    return ParameterInfo("weight", global_shape, local_shape, boxes, None, True, True)


def numbered(shape: tuple[int, ...]) -> Tensor:
    """A global tensor whose every element is its own flat index."""
    size = torch.Size(shape).numel()
    return torch.arange(size, dtype=torch.float64).view(shape)


def rank_part(kind: str, rank: int) -> tuple[ParameterInfo, Tensor]:
    """The facts and the local tensor of ``rank`` of two, cut without any of the code under test."""
    if kind == "whole vector":
        return info_of(((7,), (7,), (Box((0,), (0,), (7,)),))), numbered((7,))
    if kind == "rows":
        return info_of(sharded_boxes([6], [5], rank, 2)), numbered((6, 5)).chunk(2)[rank]
    if kind == "columns":
        return info_of(columns_box(4, 6, rank, 2)), numbered((4, 6)).chunk(2, dim=1)[rank]
    assert kind == "fused sections"
    query, key, value = numbered((8, 3)).split([4, 2, 2])
    local = torch.cat([section.chunk(2)[rank] for section in (query, key, value)])
    return info_of(sharded_boxes([4, 2, 2], [3], rank, 2)), local


KINDS = ["whole vector", "rows", "columns", "fused sections"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_of_every_flat_range_hold_exactly_its_elements(kind: str, rank: int) -> None:
    info, local = rank_part(kind, rank)
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
    info, local = rank_part(kind, 1)
    ranges = combinations_with_replacement(range(local.numel() + 1), 2)
    assert max(len(list(flat_range_boxes(info, start, stop))) for start, stop in ranges) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_flat_range_are_views_at_their_global_place(kind: str) -> None:
    info, local = rank_part(kind, 1)
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
    info, local = rank_part("rows", 0)
    boxed = BoxedTensor.from_flat_range(info, local.flatten()[:0], start=4)
    assert boxed.size() == torch.Size([6, 5])
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
