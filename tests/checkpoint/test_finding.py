"""Which checkpoint a run starts from: the newest that is whole, or an error that says there is none."""

import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint.directory import MANIFEST, TRACKER, iteration_directory, new_saving_directory
from megatron.checkpoint.files import path_of
from megatron.checkpoint.finding import find_checkpoint, list_checkpoints
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import find_saved_run
from tests.checkpoint.directories import names, write_checkpoint
from tests.checkpoint.fault_run import ALONE, Saved, load_newest, save
from tests.data.file_damage import flip_a_bit, lose, zero_a_block
from tests.rank_pool import RankPool


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
        write_checkpoint(tmp_path, iteration)
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
        write_checkpoint(tmp_path, iteration)
    os.utime(tmp_path / "iter_0000100" / MANIFEST, (1, 1))
    write_checkpoint(tmp_path, 60)
    assert find_checkpoint(tmp_path) == 60
    (tmp_path / "iter_0000010" / MANIFEST).unlink()
    assert find_checkpoint(tmp_path) == 60
    write_checkpoint(tmp_path, 110)
    assert find_checkpoint(tmp_path) == 110
    assert list_checkpoints(tmp_path) == [50, 60, 100, 110]


@pytest.mark.parametrize(("is_by_hand", "found"), [(True, 10), (False, 200)])
def test_a_tracker_set_back_by_hand_is_a_return_to_that_checkpoint(
    tmp_path: Path, is_by_hand: bool, found: int
) -> None:
    """One that a kill left behind, between the last rename and the tracker, is as old as what it names."""
    for iteration in (9, 10, 200):
        write_checkpoint(tmp_path, iteration)
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
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 1)
    (tmp_path / "iter_0000002" / MANIFEST).write_text(manifest)
    root = path_of(f"file://{tmp_path}" if at_url else str(tmp_path))
    assert find_checkpoint(root) == 1
    assert list_checkpoints(tmp_path) == [1]
    assert "iteration 2" in caplog.text and "damaged" in caplog.text
    assert "iter_0000002" in names(tmp_path)


def test_a_requested_step_is_taken_or_refused_with_what_there_is(tmp_path: Path) -> None:
    for iteration in (10, 20):
        write_checkpoint(tmp_path, iteration)
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
    write_checkpoint(tmp_path, 1)
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


# --- damaged files ------------------------------------------------------------------------------------------


FILES = [MANIFEST, "rank_00000.safetensors", "rank_00001.safetensors"]
ITERATIONS = [1, 2, 3]


def save_all(root: Path) -> None:
    """Three checkpoints."""
    world = ControlGroup(range(2), dist.get_rank())
    for iteration in ITERATIONS:
        save("sync", root, Saved(iteration, 0), world)


@pytest.fixture(scope="module")
def saved_by_two(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints that two ranks have saved."""
    root = tmp_path_factory.mktemp("saved") / "run"
    four_ranks.run(save_all, root, world_size=2)
    return root


@pytest.fixture
def root(saved_by_two: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return Path(shutil.copytree(saved_by_two, tmp_path / "run"))


def resize(change: Callable[[int], int], path: Path, chance: random.Random) -> None:
    """Cut a file off, or lengthen it."""
    os.truncate(path, change(path.stat().st_size))


def mistake(path: Path, chance: random.Random) -> None:
    """A file of the same name from another checkpoint."""
    content = path.read_bytes()
    others = (other.read_bytes() for other in sorted(path.parent.parent.glob(f"iter_*/{path.name}")))
    # One of them may itself have become a copy of this.
    path.write_bytes(chance.choice([other for other in others if other != content] or [b""]))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "empty": partial(resize, lambda size: 0),
    "half": partial(resize, lambda size: size // 2),
    "a byte less": partial(resize, lambda size: size - 1),
    "a byte more": partial(resize, lambda size: size + 1),
    "a flipped bit": flip_a_bit,
    "a page of zeros": zero_a_block,
    "missing": lose,
    "another save's": mistake,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_its_checkpoint_passed_over(
    root: Path, chance: random.Random, damage: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = iteration_directory(root, 3) / file
    DAMAGES[damage](victim, chance)
    assert load_newest(root, ALONE) == Saved(2, 0)
    assert "Skipping the checkpoint of iteration 3" in caplog.text
    # One without a manifest is no checkpoint, and by another's manifest it is the other files that are damaged.
    name = victim.parent if file == MANIFEST else victim
    with pytest.raises(CheckpointError, match=re.escape(str(name))):
        load_newest(root, ALONE, fall_back=False)


def test_of_any_files_that_are_damaged_no_corrupt_checkpoint_and_no_fresh_start_comes(
    root: Path, tmp_path: Path, chance: random.Random
) -> None:
    for trial in range(60):
        copy = Path(shutil.copytree(root, tmp_path / f"trial_{trial}"))
        bad = chance.sample(ITERATIONS, k=chance.randrange(len(ITERATIONS) + 1))
        for iteration in bad:
            damage = DAMAGES[chance.choice(sorted(DAMAGES))]
            damage(iteration_directory(copy, iteration) / chance.choice(FILES), chance)
        good = set(ITERATIONS) - set(bad)
        if good:
            assert load_newest(copy, ALONE) == Saved(max(good), 0)
        else:
            with pytest.raises(CheckpointError):
                load_newest(copy, ALONE)
        shutil.rmtree(copy)


def test_where_all_are_damaged_the_latest_is_named(root: Path, chance: random.Random) -> None:
    for iteration in ITERATIONS:
        DAMAGES["a flipped bit"](iteration_directory(root, iteration) / FILES[1], chance)
    with pytest.raises(CheckpointError, match="iter_0000003"):
        load_newest(root, ALONE)


def test_a_copy_of_an_abandoned_checkpoint_does_not_come_back(tmp_path: Path) -> None:
    """After a return to an older one, from which the copies are still behind."""
    root, copies = tmp_path / "run", tmp_path / "copies"
    for iteration in (1, 3):
        save("sync", root, Saved(iteration, 0), ALONE)
        save("sync", copies, Saved(iteration, 0), ALONE)
    for directory in (root, copies):
        os.utime(iteration_directory(directory, 3) / MANIFEST, (1, 1))
    save("sync", root, Saved(2, 1), ALONE)
    config = CheckpointConfig(save=str(root), load=str(root), redundant_save=(str(copies),))
    found = find_saved_run(config, ALONE)
    assert found is not None and (found.root, found.iteration) == (root, 2)
    shutil.rmtree(iteration_directory(root, 2))
    (root / TRACKER).unlink()
    found = find_saved_run(config, ALONE)
    assert found is not None and found.iteration == 3
