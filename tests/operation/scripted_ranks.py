"""Launchers whose ranks are a few lines of Python instead of a training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end.run_process import REPOSITORY, free_port
from tests.operation.jobs import Launcher, rendezvous

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {repository!r})
DIRECTORY = {directory!r}
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def touch(name):
    open(f"{{DIRECTORY}}/{{name}}", "w").close()

def wait_for_file(name):
    while not os.path.exists(f"{{DIRECTORY}}/{{name}}"):
        time.sleep(0.01)

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    touch(f"waits.{{RANK}}")
    time.sleep(600)

def wait_until_others_wait():
    wait_for_file(f"waits.{{1 - RANK}}")

touch(f"started.{{RANK}}.{{ATTEMPT}}")
{body}
"""
"""A rank without torch."""
WATCHED = """
from megatron.config.operation import OperationConfig
from megatron.errors import report_crash
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.processes import die_with_parent
from megatron.operation.heartbeat import RunSettings

die_with_parent()
heartbeat = Heartbeat.attach(os.environ, int(os.environ["LOCAL_RANK"]))
heartbeat.dump_stacks_on_signal()
heartbeat.write_settings(RunSettings(RANK, 2, f"{DIRECTORY}/run", OperationConfig(hang_limit_s=1.0)).to_json())

def wait_in(section):
    heartbeat.enter(section)
    touch(f"waits.{RANK}")
    time.sleep(600)

def fail(text):
    report_crash(text, RuntimeError(), os.environ["TORCHELASTIC_ERROR_FILE"])
    os._exit(1)

if ATTEMPT:
    sys.exit(0)
heartbeat.start_training(0)
for iteration in range(1, 41):
    heartbeat.start_iteration(iteration)
    for section in (Section.STEP, Section.FORWARD_BACKWARD, Section.GRADS_REDUCE, Section.OPTIMIZER):
        heartbeat.enter(section)
        time.sleep(0.005)
"""
"""Prepended to a body: the rank has a real heartbeat, and has trained for 40 iterations. Restarted, it is complete."""
TWO = ("--standalone", "--nproc-per-node", "2")


def start(
    directory: Path,
    body: str,
    *flags: str,
    node: int | str = 0,
    prepare: Callable[[], object] | None = None,
    script_flags: Sequence[str] = (),
) -> Launcher:
    """Start the launcher, with a script whose ranks run ``body``."""
    words = [*flags, str(write_script(directory, body)), *script_flags]
    return Launcher(words, directory / f"node{node}.log", prepare=prepare)


def write_script(directory: Path, body: str) -> Path:
    script = directory / "rank.py"
    script.write_text(SCRIPT.format(repository=str(REPOSITORY), directory=str(directory), body=body))
    return script


def start_nodes(directory: Path, kind: str, body: str, **keywords: Any) -> list[Launcher]:
    """Launchers of a job on two nodes; the first has the store of the rendezvous."""
    port = free_port()
    return [start_node(directory, kind, port, node, body, **keywords) for node in range(2)]


def start_node(directory: Path, kind: str, port: int, node: int, body: str, restarts: int, **keywords: Any) -> Launcher:
    """One launcher of a job on two nodes; a third one waits for a place."""
    flags = ["--nnodes", "2", "--max-restarts", str(restarts), *rendezvous(kind, port)]
    # torch numbers nodes of one address by their processes: the first node has the store, as with static places.
    flags += (
        ["--node-rank", str(node)] if kind == "static" else ["--rdzv-conf", f"is_host={'false' if node else 'true'}"]
    )
    return start(directory, body, *flags, node=node, **keywords)


def attempts(directory: Path) -> int:
    """Attempts in which a rank has started: another may be ended before it has, because one has failed already."""
    return len({path.suffix for path in directory.glob("started.*.*")})


def waiting(directory: Path) -> int:
    """Ranks that wait."""
    return len(list(directory.glob("waits.*")))
