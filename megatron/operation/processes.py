"""Child processes that must end with their parent, and the cores of this process."""

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Environment variable with the process id of megatron.operation.launch, for its ranks.
LAUNCHER = "MEGATRON_LAUNCHER_PID"


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
    if os.getppid() != parent or not (ancestor is None or is_running(ancestor)):
        os._exit(1)


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


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True
