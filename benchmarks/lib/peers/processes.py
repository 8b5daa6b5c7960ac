"""The processes of a contender of benchmarks/peers.py, one for each rank, as the command sees them."""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.peers.job import Job
from megatron.errors import ConfigError

_REPOSITORY = Path(__file__).resolve().parents[3]


class ContenderError(Exception):
    """A rank raised an error, ended, or did not answer."""


@dataclass(frozen=True)
class Timed:
    """The steps of a turn."""

    seconds: float
    """Seconds of all steps, on the slowest rank."""
    losses: list[float]


class RankProcesses:
    """The ranks of a contender; as a context manager it ends them.

    Building raises :class:`ContenderError`, as :meth:`steps` does.
    """

    def __init__(self, python: Path, jobs: Sequence[Job], threads: int, directory: Path, timeout: float) -> None:
        self._timeout = timeout
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "PYTHONPATH": str(_import_path(jobs[0].peer, directory)),
        }
        self._processes = [_start(python, environment, Path(f"{job.store}.{job.rank}.log")) for job in jobs]
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()
        try:
            self._ask([{"build": asdict(job)} for job in jobs])
        except ContenderError:
            self.close()
            raise

    def steps(self, count: int) -> Timed:
        """Run ``count`` steps on all ranks."""
        replies = self._ask([{"steps": count}] * len(self._processes))
        losses = [sum(shares) for shares in zip(*(reply["losses"] for reply in replies), strict=True)]
        return Timed(max(reply["seconds"] for reply in replies), losses)

    def _ask(self, commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send each rank its command; the replies of all ranks. The other ranks wait for one that fails: end them."""
        try:
            for process, command in zip(self._processes, commands, strict=True):
                assert process.stdin is not None
                print(json.dumps(command), file=process.stdin, flush=True)
        except BrokenPipeError as error:
            raise ContenderError("a rank has ended") from error
        replies = []
        for _ in self._processes:
            try:
                reply = self._replies.get(timeout=self._timeout)
            except queue.Empty:
                self.close()
                raise ContenderError(f"no answer within {self._timeout:.0f} seconds") from None
            if "error" in reply:
                self.close()
                raise ContenderError(reply["error"])
            replies.append(reply)
        return replies

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Queue the replies of a rank, and its end."""
        assert process.stdout is not None
        for line in process.stdout:
            self._replies.put(json.loads(line))
        self._replies.put({"error": f"a rank ended with exit code {process.wait()}"})

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start(python: Path, environment: Mapping[str, str], log: Path) -> "subprocess.Popen[str]":
    """A rank, whose standard error goes to ``log``."""
    with log.open("w") as errors:
        return subprocess.Popen(
            [str(python), "-m", "benchmarks.lib.peers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # `-m` puts the working directory on the import path.
            cwd=environment["PYTHONPATH"],
            env=environment,
        )


def _import_path(peer: str, directory: Path) -> Path:
    """Where the ranks find this package: for a peer a directory that has ``benchmarks`` and not our ``megatron``, which
    would hide megatron-core."""
    if peer == "ours":
        return _REPOSITORY
    path = directory / "import_path"
    if not path.exists():
        path.mkdir()
        (path / "benchmarks").symlink_to(_REPOSITORY / "benchmarks")
    return path


# --- environments ---------------------------------------------------------------------------------------------------
TORCH = "torch==2.13.0"
PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers==5.23.0",),
    "torchtitan": ("torchtitan==0.3.0", "triton"),  # its import needs triton
    "olmo_core": ("ai2-olmo-core==3.0.0",),
    "megatron_core": ("megatron-core==0.16.1",),
}
"""What the environment of each peer has beside torch, numpy and safetensors."""
_FINISHED = "finished"


def make_environment(peer: str, cache: Path) -> Path:
    """The python of the environment of ``peer``, which is made under ``cache`` unless it is there; ours is this one.

    transformers is used from this environment if it has the package. Raises :class:`ConfigError` if pip fails.
    """
    if peer == "ours" or (peer == "transformers" and _has_transformers()):
        return Path(sys.executable)
    directory = cache / peer
    python = directory / "bin" / "python"
    # Another list of packages is another environment.
    wanted = "\n".join((TORCH, "numpy", "safetensors", *PACKAGES[peer]))
    finished = directory / _FINISHED
    if not finished.exists() or finished.read_text() != wanted:
        if directory.exists():
            shutil.rmtree(directory)
        cache.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted.split("\n")])
        finished.write_text(wanted)
    return python


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{' '.join(command[:4])} failed: {last}")
