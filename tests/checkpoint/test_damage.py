"""Files are not what they were: a run starts from the newest checkpoint that is whole, or says that there is none."""

import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint.directory import MANIFEST, TRACKER, Retention, iteration_directory
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.control import ControlGroup
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import find_saved_run
from tests.checkpoint.fault_run import ALONE, Saved, load_newest, save
from tests.rank_pool import RankPool

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


def test_two_broken_newer_checkpoints_do_not_cost_the_good_one(root: Path, chance: random.Random) -> None:
    for iteration in (2, 3):
        flip_a_bit(iteration_directory(root, iteration) / FILES[1 + chance.randrange(2)], chance)
    retention = Retention(1, None, lambda iteration: verify_share(root, iteration, 0, 1))
    assert retention.superfluous(list_checkpoints(root)) == []
