"""What a crash in the middle of a commit leaves, and which checkpoints retention deletes."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.directory import (
    TRACKER,
    Retention,
    hidden_path,
    iteration_directory,
    locate_checkpoint,
    remove_checkpoint,
)
from megatron.checkpoint.finding import find_checkpoint, list_checkpoints
from megatron.checkpoint.manifest import read_manifest
from megatron.errors import CheckpointError
from tests.checkpoint.directories import names, write_checkpoint


def label(root: Path, iteration: int) -> str:
    """The label of the checkpoint that a reader finds; its file must be there too."""
    directory = locate_checkpoint(root, iteration)
    text: str = read_manifest(directory).state["label"]
    assert (directory / "rank_00000.safetensors").read_text() == text
    return text


def test_layout(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    write_checkpoint(root, 100)
    assert names(root) == ["iter_0000100", TRACKER]
    assert (root / TRACKER).read_text() == "100"
    assert iteration_directory(root, 12_345_678).name == "iter_12345678"


def test_the_next_save_clears_leftovers_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    for leftover in (".iter_0000002.saving-0123abcd", ".iter_0000001.replaced-0123abcd"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "rank_00000.safetensors").touch()
    (tmp_path / f".{TRACKER}.saving-0123abcd").touch()
    (tmp_path / ".iter_notes").mkdir()
    write_checkpoint(tmp_path, 3)
    assert names(tmp_path) == [".iter_notes", "iter_0000001", "iter_0000003", TRACKER]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_checkpoint(tmp_path, 1)
    finally:
        os.umask(before)
    assert (tmp_path / "iter_0000001").stat().st_mode & 0o777 == 0o755


def test_a_checkpoint_behind_a_link_is_replaced_and_stays_where_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", 1, "far")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "iter_0000001").symlink_to(tmp_path / "other" / "iter_0000001")
    write_checkpoint(tmp_path / "root", 1, "near")
    assert label(tmp_path / "root", 1) == "near"
    assert label(tmp_path / "other", 1) == "far"


class Crash(BaseException):
    """The process is gone: no handler of an ordinary error sees it."""


def crashes(allowed: int, call: Callable[[], object]) -> bool:
    """Let ``call`` change the file system ``allowed`` times, and die before the next one; whether it came so far."""
    left = allowed

    def guard(change: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Crash
            left -= 1
            return change(*args, **kwargs)

        return guarded

    names = ("rename", "replace", "unlink", "rmdir", "fsync", "mkdir")
    guarded_changes: dict[str, Any] = {name: guard(getattr(os, name)) for name in names}
    with mock.patch.multiple(os, **guarded_changes), suppress(Crash):
        call()
        return False
    return True


@pytest.mark.parametrize("iteration", [1, 2])
def test_a_crash_at_any_moment_leaves_a_checkpoint_and_no_leftover_that_stays(tmp_path: Path, iteration: int) -> None:
    """Over an earlier save of the same iteration (1), and of another one (2)."""
    labels = []
    for allowed in range(100):
        root = tmp_path / str(allowed)
        write_checkpoint(root, 1, "old")
        crashed = crashes(allowed, partial(write_checkpoint, root, iteration, "new"))
        found = find_checkpoint(root)
        assert found in (1, iteration)
        labels.append(label(root, found))
        if not crashed:
            break
        write_checkpoint(root, 3, "next")
        assert names(root) in (
            ["iter_0000001", "iter_0000003", TRACKER],
            ["iter_0000001", "iter_0000002", "iter_0000003", TRACKER],
        )
        assert label(root, found) == labels[-1]
    # First the old one, from one moment on the new one, and never anything else.
    assert sorted(labels, reverse=True) == labels
    assert {"old", "new"} == set(labels)
    assert len(labels) > 8


def test_a_half_removed_checkpoint_is_none(tmp_path: Path) -> None:
    for allowed in range(1, 12):
        write_checkpoint(tmp_path, 1)
        directory = iteration_directory(tmp_path, 1)
        for number in range(10):
            (directory / f"another_{number}").touch()
        assert crashes(allowed, partial(remove_checkpoint, directory))
        assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_loses_its_name_on_the_disk_before_its_files(tmp_path: Path) -> None:
    """A rename and a sync; a power failure may keep later changes without earlier ones that were not synced."""
    write_checkpoint(tmp_path, 1)
    whole = names(iteration_directory(tmp_path, 1))
    assert crashes(2, partial(remove_checkpoint, iteration_directory(tmp_path, 1)))
    (hidden,) = tmp_path.glob(".iter_*")
    assert names(hidden) == whole


def test_a_half_removed_checkpoint_that_was_replaced_is_not_put_back(tmp_path: Path) -> None:
    """A crash may leave the rest of its files."""
    write_checkpoint(tmp_path, 1)
    replaced = hidden_path(iteration_directory(tmp_path, 1), "replaced")
    os.rename(iteration_directory(tmp_path, 1), replaced)
    assert list_checkpoints(tmp_path)
    with mock.patch("shutil.rmtree", side_effect=Crash), pytest.raises(Crash):
        remove_checkpoint(replaced)
    assert list_checkpoints(tmp_path) == []


def test_a_removal_that_was_cut_short_is_completed_by_the_next_save(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    for allowed in range(4):
        write_checkpoint(tmp_path, 1)
        assert crashes(allowed, partial(remove_checkpoint, iteration_directory(tmp_path, 1)))
        write_checkpoint(tmp_path, 3)
        assert names(tmp_path) == ["iter_0000001"] * (allowed == 0) + ["iter_0000002", "iter_0000003", TRACKER]


def test_an_error_while_replacing_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, 1, "old")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if ".saving-" in source.name:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match=r"Cannot write .*iter_0000001 .*Input/output error"):
        write_checkpoint(tmp_path, 1, "new")
    assert label(tmp_path, 1) == "old"
    assert "iter_0000001" in names(tmp_path)


# --- retention ----------------------------------------------------------------------------------------------


class Disk:
    """Says which iterations are damaged, and counts who asks."""

    def __init__(self, damaged: Collection[int] = ()) -> None:
        self.damaged, self.asked = damaged, list[int]()

    def verify(self, iteration: int) -> None:
        self.asked.append(iteration)
        if iteration in self.damaged:
            raise CheckpointError(f"{iteration} is damaged")


@pytest.mark.parametrize(
    ("last", "interval", "damaged", "expected"),
    [
        (2, None, (), [30, 20, 10]),
        (1, None, (), [40, 30, 20, 10]),
        (9, None, (), []),
        (None, 20, (), [30, 10]),
        (2, 20, (), [30, 10]),
        (None, 25, (), [40, 30, 20, 10]),
        # Two broken newer ones do not count for the two that are kept, nor are they deleted.
        (2, None, (50, 40), [10]),
        (1, None, (50,), [30, 20, 10]),
        (2, None, (50, 40, 30, 20), []),
        (None, 30, (50, 40, 30, 20, 10), []),
    ],
)
def test_what_is_deleted(last: int | None, interval: int | None, damaged: tuple[int, ...], expected: list[int]) -> None:
    assert Retention(last, interval, Disk(damaged).verify).superfluous([10, 20, 30, 40, 50]) == expected


@given(
    iterations=st.sets(st.integers(1, 60)).map(sorted),
    last=st.integers(1, 5),
    interval=st.none() | st.integers(1, 10),
    damaged=st.sets(st.integers(1, 60)),
)
def test_the_newest_good_ones_and_the_milestones_stay(
    iterations: list[int], last: int, interval: int | None, damaged: set[int]
) -> None:
    gone = set(Retention(last, interval, Disk(damaged).verify).superfluous(iterations))
    good = [iteration for iteration in iterations if iteration not in damaged]
    assert not gone & set(good[-last:])
    assert not any(iteration % interval == 0 for iteration in gone if interval)
    if gone:
        assert max(gone) < min(good[-last:])


def test_each_is_read_once_and_only_for_a_reason() -> None:
    disk = Disk()
    retention = Retention(2, None, disk.verify)
    assert retention.superfluous([1, 2]) == []
    assert disk.asked == []
    assert retention.superfluous([1, 2, 3]) == [1]
    assert retention.superfluous([2, 3, 4]) == [2]
    assert disk.asked == [3, 2, 4]
