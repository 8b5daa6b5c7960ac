"""The causes of failed attempts, with advice for the person on call."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron.errors import ExitCode


class Cause(StrEnum):
    """Class of a cause, as in failure.json and attempts.jsonl."""

    HANG = "hang"
    STOPPED_PROCESS = "stopped_process"
    KILLED = "killed"
    OUT_OF_MEMORY = "out_of_memory"
    EXCEPTION = "exception"
    USER_ERROR = "user_error"
    IN_USE = "in_use"
    NOT_FINITE = "not_finite"
    SPIKE = "spike"
    SILENT_CORRUPTION = "silent_corruption"
    STRAGGLER = "straggler"
    NO_PROGRESS = "no_progress"
    NODE_LOST = "node_lost"
    LINK_LOST = "link_lost"
    DISK = "disk"
    DATA = "data"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Explanation:
    """What a cause means, what to do, and the exit code of an attempt that ends so."""

    meaning: str
    advice: str
    exit_codes: tuple[ExitCode, ...] = (ExitCode.CRASH,)


EXPLANATIONS: Mapping[Cause, Explanation] = {
    Cause.HANG: Explanation(
        "A rank made no progress for longer than its limit, while its process was running.",
        "Look at the rank's stack and at the groups of stacks. If the same host is named again, leave it out. If the "
        "rank only needed longer, raise --hang-limit-s, or the limit of the section.",
    ),
    Cause.STOPPED_PROCESS: Explanation(
        "A rank or a background writer was stopped by a signal or a debugger.",
        "Find out who sends SIGSTOP (a debugger, a batch system that suspends jobs); the run itself is sound.",
    ),
    Cause.KILLED: Explanation(
        "A rank ended by a signal that the launcher did not send.",
        "Signal 9: look for an administrator, a time limit of the batch system, or the kernel's log (dmesg). Signals "
        "6, 7, 8 and 11: a fault in a library, a driver or memory; if the host is named again, leave it out.",
    ),
    Cause.OUT_OF_MEMORY: Explanation(
        "The kernel killed a rank for lack of memory, or an allocation failed on the host or the GPU.",
        "Reduce --micro-batch-size, use more recomputation or sharding (--dry-run shows the memory), or a larger "
        "memory limit of the job.",
    ),
    Cause.EXCEPTION: Explanation(
        "A rank raised an exception that is not a message for the user.",
        "Read the traceback in the stack. If it is the same at every attempt, it is a defect of the code or the data; "
        "if it is always the same host, leave it out.",
    ),
    Cause.USER_ERROR: Explanation(
        "A flag, a file or a checkpoint is wrong.",
        "Follow the message; the same command would fail again.",
        (ExitCode.ACTION_REQUIRED, ExitCode.CRASH),
    ),
    Cause.IN_USE: Explanation(
        "Another run has the lock of a directory of this run. Nothing is written there, so this cause is only in the "
        "log.",
        "Stop the other run, or use another --save.",
        (ExitCode.ACTION_REQUIRED,),
    ),
    Cause.NOT_FINITE: Explanation(
        "The loss or a gradient was not finite.",
        "Follow the message: a lower --lr, other data, or a policy that skips such iterations.",
        (ExitCode.CRASH, ExitCode.NO_PROGRESS),
    ),
    Cause.SPIKE: Explanation(
        "The loss or the gradient norm left its range, and the policy could not bring it back.",
        "Compare the batches before the spike, lower --lr, or go back to an older checkpoint (--ckpt-step).",
        (ExitCode.CRASH, ExitCode.NO_PROGRESS),
    ),
    Cause.SILENT_CORRUPTION: Explanation(
        "Replicas of the same values differ, or a computation gave other bits when it was repeated.",
        "Leave the named host out and test its memory and GPUs; continue from a checkpoint before the first report.",
        (ExitCode.CRASH, ExitCode.NO_PROGRESS),
    ),
    Cause.STRAGGLER: Explanation(
        "A rank was slower than the others for so long that the run was ended.",
        "Look at the host's clocks, temperature and other processes, or leave it out.",
    ),
    Cause.NO_PROGRESS: Explanation(
        "Several attempts in a row ended without a new checkpoint.",
        "Find the cause in the failures before this one, then start once with a larger --max-failed-attempts.",
        (ExitCode.NO_PROGRESS,),
    ),
    Cause.NODE_LOST: Explanation(
        "The launcher of a node no longer answers.",
        "Look at the node: power, network, kernel. Start again without it, or with a spare.",
    ),
    Cause.LINK_LOST: Explanation(
        "A launcher could not reach the host of the rendezvous: one of the two hosts or the link between them is lost.",
        "Look at the network of both hosts, and at the report of the other launchers if there is one.",
    ),
    Cause.DISK: Explanation(
        "Files could not be read or written.",
        "Look for a full disk, an exceeded quota, or a file system that is gone or read-only.",
        (ExitCode.CRASH, ExitCode.ACTION_REQUIRED),
    ),
    Cause.DATA: Explanation(
        "A corpus, an index, a tokenizer or the data loader is at fault.",
        "Follow the message; check the storage of the corpus.",
        (ExitCode.CRASH, ExitCode.ACTION_REQUIRED),
    ),
    Cause.PREEMPTED: Explanation(
        "The run was stopped on request before it was complete.",
        "Start the same command again.",
        (ExitCode.STOPPED,),
    ),
    Cause.UNKNOWN: Explanation(
        "The attempt failed without a trace of its cause.",
        "Read the log of the attempt from its end.",
    ),
}


def advice(cause: str) -> str:
    return EXPLANATIONS[cause_named(cause)].advice


def cause_named(name: str) -> Cause:
    """The cause of this name; UNKNOWN for any other."""
    return Cause(name) if name in set(Cause) else Cause.UNKNOWN


class OutOfMemoryKills:
    """The kernel's counter of processes that it killed for lack of memory, in this process's cgroup or on the host."""

    def __init__(self) -> None:
        self._path = _oom_counter()
        self._before = self._read()

    def rose(self) -> bool:
        """Whether the counter has risen since the last call, or since the start."""
        before, self._before = self._before, self._read()
        return self._before > before

    def _read(self) -> int:
        with suppress(OSError, ValueError):
            for line in self._path.read_text().splitlines() if self._path is not None else ():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0


def _oom_counter(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The file with a line "oom_kill COUNT": of the cgroup (version 2, then 1), else of the host."""
    groups: list[list[str]] = []
    with suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in process.read_text().splitlines()]
    candidates = [root / group[2].lstrip("/") / "memory.events" for group in groups if group[1] == ""]
    candidates += [
        root / "memory" / group[2].lstrip("/") / "memory.oom_control" for group in groups if "memory" in group[1]
    ]
    candidates += [root / "memory.events", root / "memory" / "memory.oom_control", Path("/proc/vmstat")]
    for path in candidates:
        with suppress(OSError):
            if any(line.startswith("oom_kill ") for line in path.read_text().splitlines()):
                return path
    return None
