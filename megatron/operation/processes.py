"""Child processes that must end with their parent, and the cores of this process."""

import ctypes
import gc
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from megatron.errors import ExitCode

LAUNCHER = "MEGATRON_LAUNCHER_PID"
"""Environment variable with the process id of ``megatron.operation.launch``, for its ranks."""
_NO_CRASH = (None, ExitCode.COMPLETE, ExitCode.STOPPED)
"""What ``poll`` returns for a process that runs or has not crashed."""


def die_with_parent(ancestor: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends for any reason (Linux).

    Exits immediately if the parent, or the process ``ancestor``, has already ended. The kernel acts when the *thread*
    that started this process ends, so that thread must live as long as the parent. Forked children do not inherit the
    setting.
    """
    parent = os.getppid()
    with suppress(AttributeError):  # no prctl in this C library
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent or not (ancestor is None or _is_running(ancestor)):
        os._exit(1)


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


@contextmanager
def collection_paused(freeze: bool) -> Iterator[None]:
    """Import without garbage collection, which finds nothing then and costs a quarter of the time. ``freeze`` also
    excludes from later collections what exists in the end: only for a process in which that stays for good."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


def available_cores() -> int:
    """Cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True
