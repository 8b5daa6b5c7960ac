"""The operand of a GEMM: a tensor, and its scales if it is quantised."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.core.communication import Communicator, Work


@dataclass(frozen=True)
class QuantizedTensor:
    """``data`` ``[s, b, k]`` times ``inverse_scale``. Rows are communicated together with their scales."""

    data: Tensor
    inverse_scale: Tensor | None = None
    """None: not quantised. ``[]``: one scale per tensor, equal on all ranks that share it. ``[s, b, blocks]``: one
    scale per row, or per block of a row."""

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """The tensors with one entry per row: ``data``, and ``inverse_scale`` unless it is one scale per tensor."""
        if self.inverse_scale is None or self.inverse_scale.dim() == 0:
            return (self.data,)
        return self.data, self.inverse_scale

    @property
    def scaling(self) -> "QuantizedTensor":
        """No rows, and the scale of the whole tensor if there is one."""
        return QuantizedTensor(self.data.new_empty(0), self.inverse_scale if len(self.row_tensors) == 1 else None)

    def with_rows(self, row_tensors: Sequence[Tensor]) -> "QuantizedTensor":
        """The same scaling with other ``row_tensors``."""
        data, *scales = row_tensors
        return QuantizedTensor(data, *scales) if scales else QuantizedTensor(data, self.inverse_scale)

    def chunk(self, parts: int) -> list["QuantizedTensor"]:
        return [self.with_rows(rows) for rows in zip(*(tensor.chunk(parts) for tensor in self.row_tensors))]

    def start_all_gather(self, ranks: Communicator) -> Work["QuantizedTensor"]:
        return Work.all_of([ranks.start_all_gather(tensor) for tensor in self.row_tensors], self.with_rows)
