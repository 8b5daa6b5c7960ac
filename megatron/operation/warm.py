"""Warm processes: standby ranks that have imported everything, so that a restart does not wait for imports.

When the ranks of a node train, its launcher starts one further process per rank. It imports what the script imports for
training, at low priority, and waits. At a restart it receives the arguments, the environment and the output files of
the new rank, and runs the script. A standby that is not ready by then is killed, and the rank starts as usual.

Only a script or module that defines ``import_for_training()`` has warm processes: it must have no other effect when it
is run under another name than ``__main__``.
"""

import ast
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.operation.processes import LAUNCHER, die_with_parent

if TYPE_CHECKING:
    from megatron.operation.heartbeat import HeartbeatMemory

Execute = Callable[..., dict[str, Any]]
"""Runs a script or module under a name, and returns its globals."""

# Function of the script.
HOOK = "import_for_training"
_READY = b"ready"
# Seconds of training after which standby processes start.
_AFTER_SECONDS = 3.0
_REPOSITORY = Path(__file__).resolve().parents[2]
# Variables that a standby must not have: it is not a rank yet.
_OF_ONE_RANK = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
)


# --- launcher ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCommand:
    """How torch's agent starts a rank: ``prefix python [options] script arguments``, or ``-m module``."""

    prefix: tuple[str, ...]
    """For example numactl with its flags."""
    script: str
    """The path of a script, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool = False

    @staticmethod
    def parse(words: Sequence[str]) -> "RankCommand | None":
        """None for a command that is not a Python script or module with the hook."""
        if sys.executable not in words:
            return None
        python = words.index(sys.executable)
        rest = list(words[python + 1 :])
        while rest and rest[0] == "-u":
            rest.pop(0)
        is_module = rest[:1] == ["-m"]
        if is_module:
            rest.pop(0)
        if not rest or rest[0].startswith("-"):
            return None
        source = source_of(rest[0]) if is_module else Path(rest[0])
        if source is None or not has_hook(source):
            return None
        return RankCommand(tuple(words[:python]), rest[0], tuple(rest[1:]), is_module)


def source_of(module: str) -> Path | None:
    """The file of a module, which is not imported; the packages around it are."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def has_hook(script: Path) -> bool:
    """Whether a script defines or imports ``import_for_training``; it is not run."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return HOOK in functions | imports


class Standby:
    """A warm process of one local rank."""

    def __init__(self, command: RankCommand, environment: Mapping[str, str]) -> None:
        own, other = socket.socketpair()
        paths = [str(_REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
        variables = {name: value for name, value in environment.items() if name not in _OF_ONE_RANK}
        words = [*command.prefix, sys.executable, "-u", "-m", __name__, str(other.fileno())]
        words += ["module" if command.is_module else "script", command.script]
        with other:
            self.process = subprocess.Popen(
                words,
                env={**variables, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        own.setblocking(False)
        self.command = command
        self._connection = own
        self._received = b""

    def is_ready(self) -> bool:
        """Whether it waits for its rank."""
        with suppress(BlockingIOError, OSError):
            self._received += self._connection.recv(len(_READY) - len(self._received))
        return self._received == _READY and self.process.poll() is None

    def become(self, environment: Mapping[str, str], outputs: tuple[str | None, str | None]) -> subprocess.Popen[Any]:
        """Run the script as the rank of ``environment``, with standard output and error in the files ``outputs``."""
        order = {"arguments": self.command.arguments, "environment": dict(environment), "outputs": outputs}
        self._connection.setblocking(True)
        with self._connection:
            self._connection.sendall(json.dumps(order).encode())
        return self.process

    def end(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


class WarmProcesses:
    def __init__(self) -> None:
        self._commands: dict[int, tuple[RankCommand, dict[str, str]]] = {}
        self._standby: dict[int, Standby] = {}
        self._failed = False

    def started(self, local_rank: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        command = RankCommand.parse(words)
        if command is not None:
            self._commands[local_rank] = command, dict(environment)

    def prepare_when_training(self, heartbeats: "HeartbeatMemory") -> None:
        """:meth:`prepare`, once all ranks have trained for a moment: before, they need the cores themselves."""
        begun = time.monotonic_ns() - int(_AFTER_SECONDS * 1e9)
        for snapshot in heartbeats.snapshots():
            if snapshot is None or snapshot.attached_ns > begun or snapshot.section.label in ("start", "load"):
                return
        self.prepare()

    def prepare(self) -> None:
        """Start a standby for each rank that has none. Call it from a thread that lives as long as the launcher."""
        # One that ends by itself cannot import, and the next could not either.
        self._failed = self._failed or any(warm.process.poll() is not None for warm in self._standby.values())
        if self._failed:
            return
        for local_rank, (command, environment) in self._commands.items():
            if local_rank not in self._standby:
                self._standby[local_rank] = Standby(command, environment)

    def take(self, local_rank: int, words: Sequence[str]) -> Standby | None:
        """The standby for a rank with this command, if it is ready; otherwise its cores are freed."""
        warm = self._standby.pop(local_rank, None)
        if warm is None:
            return None
        if warm.is_ready() and warm.command == RankCommand.parse(words):
            return warm
        warm.end()
        return None

    def end(self) -> None:
        for warm in self._standby.values():
            warm.end()
        self._standby.clear()


# --- standby process -----------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Import, wait, become a rank: ``arguments`` are the number of the connection, ``script`` or ``module``, and its
    path or name."""
    descriptor, kind, script = arguments
    launcher = os.environ.get(LAUNCHER)
    die_with_parent(None if launcher is None else int(launcher))
    execute: Execute = runpy.run_path
    if kind == "module":
        execute = partial(runpy.run_module, alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    with socket.socket(fileno=int(descriptor)) as connection:
        _import_at_low_priority(partial(execute, script))
        connection.sendall(_READY)
        text = b""
        while part := connection.recv(1 << 16):
            text += part
    if not text:
        return  # the launcher has closed the connection
    order = json.loads(text)
    for name in set(os.environ) - set(order["environment"]):
        del os.environ[name]
    os.environ.update(order["environment"])
    for output, path in zip((1, 2), order["outputs"]):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, output)
            os.close(file)
    sys.argv = [script, *order["arguments"]]
    execute(script, run_name="__main__")


def _import_at_low_priority(execute: Execute) -> None:
    """Import in a thread of its own: on Linux a thread has a priority, and without privileges only lowers it."""

    def import_all() -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        execute(run_name="warm")[HOOK]()

    with ThreadPoolExecutor(1) as thread:
        if thread.submit(import_all).exception() is not None:
            os._exit(1)  # silently: the rank that starts instead says what is wrong


if __name__ == "__main__":
    main(sys.argv[1:])
