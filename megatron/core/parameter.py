"""The facts of a parameter: gradient norm, weight decay, initialisation, gradient synchronisation and checkpoints read
them from the parameter, so there are no lists of names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

TiedEnd = Literal["embedding", "output_layer"]

_ATTRIBUTE = "parameter_info"


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor, and its offset in a rank's local tensor; one entry per dim."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    shape: tuple[int, ...]

    def view(self, local: Tensor) -> Tensor:
        """The box as a view of ``local``."""
        return local[tuple(slice(start, start + size) for start, size in zip(self.local_offset, self.shape))]


Division = tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]]
"""Global shape, local shape, and the boxes of the local tensor."""


@dataclass(frozen=True)
class ParameterInfo:
    """Facts about one parameter, the same on every rank but for ``boxes`` and ``local_shape``."""

    name: str
    """Global name, independent of the layout, such as ``layers.17.mlp.linear_fc1.weight``."""
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The boxes of the local tensor, in their order along its dim 0. Rows after the last box are padding, which is
    always zero and in no checkpoint."""
    init_std: float | None
    """Standard deviation of the initial weights; None means ones (a norm's gain), 0 zeros."""
    weight_decay: bool
    tensor_parallel_sharded: bool
    """False: every tensor-parallel rank has the whole parameter, and only the first counts it in norms. An expert's
    parameter is counted by every rank that has a shard of it."""
    gradient_is_partial: bool = False
    """True: each tensor-parallel rank computes the gradient of its part of the sequence (sequence parallelism) or of
    its heads, so the gradients must be summed over the tensor-parallel group."""
    uses: int = 1
    """How many gradients the backward pass of a microbatch accumulates."""
    is_vocabulary: bool = False
    """Whether its rows are ids of the vocabulary: the embedding and the output layer."""
    tied_end: TiedEnd | None = None
    """If the first and the last stage each have a copy of this tied weight: the end of the model of this copy. Their
    gradients must be summed; only the embedding's copy is counted in norms and saved."""
    is_expert: bool = False
    """Whether it belongs to experts: then the ranks of the stage divide it by the axes ``etp`` and ``ep``, and the
    ranks along ``edp`` share it. Other parameters are dense: the axes are ``tp``, and ``cp`` and ``dp``."""
    fan_in_mult: float = 1.0
    """Under muP the fan-in of a matrix divided by its fan-in in the base model. 1 if it does not grow with the width,
    and for the output layer, whose logits have a multiplier instead."""
    fan_out_mult: float = 1.0
    """The same of the fan-out; of a vector, its size."""


def attach_info(parameter: nn.Parameter, info: ParameterInfo) -> nn.Parameter:
    """Store ``info`` on ``parameter`` and return it."""
    assert tuple(parameter.shape) == info.local_shape, (info.name, parameter.shape, info.local_shape)
    setattr(parameter, _ATTRIBUTE, info)
    return parameter


def info_of(parameter: Tensor) -> ParameterInfo:
    """The facts of ``parameter``; every parameter of the core has them."""
    info: ParameterInfo = getattr(parameter, _ATTRIBUTE)
    return info


def sharded_boxes(section_sizes: Sequence[int], other_sizes: Sequence[int], rank: int, size: int) -> Division:
    """Split each section of dim 0 evenly over ``size`` ranks and stack this rank's shards: (global shape, local shape,
    boxes). Fused weights (query-key-value, gate-up) are several sections."""
    other = tuple(other_sizes)
    zeros = (0,) * len(other)
    boxes = []
    global_start = local_start = 0
    for section in section_sizes:
        assert section % size == 0, (section, size)
        part = section // size
        boxes.append(Box((global_start + rank * part, *zeros), (local_start, *zeros), (part, *other)))
        global_start += section
        local_start += part
    return (global_start, *other), (local_start, *other), tuple(boxes)


def padded_rows_box(rows: int, padded_rows: int, columns: int, rank: int, size: int) -> Division:
    """Split ``padded_rows`` evenly over ``size`` ranks: (global shape, local shape, boxes). Only the first ``rows``
    exist globally; a rank with padding alone has no box."""
    assert padded_rows % size == 0 and padded_rows >= rows, (rows, padded_rows, size)
    part = padded_rows // size
    first = rank * part
    real = min(rows, first + part) - first
    boxes = (Box((first, 0), (0, 0), (real, columns)),) if real > 0 else ()
    return (rows, columns), (part, columns), boxes


def columns_box(rows: int, columns: int, rank: int, size: int) -> Division:
    """Split dim 1 of a ``[rows, columns]`` weight evenly over ``size`` ranks: (global shape, local shape, boxes)."""
    assert columns % size == 0, (columns, size)
    part = columns // size
    return (rows, columns), (rows, part), (Box((0, rank * part), (0, 0), (rows, part)),)


@dataclass(frozen=True)
class RowDivision:
    """An even division of a parameter's local rows among ranks: each keeps the next ``rows`` of them, the last ranks
    fewer or none, and no other rank keeps them."""

    rows: int
    first_rank: int
    stride: int
    """From one rank to the next, at least 1."""


def flat_range_boxes(info: ParameterInfo, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Cut elements ``[start, stop)`` of the flattened local tensor into boxes: ``(box, begin, end)``, where elements
    ``[begin, end)`` viewed as ``box.shape`` are the box. A range of a 2-D tensor with one box has at most three."""
    width = prod(info.local_shape[1:])
    for box in info.boxes:
        first = box.local_offset[0] * width
        last = first + prod(box.shape)
        begin, end = max(start, first), min(stop, last)
        while begin < end:
            row, column = divmod(begin, width)
            # Whole rows in one box; a partial first or last row each in a box of its own.
            rows = (end - begin) // width if column == 0 else 0
            length = rows * width if rows else min(end, (row + 1) * width) - begin
            yield _row_box(info, box, row, column, rows, length), begin, begin + length
            begin += length


def _row_box(info: ParameterInfo, box: Box, row: int, column: int, rows: int, length: int) -> Box:
    global_row = box.global_offset[0] + row - box.local_offset[0]
    if len(info.local_shape) == 1:
        return Box((global_row,), (row,), (rows,))
    assert len(info.local_shape) == 2, info.local_shape
    shape = (rows, info.local_shape[1]) if rows else (1, length)
    return Box((global_row, box.global_offset[1] + column), (row, column), shape)


def empty_parameter(info: ParameterInfo, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter of the local shape with its facts attached."""
    return attach_info(nn.Parameter(torch.empty(info.local_shape, dtype=dtype, device=device)), info)
