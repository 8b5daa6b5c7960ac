"""Standby processes become ranks: with the arguments, environment and output files of the new attempt."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.operation.warm import RankCommand, Standby, WarmProcesses
from tests.end_to_end.run_process import wait_until
from tests.operation.jobs import PATIENCE, environment_of, standby_processes

SCRIPT = """
import json, os, sys

def import_for_training():
    import wave
    {hook}

if __name__ == "__main__":
    found = [sys.argv, dict(os.environ), "wave" in sys.modules, sys.path[0], os.getpriority(os.PRIO_PROCESS, 0)]
    print(json.dumps(found), flush=True)
    sys.exit(7)
"""


@pytest.fixture
def warm() -> Iterator[WarmProcesses]:
    processes = WarmProcesses()
    yield processes
    processes.end()


def words(directory: Path, *arguments: str, hook: str = "pass") -> list[str]:
    """The command of a rank, as torchrun's."""
    script = directory / "script.py"
    script.write_text(SCRIPT.format(hook=hook))
    return [sys.executable, "-u", str(script), *arguments]


def are_ready(warm: WarmProcesses) -> bool:
    """Whether every rank has a standby that is ready."""
    return bool(warm._standby) and all(standby.is_ready() for standby in warm._standby.values())


def test_a_standby_becomes_a_rank(tmp_path: Path, warm: WarmProcesses) -> None:
    command, environment = words(tmp_path, "--lr", "1"), dict(os.environ, RANK="0", OLD="1")
    warm.started(0, command, environment)
    warm.prepare()
    warm.prepare()  # has no effect
    wait_until(lambda: are_ready(warm), PATIENCE)
    standby = warm.take(0, command)
    assert standby is not None and "RANK" not in environment_of(standby.process.pid)
    new = {**{name: value for name, value in environment.items() if name != "OLD"}, "RANK": "3"}
    process = standby.become(new, (str(tmp_path / "out"), None))
    assert process.wait(PATIENCE) == 7
    arguments, variables, has_imported, first_path, niceness = json.loads((tmp_path / "out").read_text())
    assert arguments == command[2:] and has_imported and first_path == str(tmp_path)
    assert variables == new
    assert niceness == os.getpriority(os.PRIO_PROCESS, 0)  # only its imports have a low priority
    assert warm.take(0, command) is None


def test_ranks_that_start_as_usual(tmp_path: Path, warm: WarmProcesses) -> None:
    """Before a standby is ready, with another command, and after a standby that could not import."""
    slow = words(tmp_path, hook="import time; time.sleep(600)")
    warm.started(0, slow, os.environ)
    warm.prepare()
    assert not are_ready(warm) and warm.take(0, slow) is None
    quick = words(tmp_path)
    warm.prepare()
    wait_until(lambda: are_ready(warm), PATIENCE)
    assert warm.take(0, [*quick, "--other"]) is None
    words(tmp_path, hook="raise ImportError")
    warm.prepare()
    wait_until(lambda: not standby_processes(os.getpid()), PATIENCE)
    warm.prepare()
    assert not standby_processes(os.getpid())
    assert not are_ready(warm) and warm.take(0, quick) is None


def test_a_standby_becomes_a_rank_of_a_module(tmp_path: Path, warm: WarmProcesses) -> None:
    (tmp_path / "warm_module.py").write_text(SCRIPT.format(hook="pass"))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    command = RankCommand((), "warm_module", ("--lr", "1"), is_module=True)
    standby = Standby(command, environment)
    wait_until(standby.is_ready, PATIENCE)
    process = standby.become(environment, (str(tmp_path / "out"), None))
    assert process.wait(PATIENCE) == 7
    arguments, _, has_imported, _, _ = json.loads((tmp_path / "out").read_text())
    assert arguments == [str(tmp_path / "warm_module.py"), "--lr", "1"] and has_imported


def test_commands_with_standby_and_without(tmp_path: Path) -> None:
    """A script that does not define the hook might train when it is imported."""
    plain = words(tmp_path, "--lr", "1")
    module = [sys.executable, "-u", "-m", "megatron.commands.pretrain_llama", "--lr", "1"]
    assert RankCommand.parse(plain) == RankCommand((), plain[2], ("--lr", "1"))
    assert RankCommand.parse(module) == RankCommand((), module[3], ("--lr", "1"), is_module=True)
    bound = ("numactl", "-N", "0")
    assert RankCommand.parse([*bound, *plain]) == RankCommand(bound, plain[2], ("--lr", "1"))
    for rest in ([], ["-u", "-m", "module"], ["-u", "missing.py"], ["-u", __file__]):
        assert RankCommand.parse([sys.executable, *rest]) is None
    assert RankCommand.parse(["sh", "-c", "true"]) is None
