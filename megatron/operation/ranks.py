"""The ranks of a job: how many train on fewer nodes than planned, the signals that stop them and their launcher, and
how the launcher ends the processes of its node or waits for their end."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

from megatron.config.checks import check_run
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError, ExitCode, UserError
from megatron.operation.heartbeat import Heartbeat, HeartbeatMemory, Section

# Environment variable of the ranks: set if the number of nodes may change.
ELASTIC = "MEGATRON_ELASTIC"
# Time for other ranks to end after a crash; none of their collectives can complete.
CRASH_SECONDS = 5
# Time for a killed process to end; it needs longer only if it waits in the kernel for a device.
KILL_SECONDS = 10
# Time for ranks to begin a save when a node joins.
JOIN_SECONDS = 30
# A failure of ranks without a heartbeat after so long is not counted as one at once.
_LONG_ATTEMPT_SECONDS = 60.0
# What poll returns for a process that runs or has not crashed.
_NO_CRASH = (None, ExitCode.COMPLETE, ExitCode.STOPPED)
_ON_REQUEST = {ExitCode.STOPPED, ExitCode.COMPLETE}
_END, _STOP = "megatron/spares/end", "megatron/spares/stop"
_POLL_SECONDS = 0.5

Handler = Callable[[int, FrameType | None], Any] | int | None


# --- fewer nodes than planned --------------------------------------------------------------------------------
#
# A job with --nnodes MIN:MAX. The sizes of tensor, context and pipeline parallelism and of the experts do not change,
# nor does the global batch. Only the data-parallel size does: it is the largest with which the run is valid. Further
# ranks wait as spares.


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
    first: ConfigError | None = None
    for data_parallel_size in range(world_size // replica, 0, -1):
        try:
            check_batches(data_parallel_size)
            check_run(config, data_parallel_size * replica)
        except ConfigError as error:
            first = first or error
        else:
            return data_parallel_size * replica
    assert first is not None
    raise first


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


# --- signals -------------------------------------------------------------------------------------------------


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
    numbers = [signal.Signals[name] for name in names]
    previous = {number: signal.signal(number, watch.note) for number in numbers}
    watch.previous = dict(previous)
    try:
        yield watch
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
        from megatron.torch_compat import handle_signals_by  # imports torch

        self._received: signal.Signals | None = None
        handle_signals_by(self._stop)
        for number in self.numbers:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for repeated in self.numbers - {signal.SIGINT}:
            signal.signal(repeated, signal.SIG_IGN)
        self._received = signal.Signals(number)
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


# --- the end of the processes --------------------------------------------------------------------------------


class RunningProcess(Protocol):
    """A process that this one has started, for example a :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""


def end_processes(
    processes: Mapping[int, RunningProcess],
    death_signal: signal.Signals,
    seconds: float,
    kill_seconds: float,
    send: Callable[[int, signal.Signals], None] = os.killpg,
    crash_seconds: float = math.inf,
) -> list[int]:
    """Signal the ``processes`` (by local rank) and their groups, kill them after ``seconds``, and wait.

    ``crash_seconds``: they are killed this long after one of them has ended otherwise than complete or stopped. The
    others may wait for it for ever: a rank that a signal ends before it handles signals joins no process group.

    Returns the local ranks whose processes still run ``kill_seconds`` after SIGKILL: a process that waits in the kernel
    for a device does not end. torch's own ``close`` may wait for it for ever.
    """
    waits = [(death_signal, seconds, crash_seconds), (signal.SIGKILL, kill_seconds, math.inf)]
    for number, patience, patience_after_crash in waits if death_signal != signal.SIGKILL else waits[1:]:
        running = [process for process in processes.values() if process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                send(process.pid, number)
        deadline = time.monotonic() + patience
        has_crashed = False
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            if not has_crashed and any(process.poll() not in _NO_CRASH for process in processes.values()):
                has_crashed, deadline = True, min(deadline, time.monotonic() + patience_after_crash)
            time.sleep(0.02)
    return [rank for rank, process in processes.items() if process.poll() is None]


class RankProcesses:
    """``processes()`` returns the processes by local rank; empty before the first attempt."""

    def __init__(
        self, processes: Callable[[], Mapping[int, RunningProcess]], heartbeats: HeartbeatMemory, save_seconds: int
    ) -> None:
        """``save_seconds``: time for the ranks to finish an iteration and save."""
        self._processes, self._heartbeats, self._save_seconds = processes, heartbeats, save_seconds
        self.survivors: list[int] = []
        """Local ranks whose processes cannot be killed."""

    def codes(self) -> dict[int, int]:
        """Exit codes of ended ranks, by local rank; negative: the signal that ended it."""
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def are_running(self) -> bool:
        return len(self.codes()) < len(self._processes())

    def have_stopped(self) -> bool:
        """Whether all ranks that have ended have stopped on request."""
        return set(self.codes().values()) <= _ON_REQUEST

    def made_progress(self, started_at: float) -> bool:
        """Whether an attempt that began at ``started_at`` of the monotonic clock has finished an iteration."""
        snapshots = [self._heartbeats.read(rank) for rank in range(self._heartbeats.num_ranks)]
        if not any(snapshots):
            return time.monotonic() - started_at > _LONG_ATTEMPT_SECONDS
        return any(snapshot is not None and snapshot.section_ns[Section.OPTIMIZER] > 0 for snapshot in snapshots)

    def end(self, seconds: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
        """Signal the running ranks, and kill those that have not ended after ``seconds``, or :data:`CRASH_SECONDS`
        after one has crashed."""
        if not self.survivors and self.are_running():
            self.survivors = end_processes(
                self._processes(), death_signal, seconds, KILL_SECONDS, crash_seconds=CRASH_SECONDS
            )

    def end_after_crash(self) -> None:
        """End the ranks of an attempt that has failed. A spare would wait for an end of the training."""
        for rank, process in self._processes().items():
            snapshot = self._heartbeats.read(rank)
            if snapshot is not None and snapshot.section == Section.SPARE and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        self.end(CRASH_SECONDS)

    def wait_for_stop(self) -> None:
        """Wait for the other ranks while all stop on request; torch would terminate them immediately."""
        deadline = time.monotonic() + self._save_seconds
        # All ranks have saved when the first has stopped on request, but some may still copy.
        while self.have_stopped() and self.are_running() and time.monotonic() < deadline:
            time.sleep(0.1)

    def stop_for_join(self) -> None:
        """Let the ranks stop and save. A rank that hangs, because a node was lost, gets :data:`JOIN_SECONDS`."""
        for process in self._processes().values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        now = time.monotonic()
        give_up, latest = now + JOIN_SECONDS, now + self._save_seconds
        while self.are_running() and now < min(give_up, latest):
            time.sleep(0.05)
            now = time.monotonic()
            snapshots = [self._heartbeats.read(rank) for rank in range(self._heartbeats.num_ranks)]
            if any(snapshot is not None and snapshot.section == Section.SAVE for snapshot in snapshots):
                give_up = now + JOIN_SECONDS
