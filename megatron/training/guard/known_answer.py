"""The known product (megatron/features/known_product/listener.py) at the start of a run and at intervals of time."""

import socket
import time
from collections.abc import Callable, Sequence

from megatron.core.control import ControlGroup, run_on_all_ranks
from megatron.errors import SilentCorruptionError
from megatron.features.known_product.listener import KnownProduct
from megatron.training.loop.trainer import Listener, Trainer


class KnownAnswer(Listener):
    """Computes the ``products`` now and every ``interval_s`` seconds (0: never), on each rank alone.

    Creation is a collective, and raises :class:`SilentCorruptionError` on all ranks if the product of one is wrong.
    Later failures reach all ranks with the flags of the next step
    (:class:`~megatron.training.loop.stop.StopConditions`), or with the check before a save.
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
        self._failure: str | None = None
        self._tested = clock()
        if self._products:
            run_on_all_ranks(control, self._test_or_raise)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def failure(self) -> str | None:
        """What is wrong with the product of this rank."""
        return self._failure

    def on_iteration_start(self, trainer: Trainer) -> None:
        if self._products and self._clock() - self._tested >= self._interval_s:
            self.test()

    def test(self) -> None:
        """Compute the products; sets :attr:`failure`."""
        self._tested = self._clock()
        for product in self._products:
            wrong = product.count_errors()
            if wrong:
                self._failure = (
                    f"{wrong} elements of a known product in {str(product.dtype).removeprefix('torch.')} are wrong on "
                    f"rank {self._control.rank} (host {socket.gethostname()})"
                )

    def _test_or_raise(self) -> None:
        self.test()
        if self._failure is not None:
            raise _error(self._failure, self._control.rank)

    def raise_on_all_ranks(self) -> None:
        """Raise :class:`SilentCorruptionError` on every rank if the test of one has failed; a collective."""
        for rank, failure in enumerate(self._control.all_gather_object(self._failure)):
            if failure is not None:
                raise _error(failure, rank)


def _error(failure: str, rank: int) -> SilentCorruptionError:
    return SilentCorruptionError(
        f"{failure}: the device of this rank computes wrong results. Leave its host out, then start the same command "
        "again; --known-answer-interval-s 0 disables the test.",
        (rank,),
    )
