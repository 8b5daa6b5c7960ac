"""Launchers, and the ranks that they start.

A launcher and its ranks are forked from a process that has imported torch, which spares each of them seconds of CPU.
All else is as usual: a session and an environment of their own, arguments, exit codes, signals, output files.
"""

import mmap
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.operation import agent, heartbeat, launch
from megatron.operation.heartbeat import Snapshot
from megatron.operation.processes import stat_of
from megatron.torch_compat import redirected_to
from tests.end_to_end.run_process import (
    REPOSITORY,
    TINY_RUN,
    Flags,
    FlagValue,
    Record,
    descendants,
    environment,
    free_port,
    iterations,
    wait_until,
    words_of,
)
from tests.forked import ForkedProcess, fork_context

PATIENCE = 240.0
"""For a start of all ranks, on a machine that does much else."""
TORCHRUN, LAUNCH = "torch.distributed.run", "megatron.operation.launch"
MODEL: Flags = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": 100_000}
PRETRAIN = str(REPOSITORY / "pretrain_llama.py")


def rendezvous(kind: str, port: int | None = None) -> list[str]:
    address, port = "127.0.0.1", port or free_port()
    return {
        "standalone": ["--standalone"],
        "static": ["--master-addr", address, "--master-port", f"{port}", "--local-addr", address],
        "c10d": ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={address}:{port}", "--local-addr", address],
    }[kind]


class Launcher:
    """A launcher in a process of its own, with its output in a file; ``words`` begin with the flags of torchrun."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        module: str = LAUNCH,
        forks: bool = True,
        variables: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """Without ``forks`` its ranks are started as usual, and so are those of a launcher that is not ours.
        ``prepare`` is called in its process first."""
        self.log, variables = log, environment() if variables is None else variables
        log.touch()  # it may be killed before it opens it
        arguments = (module, words, variables, log, forks, prepare)
        self.process: BaseProcess = fork_context().Process(target=_run_launcher, args=arguments)
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def text(self) -> str:
        """What it and its ranks have written."""
        return self.log.read_text(errors="replace")

    def exit_code(self) -> int:
        """Wait for its end."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, self.text()
        return self.process.exitcode

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; the launcher must not end before."""

        def holds() -> bool:
            assert self.process.exitcode is None, self.text()
            return condition()

        wait_until(holds, PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it with everything that it has started."""
        kill_all([self.pid, *descendants(self.pid)])
        self.process.join()

    def heartbeats(self) -> dict[int, Snapshot]:
        """What the ranks of the last attempt did last, by local rank."""
        with suppress(OSError, ValueError):  # it has ended, or has no memory for them
            for path in Path(f"/proc/{self.pid}/fd").iterdir():
                if os.readlink(path).startswith("/memfd:heartbeats"):
                    return _read_heartbeats(path)
        return {}

    def ranks(self) -> dict[int, int]:
        """Processes of the ranks that run, by local rank: those that were started as ranks, and those that have
        attached to the heartbeats."""
        found = {}
        for pid in children(self.pid):
            rank = environment_of(pid).get("LOCAL_RANK")
            if rank is not None:
                found[int(rank)] = pid
        for local_rank, snapshot in self.heartbeats().items():
            if is_alive(snapshot.pid):
                found.setdefault(local_rank, snapshot.pid)
        return found


class Job(Launcher):
    """A launcher with two ranks that train until they are stopped."""

    def __init__(
        self,
        directory: Path,
        launcher_flags: Sequence[str] = ("--standalone",),
        module: str = LAUNCH,
        forks: bool = True,
        script: Sequence[str] = (PRETRAIN,),
        flags: Mapping[str, FlagValue] | None = None,
        **changes: FlagValue,
    ) -> None:
        self.save, self.metrics = directory / "save", directory / "metrics.jsonl"
        places = {"save": self.save, "load": self.save, "metrics_jsonl": self.metrics}
        words = [
            "--nproc-per-node",
            "2",
            *launcher_flags,
            *script,
            *words_of({**MODEL, **places, **(flags or {}), **changes}),
        ]
        super().__init__(words, directory / "log", module, forks)

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


@contextmanager
def ended() -> Iterator[list[Any]]:
    """What is put into the list, launchers for example, does not outlive the context."""
    started: list[Any] = []
    try:
        yield started
    finally:
        for one in started:
            one.end()


# --- processes -----------------------------------------------------------------------------------------------


def _read_heartbeats(path: Path) -> dict[int, Snapshot]:
    with path.open("rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    size = heartbeat._SLOT_BYTES
    slots = {place // size: heartbeat._read(memory[place : place + size]) for place in range(0, len(memory), size)}
    return {rank: snapshot for rank, snapshot in slots.items() if snapshot is not None}


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """The variables with which the program of a process was started: a forked one has those of the process that it
    was forked from."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def started_at(pid: int) -> str:
    """When a process was started, in ticks since the boot; empty if it has gone."""
    return "".join(stat_of(pid)[19:20])


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which its parent has not asked about, does not."""
    return (stat_of(pid) or ["X"])[0] not in "ZX"


def cmdline(pid: int) -> bytes:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def standby_processes(launcher: int) -> set[int]:
    """The standby processes of a launcher that run, and those that have become ranks."""
    return {pid for pid in children(launcher) if b"megatron.operation.warm" in cmdline(pid)}


def has_imported(pid: int) -> bool:
    """Whether a standby waits: only the main thread of a process is left, after the thread that imports."""
    try:
        modules = Path(f"/proc/{pid}/maps").read_text()
        return "libtorch_python" in modules and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return False  # it has just ended


def _run_launcher(
    module: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    forks: bool,
    prepare: Callable[[], object] | None,
) -> None:
    os.setsid()
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if module != LAUNCH:
        os.chdir(REPOSITORY)
        os.execve(sys.executable, [sys.executable, "-m", module, *words], variables)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    if forks:
        vars(agent)["start_rank"] = lambda handler, words, variables: fork_rank(
            words, variables, redirected_to(handler)
        )
    if prepare is not None:
        prepare()
    sys.exit(launch.main(words))


def fork_rank(words: Sequence[str], variables: Mapping[str, str], outputs: Sequence[str | None]) -> ForkedProcess:
    """Start a rank as torch's agent would."""
    is_ready, reports_ready = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_run_script, args=(words, variables, outputs))
    process.start()
    # Python would wait for it at the end of the launcher, which has no record of it if a signal comes now.
    vars(multiprocessing.process)["_children"].discard(process)
    # Signals are for its session, which a started process has at once.
    os.close(reports_ready)
    os.read(is_ready, 1)
    os.close(is_ready)
    return ForkedProcess(process)


def _run_script(words: Sequence[str], variables: Mapping[str, str], outputs: Sequence[str | None]) -> None:
    """``python -u SCRIPT ARGUMENTS`` in this process."""
    os.setsid()
    # The launcher's handlers, which a started process would not have.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, path in zip((1, 2), outputs):
        if path is not None:
            with open(path, "ab") as file:
                os.dup2(file.fileno(), descriptor)
    os.closerange(3, 4096)  # also the pipe of fork_rank: this process is ready for signals
    # sys.stdout and sys.stderr write to the same descriptors as before.
    os.environ.clear()
    os.environ.update(variables)
    python = list(words).index(sys.executable)
    sys.argv = [word for word in words[python + 1 :] if word != "-u"]
    runpy.run_path(sys.argv[0], run_name="__main__")
