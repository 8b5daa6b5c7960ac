"""Ranks that the launcher forks instead of starting: they have imported torch already, which costs seconds of CPU.

All else is as usual: a session and an environment of their own, arguments, exit codes, signals, output files.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.operation import launch
from megatron.torch_compat import redirected_to


class ForkedRank:
    """The part of :class:`subprocess.Popen` that torch's agent uses, for a forked process."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str | None]) -> None:
        context = multiprocessing.get_context("fork")
        is_ready, reports_ready = os.pipe()
        self._process = context.Process(target=_run_script, args=(words, environment, outputs))
        self._process.start()
        # Python would wait for it at the end of the launcher, which has no record of it if a signal comes now.
        vars(multiprocessing.process)["_children"].discard(self._process)
        assert self._process.pid is not None
        # Signals are for its session, which a started process has at once.
        os.close(reports_ready)
        os.read(is_ready, 1)
        os.close(is_ready)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_launcher(words: Sequence[str], environment: Mapping[str, str], log: Path, forks: bool = True) -> None:
    """The launcher in a forked process, which has imported torch already; with ``forks`` it forks its ranks."""
    if forks:
        fork_ranks()
    os.setsid()
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.exit(launch.main(words))


def fork_ranks() -> None:
    """In the process of a launcher: fork its ranks from now on."""

    def fork(handler: Any, words: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        return ForkedRank(words, environment, redirected_to(handler))

    vars(launch)["start_rank"] = fork


def _run_script(words: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str | None]) -> None:
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
    os.closerange(3, 4096)  # also the pipe of ForkedRank: this process is ready for signals
    # sys.stdout and sys.stderr write to the same descriptors as before.
    os.environ.clear()
    os.environ.update(environment)
    python = list(words).index(sys.executable)
    sys.argv = [word for word in words[python + 1 :] if word != "-u"]
    runpy.run_path(sys.argv[0], run_name="__main__")
