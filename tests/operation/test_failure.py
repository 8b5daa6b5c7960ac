"""failure.json: the rank that failed first, the cause, and the files."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron import errors
from megatron.errors import (
    ConfigError,
    DataError,
    DirectoryInUseError,
    LoaderError,
    NoProgressError,
    NotFiniteError,
    RankError,
    SilentCorruptionError,
    UserError,
    cause_of,
)
from megatron.operation import causes
from megatron.operation.attempts import Attempt, write_current
from megatron.operation.causes import EXPLANATIONS, Cause, OutOfMemoryKills
from megatron.operation.failure import (
    FILE,
    RankEnd,
    attempt_number,
    failure_of_ends,
    failure_of_lost_nodes,
    read_failure,
    record_own_failure,
    write_failure,
)
from megatron.operation.heartbeat import Heartbeat, Section

CLOSED = "Traceback ...\nRuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"
BUG = "Traceback ...\nZeroDivisionError: division by zero"


def end(rank: int, **changes: object) -> RankEnd:
    known = {"local_rank": rank, "host": "a", "exit_code": 1, "time": 100.0 + rank, "iteration": 7, "section": "step"}
    return RankEnd(rank=rank, **{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        ({"text": BUG, "cause": "exception"}, Cause.EXCEPTION),
        ({"exit_code": -signal.SIGKILL}, Cause.KILLED),
        ({"exit_code": -signal.SIGSEGV}, Cause.KILLED),
        ({"text": "ERROR: rank 2: no microbatch", "cause": "data", "exit_code": 2}, Cause.DATA),
        ({"text": "OSError: [Errno 28] No space left on device", "cause": "disk"}, Cause.DISK),
        ({"exit_code": 3}, Cause.UNKNOWN),
    ],
)
@pytest.mark.parametrize("moment", [50.0, 500.0])
def test_the_cause_is_named_among_its_consequences(culprit: dict[str, object], cause: Cause, moment: float) -> None:
    """Whether its end is noticed before theirs or after them."""
    others = [end(rank, text=CLOSED, cause="exception") for rank in (0, 1)] + [end(3, exit_code=-signal.SIGABRT)]
    failure = failure_of_ends([*others, end(2, time=moment, **culprit)], 1, out_of_memory=False)
    assert (failure.rank, failure.cause) == (2, cause)
    assert failure.iteration == 7 and failure.section == "step"


def test_of_two_causes_the_first_is_named() -> None:
    assert failure_of_ends([end(0, text=BUG, time=9.0), end(1, text=BUG, time=8.0)], 1, False).rank == 1


@pytest.mark.parametrize("moment", [50.0, 500.0])
def test_a_rank_that_aborts_precedes_those_that_lost_its_connection(moment: float) -> None:
    """gloo aborts a process that receives a message of another size, as after a wrong collective."""
    ends = [end(0, text=CLOSED, cause="exception"), end(1, exit_code=-signal.SIGABRT, time=moment)]
    failure = failure_of_ends(ends, 1, False)
    assert (failure.rank, failure.cause) == (1, Cause.KILLED)


def test_a_kill_for_memory_is_told_from_another_kill() -> None:
    killed = end(1, exit_code=-signal.SIGKILL)
    assert failure_of_ends([killed], 1, out_of_memory=True).cause == Cause.OUT_OF_MEMORY
    assert failure_of_ends([killed], 1, out_of_memory=False).cause == Cause.KILLED
    assert failure_of_ends([end(1, exit_code=-signal.SIGSEGV)], 1, out_of_memory=True).cause == Cause.KILLED


def test_an_error_of_all_ranks_names_none() -> None:
    text = "ERROR: Iteration 3 has loss nan: lower --lr."
    failure = failure_of_ends([end(0, text=text, cause="not_finite", is_local=False)], 1, False)
    assert failure.rank is None and failure.message == "Iteration 3 has loss nan: lower --lr."


def test_nodes_that_do_not_answer_are_named() -> None:
    failure = failure_of_lost_nodes({"b": [4, 5]})
    assert (failure.cause, failure.host, failure.rank) == (Cause.NODE_LOST, "b", 4)
    assert "b (ranks 4 and 5)" in failure.message
    assert failure_of_lost_nodes({"b": [4], "c": [6]}).host is None


# --- causes --------------------------------------------------------------------------------------------------


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("x"), Cause.EXCEPTION),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA out of memory"), Cause.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), Cause.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left"), Cause.DISK),
        (OSError(errno.ENOENT, "No such file"), Cause.EXCEPTION),
        (raised(UserError("the save failed"), OSError(errno.EIO, "input/output")), Cause.DISK),
        (ConfigError("--lr"), Cause.USER_ERROR),
        (DirectoryInUseError("out is in use"), Cause.IN_USE),
        (DataError("corpus"), Cause.DATA),
        (LoaderError("loader"), Cause.DATA),
        (NotFiniteError("nan"), Cause.NOT_FINITE),
        (NoProgressError("3 attempts"), Cause.NO_PROGRESS),
    ],
)
def test_the_cause_of_an_error(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) == cause


def test_every_cause_is_explained_and_every_error_has_a_known_one() -> None:
    assert EXPLANATIONS.keys() == set(Cause)
    assert all(item.advice and item.meaning and item.exit_codes for item in EXPLANATIONS.values())
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UserError)]
    assert {kind.cause for kind in kinds} <= set(Cause)


def test_the_page_has_the_table_of_causes() -> None:
    page = Path(__file__).parents[2] / "docs" / "failures.md"
    rows = [
        f"| `{cause}` | {item.meaning} | {item.advice} | {', '.join(str(int(code)) for code in item.exit_codes)} |"
        for cause, item in EXPLANATIONS.items()
    ]
    assert "\n".join(["| --- | --- | --- | --- |", *rows]) in page.read_text(encoding="utf-8")


def test_the_kernels_counter_of_kills(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpu:/\n4:memory:/job\n0::/slice/job\n")
    counter = tmp_path / "slice" / "job" / "memory.events"
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom 3\noom_kill 2\n")
    assert causes._oom_counter(groups, tmp_path) == counter
    kills = OutOfMemoryKills()
    kills._path, kills._before = counter, 2
    assert not kills.rose()
    counter.write_text("low 0\noom 4\noom_kill 3\n")
    assert kills.rose() and not kills.rose()
    counter.unlink()
    assert not kills.rose()


# --- files ---------------------------------------------------------------------------------------------------

FIELDS = {"schema", "attempt", "time", "cause", "rank", "local_rank", "host", "iteration", "microbatch", "section"}
FIELDS |= {"message", "stack", "groups", "last_checkpoint", "advice", "exit_code"}


def test_the_files_have_every_field(tmp_path: Path) -> None:
    failure = failure_of_ends([end(1, text=BUG, committed_iteration=5)], 1, False)
    write_failure(tmp_path, failure, 3)
    found = read_failure(tmp_path / FILE)
    assert found == read_failure(tmp_path / "failures" / "0003.json")
    assert found is not None and found.keys() == FIELDS
    assert (found["attempt"], found["cause"], found["rank"], found["exit_code"]) == (3, "exception", 1, 1)
    assert found["last_checkpoint"] == 5 and BUG in found["stack"] and found["advice"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert attempt_number(tmp_path, time.time()) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_failure(tmp_path / FILE) is None


def test_the_number_is_that_of_the_attempt_under_way(tmp_path: Path) -> None:
    assert attempt_number(tmp_path, 1.0) == 1
    write_current(tmp_path, Attempt(attempt=7, start=1.0, end=2.0, outcome="running"))
    assert attempt_number(tmp_path, 1.0) == 7
    # The record of an attempt that was lost is still there.
    assert attempt_number(tmp_path, 3.0) == 8


@pytest.mark.parametrize(
    ("error", "writes_on"),
    [
        (ValueError("bug"), (0, 1)),
        (RankError("mine"), (0, 1)),
        (NotFiniteError("nan"), (0,)),
        (SilentCorruptionError("bits of rank 1", [1]), (1,)),
        (SilentCorruptionError("bits of some rank", [0, 1]), (0,)),
    ],
)
def test_without_a_launcher_the_first_rank_writes(tmp_path: Path, error: Exception, writes_on: tuple[int, ...]) -> None:
    for rank in (1, 0):
        heartbeat = Heartbeat()
        heartbeat.write_settings({"run_dir": str(tmp_path / str(rank))})
        heartbeat.start_iteration(9)
        heartbeat.enter(Section.SAVE)
        record_own_failure(error, "the text", rank, rank, heartbeat)
        assert (tmp_path / str(rank) / FILE).exists() == (rank in writes_on)
    heartbeat = Heartbeat()
    heartbeat.write_settings({"run_dir": str(tmp_path / "0")})
    time.sleep(0.01)
    heartbeat_later = Heartbeat()
    heartbeat_later.write_settings({"run_dir": str(tmp_path / "0")})
    record_own_failure(ValueError("first"), "first", 1, 1, heartbeat)
    record_own_failure(ValueError("second"), "second", 0, 0, heartbeat_later)
    found = json.loads((tmp_path / "0" / FILE).read_text())
    assert "first" in found["message"] and found["attempt"] == (2 if 0 in writes_on else 1)
    earlier = json.loads((tmp_path / str(writes_on[0]) / "failures" / "0001.json").read_text())
    assert earlier["section"] == "save" and earlier["message"].endswith("the text")


def test_who_is_kept_out_writes_nothing_or_only_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    heartbeat = Heartbeat()
    record_own_failure(ValueError("x"), "x", 0, 0, heartbeat)
    heartbeat.write_settings({"run_dir": str(tmp_path)})
    record_own_failure(DirectoryInUseError("out is in use"), "the text", 0, 0, heartbeat)
    heartbeat.write_settings({"run_dir": str(tmp_path / "file")})
    record_own_failure(ValueError("x"), "x", 0, 0, heartbeat)
    assert os.listdir(tmp_path) == ["file"]
    assert capsys.readouterr().err.count("cannot be written") == 1
