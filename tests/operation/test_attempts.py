"""What attempts leave for the next one: a count of failures, a pause before the restart, and how long stays last."""

import json
from pathlib import Path

import pytest

from megatron.errors import ExitCode, NoProgressError
from megatron.operation import hang as stays
from megatron.operation.attempts import FILE, AttemptCounter, FailedAttempts, read
from megatron.operation.hang import command_key, longest_stays, write_stays
from megatron.operation.nodes import Backoff

LIMIT = 3


def begin(directory: Path, newest_iteration: int | None) -> AttemptCounter:
    """Start an attempt, which then fails unless it is taken back."""
    counter = AttemptCounter(directory, LIMIT)
    counter.begin(newest_iteration)
    return counter


def is_refused(directory: Path, newest_iteration: int | None) -> bool:
    try:
        begin(directory, newest_iteration)
    except NoProgressError as error:
        assert error.exit_code == ExitCode.NO_PROGRESS
        assert str(directory / FILE) in str(error)
        return True
    return False


@pytest.mark.parametrize("newest", [None, 0, 40])
def test_the_start_after_three_failures_is_refused_until_the_file_is_gone(tmp_path: Path, newest: int | None) -> None:
    assert [is_refused(tmp_path, newest) for _ in range(5)] == [False] * LIMIT + [True] * 2
    (tmp_path / FILE).unlink()
    assert not is_refused(tmp_path, newest)


def test_a_new_checkpoint_starts_the_count_anew(tmp_path: Path) -> None:
    """A first one, too; and one below the others, after a return to it."""
    for newest in (None, None, 5, 5, 10, 10, 5, 5, 5):
        assert not is_refused(tmp_path, newest)
    assert is_refused(tmp_path, 5)


def test_an_attempt_that_is_stopped_on_request_is_not_counted_and_forgives_nothing(tmp_path: Path) -> None:
    begin(tmp_path, 5)
    begin(tmp_path, 5)
    for _ in range(4):
        begin(tmp_path, 5).take_back(5)
    assert not is_refused(tmp_path, 5)
    assert is_refused(tmp_path, 5)


def test_nothing_is_left_behind_by_attempts_that_end_as_they_should(tmp_path: Path) -> None:
    begin(tmp_path, None).take_back(None)
    begin(tmp_path, None).take_back(5)
    begin(tmp_path, 5)
    assert list(tmp_path.iterdir())
    begin(tmp_path, 5).take_back(10)
    assert not list(tmp_path.iterdir())


DAMAGED = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"failed": 9}', b'{"newest_iteration": 5, "failed": "9"}']
DAMAGED += [b"\0" * 4096, b"[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_never_blocks_a_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert read(tmp_path / FILE) is None
    begin(tmp_path, 5)
    assert read(tmp_path / FILE) == FailedAttempts(5, 1)


def test_the_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    """A crash leaves the count before or the count after; what cannot be replaced leaves no draft."""
    begin(tmp_path, 5)
    (before := tmp_path / "before").hardlink_to(tmp_path / FILE)
    begin(tmp_path, 5)
    assert read(before) == FailedAttempts(5, 1) and read(tmp_path / FILE) == FailedAttempts(5, 2)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        begin(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", FILE]


# --- the pause before a restart ------------------------------------------------------------------------------


def test_pauses() -> None:
    """None before the first restart, then doubling up to a limit; progress starts the count anew."""
    backoff = Backoff(first_s=1.0, longest_s=30.0)
    assert [backoff.pause_after_failure(False) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.pause_after_failure(True) == 0
    assert [backoff.pause_after_failure(False) for _ in range(3)] == [0, 1, 2]


# --- stays ---------------------------------------------------------------------------------------------------

KEY = command_key(["pretrain_llama.py", "--bf16"], 8)


def test_the_longest_stay_of_the_same_command_counts(tmp_path: Path) -> None:
    assert longest_stays(tmp_path, KEY) == longest_stays(None, KEY) == {}
    write_stays(tmp_path, KEY, "a", {"start": 8.0, "save": 0.4})
    write_stays(tmp_path, KEY, "a", {"start": 8.0, "save": 0.5})
    write_stays(tmp_path, KEY, "b", {"start": 2.0, "save": 0.6})
    write_stays(tmp_path, command_key(["pretrain_llama.py", "--bf16"], 16), "c", {"start": 100.0})
    assert longest_stays(tmp_path, KEY) == {"start": 8.0, "save": 0.6}
    assert len(json.loads((tmp_path / stays.FILE).read_text())["attempts"]) == 3


def test_old_attempts_are_forgotten(tmp_path: Path) -> None:
    for attempt in range(40):
        write_stays(tmp_path, KEY, str(attempt), {"save": float(40 - attempt)})
    assert longest_stays(tmp_path, KEY) == {"save": 20.0}


@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", "[" * 100_000, '{"schema": 1, "attempts": 3}', '{"schema": 1, "attempts": [3, {"command": []}]}'],
)
def test_a_damaged_file_teaches_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / stays.FILE).write_text(text)
    assert longest_stays(tmp_path, KEY) == {}
    write_stays(tmp_path, KEY, "a", {"save": 1.0})
    assert longest_stays(tmp_path, KEY) == {"save": 1.0}
