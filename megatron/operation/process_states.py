"""What the kernel says of the processes of a rank (Linux)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STOPPED = "Tt"
"""Stopped by a signal, or by a debugger."""
UNINTERRUPTIBLE = "D"
"""Waits for a device; no signal ends it."""
ENDED = "ZX"
BACKGROUND_WRITER, HELPER = "background writer", "helper process"
_WRITER = "megatron.checkpoint.background_main"
_HELPERS = ("resource_tracker", "forkserver", "compile_worker")


@dataclass(frozen=True)
class ChildProcess:
    """A process that a rank has started, or one of that process."""

    pid: int
    state: str
    role: str
    """"loader process", "background writer" or "helper process"."""


def process_state(pid: int) -> str | None:
    """The letter of the process's state, "?" where the system does not tell; None without such a process."""
    stat = _stat(pid)
    if stat is not None:
        return stat[0]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "?"


def child_processes(pid: int) -> tuple[ChildProcess, ...]:
    """Children, grandchildren and so on."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in _pids():
        stat = _stat(name)
        if stat is not None:
            children.setdefault(stat[1], []).append((name, stat[0]))
    found, unseen = [], [pid]
    while unseen:
        for child, state in children.get(unseen.pop(), []):
            found.append(ChildProcess(child, state, _role(child)))
            unseen.append(child)
    return tuple(sorted(found, key=lambda child: child.pid))


def transferred_bytes(pid: int) -> int:
    """Bytes that the process has read from and written to files, also through mappings; 0 where the system does not
    tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar", "read_b", "write_b")))
    except (OSError, ValueError, IndexError):
        return 0


def context_switches(pid: int) -> int:
    """How often the main thread has given up the processor of its own accord."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _pids() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent."""
    try:
        # "pid (name) state parent ...": the name may contain blanks and parentheses.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)


def _role(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return HELPER
    if _WRITER in words:
        return BACKGROUND_WRITER
    # torch forks its loader processes from the rank, so they have the rank's command line.
    return HELPER if any(word in words for word in _HELPERS) else "loader process"
