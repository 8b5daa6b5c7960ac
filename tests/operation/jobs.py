"""Jobs under a launcher, and the processes of their ranks."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.operation import heartbeat
from megatron.operation.heartbeat import HEARTBEATS, Snapshot
from tests.end_to_end.run_process import (
    REPOSITORY,
    TINY_RUN,
    FlagValue,
    Record,
    descendants,
    environment,
    free_port,
    iterations,
    wait_until,
    words_of,
)

PATIENCE = 240.0
"""For a start of all ranks, on a machine that does much else."""
TORCHRUN, LAUNCH = "torch.distributed.run", "megatron.operation.launch"
MODEL = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": 100_000}


def rendezvous(kind: str) -> list[str]:
    address, port = "127.0.0.1", str(free_port())
    return {
        "standalone": ["--standalone"],
        "static": ["--master-addr", address, "--master-port", port],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", "--local-addr", address],
    }[kind]


class Job:
    """A launcher with two ranks that train until they are stopped."""

    def __init__(self, directory: Path, module: str, launcher_flags: Sequence[str], **changes: FlagValue) -> None:
        self.save, self.log, self.metrics = directory / "save", directory / "log", directory / "metrics.jsonl"
        places = {"save": self.save, "load": self.save, "metrics_jsonl": self.metrics}
        words = words_of({**MODEL, **places, **changes})
        launcher = [sys.executable, "-m", module, "--nproc-per-node", "2", *launcher_flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*launcher, str(REPOSITORY / "pretrain_llama.py"), *words],
                cwd=REPOSITORY,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> dict[int, int]:
        """Processes of the ranks that run, by local rank: those that were started as ranks, and warm processes."""
        found = {}
        for pid in children(self.process.pid):
            rank = environment_of(pid).get("LOCAL_RANK")
            if rank is not None:
                found[int(rank)] = pid
        for local_rank, snapshot in self.heartbeats().items():
            if is_alive(snapshot.pid):
                found.setdefault(local_rank, snapshot.pid)
        return found

    def heartbeats(self) -> dict[int, Snapshot]:
        """What the ranks of the last attempt did last, by local rank."""
        return read_heartbeats_of(self.process.pid)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return condition()

        wait_until(holds, PATIENCE)

    def wait_for_training(self, without: Sequence[int] = ()) -> None:
        """Wait until two ranks, none of them ``without``, have trained and saved."""

        def is_training() -> bool:
            ranks = self.ranks()
            return len(ranks) == 2 and not set(ranks.values()) & set(without)

        self.wait_for(is_training)
        seen = self._logged()
        self.wait_for(lambda: self._logged() >= seen + 3)

    def _logged(self) -> int:
        return self.log.read_bytes().count(b"] iteration ")

    def records(self) -> list[Record]:
        return iterations(self.metrics)

    def end(self) -> None:
        everything = [self.process.pid, *descendants(self.process.pid)]
        for pid in everything:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def read_heartbeats_of(launcher: int) -> dict[int, Snapshot]:
    """The slots of the ranks of a launcher, by local rank."""
    for pid in children(launcher):
        path = environment_of(pid).get(HEARTBEATS)
        if path is not None:
            return read_heartbeats(Path(path))
    return {}


def read_heartbeats(path: Path) -> dict[int, Snapshot]:
    """The slots of a launcher."""
    try:
        with path.open("rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError:
        return {}  # the launcher has ended
    size = heartbeat._SLOT_BYTES
    slots = {place // size: heartbeat._read(memory[place : place + size]) for place in range(0, len(memory), size)}
    return {rank: snapshot for rank, snapshot in slots.items() if snapshot is not None}


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which its parent has not asked about, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def standby_processes(launcher: int) -> set[int]:
    """The standby processes of a launcher that run, and those that have become ranks."""
    return {pid for pid in children(launcher) if b"megatron.operation.warm" in cmdline(pid)}


def cmdline(pid: int) -> bytes:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def has_imported(pid: int) -> bool:
    """Whether a standby waits: only the main thread of a process is left, after the thread that imports."""
    try:
        modules = Path(f"/proc/{pid}/maps").read_text()
        return "libtorch_python" in modules and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return False  # it has just ended
