"""A save that fails costs that save: the run goes on, tries again, and ends when too many have failed in a row."""

import errno
import os
from pathlib import Path

import pytest

from megatron.checkpoint import storage
from megatron.checkpoint.directory import new_saving_directory
from megatron.checkpoint.safetensors_file import write_safetensors
from megatron.checkpoint.tokenizer_files import COPY
from megatron.operation import accounting, failure, run_files
from megatron.training.checkpoints import saver as saver_module
from megatron.training.checkpoints.saver import Saver
from megatron.training.checkpoints.state import RunState
from tests.checkpoint.file_faults import raise_error
from tests.end_to_end.run_process import Corpus, FlagValue, call_training, flags_of


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


@pytest.mark.parametrize(("failures", "allowed"), [(1, 1), (2, 1)])
def test_a_failure_is_a_warning_until_more_than_the_allowed_ones_in_a_row(
    corpus: Corpus,
    tmp_path: Path,
    failures: int,
    allowed: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def sometimes_spoiled(root: Path, iteration: int) -> Path:
        directory = new_saving_directory(root, iteration)
        if 2 <= iteration < 2 + failures:
            (directory / "rank_00000.safetensors").mkdir()
        return directory

    # The last attempt before the end is not made in the background.
    for module in ("background", "storage"):
        monkeypatch.setattr(f"megatron.checkpoint.{module}.new_saving_directory", sometimes_spoiled)
    changes: dict[str, FlagValue | Path] = {"train_iters": 5, "lr_decay_iters": 5, "max_failed_saves": allowed}
    outcome = call_training(command(corpus, tmp_path, async_save=True, bf16=True, **changes))
    assert "Iteration 2 is not saved: rank 0: Cannot write" in caplog.text
    assert "Training continues; the next attempt is now, after iteration 3." in caplog.text
    if failures <= allowed:
        outcome.succeeded()
        assert names(tmp_path) == saved(1, 3, 4, 5)
    else:
        assert outcome.exit_code != 0
        (sentence,) = outcome.errors
        assert f"The last {failures} saves failed, more than --max-failed-saves {allowed} allows: " in sentence
        assert "Cannot write" in sentence and "The newest checkpoint is of iteration 1." in sentence
        assert names(tmp_path) == saved(1)


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
