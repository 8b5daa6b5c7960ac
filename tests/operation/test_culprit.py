"""Which rank is named, from evidence: stacks, heartbeats, and what the kernel says of processes."""

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from megatron.core.communication import Communicator
from megatron.core.control import ControlGroup
from megatron.core.transport.shared_memory import SharedMemoryTransport
from megatron.core.transport.torch_distributed import Transport
from megatron.operation import evidence
from megatron.operation.causes import Cause
from megatron.operation.culprit import failure_of_hang, find_culprit
from megatron.operation.evidence import (
    STOPPED,
    ChildProcess,
    Evidence,
    Frame,
    child_processes,
    count_switches,
    group_by_stack,
    is_waiting_for_ranks,
    main_stack,
    parse_stacks,
    process_state,
)
from megatron.operation.namespace import fresh_namespace
from megatron.operation.waits import MeteredTopology
from tests.end_to_end.run_process import wait_until

DUMP = """\
Thread 0x00007f1a2bfff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f1a4c0b2740 (most recent call first):
  File "{repository}/megatron/operation/waits.py", line 44 in measure
  File "{repository}/megatron/core/communication.py", line 64 in wait
  File "{repository}/megatron/training/loop/step.py", line 88 in train_step
  File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line ??? in __next__
  File "{repository}/pretrain_llama.py", line 90 in <module>
  Garbage-collecting
"""


def text() -> str:
    return DUMP.replace("{repository}/", evidence._REPOSITORY)


def test_the_text_of_a_dump_is_parsed() -> None:
    other, main = parse_stacks(text())
    assert [frame.function for frame in other] == ["wait", "_bootstrap"]
    assert main[0] == Frame("megatron/operation/waits.py", 44, "measure")
    assert main[3] == Frame("torch/nn/modules/module.py", 0, "__next__")
    assert main_stack([other, main]) == main_stack([main, other]) == main
    assert parse_stacks("") == [] and main_stack([]) is None
    assert parse_stacks("no stack\n  File x") == []


@pytest.mark.parametrize(
    "waits", [fresh_namespace, MeteredTopology, Communicator, ControlGroup, Transport, SharedMemoryTransport]
)
def test_what_waits_for_ranks_is_found_in_its_file(waits: Callable[..., object]) -> None:
    """The files are named by their paths, which a move must not leave behind."""
    assert is_waiting_for_ranks((Frame(str(inspect.getsourcefile(waits)).removeprefix(evidence._REPOSITORY), 1, ""),))


WAITING = parse_stacks(text())[1]
SHARED_MEMORY = "megatron/core/transport/shared_memory.py"
SLEEPING = (Frame("corpus.py", 3, "read"), Frame("pretrain_llama.py", 90, "<module>"))


@pytest.mark.parametrize(
    ("stack", "is_waiting"),
    [
        (WAITING, True),
        (SLEEPING, False),
        # The caller of a collective that computes is not in it.
        ((Frame("torch/nn/functional.py", 5, "linear"), *WAITING), False),
        # A send that a thread of ours waits for.
        ((Frame("/usr/lib/python3.11/threading.py", 327, "wait"), Frame(SHARED_MEMORY, 89, "wait")), True),
        ((Frame("/usr/lib/python3.11/queue.py", 180, "get"), Frame("megatron/data/loader.py", 9, "f")), False),
        ((Frame(SHARED_MEMORY, 310, "_wait_until"), *WAITING[1:]), True),
        ((), False),
    ],
)
def test_a_rank_that_waits_for_others_is_recognized(stack: tuple[Frame, ...], is_waiting: bool) -> None:
    assert is_waiting_for_ranks(stack) == is_waiting


def rank(number: int, **changes: object) -> Evidence:
    """A rank that waits in a collective, as the others of a run do for a culprit."""
    waiting = Evidence(
        rank=number,
        local_rank=number % 4,
        host=f"host{number // 4}",
        pid=1000 + number,
        section="grads-reduce",
        seconds=70.0 + number / 1000,
        iteration=12,
        microbatch=4,
        collectives=500,
        state="S",
        stack=WAITING,
    )
    return replace(waiting, **changes)  # type: ignore[arg-type]


STOPPED_WRITER = ChildProcess(77, "T", "background writer")


@pytest.mark.parametrize("number", [1, 2, 8])
@pytest.mark.parametrize(
    ("changes", "cause", "reason"),
    [
        ({"state": "T", "stack": None}, Cause.STOPPED_PROCESS, "stopped"),
        ({"state": None, "stack": None, "pid": None}, Cause.KILLED, "ended"),
        ({"state": None, "stack": None, "pid": None, "is_lost": True}, Cause.NODE_LOST, "launcher"),
        ({"state": "D", "stack": None}, Cause.HANG, "kernel"),
        ({"children": (STOPPED_WRITER,), "section": "save"}, Cause.STOPPED_PROCESS, "background writer 77"),
        ({"waits_for_lock": True}, Cause.HANG, "interpreter's lock"),
        ({"stack": SLEEPING}, Cause.HANG, "does not wait"),
        ({"iteration": 11, "collectives": 450}, Cause.HANG, "iteration 11"),
        ({"section": "optimizer"}, Cause.HANG, "section"),
        ({"collectives": 499}, Cause.HANG, "number of collectives"),
        ({"seconds": 90.0}, Cause.HANG, "oldest"),
    ],
)
def test_the_culprit_is_named(number: int, changes: dict[str, object], cause: Cause, reason: str) -> None:
    """Among 16 ranks, and (where the evidence does not need a majority) among two."""
    evidence = [rank(other) for other in range(16)]
    evidence[number] = rank(number, **changes)
    verdict = find_culprit(evidence)
    assert (verdict.rank, verdict.cause) == (number, cause)
    assert reason in verdict.reason
    if "section" not in changes or len(changes) > 1:
        assert find_culprit([rank(0), evidence[number]]).rank == number


def test_strong_evidence_comes_before_weak() -> None:
    """A stopped rank behind which another, in its loader, is the oldest."""
    evidence = [rank(0), rank(1, state="T", stack=None), rank(2, section="data", seconds=100.0, stack=SLEEPING)]
    assert find_culprit(evidence).rank == 1
    # Among ranks that do not wait for others, the one behind.
    evidence = [rank(0), rank(1, stack=SLEEPING), rank(2, stack=SLEEPING, iteration=11)]
    assert find_culprit(evidence).rank == 2


def test_a_spare_rank_is_not_taken_for_the_odd_one() -> None:
    spare = rank(3, section="spare", stack=SLEEPING, iteration=None, collectives=0, seconds=9000.0)
    assert find_culprit([rank(0), rank(1, iteration=11), rank(2), spare]).rank == 1
    assert find_culprit([rank(0), rank(1), rank(2), spare]).rank is None


def test_different_roles_in_a_pipeline_are_not_taken_for_a_rank_behind() -> None:
    """Stages start different numbers of collectives in every iteration."""
    evidence = [rank(0, collectives=9000), rank(1, collectives=5000), rank(2, collectives=5000)]
    assert find_culprit(evidence).rank is None


def test_nothing_is_claimed_where_nothing_distinguishes_a_rank() -> None:
    """For example a network that is cut."""
    verdict = find_culprit([rank(number) for number in range(4)])
    failure = failure_of_hang(verdict, [rank(number) for number in range(4)], 61.0, 60.0)
    assert verdict.rank is None and failure.rank is None and failure.section == "grads-reduce"
    assert "nothing distinguishes" in failure.message and "limit is 60.0 s" in failure.message


def test_one_rank_alone_is_named() -> None:
    failure = failure_of_hang(find_culprit([rank(0)]), [rank(0)], 61.0, 60.0)
    assert failure.rank == 0 and "grads-reduce of iteration 12" in failure.message


def test_ranks_in_different_collectives_are_reported_with_their_numbers() -> None:
    """A rank that calls another collective: two waits, at two places."""
    elsewhere = (*WAITING[:2], Frame("megatron/training/loop/listeners.py", 9, "extra"), WAITING[-1])
    evidence = [rank(0), rank(1), rank(2, stack=elsewhere, collectives=501)]
    failure = failure_of_hang(find_culprit(evidence), evidence, 61.0, 60.0)
    assert failure.rank == 2
    assert "ranks 0 and 1 at megatron/training/loop/step.py:88 in train_step (collective 500)" in failure.message
    assert "rank 2 at megatron/training/loop/listeners.py:9 in extra (collective 501)" in failure.message
    assert [group["ranks"] for group in failure.groups] == [[0, 1], [2]]


def test_evidence_travels_as_json() -> None:
    one = rank(3, children=(STOPPED_WRITER,))
    assert Evidence.from_json(json.loads(json.dumps(asdict(one)))) == one


def test_ranks_are_grouped_by_stack() -> None:
    assert group_by_stack({0: SLEEPING, 1: WAITING, 2: WAITING, 3: None}) == [
        ([1, 2], WAITING),
        ([0], SLEEPING),
        ([3], None),
    ]


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
        wait_until(lambda: len(child_processes(process.pid)) == 1 and count_switches(process.pid)[1] == 2, PATIENCE)
        (child,) = child_processes(process.pid)
        assert child.role == "helper process" and child.state not in STOPPED
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: child_processes(process.pid)[0].state in STOPPED, PATIENCE)
        assert process_state(process.pid) not in (None, *STOPPED)
        assert {one.pid for one in child_processes(os.getpid())} >= {process.pid, child.pid}
        assert count_switches(process.pid)[0] > 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process_state(process.pid) is None and child_processes(process.pid) == ()
