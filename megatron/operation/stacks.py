"""Stacks of ranks that hang: requested by a signal, parsed, and grouped."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.operation.heartbeat import DUMP_SIGNAL

ANSWER_SECONDS = 1.0
"""Time for a rank to write its stacks; it takes milliseconds unless the process gets no processor."""
_QUIET_SECONDS = 0.05
"""A file that does not grow for so long is complete."""
_MOST_FRAMES = 30
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')
_REPOSITORY = f"{Path(__file__).parents[2]}{os.sep}"
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/rendezvous.py",
    "megatron/core/communication.py",
    "megatron/core/control.py",
    "megatron/core/transport.py",
    "megatron/core/transport.py",
    "megatron/operation/namespace.py",
    "megatron/operation/waits.py",
)
"""Modules in which a rank waits for other ranks."""
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
            if len(threads[-1]) < _MOST_FRAMES:
                threads[-1].append(Frame(_short(file), int(number) if number.isdigit() else 0, function))
    return [tuple(frames) for frames in threads]


def _short(file: str) -> str:
    _, _, below_packages = file.rpartition("/site-packages/")
    if below_packages != file:
        return below_packages
    return file.removeprefix(_REPOSITORY)


def is_waiting_for_ranks(stack: Stack) -> bool:
    """Whether a thread with this ``stack`` waits for other ranks in a collective or a message."""
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES):
            return True
        if os.path.basename(frame.file) not in _PYTHON_WAITS:
            return False
    return False


def excerpt(stack: Stack, frames: int = 12) -> str:
    """The innermost frames, one per line."""
    rest = len(stack) - frames
    return "\n".join([*map(str, stack[:frames]), *([f"... and {rest} more"] if rest > 0 else [])])


def request_stacks(
    files: Mapping[int, str], pids: Mapping[int, int], seconds: float = ANSWER_SECONDS
) -> dict[int, str]:
    """What the ranks write at :data:`DUMP_SIGNAL`; a rank that does not answer is left out.

    ``files`` has the path of each rank's file (``stacks`` of its settings), ``pids`` its process.
    """
    offsets = {rank: size for rank, path in files.items() if (size := _size(path)) is not None}
    for rank in offsets:
        with suppress(ProcessLookupError, PermissionError):
            assert DUMP_SIGNAL is not None  # else no rank has a file
            os.kill(pids[rank], DUMP_SIGNAL)
    deadline = time.monotonic() + seconds
    sizes, changed_at = dict(offsets), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS / 5)
        found = {rank: _size(files[rank]) or offsets[rank] for rank in offsets}
        if found != sizes:
            sizes, changed_at = found, time.monotonic()
        elif all(sizes[rank] > offsets[rank] for rank in offsets) and time.monotonic() - changed_at > _QUIET_SECONDS:
            break
    texts = {rank: _read_from(files[rank], offset) for rank, offset in offsets.items()}
    return {rank: text for rank, text in texts.items() if text}


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), 1 << 20, offset).decode(errors="replace")
    except OSError:
        return ""


def group_by_stack(stacks: Mapping[int, Stack | None]) -> list[tuple[list[int], Stack | None]]:
    """Ranks with equal stacks (None: the rank gave none), the largest group first."""
    groups: dict[Stack | None, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank], []).append(rank)
    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=lambda group: (-len(group[0]), group[0]))


def main_stack(stacks: Sequence[Stack]) -> Stack | None:
    """The stack of the main thread."""
    return next((stack for stack in reversed(stacks) if stack and stack[-1].function == "<module>"), None) or (
        stacks[-1] if stacks else None
    )
