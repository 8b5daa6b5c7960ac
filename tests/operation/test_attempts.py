"""Attempts that fail without a new checkpoint are counted, and the run ends after the third."""

import json
import os
from pathlib import Path

import pytest

from megatron.errors import ExitCode, NoProgressError
from megatron.operation.attempts import FILE, AttemptCounter, FailedAttempts, read

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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"failed": 9}',
        b'{"newest_iteration": 5, "failed": "9"}',
        b"\0" * 4096,
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_never_blocks_a_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert read(tmp_path / FILE) is None
    begin(tmp_path, 5)
    assert read(tmp_path / FILE) == FailedAttempts(5, 1)


def test_the_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash leaves the count before or the count after; a full disk leaves no draft."""
    begin(tmp_path, 5)

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        begin(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert json.loads((tmp_path / FILE).read_text()) == {"newest_iteration": 5, "failed": 1}
