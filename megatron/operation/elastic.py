"""A job on fewer nodes than planned (``--nnodes MIN:MAX``): how many of its ranks train.

The sizes of tensor, context and pipeline parallelism and of the experts do not change, nor does the global batch. Only
the data-parallel size does: it is the largest with which the run is valid. Further ranks wait as spares.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from megatron.config.checks import check_run
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError, ExitCode
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.signals import watch_signals

# Environment variable of the ranks: set if the number of nodes may change.
ELASTIC = "MEGATRON_ELASTIC"
_END, _STOP = "megatron/spares/end", "megatron/spares/stop"
_POLL_SECONDS = 0.5


def usable_world_size(config: RunConfig, world_size: int, check_batches: Callable[[int], None]) -> int:
    """The number of ranks that train, of ``world_size`` that have started; the others are spares.

    ``check_batches(data_parallel_size)`` raises :class:`ConfigError` for a size that does not divide every global
    batch of the run. Raises :class:`ConfigError` if no size is valid: the error of the largest.
    """
    training, replica = config.training, config.parallel.model_parallel_size
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        raise ConfigError(
            "--nnodes MIN:MAX needs a batch that does not depend on the number of ranks: add --global-batch-size."
        )
    if world_size < replica:
        raise ConfigError(
            f"{world_size} processes are fewer than --tensor-model-parallel-size x --pipeline-model-parallel-size x "
            f"--context-parallel-size = {replica}: raise MIN of --nnodes MIN:MAX."
        )
    errors: list[ConfigError] = []
    for data_parallel_size in range(world_size // replica, 0, -1):
        try:
            check_batches(data_parallel_size)
            check_run(config, data_parallel_size * replica)
        except ConfigError as error:
            errors.append(error)
        else:
            return data_parallel_size * replica
    raise errors[0]


class Spares:
    """Ends the spare ranks with the training, and stops the training at a signal to a spare.

    The launcher of the first node has a new store for each attempt. If the training fails, launchers end the spares.
    """

    def __init__(self, training: TrainingConfig, rank: int, world_size: int, environment: Mapping[str, str]) -> None:
        """``world_size`` ranks train; those with a higher number are the spares."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._training, self._rank, self._world_size = training, rank, world_size
        self._store = TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(minutes=5),
            wait_for_workers=False,
        )

    def end_with(self, run: Callable[[], ExitCode], heartbeat: Heartbeat) -> ExitCode:
        """Train with ``run``, or wait for the end of the training; its exit code."""
        if self._rank >= self._world_size:
            with heartbeat.section(Section.SPARE):
                return self._wait()
        if self._rank > 0:
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
        from torch.distributed import DistError

        with suppress(DistError):
            while not self._store.check([_STOP]):
                time.sleep(_POLL_SECONDS)
            os.kill(os.getpid(), signal.Signals[self._training.exit_signal])
