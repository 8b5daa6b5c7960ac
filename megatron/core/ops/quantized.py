"""A tensor in the format in which a GEMM reads it: its numbers, and their scales if it is quantised."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.core.communication import Communicator, Work


@dataclass(frozen=True)
class QuantizedTensor:
    """``data`` ``[s, b, k]`` times ``inverse_scale``. Rows move between ranks together with the scales of rows."""

    data: Tensor
    inverse_scale: Tensor | None = None
    """None: not quantised. ``[]``: one scale for the tensor, equal on all ranks that share it. ``[s, b, blocks]``: one
    scale for each row, or for each block of a row."""

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """The tensors with a part for each row: ``data``, and ``inverse_scale`` if rows have scales of their own."""
        if self.inverse_scale is None or self.inverse_scale.dim() == 0:
            return (self.data,)
        return self.data, self.inverse_scale

    @property
    def scaling(self) -> "QuantizedTensor":
        """The scale of the whole tensor, without rows; None where rows have scales of their own."""
        return QuantizedTensor(self.data.new_empty(0), self.inverse_scale if len(self.row_tensors) == 1 else None)

    def with_rows(self, row_tensors: Sequence[Tensor]) -> "QuantizedTensor":
        """The same scaling with other ``row_tensors``."""
        data, *scales = row_tensors
        return QuantizedTensor(data, *scales) if scales else QuantizedTensor(data, self.inverse_scale)

    def chunk(self, parts: int) -> list["QuantizedTensor"]:
        """``parts`` equal ranges of rows."""
        return [self.with_rows(rows) for rows in zip(*(tensor.chunk(parts) for tensor in self.row_tensors))]

    def start_all_gather(self, ranks: Communicator) -> Work["QuantizedTensor"]:
        """Start to gather the rows of all ``ranks``."""
        return Work.all_of([ranks.start_all_gather(tensor) for tensor in self.row_tensors], self.with_rows)
