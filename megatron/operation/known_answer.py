"""A matrix product whose bits are known: a test of the arithmetic of one device.

The factors are small integers, so every partial sum is an integer that the format represents exactly, and the result is
the same in any order of addition. The expected product is computed by the integer unit of the host.
"""

from functools import cached_property

import torch
from torch import Tensor

from megatron.core.ops.matmul import linear

TILE, DEPTH = 128, 512
"""Rows and columns of a tile of the product, and the length of the sums. All sums are at most 256, up to which bf16 has
every integer (:attr:`KnownProduct.expected` checks it)."""
_TILES_ON_GPU = 32
"""Tiles along both dims on a GPU, so that every multiprocessor computes some."""


class KnownProduct:
    """``[n, k] @ [n, k]^T`` in ``dtype`` on ``device``, as linear layers compute it. All tiles of it are equal."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self.dtype = device, dtype
        self._tiles = _TILES_ON_GPU if device.type != "cpu" else 1

    @cached_property
    def _tile_factors(self) -> tuple[Tensor, Tensor]:
        """The factors ``[tile, depth]`` of a tile; every entry is -1, 0 or 1."""
        generator = torch.Generator().manual_seed(1)
        left, right = torch.randint(-1, 2, (2, TILE, DEPTH), generator=generator)
        return left, right

    @cached_property
    def expected(self) -> Tensor:
        """A tile of the product in int64, on the host."""
        left, right = self._tile_factors
        product = left @ right.t()
        assert int(product.abs().max()) <= 256
        return product

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        left, right = (factor.repeat(self._tiles, 1).to(self._device, self.dtype) for factor in self._tile_factors)
        return left, right

    def count_errors(self) -> int:
        """Compute the product, and count its wrong elements; waits for the device."""
        left, right = self._factors
        return self.count_wrong(linear(left, right))

    def count_wrong(self, product: Tensor) -> int:
        """The elements of ``product`` that are not as expected."""
        expected = self.expected.to(product.device, product.dtype)
        tiles = product.view(self._tiles, TILE, self._tiles, TILE)
        return int((tiles != expected[None, :, None, :]).sum())
