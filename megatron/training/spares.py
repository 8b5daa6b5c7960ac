"""Ranks that wait while the others train (``--nnodes MIN:MAX``, megatron/operation/elastic.py)."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from megatron.config.training import TrainingConfig
from megatron.errors import ExitCode
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.signals import watch_signals
from megatron.training.initialize import Process

_END, _STOP = "megatron/spares/end", "megatron/spares/stop"
_POLL_SECONDS = 0.5


class Spares:
    """Ends the spare ranks with the training, and stops the training at a signal to a spare.

    The launcher of the first node has a new store for each attempt. If the training fails, launchers end the spares.
    """

    def __init__(self, training: TrainingConfig, process: Process, environment: Mapping[str, str]) -> None:
        self._training = training
        self._process = process
        self._store = TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(minutes=5),
            wait_for_workers=False,
        )

    def end_with(self, run: Callable[[], ExitCode], heartbeat: Heartbeat) -> ExitCode:
        """Train with ``run``, or wait for the end of the training; its exit code."""
        if self._process.rank >= self._process.world_size:
            with heartbeat.section(Section.SPARE):
                return self._wait()
        if self._process.rank > 0:
            return run()
        threading.Thread(target=self._stop_on_request, daemon=True).start()
        exit_code = run()
        self._store.set(_END, str(int(exit_code)))
        return exit_code

    def _wait(self) -> ExitCode:
        with watch_signals(self._training) as signals:
            while not self._store.check([_END]):
                if signals.received is not None:
                    self._store.set(_STOP, signals.received)
                time.sleep(_POLL_SECONDS)
        return ExitCode(int(self._store.get(_END)))

    def _stop_on_request(self) -> None:
        """On rank 0: act as if the signal to a spare had come here."""
        with suppress(DistError):
            while not self._store.check([_STOP]):
                time.sleep(_POLL_SECONDS)
            os.kill(os.getpid(), signal.Signals[self._training.exit_signal])
