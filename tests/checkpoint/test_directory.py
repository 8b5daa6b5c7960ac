"""Which checkpoint is found, and what a crash in the middle of a commit leaves."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.checkpoint.directory import (
    MANIFEST,
    TRACKER,
    commit,
    hidden_path,
    iteration_directory,
    locate_checkpoint,
    new_saving_directory,
    remove_checkpoint,
)
from megatron.checkpoint.finding import find_checkpoint, list_checkpoints
from megatron.checkpoint.manifest import Manifest, encode_manifest, read_manifest
from megatron.checkpoint.remote_path import path_of
from megatron.errors import CheckpointError


def write(root: Path, iteration: int, label: str = "") -> None:
    """Save a checkpoint without tensors, whose state is ``label``."""
    saving = new_saving_directory(root, iteration)
    (saving / "rank_00000.safetensors").write_text(label)
    commit(saving, root, iteration, encode_manifest(Manifest({}, (), {"label": label})))


def label(root: Path, iteration: int) -> str:
    """The label of the checkpoint that a reader finds; its file must be there too."""
    directory = locate_checkpoint(root, iteration)
    text: str = read_manifest(directory).state["label"]
    assert (directory / "rank_00000.safetensors").read_text() == text
    return text


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_layout(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    write(root, 100)
    assert names(root) == ["iter_0000100", TRACKER]
    assert (root / TRACKER).read_text() == "100"
    assert iteration_directory(root, 12_345_678).name == "iter_12345678"


@pytest.mark.parametrize("make", [False, True])
def test_nothing_saved_yet_is_a_fresh_start(tmp_path: Path, make: bool) -> None:
    root = tmp_path / "root"
    if make:
        root.mkdir()
        (root / "notes.txt").touch()
    assert find_checkpoint(root) is None
    assert list_checkpoints(root) == []


# A number of which the manifests know nothing better, or none at all.
TRACKERS = [b"", b"garbage", b"200", b"201", b"0", b"-1", b"1e9", b"9" * 5000, b"200\n\n", b"\xff\xfe", b"\0\0\0\0"]
TRACKERS += [b"release", b"[3]"]


@pytest.mark.parametrize("tracker", [*TRACKERS, None], ids=lambda tracker: str(tracker)[:10])
def test_whatever_the_tracker_says_the_newest_readable_directory_wins(tmp_path: Path, tracker: bytes | None) -> None:
    for iteration in (10, 9, 200):
        write(tmp_path, iteration)
    if tracker is None:
        (tmp_path / TRACKER).unlink()
    else:
        (tmp_path / TRACKER).write_bytes(tracker)
    assert find_checkpoint(tmp_path) == 200
    assert list_checkpoints(tmp_path) == [9, 10, 200]


@pytest.mark.parametrize("tracker", TRACKERS, ids=lambda tracker: str(tracker)[:10])
def test_a_tracker_without_checkpoints_is_not_a_fresh_start(tmp_path: Path, tracker: bytes) -> None:
    (tmp_path / TRACKER).write_bytes(tracker)
    with pytest.raises(CheckpointError, match="has no readable checkpoint"):
        find_checkpoint(tmp_path)


def test_a_continuation_that_was_abandoned_does_not_come_back(tmp_path: Path) -> None:
    """Nor does a broken checkpoint bring it back."""
    for iteration in (10, 50, 100):
        write(tmp_path, iteration)
    os.utime(tmp_path / "iter_0000100" / MANIFEST, (1, 1))
    write(tmp_path, 60)
    assert find_checkpoint(tmp_path) == 60
    (tmp_path / "iter_0000010" / MANIFEST).unlink()
    assert find_checkpoint(tmp_path) == 60
    write(tmp_path, 110)
    assert find_checkpoint(tmp_path) == 110
    assert list_checkpoints(tmp_path) == [50, 60, 100, 110]


@pytest.mark.parametrize(("is_by_hand", "found"), [(True, 10), (False, 200)])
def test_a_tracker_set_back_by_hand_is_a_return_to_that_checkpoint(
    tmp_path: Path, is_by_hand: bool, found: int
) -> None:
    """One that a kill left behind, between the last rename and the tracker, is as old as what it names."""
    for iteration in (9, 10, 200):
        write(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("10")
    if not is_by_hand:
        written = (tmp_path / "iter_0000010" / MANIFEST).stat().st_mtime
        os.utime(tmp_path / TRACKER, (written, written))
    assert find_checkpoint(tmp_path) == found


@pytest.mark.parametrize("at_url", [False, True])
@pytest.mark.parametrize("manifest", ["{", "[" * 100_000])
def test_an_unreadable_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, manifest: str, at_url: bool
) -> None:
    write(tmp_path, 2)
    write(tmp_path, 1)
    (tmp_path / "iter_0000002" / MANIFEST).write_text(manifest)
    root = path_of(f"file://{tmp_path}" if at_url else str(tmp_path))
    assert find_checkpoint(root) == 1
    assert list_checkpoints(tmp_path) == [1]
    assert "iteration 2" in caplog.text and "damaged" in caplog.text
    assert "iter_0000002" in names(tmp_path)


def test_a_requested_step_is_taken_or_refused_with_what_there_is(tmp_path: Path) -> None:
    for iteration in (10, 20):
        write(tmp_path, iteration)
    assert find_checkpoint(tmp_path, 10) == 10
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 15; it has: 10, 20"):
        find_checkpoint(tmp_path, 15)
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 15; it has: none"):
        find_checkpoint(tmp_path / "elsewhere", 15)
    (tmp_path / "iter_0000020" / MANIFEST).write_text("")
    with pytest.raises(CheckpointError, match=r"iter_0000020/manifest\.json is damaged"):
        find_checkpoint(tmp_path, 20)


@pytest.mark.parametrize("spoil", ["empty manifest", "no manifest", "no directory"])
def test_the_loss_of_all_checkpoints_is_not_a_fresh_start(tmp_path: Path, spoil: str) -> None:
    write(tmp_path, 1)
    manifest = tmp_path / "iter_0000001" / MANIFEST
    if spoil == "empty manifest":
        manifest.write_text("")
    else:
        manifest.unlink()
    if spoil == "no directory":
        (tmp_path / "iter_0000001").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="has no readable checkpoint"):
        find_checkpoint(tmp_path)


def test_a_root_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    with pytest.raises(CheckpointError, match="root"):
        find_checkpoint(tmp_path / "root")
    with pytest.raises(CheckpointError, match="root"):
        new_saving_directory(tmp_path / "root", 1)


def test_the_next_save_clears_leftovers_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for leftover in (".iter_0000002.saving-0123abcd", ".iter_0000001.replaced-0123abcd"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "rank_00000.safetensors").touch()
    (tmp_path / f".{TRACKER}.saving-0123abcd").touch()
    (tmp_path / ".iter_notes").mkdir()
    write(tmp_path, 3)
    assert names(tmp_path) == [".iter_notes", "iter_0000001", "iter_0000003", TRACKER]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path, 1)
    finally:
        os.umask(before)
    assert (tmp_path / "iter_0000001").stat().st_mode & 0o777 == 0o755


def test_a_checkpoint_behind_a_link_is_replaced_and_stays_where_it_is(tmp_path: Path) -> None:
    write(tmp_path / "other", 1, "far")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "iter_0000001").symlink_to(tmp_path / "other" / "iter_0000001")
    write(tmp_path / "root", 1, "near")
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
        write(root, 1, "old")
        crashed = crashes(allowed, partial(write, root, iteration, "new"))
        found = find_checkpoint(root)
        assert found in (1, iteration)
        labels.append(label(root, found))
        if not crashed:
            break
        write(root, 3, "next")
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
        write(tmp_path, 1)
        directory = iteration_directory(tmp_path, 1)
        for number in range(10):
            (directory / f"another_{number}").touch()
        assert crashes(allowed, partial(remove_checkpoint, directory))
        assert list_checkpoints(tmp_path) == []


def test_a_half_removed_checkpoint_that_was_replaced_is_not_put_back(tmp_path: Path) -> None:
    """A crash may leave the rest of its files."""
    write(tmp_path, 1)
    replaced = hidden_path(iteration_directory(tmp_path, 1), "replaced")
    os.rename(iteration_directory(tmp_path, 1), replaced)
    assert list_checkpoints(tmp_path)
    with mock.patch("shutil.rmtree", side_effect=Crash), pytest.raises(Crash):
        remove_checkpoint(replaced)
    assert list_checkpoints(tmp_path) == []


def test_a_removal_that_was_cut_short_is_completed_by_the_next_save(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for allowed in range(4):
        write(tmp_path, 1)
        assert crashes(allowed, partial(remove_checkpoint, iteration_directory(tmp_path, 1)))
        write(tmp_path, 3)
        assert names(tmp_path) == ["iter_0000001"] * (allowed == 0) + ["iter_0000002", "iter_0000003", TRACKER]


def test_an_error_while_replacing_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, "old")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if ".saving-" in source.name:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match=r"Cannot write .*iter_0000001 .*Input/output error"):
        write(tmp_path, 1, "new")
    assert label(tmp_path, 1) == "old"
    assert "iter_0000001" in names(tmp_path)
