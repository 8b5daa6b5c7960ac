"""What the system shows of the ranks that hang: states of their processes, and the stacks of their threads (Linux)."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.operation.heartbeat import DUMP_SIGNAL, HeartbeatMemory
from megatron.operation.processes import is_running, stat_of
from megatron.operation.watchdog import Processes

# --- processes -----------------------------------------------------------------------------------------------

# Stopped by a signal, or by a debugger.
STOPPED = "Tt"
# Waits for a device; no signal ends it.
UNINTERRUPTIBLE = "D"
ENDED = "ZX"
BACKGROUND_WRITER, HELPER = "background writer", "helper process"
_WRITER = "megatron.checkpoint.background_main"


@dataclass(frozen=True)
class ChildProcess:
    """A process that a rank has started, or one of that process."""

    pid: int
    state: str
    role: str
    """"background writer" or "helper process"."""


def process_state(pid: int) -> str | None:
    """The letter of the process's state, "?" where the system does not tell; None without such a process."""
    stat = stat_of(pid)
    return stat[0] if stat else "?" if is_running(pid) else None


def child_processes(pid: int) -> tuple[ChildProcess, ...]:
    """Children, grandchildren and so on."""
    children: dict[int, list[tuple[int, str]]] = {}
    with suppress(OSError):  # no /proc
        for name in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if stat := stat_of(name):
                children.setdefault(int(stat[1]), []).append((name, stat[0]))
    found, unseen = [], [pid]
    while unseen:
        for child, state in children.get(unseen.pop(), []):
            found.append(ChildProcess(child, state, _role(child)))
            unseen.append(child)
    return tuple(sorted(found, key=lambda child: child.pid))


def count_switches(pid: int) -> tuple[int, int]:
    """How often the main thread has given up the processor of its own accord, and the number of threads."""
    with suppress(OSError, ValueError, KeyError):
        found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(found["voluntary_ctxt_switches"]), int(found["Threads"])
    return 0, 0


def _role(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return HELPER
    return BACKGROUND_WRITER if _WRITER in words else HELPER


def observe_processes(pid: int) -> Processes:
    """What the kernel says of a rank that makes no progress, and of its background writer."""
    writers = [child for child in child_processes(pid) if child.role == BACKGROUND_WRITER]
    state = process_state(pid) or "Z"
    states = [state, *(writer.state for writer in writers)]
    transferred = 0
    for one in [pid, *(writer.pid for writer in writers)]:
        with suppress(OSError, ValueError, IndexError):
            # Bytes read from and written to files, also through mappings.
            lines = Path(f"/proc/{one}/io").read_text().splitlines()
            wanted = [line for line in lines if line.startswith(("rchar", "wchar", "read_b", "write_b"))]
            transferred += sum(int(line.split()[1]) for line in wanted)
    return Processes(
        # Not of a child that has ended: what the rank does with it is its own matter.
        is_stopped=state in ENDED or any(one in STOPPED for one in states),
        waits_for_storage=any(one in UNINTERRUPTIBLE for one in states),
        transferred=transferred,
    )


# --- stacks --------------------------------------------------------------------------------------------------

# Time for a rank to write its stacks; it takes milliseconds unless the process gets no processor.
_ANSWER_SECONDS = 1.0
# A file that does not grow for so long is complete.
_QUIET_SECONDS = 0.05
_MOST_FRAMES, _MOST_REPORTED = 30, 12
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')
_REPOSITORY = f"{Path(__file__).parents[2]}{os.sep}"
# Modules in which a rank waits for other ranks.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/rendezvous.py",
    "megatron/core/communication.py",
    "megatron/core/control.py",
    "megatron/core/transport/shared_memory.py",
    "megatron/core/transport/torch_distributed.py",
    "megatron/operation/namespace.py",
    "megatron/operation/waits.py",
)
_PYTHON_WAITS = ("threading.py", "queue.py", "selectors.py")


@dataclass(frozen=True)
class Frame:
    file: str
    """Path below the repository or below site-packages."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""Frames, the innermost first."""


def parse_stacks(text: str) -> list[Stack]:
    """The stacks of all threads in the text of :mod:`faulthandler`, the main thread last.

    Lines of other kinds, of newer versions of Python, are dropped.
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            file, number, function = found.groups()
            short = file.rpartition("/site-packages/")[2].removeprefix(_REPOSITORY)
            if len(threads[-1]) < _MOST_FRAMES:
                threads[-1].append(Frame(short, int(number) if number.isdigit() else 0, function))
    return [tuple(frames) for frames in threads]


def is_waiting_for_ranks(stack: Stack) -> bool:
    """Whether a thread with this ``stack`` waits for other ranks in a collective or a message."""
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES):
            return True
        if os.path.basename(frame.file) not in _PYTHON_WAITS:
            return False
    return False


def excerpt(stack: Stack) -> str:
    rest = len(stack) - _MOST_REPORTED
    return "\n".join([*map(str, stack[:_MOST_REPORTED]), *([f"... and {rest} more"] if rest > 0 else [])])


def request_stacks(files: Mapping[int, str], pids: Mapping[int, int]) -> dict[int, str]:
    """What the ranks write at :data:`DUMP_SIGNAL`; a rank that does not answer is left out.

    ``files`` has the path of each rank's file (``stacks`` of its settings), ``pids`` its process.
    """
    offsets = {rank: size for rank, path in files.items() if (size := _size(path)) is not None}
    for rank in offsets:
        with suppress(ProcessLookupError, PermissionError):
            assert DUMP_SIGNAL is not None  # else no rank has a file
            os.kill(pids[rank], DUMP_SIGNAL)
    deadline = time.monotonic() + _ANSWER_SECONDS
    sizes, changed_at = dict(offsets), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS / 5)
        found = {rank: _size(files[rank]) or offsets[rank] for rank in offsets}
        if found != sizes:
            sizes, changed_at = found, time.monotonic()
        elif all(sizes[rank] > offsets[rank] for rank in offsets) and time.monotonic() - changed_at > _QUIET_SECONDS:
            break
    texts = {}
    for rank, offset in offsets.items():
        with suppress(OSError), open(files[rank], "rb") as file:
            texts[rank] = os.pread(file.fileno(), 1 << 20, offset).decode(errors="replace")
    return {rank: text for rank, text in texts.items() if text}


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def group_by_stack(stacks: Mapping[int, Stack | None]) -> list[tuple[list[int], Stack | None]]:
    """Ranks with equal stacks (None: the rank gave none), the largest group first."""
    groups: dict[Stack | None, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank], []).append(rank)
    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=lambda group: (-len(group[0]), group[0]))


def main_stack(stacks: Sequence[Stack]) -> Stack | None:
    found = [stack for stack in stacks if stack and stack[-1].function == "<module>"] or stacks
    return found[-1] if found else None


# --- evidence ------------------------------------------------------------------------------------------------

# For so long the wait for the interpreter's lock is observed.
_LOCK_SECONDS = 0.3
# Context switches per second of a thread that waits for the lock: it wakes up every 5 ms.
_LOCK_RATES = 20.0, 400.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a rank when one of the ranks has exceeded its limit."""

    rank: int
    local_rank: int
    host: str
    pid: int | None
    section: str
    """Label of the section; ``start`` before the rank has attached."""
    seconds: float
    """Time since the last progress."""
    iteration: int | None = None
    microbatch: int | None = None
    collectives: int | None = None
    state: str | None = None
    """Letter of the process's state; None if there is no such process."""
    children: tuple[ChildProcess, ...] = ()
    """Stopped children."""
    stack: Stack | None = None
    """The stack of the main thread; None if the rank has written none."""
    waits_for_lock: bool = False
    """Whether the main thread tries all the time to get the interpreter's lock."""
    committed_iteration: int | None = None
    is_lost: bool = False
    """Whether the launcher of the rank does not answer, so that nothing else is known."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Evidence":
        """The inverse of ``asdict``."""
        children = tuple(ChildProcess(**child) for child in values["children"])
        stack = None if values["stack"] is None else tuple(Frame(**frame) for frame in values["stack"])
        return Evidence(**{**values, "children": children, "stack": stack})


def gather_evidence(
    heartbeats: HeartbeatMemory, ranks: Mapping[int, int], pids: Mapping[int, int], host: str, now_ns: Callable[[], int]
) -> list[Evidence]:
    """What is known of the ranks of this node that still run.

    ``ranks`` are global ranks and ``pids`` the processes that run, both by local rank; ``now_ns`` reads the monotonic
    clock. Takes a third of a second, and longer if a rank does not write its stacks.
    """
    before = {rank: (process_state(pid), count_switches(pid)[0]) for rank, pid in pids.items()}
    began = time.monotonic()
    files = {}
    for rank in pids:
        path = heartbeats.settings(rank).get("stacks")
        if path is not None and (before[rank][0] or "Z") not in STOPPED + ENDED:
            files[rank] = path
    texts = request_stacks(files, pids)
    time.sleep(max(0.0, _LOCK_SECONDS - (time.monotonic() - began)))
    seconds = time.monotonic() - began
    evidence = []
    for rank, pid in pids.items():
        state, (state_before, switches) = process_state(pid), before[rank]
        if state == UNINTERRUPTIBLE and state_before != UNINTERRUPTIBLE:
            state = state_before  # a short wait for a disk is no evidence
        switches_now, threads = count_switches(pid)
        rate = (switches_now - switches) / seconds
        snapshot = heartbeats.read(rank)
        evidence.append(
            Evidence(
                rank=ranks[rank],
                local_rank=rank,
                host=host,
                pid=pid,
                seconds=0.0 if snapshot is None else (now_ns() - snapshot.entered_ns) * 1e-9,
                collectives=None if snapshot is None else snapshot.collectives,
                state=state,
                children=tuple(one for one in child_processes(pid) if one.state in STOPPED),
                stack=main_stack(parse_stacks(texts.get(rank, ""))),
                waits_for_lock=_LOCK_RATES[0] <= rate <= _LOCK_RATES[1] and threads > 1,
                **({"section": "start"} if snapshot is None else snapshot.position()),
            )
        )
    return evidence
