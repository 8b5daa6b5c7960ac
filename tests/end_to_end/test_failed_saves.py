"""A save that fails costs that save: the run goes on, tries again, and ends when too many have failed in a row."""

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint import storage
from megatron.checkpoint.safetensors_file import write_safetensors
from megatron.checkpoint.tokenizer_files import COPY
from megatron.commands import pretrain_llama
from megatron.operation import accounting, failure, run_files
from megatron.training.checkpoints import saver as saver_module
from megatron.training.checkpoints.saver import Saver
from megatron.training.checkpoints.state import RunState
from tests.checkpoint.file_faults import ALL, NotAllowed, make_read_only, mount_small, raise_error, small_disk
from tests.end_to_end.run_process import (
    ENVIRONMENT,
    START_TIMEOUT,
    Corpus,
    FlagValue,
    call_training,
    flags_of,
    fork_training,
    iterations,
)
from tests.forked import fork_context

DISK = 16 << 20
"""Bytes of the small disk: enough for five checkpoints of the tiny run."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save is tried again at once."""
    monkeypatch.setattr(saver_module, "LAST_SAVE_PAUSE", 0.0)


def command(corpus: Corpus, save: Path, **changes: FlagValue | Path) -> list[str]:
    """A run of six iterations that saves after each."""
    common: dict[str, FlagValue | Path] = {"train_iters": 6, "lr_decay_iters": 6, "save": save, "save_interval": 1}
    return flags_of(corpus, **common | {"global_batch_size": 4} | changes)


def names(root: Path) -> list[str]:
    """What lies in a directory of checkpoints, but the tokenizer, the records of attempts and of their failures."""
    records = {accounting.ATTEMPTS, accounting.CURRENT, failure.FILE, failure.DIRECTORY, *run_files.FILES}
    records |= {run_files.EARLIER, COPY}
    return sorted(set(os.listdir(root)) - records)


def saved(*numbers: int) -> list[str]:
    """What shall lie there."""
    return [*(f"iter_{number:07d}" for number in numbers), "latest_checkpointed_iteration.txt"]


# --- a disk that is full for a while --------------------------------------------------------------------------

Trouble = Callable[[Path], Callable[[bool], object]]
"""Prepares a directory; the result brings the trouble about, or ends it."""


def full_disk(place: Path) -> Callable[[bool], object]:
    """Room for nothing."""
    leave = small_disk(place, DISK)
    return lambda is_on: leave(8192 if is_on else ALL)


def read_only(place: Path) -> Callable[[bool], object]:
    """A file system that becomes read-only; in this test it stays so."""
    mount_small(place, DISK)
    return lambda is_on: make_read_only(place) if is_on else None


def train_with_trouble(place: Path, trouble: Trouble, during: range, flags: Sequence[str], log: Path) -> None:
    """Train; what is saved in the iterations ``during`` meets ``trouble``."""
    try:
        bring = trouble(place)
    except NotAllowed as error:
        log.write_text(f"not allowed: {error}")
        return
    save = Saver.save

    def troubled_save(self: Saver, state: RunState) -> None:
        bring(state.progress.iteration in during)
        save(self, state)
        # An asynchronous save meets it as well, and the one before does not.
        if self._background is not None and self._background.saving is not None:
            _ = self._background.saving.finish_own() or self._background.saving.finish()

    os.environ.update(ENVIRONMENT)
    with log.open("w", buffering=1) as stream, redirect_stdout(stream), redirect_stderr(stream):
        with mock.patch.object(Saver, "save", troubled_save), mock.patch.object(saver_module, "LAST_SAVE_PAUSE", 0.0):
            code = pretrain_llama.main(flags)
        print(f"\nexit {code}, left {names(place / 'run')}", file=sys.stderr)


def outcome_of(
    tmp_path: Path, trouble: Trouble, during: range, flags: Callable[[Path], Sequence[str]]
) -> tuple[str, int, str]:
    """The log, the exit code and what is left of a run that meets trouble."""
    place, log = tmp_path / "place", tmp_path / "log"
    place.mkdir()
    arguments = (place, trouble, during, flags(place / "run"), log)
    process = fork_context().Process(target=train_with_trouble, args=arguments)
    process.start()
    process.join(START_TIMEOUT)
    text = log.read_text()
    if text.startswith("not allowed"):
        pytest.skip(text)
    assert process.exitcode == 0, text
    text, _, ending = text.rpartition("\nexit ")
    code, _, left = ending.partition(", left ")
    return text, int(code), left.strip()


@pytest.mark.slow(reason="many saves with pauses")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_disk_that_is_full_for_a_while_costs_the_saves_of_that_while(
    corpus: Corpus, tmp_path: Path, async_save: bool
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = partial(command, corpus, async_save=async_save, metrics_jsonl=metrics, save_retain_last=2)
    log, code, left = outcome_of(tmp_path, full_disk, range(2, 4), flags)
    assert code == 0, log
    assert [record["iteration"] for record in iterations(metrics)] == [1, 2, 3, 4, 5, 6]
    for number in (2, 3):
        (line,) = [line for line in log.splitlines() if f"Iteration {number} is not saved: " in line]
        assert "No space left on device): free some space" in line
        assert "The newest checkpoint is of iteration 1." in line
        assert (
            f"Training continues; the next attempt is {'now, ' if async_save else ''}after iteration {number + 1}."
            in line
        )
    # Nothing was deleted while the disk was full: iteration 1 went when 4 and 5 were there.
    assert "deleted" not in log.partition("saved checkpoint")[2].partition("iter_0000004")[0]
    assert left == str(saved(5, 6))


@pytest.mark.slow(reason="many saves with pauses")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_disk_that_stays_read_only_ends_the_run(corpus: Corpus, tmp_path: Path, async_save: bool) -> None:
    flags = partial(command, corpus, async_save=async_save, max_failed_saves=2, train_iters=20, lr_decay_iters=20)
    log, code, left = outcome_of(tmp_path, read_only, range(2, 20), flags)
    assert code != 0
    (sentence,) = [line for line in log.splitlines() if line.startswith("ERROR: ")]
    assert "The last 3 saves failed, more than --max-failed-saves 2 allows: " in sentence
    assert "Read-only file system" in sentence and "The newest checkpoint is of iteration 1." in sentence
    assert " iteration        4/" in log and " iteration        5/" not in log
    # The lock and the count of attempts cannot be removed any more.
    assert left == str([".run.lock", "failed_attempts.json", *saved(1)])


# --- errors on one rank ---------------------------------------------------------------------------------------


def main_with_error(flags: Sequence[str]) -> int:
    """The entry point; on rank 1 the files of the second and third save meet an error of the disk."""
    count: Iterator[int] = iter(range(1, 100))
    if os.environ["RANK"] != "1":
        return pretrain_llama.main(flags)
    write = write_safetensors

    def sometimes(*arguments: object) -> object:
        return raise_error(errno.EIO) if next(count) in (2, 3) else write(*arguments)  # type: ignore[arg-type]

    with mock.patch.object(storage, "write_safetensors", sometimes):
        return pretrain_llama.main(flags)


@pytest.mark.slow(reason="two ranks")
@pytest.mark.parametrize("allowed", [3, 1])
def test_an_error_on_one_rank_is_everybodys(corpus: Corpus, tmp_path: Path, allowed: int) -> None:
    save = tmp_path / "run"
    flags = command(corpus, save, tensor_model_parallel_size=2, max_failed_saves=allowed)
    outcome = fork_training(flags, 2, main_with_error)
    assert "Iteration 2 is not saved: Rank 1: Cannot write" in outcome.stderr
    if allowed == 3:
        outcome.succeeded()
        assert names(save) == saved(1, 4, 5, 6)
    else:
        assert outcome.exit_code != 0
        (sentence,) = outcome.errors
        assert "The last 2 saves failed, more than --max-failed-saves 1 allows: Rank 1: Cannot write" in sentence
        assert names(save) == saved(1)


# --- the last save --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [2, 3])
def test_the_last_save_is_tried_three_times(
    corpus: Corpus, tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, count = write_safetensors, iter(range(1, 100))

    def at_first_not(*arguments: object) -> object:
        # The first save is that of iteration 4.
        is_failure = 1 < next(count) <= 1 + failures
        return raise_error(errno.EDQUOT) if is_failure else write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(storage, "write_safetensors", at_first_not)
    outcome = call_training(command(corpus, tmp_path, save_interval=4))
    assert caplog.text.count("Iteration 6 is not saved") == 2
    if failures == 2:
        outcome.succeeded()
        assert names(tmp_path) == saved(4, 6)
    else:
        assert outcome.exit_code != 0
        (sentence,) = outcome.errors
        assert "Iteration 6, the last of this run, is not saved, after 3 attempts: " in sentence
        assert "Disk quota exceeded): free some space" in sentence
        assert "The newest checkpoint is of iteration 4." in sentence
        assert names(tmp_path) == saved(4)


def test_a_run_whose_directory_was_taken_over_ends_at_once(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Saver.save

    def taken_over(self: Saver, state: RunState) -> None:
        if state.progress.iteration == 2:
            lock = tmp_path / ".run.lock"
            lock.write_text(lock.read_text().replace(self._locks[0].token, "another"))
        save(self, state)

    monkeypatch.setattr(Saver, "save", taken_over)
    outcome = call_training(command(corpus, tmp_path))
    assert outcome.exit_code != 0
    assert "was taken over by process" in outcome.errors[0]
    assert [name for name in names(tmp_path) if name.startswith("iter")] == ["iter_0000001"]
