"""A matrix product whose bits are known on every processor, in every format, whatever the order of the additions.

``left[i, k] = (i + 3k) mod 7 - 3`` and ``right[k, j] = (2k + j) mod 5 - 2``. Over 35 consecutive k the products cancel
(Chinese remainder theorem), so every sum of consecutive products is a sum of fewer than 35 terms of at most 6: an
integer below 256, which bf16, fp16 and wider formats hold exactly. The element (i, j) depends on i mod 7 and j mod 5.
"""

from functools import cached_property

import torch
from torch import Tensor

from megatron.core.ops.matmul import linear

ROWS, COLUMNS = 7, 5
"""Periods of the product."""


def operands(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two ``[size, size]`` factors."""
    numbers = torch.arange(size, device=device)
    left = (numbers[:, None] + 3 * numbers[None, :]) % ROWS - ROWS // 2
    right = (2 * numbers[:, None] + numbers[None, :]) % COLUMNS - COLUMNS // 2
    return left.to(dtype), right.to(dtype)


def period_of(size: int) -> list[list[int]]:
    """The first 7 rows and 5 columns of the product, in Python's integers."""
    return [
        [sum(((row + 3 * k) % ROWS - ROWS // 2) * ((2 * k + column) % COLUMNS - COLUMNS // 2) for k in range(size))
         for column in range(COLUMNS)]
        for row in range(ROWS)
    ]  # fmt: skip


def expected_product(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The product ``[size, size]``, computed without a matrix product."""
    period = torch.tensor(period_of(size), dtype=dtype, device=device)
    return period.repeat(-(-size // ROWS), -(-size // COLUMNS))[:size, :size]


_SIZES = {"cpu": 256}
_SIZE_ON_GPU = 4096
"""Every multiprocessor computes several tiles."""


class KnownProduct:
    """The product ``[n, n]`` in ``dtype`` on ``device``, as linear layers compute it: a test of the arithmetic."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self.dtype = device, dtype
        self.size = _SIZES.get(device.type, _SIZE_ON_GPU)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        left, right = operands(self.size, self.dtype, self._device)
        return left, right.t().contiguous()

    @cached_property
    def expected(self) -> Tensor:
        """The product as it must be."""
        return expected_product(self.size, self.dtype, self._device)

    def count_errors(self) -> int:
        """Compute the product, and count its wrong elements; waits for the device."""
        return self.count_wrong(linear(*self._factors))

    def count_wrong(self, product: Tensor) -> int:
        """The elements of ``product`` that are not as expected."""
        return int((product != self.expected).sum())
