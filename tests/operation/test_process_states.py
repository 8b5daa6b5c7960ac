"""What the kernel says of a rank's processes."""

import os
import signal
import subprocess
import sys

import pytest

from megatron.operation.process_states import (
    STOPPED,
    child_processes,
    context_switches,
    num_threads,
    process_state,
)
from tests.end_to_end.run_process import wait_until

PATIENCE = 60.0
THREADS = """
import subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])
"""


@pytest.mark.processes
def test_stopped_processes_and_their_children() -> None:
    process = subprocess.Popen([sys.executable, "-c", THREADS], start_new_session=True)
    try:
        wait_until(lambda: len(child_processes(process.pid)) == 1 and num_threads(process.pid) == 2, PATIENCE)
        (child,) = child_processes(process.pid)
        assert child.role == "loader process" and child.state not in STOPPED
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: child_processes(process.pid)[0].state in STOPPED, PATIENCE)
        assert process_state(process.pid) not in (None, *STOPPED)
        assert {one.pid for one in child_processes(os.getpid())} >= {process.pid, child.pid}
        assert context_switches(process.pid) > 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process_state(process.pid) is None and child_processes(process.pid) == ()
