"""The signals that stop a job, in its launcher."""

import os
import signal
from collections.abc import Iterable
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from megatron.errors import ConfigError
from megatron.torch_compat import handle_signals_by


class StopSignals:
    """The signals that stop a job. The first one raises torch's ``SignalException``; the same again are ignored, except
    SIGINT, whose second one kills the ranks."""

    def __init__(self, names: str) -> None:
        """``names`` is the value of --signals-to-handle; raises :class:`ConfigError`."""
        try:
            self.numbers = frozenset(signal.Signals[name.strip()] for name in names.split(","))
        except KeyError as error:
            raise ConfigError(
                f"--signals-to-handle {names}: {error.args[0]} is no signal of this system: use names like SIGTERM."
            ) from None
        handle_signals_by(self._stop)
        for number in self.numbers:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for repeated in self.numbers - {signal.SIGINT}:
            signal.signal(repeated, signal.SIG_IGN)
        raise SignalException(f"Process {os.getpid()} received {signal.Signals(number).name}", signal.Signals(number))

    def have_ended(self, exit_codes: Iterable[int]) -> bool:
        """Whether one of the signals has ended one of the ranks, which did not handle signals yet."""
        return any(-code in self.numbers for code in exit_codes)
