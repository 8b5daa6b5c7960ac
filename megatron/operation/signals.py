"""The signals that stop a job, in its launcher and in its ranks."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError, ExitCode, UserError

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequested(UserError):
    """A signal requested a stop before training began: there is nothing to save."""

    exit_code = ExitCode.STOPPED


class SignalWatch:
    """Records the first signal."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._interrupts = 0
        self.previous: dict[signal.Signals, Handler] = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler; at the second SIGINT it restores the previous handlers."""
        self.received = self.received or signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts == 2:
            for watched, handler in self.previous.items():
                signal.signal(watched, handler)


@contextmanager
def watch_signals(config: TrainingConfig) -> Iterator[SignalWatch]:
    """Record SIGINT, SIGTERM and ``--exit-signal``; the third SIGINT has its usual effect.

    Ctrl-C under torchrun may arrive twice: from the terminal and from torchrun. A batch system may send its signal more
    often: to the rank, to the launcher, and again through ``srun``.
    """
    watch = SignalWatch()
    names = {"SIGINT", "SIGTERM", config.exit_signal} if config.exit_signal_handler else set()
    watch.previous = {signal.Signals[name]: signal.signal(signal.Signals[name], watch.note) for name in names}
    try:
        yield watch
    finally:
        for number, handler in watch.previous.items():
            signal.signal(number, handler)


class StopSignals:
    """The signals that stop a job. The first one raises torch's ``SignalException``; others are ignored then, except
    SIGINT, which kills the ranks."""

    def __init__(self, names: str) -> None:
        """``names`` is the value of --signals-to-handle; raises :class:`ConfigError`."""
        try:
            self.numbers = frozenset(signal.Signals[name.strip()] for name in names.split(","))
        except KeyError as error:
            raise ConfigError(
                f"--signals-to-handle {names}: {error.args[0]} is no signal of this system: use names like SIGTERM."
            ) from None
        from megatron.torch_compat import handle_signals_by  # imports torch

        self._received: signal.Signals | None = None
        self._are_held = False
        handle_signals_by(self._stop)
        for number in self.numbers:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._received is None or number == signal.SIGINT:
            self._received = signal.Signals(number)
            if not self._are_held:
                self.raise_received()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that arrives meanwhile raises at the end."""
        self._are_held = True
        try:
            yield
        finally:
            self._are_held = False
        self.raise_received()

    def raise_received(self) -> None:
        """Raise the exception of a signal that has arrived. Python only prints an exception that leaves a finalizer or
        a hook of ``os.fork``, so a signal that arrives in one of them must be raised again."""
        from torch.distributed.elastic.multiprocessing import SignalException

        if self._received is not None:
            raise SignalException(f"Process {os.getpid()} received {self._received.name}", self._received)

    def have_ended(self, exit_codes: Iterable[int]) -> bool:
        """Whether one of the signals has ended one of the ranks, which did not handle signals yet."""
        return any(-code in self.numbers for code in exit_codes)
