"""How a launcher ends the processes of its ranks."""

import signal
import subprocess
import sys
import time

import pytest

from megatron.operation.ranks import RunningProcess, end_processes


class Unkillable:
    """A process in the kernel, which no signal ends."""

    pid = 2**22 + 1

    def poll(self) -> int | None:
        return None


@pytest.mark.processes
def test_a_process_that_does_not_end_is_named_within_a_limit() -> None:
    ordinary = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    sent: list[tuple[int, signal.Signals]] = []

    def send(pid: int, number: signal.Signals) -> None:
        sent.append((pid, number))
        if pid == ordinary.pid:
            ordinary.send_signal(number)

    processes: dict[int, RunningProcess] = {0: ordinary, 1: Unkillable()}
    assert end_processes(processes, signal.SIGTERM, 0.2, 0.2, send) == [1]
    assert sent == [(ordinary.pid, signal.SIGTERM), (Unkillable.pid, signal.SIGTERM), (Unkillable.pid, signal.SIGKILL)]
    assert ordinary.poll() == -signal.SIGTERM
    assert end_processes({0: ordinary}, signal.SIGTERM, 5.0, 5.0, send) == []


class Ended(Unkillable):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def poll(self) -> int | None:
        return self.exit_code


@pytest.mark.parametrize(("exit_code", "is_crash"), [(0, False), (75, False), (1, True), (-signal.SIGTERM, True)])
def test_only_a_crash_shortens_the_wait_for_the_others(exit_code: int, is_crash: bool) -> None:
    processes: dict[int, RunningProcess] = {0: Ended(exit_code), 1: Unkillable()}
    sent: list[float] = []
    end_processes(processes, signal.SIGTERM, 0.5, 0.0, lambda pid, number: sent.append(time.monotonic()), 0.05)
    assert (sent[1] - sent[0] < 0.4) == is_crash
