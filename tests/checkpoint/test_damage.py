"""Files are not what they were: a run starts from the newest checkpoint that is whole, or says that there is none."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron.checkpoint.checkpointing import verify_share
from megatron.checkpoint.directory import MANIFEST, TRACKER, iteration_directory
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.retention import Retention
from megatron.config.checkpoint import CheckpointConfig
from megatron.data.digests import seal
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import find_saved_run
from tests.checkpoint.fault_run import ALONE, Life, Saved, World, load_newest, run, save

FILES = [MANIFEST, "rank_00000.safetensors", "rank_00001.safetensors"]
ITERATIONS = [1, 2, 3]


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints that two ranks have saved."""
    directory = tmp_path_factory.mktemp("saved")
    World(directory, 2, run, Life(directory / "run", 0, saves=len(ITERATIONS), keep=len(ITERATIONS))).end()
    return directory / "run"


@pytest.fixture
def root(saved_by_two: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return Path(shutil.copytree(saved_by_two, tmp_path / "run"))


def resize(change: Callable[[int], int], path: Path, chance: random.Random) -> None:
    """Cut a file off, or lengthen it."""
    os.truncate(path, change(path.stat().st_size))


def flip_a_bit(path: Path, chance: random.Random) -> None:
    """One bit anywhere."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def lose_a_page(path: Path, chance: random.Random) -> None:
    """A part that never reached the disk: zeros."""
    content = path.read_bytes()
    start = chance.randrange(len(content) // 2)
    lost = content[start : start + 4096]
    path.write_bytes(content.replace(lost, b"\0" * len(lost)))


def lose(path: Path, chance: random.Random) -> None:
    """The file is gone."""
    path.unlink()


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
    "a page of zeros": lose_a_page,
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


def test_a_tracker_that_was_left_behind_hides_nothing(root: Path) -> None:
    """As after a kill between the last rename and the tracker."""
    (root / TRACKER).write_text("2")
    written = (iteration_directory(root, 2) / MANIFEST).stat().st_mtime
    os.utime(root / TRACKER, (written, written))
    assert load_newest(root, ALONE) == Saved(3, 0)


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


def copy_as(root: Path, iteration: int, number: int) -> None:
    """Copy a checkpoint as that of another iteration, with the state to match."""
    shutil.copytree(iteration_directory(root, iteration), iteration_directory(root, number))
    manifest = iteration_directory(root, number) / MANIFEST
    content = json.loads(manifest.read_text())["manifest"]
    content["state"]["iteration"] = number
    manifest.write_text(seal("manifest", json.dumps(content)))


def test_two_broken_newer_checkpoints_do_not_cost_the_two_good_ones(root: Path, chance: random.Random) -> None:
    for number in (4, 5):
        copy_as(root, 3, number)
        flip_a_bit(iteration_directory(root, number) / FILES[1 + chance.randrange(2)], chance)
    retention = Retention(2, None, lambda iteration: verify_share(root, iteration, 0, 1))
    assert list_checkpoints(root) == [1, 2, 3, 4, 5]
    assert retention.superfluous(list_checkpoints(root)) == [1]
