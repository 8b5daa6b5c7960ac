"""The processes of the ranks of a node in the attempt under way, as its launcher ends them or waits for their end."""

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from megatron.errors import ExitCode
from megatron.operation.heartbeat import HeartbeatMemory, Section

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
        snapshots = [snapshot for snapshot in self._heartbeats.snapshots() if snapshot is not None]
        if not snapshots:
            return time.monotonic() - started_at > _LONG_ATTEMPT_SECONDS
        return any(snapshot.section_ns[Section.OPTIMIZER] > 0 for snapshot in snapshots)

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
            snapshots = self._heartbeats.snapshots()
            if any(snapshot is not None and snapshot.section == Section.SAVE for snapshot in snapshots):
                give_up = now + JOIN_SECONDS
