"""A matrix product whose bits are known on every processor, in every format, whatever the order of the additions.

``left[i, k] = (i + 3k) mod 7 - 3`` and ``right[k, j] = (2k + j) mod 5 - 2``. Over 35 consecutive k the products cancel
(Chinese remainder theorem), so every sum of consecutive products is a sum of fewer than 35 terms of at most 6: an
integer below 256, which bf16, fp16 and wider formats hold exactly. The element (i, j) depends on i mod 7 and j mod 5.
"""

import socket
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.control import ControlGroup
from megatron.core.ops.matmul import linear
from megatron.errors import SilentCorruptionError
from megatron.training.context import RunContext, TrainModule
from megatron.training.loop.step import RankAlarm
from megatron.training.loop.trainer import Listener, Trainer

ROWS, COLUMNS = 7, 5
"""Periods of the product."""
_SIZES = {"cpu": 256}
# Every multiprocessor computes several tiles.
_SIZE_ON_GPU = 4096


def operands(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two factors, each ``[size, size]``."""
    numbers = torch.arange(size, device=device)
    left = (numbers[:, None] + 3 * numbers[None, :]) % ROWS - ROWS // 2
    right = (2 * numbers[:, None] + numbers[None, :]) % COLUMNS - COLUMNS // 2
    return left.to(dtype), right.to(dtype)


def expected_product(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The product ``[size, size]``, computed without a matrix product: its period in Python's integers, repeated."""
    first = [
        [sum(((row + 3 * k) % ROWS - ROWS // 2) * ((2 * k + column) % COLUMNS - COLUMNS // 2) for k in range(size))
         for column in range(COLUMNS)]
        for row in range(ROWS)
    ]  # fmt: skip
    period = torch.tensor(first, dtype=dtype, device=device)  # [7, 5]
    return period.repeat(-(-size // ROWS), -(-size // COLUMNS))[:size, :size]


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
        return expected_product(self.size, self.dtype, self._device)

    def count_errors(self) -> int:
        """Compute the product, and count its wrong elements; waits for the device."""
        return int((linear(*self._factors) != self.expected).sum())


def build_known_answer(context: RunContext, module: TrainModule) -> "KnownAnswer":
    """The test in the formats of the weights; a collective, which raises :class:`SilentCorruptionError` on all ranks if
    a device computes wrong results."""
    formats, device = module.data_parallel.formats, context.topology.device
    products = [KnownProduct(device, dtype) for dtype in dict.fromkeys((formats.weight, formats.master))]
    return KnownAnswer(context.control, products, context.config.operation.known_answer_interval_s)


class KnownAnswer(Listener, RankAlarm):
    """Computes the ``products`` now and every ``interval_s`` seconds (0: never), on each rank alone.

    Creation is a collective, and raises :class:`SilentCorruptionError` on all ranks if the product of one is wrong.
    Later failures reach all ranks with the flags of the next step
    (:class:`~megatron.training.loop.step.StopConditions`), or with the check before a save.
    """

    def __init__(
        self,
        control: ControlGroup,
        products: Sequence[KnownProduct],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._interval_s, self._clock = control, interval_s, clock
        self._products = products if interval_s else ()
        self.failure: str | None = None
        """What is wrong with the product of this rank."""
        self._tested = clock()
        if self._products:
            self.test()
            self.raise_on_all_ranks()

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    def on_iteration_start(self, trainer: Trainer) -> None:
        if self._products and self._clock() - self._tested >= self._interval_s:
            self.test()

    def test(self) -> None:
        """Compute the products; sets :attr:`failure`."""
        # On each rank alone: a collective here would wait for ranks whose interval has not passed.
        self._tested = self._clock()
        for product in self._products:
            wrong = product.count_errors()
            if wrong:
                self.failure = (
                    f"{wrong} elements of a known product in {str(product.dtype).removeprefix('torch.')} are wrong on "
                    f"rank {self._control.rank} (host {socket.gethostname()})"
                )

    def raise_on_all_ranks(self) -> None:
        """Raise :class:`SilentCorruptionError` on every rank if the test of one has failed; a collective."""
        for rank, failure in enumerate(self._control.all_gather_object(self.failure)):
            if failure is not None:
                raise SilentCorruptionError(
                    f"{failure}: the device of this rank computes wrong results. Leave its host out, then start the "
                    "same command again; --known-answer-interval-s 0 disables the test.",
                    (rank,),
                )
