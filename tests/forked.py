"""Processes forked from one that has imported everything."""

import multiprocessing as mp
import os
import subprocess
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess


def fork_context() -> ForkServerContext:
    """Starts such processes; the session's first use starts the one that they are forked from."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


class ForkedProcess:
    """The part of :class:`subprocess.Popen` that launchers use, for a forked process that has started."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
