"""``python -m megatron.operation.launch``: which exit codes end a job, on how many nodes, and what it says last."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SubprocessContext

from megatron.errors import ExitCode
from megatron.operation import agent, ranks
from megatron.operation.agent import final_code
from megatron.operation.attempts import failures_without_progress, history, read_current
from megatron.operation.signals import StopSignals
from tests.end_to_end.run_process import REPOSITORY, environment, wait_until
from tests.operation.jobs import PATIENCE, children, is_alive, kill_all, rendezvous
from tests.operation.scripted_ranks import TWO, attempts, start, start_nodes, waiting, write_script

CODES = [([0, 0], None), ([1, -15], None), ([-9], None), ([75, 75], 75), ([75, -15], 75), ([1, 2], 2), ([2, 93], 93)]


@pytest.mark.parametrize(("codes", "final"), CODES)
def test_codes_that_end_a_job(codes: list[int], final: int | None) -> None:
    assert final_code(codes) == final


@pytest.mark.parametrize(
    ("body", "exit_code", "number"),
    [
        ("sys.exit(0)", 0, 1),
        ("sys.exit(2)", 2, 1),
        ("sys.exit(75)", 75, 1),
        ("sys.exit(93)", 93, 1),
        ("sys.exit(1)", 1, 3),
        ("sys.exit(1 if ATTEMPT < 2 else 2)", 2, 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if ATTEMPT == 0 else sys.exit(0)", 0, 2),
        # A rank that knows better than the others, which its end makes crash.
        ("sys.exit(2 - RANK)", 2, 1),
        # torchrun signals the others as soon as the first ends on request, which now would kill this one.
        ("time.sleep(1.0) if RANK else None; touch(f'saved.{RANK}'); sys.exit(75)", 75, 1),
    ],
)
def test_restarts_and_exit_code(tmp_path: Path, body: str, exit_code: int, number: int) -> None:
    assert start(tmp_path, body, *TWO, "--max-restarts", "2").exit_code() == exit_code
    assert attempts(tmp_path) == number
    assert len(list(tmp_path.glob("saved.*"))) == 2 * ("saved" in body)


def test_the_command_restarts_its_ranks_and_ends_with_their_code(tmp_path: Path) -> None:
    """In a Python of its own; the other tests fork launchers."""
    script = write_script(tmp_path, "sys.exit(75 if ATTEMPT else 1)")
    words = [sys.executable, "-m", "megatron.operation.launch", *TWO, "--max-restarts", "1", str(script)]
    assert subprocess.run(words, env=environment(), cwd=REPOSITORY, timeout=PATIENCE).returncode == 75
    assert attempts(tmp_path) == 2


def shorten_waits() -> None:
    """The limits that do not matter, of torch and of a save, are longer than the patience."""
    ranks.CRASH_SECONDS, close = 1, SubprocessContext._close
    setattr(SubprocessContext, "_close", lambda self, death_sig, timeout=0: close(self, death_sig, 600))  # noqa: B010


def test_a_rank_that_hangs_beside_one_that_crashed_is_killed_soon(tmp_path: Path) -> None:
    """SIGTERM does not end it: it waits for a rank that is no more."""
    node = start(tmp_path, "hang() if RANK else (wait_until_others_wait(), sys.exit(1))", *TWO, prepare=shorten_waits)
    assert node.exit_code() == ExitCode.CRASH


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_is_passed_on_and_the_save_is_waited_for_however_often_it_is_repeated(
    tmp_path: Path, name: str
) -> None:
    """SLURM's daemon sends SIGTERM, and srun once more."""
    save = f"signal.signal(signal.{name}, lambda *_: (wait_for_file('go'), touch(f'saved.{{RANK}}'), os._exit(75)))"
    flags = ["--max-restarts", "2", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    node = start(tmp_path, f"{save}; touch(f'waits.{{RANK}}'); time.sleep(600)", *TWO, *flags)
    wait_until(lambda: waiting(tmp_path) == 2, PATIENCE)
    for _ in range(3 if name == "SIGTERM" else 1):
        node.signal(signal.Signals[name])
        time.sleep(0.5)
    (tmp_path / "go").touch()
    assert node.exit_code() == ExitCode.STOPPED
    assert attempts(tmp_path) == 1 and len(list(tmp_path.glob("saved.*"))) == 2
    assert "FAILED" not in node.text() and "Traceback" not in node.text()


def test_a_rank_that_waits_for_one_that_the_stop_has_ended_is_killed_soon(tmp_path: Path) -> None:
    """The signal of the stop ends a rank before it handles signals; the other one does, and waits for it to join."""
    body = "hang() if RANK else (wait_until_others_wait(), touch('ready'), time.sleep(600))"
    node = start(tmp_path, body, *TWO, prepare=shorten_waits)
    wait_until((tmp_path / "ready").exists, PATIENCE)
    node.signal(signal.SIGTERM)
    assert node.exit_code() == ExitCode.STOPPED


def send_a_signal_while_ranks_are_forked() -> None:
    def stop() -> None:
        if getattr(signal.getsignal(signal.SIGTERM), "__qualname__", "").startswith(StopSignals.__name__):
            signal.raise_signal(signal.SIGTERM)

    os.register_at_fork(after_in_parent=stop)


def test_a_signal_that_arrives_while_ranks_are_forked_stops_the_job(tmp_path: Path) -> None:
    """Python only prints the exception of a hook of ``os.fork``."""
    node = start(tmp_path, "time.sleep(600)", *TWO, "--max-restarts", "2", prepare=send_a_signal_while_ranks_are_forked)
    assert node.exit_code() == ExitCode.STOPPED


def send_a_signal_when_a_rank_is_started(directory: Path) -> None:
    start_rank = vars(agent)["start_rank"]

    def start_and_stop(*arguments: Any) -> Any:
        process = start_rank(*arguments)
        (directory / f"{process.pid}.pid").touch()
        signal.raise_signal(signal.SIGTERM)
        return process

    vars(agent)["start_rank"] = start_and_stop


def test_a_signal_between_the_starts_of_two_ranks_ends_both(tmp_path: Path) -> None:
    """torch has no record of the first one yet."""
    node = start(tmp_path, "time.sleep(600)", *TWO, prepare=partial(send_a_signal_when_a_rank_is_started, tmp_path))
    assert node.exit_code() == ExitCode.STOPPED
    assert [is_alive(int(path.stem)) for path in tmp_path.glob("*.pid")] == [False, False]


def wait_long_for_a_signal() -> None:
    agent.SIGNAL_SECONDS = PATIENCE


def test_a_job_that_is_stopped_before_its_ranks_handle_signals_has_not_failed(tmp_path: Path) -> None:
    """SLURM also signals the ranks themselves, some of them before the launcher."""
    node = start(tmp_path, "time.sleep(600)", *TWO, "--max-restarts", "2", prepare=wait_long_for_a_signal)
    wait_until(lambda: len(list(tmp_path.glob("started.*"))) == 2, PATIENCE)
    running = children(node.pid)
    for rank in running:
        os.kill(rank, signal.SIGTERM)
    wait_until(lambda: children(node.pid) != running, PATIENCE)  # the launcher knows it
    node.signal(signal.SIGTERM)
    assert node.exit_code() == ExitCode.STOPPED
    assert attempts(tmp_path) == 1
    assert "failed" not in node.text()


def handles_sigterm(pid: int) -> bool:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> signal.SIGTERM - 1 & 1)


def test_a_job_that_waits_for_its_nodes_is_stopped(tmp_path: Path) -> None:
    node = start(tmp_path, "sys.exit(0)", "--nnodes", "2", *rendezvous("c10d"))
    wait_until(lambda: handles_sigterm(node.pid), PATIENCE)
    time.sleep(1.0)  # until it waits
    node.signal(signal.SIGTERM)
    assert node.exit_code() == ExitCode.STOPPED


COUNTED = """
from pathlib import Path
from megatron.config.operation import OperationConfig
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.heartbeat import RunSettings
settings = RunSettings(RANK, 1, DIRECTORY, OperationConfig(), ("host",), counts_from=0)
Heartbeat.attach(os.environ, 0).write_settings(settings.to_json())
hang()
"""


def counts_from(directory: Path) -> int | None:
    current = read_current(directory)
    return -1 if current is None else current.counts_from


def test_a_preemption_that_leaves_no_time_to_save_is_no_failed_attempt(tmp_path: Path) -> None:
    """Else three preemptions before the first checkpoint end with 93. The launcher is killed, too, after the grace."""
    for number in range(4):
        node = start(tmp_path, COUNTED, "--standalone", "--nproc-per-node", "1")
        wait_until((tmp_path / "waits.0").exists, PATIENCE)
        wait_until(lambda: counts_from(tmp_path) == 0, PATIENCE)
        ranks = children(node.pid)
        node.signal(signal.SIGTERM)
        wait_until(lambda: counts_from(tmp_path) is None, PATIENCE)
        kill_all([node.pid, *ranks])
        node.process.join(PATIENCE)
        (tmp_path / "waits.0").unlink()
        found = history(tmp_path, before=time.time())
        assert len(found) == number + 1 and failures_without_progress(found, 0) == 0


@pytest.mark.slow(reason="waits for a time limit")
def test_ranks_that_take_too_long_to_stop_are_killed(tmp_path: Path) -> None:
    node = start(tmp_path, "hang()", *TWO, "--shutdown-timeout", "1")
    wait_until(lambda: waiting(tmp_path) == 2, PATIENCE)
    node.signal(signal.SIGTERM)
    assert node.exit_code() == ExitCode.CRASH


# --- what is said last ---------------------------------------------------------------------------------------

SENTENCE = """
from megatron.errors import ConfigError, report
report(ConfigError("--lr -1 must be positive: take another."), RANK, os.environ["TORCHELASTIC_ERROR_FILE"])
os._exit(2)
"""
LOCAL = """
from megatron.errors import RankError, report, report_crash
if RANK == 1:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"] + ".pid", "w") as file:
        file.write(str(os.getpid()))
    report(RankError("rank 1: corpus.bin was truncated."), RANK, os.environ["TORCHELASTIC_ERROR_FILE"])
    os._exit(2)
other = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error", "/1/error")
while not os.path.exists(other):
    time.sleep(0.01)
with open(other + ".pid") as file:
    status = f"/proc/{file.read()}/stat"
try:
    while open(status).read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
except OSError:
    pass  # it has ended, and the launcher knows it
time.sleep(0.3)
report_crash("Traceback ...: Connection closed by peer", os.environ["TORCHELASTIC_ERROR_FILE"])
os._exit(1)
"""


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(SENTENCE, "ERROR: --lr -1 must be positive: take another."), (LOCAL, "ERROR: rank 1: corpus.bin was truncated.")],
    ids=["all ranks know", "one rank knows"],
)
@pytest.mark.parametrize("is_torchrun", [True, False], ids=["torchrun", "our launcher"])
def test_the_sentence_stands_in_the_last_box(tmp_path: Path, is_torchrun: bool, body: str, sentence: str) -> None:
    if is_torchrun:
        words = [sys.executable, "-m", "torch.distributed.run", *TWO, str(write_script(tmp_path, body))]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == ExitCode.CRASH
        text = ended.stderr
    else:
        node = start(tmp_path, body, *TWO)
        assert node.exit_code() == ExitCode.ACTION_REQUIRED
        text = node.text()
        assert "Traceback (most recent call last)" not in text
    last_box = text[text.rindex("Root Cause (first observed failure):") :]
    assert sentence in last_box and "error_file: <N/A>" not in last_box


# --- several nodes -------------------------------------------------------------------------------------------

RESTART = "hang() if RANK and not ATTEMPT else sys.exit(0 if ATTEMPT else (wait_until_others_wait(), 1)[1])"


@pytest.mark.slow(reason="launchers on two nodes")
@pytest.mark.parametrize("kind", ["static", "c10d"])
@pytest.mark.parametrize(
    ("body", "exit_code", "number"),
    [
        # The other node's rank waits for a message that never comes.
        ("hang() if RANK else (wait_until_others_wait(), sys.exit(2))", 2, 1),
        ("(wait_until_others_wait(), sys.exit(2)) if RANK else hang()", 2, 1),
        # The other node's rank crashes, because its neighbour is gone, and waits for it when it is started again.
        ("sys.exit(2) if RANK == 0 else time.sleep(600) if ATTEMPT else sys.exit(1)", 2, None),
        ("sys.exit(2) if RANK == 1 else time.sleep(600) if ATTEMPT else sys.exit(1)", 2, None),
        ("sys.exit(75)", 75, 1),
        # All nodes restart together.
        (RESTART, 0, 2),
        ("hang() if RANK else (wait_until_others_wait(), sys.exit(1))", 1, 3),
    ],
    ids=["2 on the first", "2 on the second", "2 and 1", "1 and 2", "75", "a restart", "no restarts left"],
)
def test_all_nodes_end_or_restart_together(
    tmp_path: Path, kind: str, body: str, exit_code: int, number: int | None
) -> None:
    nodes = start_nodes(tmp_path, kind, body, restarts=2)
    assert [node.exit_code() for node in nodes] == [exit_code] * 2, [node.text() for node in nodes]
    if number is not None:
        assert attempts(tmp_path) == number


def never_read_nodes() -> None:
    agent._NODES_SECONDS = 1e9


@pytest.mark.slow(reason="launchers on two nodes")
def test_a_restart_is_counted_on_a_node_that_sees_the_other_one_join(tmp_path: Path) -> None:
    """The node without a crash sees that the other one waits for it before it reads the request of a restart."""
    nodes = start_nodes(tmp_path, "c10d", RESTART, restarts=2, prepare=never_read_nodes)
    assert [node.exit_code() for node in nodes] == [0, 0], [node.text() for node in nodes]
    assert attempts(tmp_path) == 2


LISTENING = """
from contextlib import suppress
inodes = set()
for name in os.listdir(f"/proc/{os.getppid()}/fd"):
    with suppress(OSError):
        inodes.add(os.readlink(f"/proc/{os.getppid()}/fd/{name}"))
for family in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{family}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            print("LISTENS", fields[1].split(":")[0], flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads /proc")
def test_a_standalone_launcher_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    """Its stores accept what anybody sends who can reach them."""
    node = start(tmp_path, LISTENING, "--standalone", "--nproc-per-node", "1")
    assert node.exit_code() == ExitCode.COMPLETE
    listening = [line.split()[1] for line in node.text().splitlines() if line.startswith("LISTENS")]
    assert listening and set(listening) <= {"0100007F", "00000000000000000000000001000000"}
