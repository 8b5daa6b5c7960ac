"""Boxes: the rectangles of a global tensor that a rank holds, and the arithmetic with them.

Every way to shard a tensor (tensor parallelism by rows or columns, fused sections, flat ranges of a distributed
optimizer) gives a rank some boxes. A checkpoint written as boxes can be read as any other boxes, so it does not depend
on the layout. :class:`BoxedTensor` has a rank's boxes in the form that ``torch.distributed.checkpoint`` (DCP) plans
with.

FSDP divides every parameter by rows over all ranks of its shard group. Listed one by one, the parts would be ranks
times parameters, on the rank that plans a save and in the manifest. So a :class:`DividedBox` is one row of a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.parameter import ParameterInfo, RowDivision, flat_range_boxes
from megatron.torch_compat import wrapper_subclass

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Place = tuple[slice, ...]
"""A part of a tensor: start, stop and step of every dim (step positive; None is 1)."""


def overlap(wanted: slice, start: int, size: int) -> tuple[slice, slice]:
    """Intersection of the elements ``wanted`` of a dim with ``[start, start + size)``.

    Returns two slices of equal length: positions among the wanted elements, and positions relative to ``start``.
    """
    step = wanted.step or 1
    count = len(range(wanted.start, wanted.stop, step))
    first = min(count, max(0, -(-(start - wanted.start) // step)))
    last = min(count, max(first, -(-(start + size - wanted.start) // step)))
    return slice(first, last), strided(wanted.start + first * step - start, last - first, step)


def strided(start: int, count: int, step: int) -> slice:
    """Slice of ``count`` elements from ``start`` on, ``step`` apart."""
    return slice(start, start + (count - 1) * step + 1, step) if count else slice(0, 0, step)


def boxes_are_disjoint(starts: Numbers, stops: Numbers, groups: Numbers | None = None) -> bool:
    """Whether no two boxes ``[starts, stops)`` (``[boxes, dims]`` each) share an element.

    Only boxes of one of the ``groups`` ``[boxes]`` are compared; by default all are. Groups are divided along one dim
    after the other, all at once. For shards of a tensor they end up as single boxes; groups that no dim divides are
    compared pair by pair.
    """
    groups = np.zeros(len(starts), np.int64) if groups is None else groups
    chosen = np.flatnonzero((stops > starts).all(axis=1))
    starts, stops, groups = starts[chosen], stops[chosen], groups[chosen]
    divided = True
    while divided:
        divided = False
        for dim in range(starts.shape[1]):
            groups, order, cuts = _divided(starts[:, dim], stops[:, dim], groups)
            divided |= cuts
            # Boxes that are alone in their group are done.
            starts, stops = starts[order], stops[order]
            together = np.zeros(len(groups), bool)
            same = groups[1:] == groups[:-1]
            together[1:] |= same
            together[:-1] |= same
            starts, stops, groups = starts[together], stops[together], groups[together]
    borders = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    for low, high in zip(np.split(starts, borders), np.split(stops, borders)):
        for box in range(len(low) - 1):
            if ((low[box] < high[box + 1 :]) & (low[box + 1 :] < high[box])).all(axis=1).any():
                return False
    return True


def _divided(starts: Numbers, stops: Numbers, groups: Numbers) -> tuple[Numbers, Numbers, bool]:
    """Divide groups of ranges ``[starts, stops)`` where no range crosses a border.

    Returns the new group of each range in a new order, that order, and whether there was such a border.
    """
    order = np.lexsort((starts, groups))
    starts, stops, groups = starts[order], stops[order], groups[order]
    if len(order) < 2:
        return groups, order, False
    length = int(stops.max()) + 1
    if length * len(order) >= 1 << 62:
        # Places among all coordinates instead, so that the sums below cannot overflow.
        coordinates, places = np.unique(np.concatenate((starts, stops)), return_inverse=True)
        starts, stops = np.split(places, 2)
        length = len(coordinates)
    is_first = np.concatenate(([True], groups[1:] != groups[:-1]))
    number = np.cumsum(is_first)
    # The furthest end of the earlier ranges of the group: later groups have larger numbers.
    reached = np.maximum.accumulate(number * length + stops)
    is_border = np.concatenate(([False], starts[1:] + number[1:] * length >= reached[:-1]))
    return np.cumsum(is_first | is_border), order, bool((is_border & ~is_first).any())


# --- boxes whose rows ranks divide --------------------------------------------------------------------------


@dataclass(frozen=True)
class DividedBox:
    """A box of a global tensor whose rows (dim 0) are divided among ranks."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int  # the rank of the first part
    first_rows: int  # rows of the first part
    rows: int  # rows of every other part; the last one may have fewer
    stride: int  # distance between the ranks of two consecutive parts, at least 1


def divided_boxes(info: ParameterInfo, division: RowDivision) -> list[DividedBox]:
    """The boxes of a parameter's local tensor, as its ranks divide them."""
    boxes = []
    for box in info.boxes:
        part, skipped = divmod(box.local_offset[0], division.rows)
        first_rows = min(division.rows - skipped, box.shape[0])
        owner = division.first_rank + part * division.stride
        boxes.append(DividedBox(box.global_offset, box.shape, owner, first_rows, division.rows, division.stride))
    return boxes


@dataclass(frozen=True)
class Divisions:
    """The divisions of boxes, as columns ``[boxes]``. A box with the stride 0 is one part."""

    # A box of ten rows with first_rows 2, rows 4 and stride 3, whose first part is of rank 5 (or in file 5):
    #
    #   rows   0 1 │ 2 3 4 5 │ 6 7 8 9
    #   part   0   │ 1       │ 2
    #   rank   5   │ 8       │ 11

    first_rows: Numbers
    rows: Numbers
    strides: Numbers

    @classmethod
    def none(cls, count: int) -> "Divisions":
        """The divisions of ``count`` boxes that are one part each."""
        return cls(*np.zeros((3, count), np.int64))

    @classmethod
    def of(cls, boxes: Sequence[DividedBox]) -> "Divisions":
        columns = [(box.first_rows, box.rows, box.stride) for box in boxes]
        return cls(*np.array(columns, np.int64).reshape(len(boxes), 3).T)

    @classmethod
    def joined(cls, divisions: Sequence["Divisions"]) -> "Divisions":
        """The divisions of the boxes of all tables, one table after another."""
        return cls(*(np.concatenate(columns) for columns in zip(*(one.columns for one in divisions))))

    @property
    def columns(self) -> tuple[Numbers, Numbers, Numbers]:
        return self.first_rows, self.rows, self.strides

    @property
    def is_divided(self) -> Mask:
        return self.strides > 0  # [boxes]

    def take(self, boxes: Numbers) -> "Divisions":
        """The divisions of the ``boxes`` with these numbers."""
        return Divisions(*(column[boxes] for column in self.columns))

    def counts(self, sizes: Numbers) -> Numbers:
        """Parts ``[boxes]`` of boxes with these ``sizes`` of dim 0 ``[boxes]``."""
        rest = np.maximum(sizes - self.first_rows, 0)
        return np.where(self.is_divided, 1 + -(-rest // np.maximum(self.rows, 1)), 1)

    def part_of(self, row: Numbers) -> Numbers:
        """The part ``[boxes]`` in which a ``row`` of each box lies."""
        behind = 1 + (row - self.first_rows) // np.maximum(self.rows, 1)
        return np.where(self.is_divided & (row >= self.first_rows), behind, 0)

    def add_bytes(self, load: Numbers, files: Numbers, sizes: Numbers, row_bytes: Numbers) -> None:
        """Add the bytes of every part to ``load`` ``[files]``.

        The boxes have ``sizes`` rows of ``row_bytes``, and their first parts are in ``files``.
        """
        np.add.at(load, files, np.where(self.is_divided, 0, sizes * row_bytes))
        columns = files, self.counts(sizes), *self.columns, sizes, row_bytes
        for box in np.flatnonzero(self.is_divided).tolist():
            file, count, first_rows, rows, stride, size, of_row = (int(column[box]) for column in columns)
            last = file + (count - 1) * stride
            load[file : last + 1 : stride] += rows * of_row
            load[file] += (first_rows - rows) * of_row
            load[last] -= (first_rows + (count - 1) * rows - size) * of_row

    def ranges(self, parts: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """First row and end ``[boxes]`` of one of the ``parts`` of each box, of ``sizes`` rows."""
        starts = np.where(parts > 0, self.first_rows + (parts - 1) * self.rows, 0)
        stops = np.where(self.is_divided, np.minimum(sizes, self.first_rows + parts * self.rows), sizes)
        return starts, stops


# --- a rank's boxes of a tensor -----------------------------------------------------------------------------


class BoxedTensor(Tensor):
    """A global tensor of which this rank holds some boxes, or none.

    ``size()`` and ``dtype`` describe the global tensor. It has no memory: the boxes are views of local tensors, which a
    save reads and a load fills in place. Computing with it fails.
    """

    _boxes: dict[tuple[int, ...], Tensor]
    holders: Sequence[int]
    """The ranks that hold exactly these boxes, if that is known: then they divide the boxes at a save without asking
    each other, and the coordinator does not receive them from all. Ranks of ``torch.distributed``."""
    divided: Sequence[DividedBox]
    """The boxes of all ranks that divide the rows of the tensor. Every rank writes its own rows, and only the owner
    of a box lists it in the plan of a save. Empty if no ranks divide the rows."""

    @classmethod
    def from_boxes(
        cls,
        global_shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Iterable[tuple[Sequence[int], Tensor]],
        holders: Sequence[int] = (),
        divided: Sequence[DividedBox] = (),
    ) -> "BoxedTensor":
        """A tensor of ``(global offset, local view)`` pairs, which must not overlap. Empty boxes are dropped."""
        kept: dict[tuple[int, ...], Tensor] = {}
        for offset, box in boxes:
            assert len(offset) == box.dim() == len(global_shape), (offset, box.shape, global_shape)
            for start, length, size in zip(offset, box.shape, global_shape):
                assert start + length <= size, (offset, box.shape, global_shape)
            assert box.dtype == dtype, (box.dtype, dtype)
            # A global tensor without elements needs its empty box: otherwise no rank would write it.
            if box.numel() > 0 or prod(global_shape) == 0:
                assert tuple(offset) not in kept, offset
                kept[tuple(offset)] = box.detach()
        device = next((box.device for box in kept.values()), torch.device("cpu"))
        tensor: BoxedTensor = wrapper_subclass(cls, torch.Size(global_shape), dtype, device)
        tensor._boxes, tensor.holders, tensor.divided = kept, holders, divided
        return tensor

    @classmethod
    def from_whole(cls, tensor: Tensor, holders: Sequence[int] = ()) -> "BoxedTensor":
        """A tensor that is the whole global tensor, replicated on every rank that passes it."""
        return cls.from_boxes(tensor.shape, tensor.dtype, [((0,) * tensor.dim(), tensor)], holders)

    @classmethod
    def from_flat_range(
        cls,
        info: ParameterInfo,
        flat_tensor: Tensor,
        start: int,
        holders: Sequence[int] = (),
        division: RowDivision | None = None,
    ) -> "BoxedTensor":
        """A tensor of the elements ``[start, start + numel)`` of the flattened local parameter, in ``flat_tensor``.

        Under a ``division`` they are this rank's rows.
        """
        assert flat_tensor.dim() == 1, (info.name, flat_tensor.shape)
        boxes = [
            (box.global_offset, flat_tensor[begin - start : end - start].view(box.shape))
            for box, begin, end in flat_range_boxes(info, start, start + flat_tensor.numel())
        ]
        divided = () if division is None else divided_boxes(info, division)
        return cls.from_boxes(info.global_shape, flat_tensor.dtype, boxes, holders, divided)

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The ``(global offset, local view)`` pairs of this rank."""
        return list(self._boxes.items())

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.size()) for offset, box in self._boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The box at ``index.offset``; boxes do not overlap, so the offset identifies it."""
        assert index.offset is not None, index
        return self._boxes[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(f"{function}: a BoxedTensor only says where its boxes lie; compute with the boxes.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{list(box.shape)} at {list(offset)}" for offset, box in self._boxes.items())
        return f"BoxedTensor({list(self.shape)}, {self.dtype}, boxes: {boxes or 'none'})"


def boxed(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor as a :class:`BoxedTensor` or DTensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor), (name, type(tensor))  # what is not a tensor belongs in the state
        found[name] = tensor if hasattr(tensor, "__create_write_items__") else BoxedTensor.from_whole(tensor)
    return found
