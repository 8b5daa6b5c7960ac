"""Boxes whose rows several ranks divide evenly, in one row of a table instead of one for each rank.

FSDP divides every parameter over all ranks of its shard group. Listed one by one, the parts would be ranks times
parameters, on the rank that plans a save and in the manifest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.checkpoint.boxes import Mask, Numbers
from megatron.core.parameter import ParameterInfo, RowDivision


@dataclass(frozen=True)
class DividedBox:
    """A box of a global tensor whose rows (dim 0) are divided among ranks."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    """The rank of the first part."""
    first_rows: int
    """Rows of the first part."""
    rows: int
    """Rows of every other part; the last one may have fewer."""
    stride: int
    """From the rank of one part to the next one's, at least 1."""


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
    """How boxes are divided, as columns ``[boxes]``. A box with the stride 0 is one part."""

    first_rows: Numbers
    rows: Numbers
    strides: Numbers

    @classmethod
    def none(cls, count: int) -> "Divisions":
        """Of ``count`` boxes that are one part each."""
        return cls(*np.zeros((3, count), np.int64))

    @classmethod
    def of(cls, boxes: Sequence[DividedBox]) -> "Divisions":
        columns = [(box.first_rows, box.rows, box.stride) for box in boxes]
        return cls(*np.array(columns, np.int64).reshape(len(boxes), 3).T)

    @classmethod
    def joined(cls, divisions: Sequence["Divisions"]) -> "Divisions":
        """Of the boxes of all ``divisions``."""
        return cls(*(np.concatenate(columns) for columns in zip(*(one.columns for one in divisions))))

    @property
    def columns(self) -> tuple[Numbers, Numbers, Numbers]:
        """First rows, rows and strides."""
        return self.first_rows, self.rows, self.strides

    @property
    def is_divided(self) -> Mask:
        """``[boxes]``"""
        return self.strides > 0

    def take(self, boxes: Numbers) -> "Divisions":
        """Of some boxes."""
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
