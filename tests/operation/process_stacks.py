"""What every process below a launcher does, for a campaign that waits in vain (Linux)."""

import os
import time
from contextlib import suppress
from pathlib import Path

from megatron.operation.heartbeat import DUMP_SIGNAL
from tests.end_to_end.run_process import descendants

_ANSWER_SECONDS = 1.0


def describe_processes(pid: int) -> str:
    """State, threads and Python stacks of a process and of all below it."""
    return "\n".join(_describe(one) for one in [pid, *descendants(pid)])


def _describe(pid: int) -> str:
    process = Path(f"/proc/{pid}")
    lines = [f"--- process {pid}: {_read(process / 'cmdline').replace(chr(0), ' ')[:120]}"]
    wanted = ("State", "PPid", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    lines += [line for line in _read(process / "status").splitlines() if line.startswith(wanted)]
    with suppress(OSError):
        for task in sorted((process / "task").iterdir(), key=lambda task: int(task.name)):
            lines.append(f"thread {task.name} {_read(task / 'comm')} in {_read(task / 'wchan') or '?'}")
            lines += [f"    {frame}" for frame in _read(task / "stack").splitlines()[:6]]
    return "\n".join([*lines, _python_stacks(pid)])


def _python_stacks(pid: int) -> str:
    """What the process writes at the signal of the heartbeat; loader processes have a rank's handler and its file."""
    caught = next((line for line in _read(Path(f"/proc/{pid}/status")).splitlines() if line.startswith("SigCgt")), "")
    if DUMP_SIGNAL is None or not caught or not int(caught.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1:
        return "no handler for stacks"
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        file = next(one for one in descriptors if os.readlink(one).startswith("/memfd:stacks"))
        with file.open("rb") as stacks:
            before = stacks.seek(0, os.SEEK_END)
            os.kill(pid, DUMP_SIGNAL)
            time.sleep(_ANSWER_SECONDS)
            stacks.seek(before)
            return stacks.read().decode(errors="replace") or "no answer to the request for stacks"
    except (OSError, StopIteration) as error:
        return f"no stacks: {error!r}"


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError as error:
        return f"({error.strerror})"
