"""Whatever befalls a run while it saves: no corrupt checkpoint is accepted, no committed one is lost, no process
remains, and nothing that was left behind stays.

Chance is drawn afresh each time; a test that fails prints FAULT_SEED, and with that variable set it draws the same.
"""

import errno
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint.directory import TRACKER
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.lock import LOCK, RunLock
from megatron.config.errors import CheckpointError
from megatron.training.launch import on_first_rank
from tests.checkpoint.fault_run import (
    ALONE,
    KINDS,
    Committed,
    Life,
    Saved,
    Seat,
    Started,
    World,
    all_saved,
    leftovers,
    load_newest,
    run,
    save,
)
from tests.checkpoint.file_faults import (
    ALL,
    FileSteps,
    Forbid,
    NotAllowed,
    Room,
    no_permission,
    raise_error,
    read_only_disk,
    small_disk,
    small_files,
)

KILLS = 50


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one, for tests that save hundreds of times: the steps are the same, but a
    sync takes no time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def save_alone(root: Path, saved: Saved, kind: str = "sync") -> None:
    """Save a checkpoint from this process."""
    save(KINDS[kind](), root, saved, ALONE)


def sentence(call: Callable[[], object]) -> str:
    """What the :class:`CheckpointError` says that ``call`` raises; empty without."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


# --- killed at random moments --------------------------------------------------------------------------------


class History:
    """What a run has told of its checkpoints, from start to start, compared with what lies on disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[int, Saved] = {}

    def follow(self, told: Sequence[Started | Committed]) -> None:
        """Hear out one life, which is over."""
        for words in told:
            if isinstance(words, Started):
                self._check_start(words.found)
            else:
                assert not words.stayed
                self._known[words.saved.iteration] = words.saved
        self._check_disk()

    def _check_start(self, found: Saved | None) -> None:
        if self._known:
            newest = self._known[max(self._known)]
            assert found is not None and found >= newest, f"started from {found} although {newest} was there"
        if found is not None:
            self._known[found.iteration] = found

    def _check_disk(self) -> None:
        there = {saved.iteration: saved for saved in all_saved(self._root)}
        for iteration in sorted(self._known)[-2:]:
            assert iteration in there, f"{self._known[iteration]} is lost; there are {list(there.values())}"
            assert there[iteration] >= self._known[iteration]


def kill_at_some_moment(world: World, chance: random.Random) -> tuple[int, ...]:
    """Kill one rank or all; those that were killed."""
    if chance.random() < 0.15:
        # A rank that waits for another to come would wait long: torchrun ends all.
        time.sleep(chance.uniform(0.0, 0.2))
        victims: tuple[int, ...] = (0, 1)
    else:
        world.wait_for_words()
        time.sleep(chance.uniform(0.0, 0.15))
        victims = chance.choice([(0,), (1,), (0, 1)])
    world.kill(victims)
    return victims


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_at_random_moments_loses_nothing(tmp_path: Path, chance: random.Random, kind: str) -> None:
    """One directory, one start after the other; sometimes the iteration that was loaded is saved once more."""
    root = tmp_path / "run"
    history = History(root)
    for number in range(KILLS):
        life = Life(root, number, kind, again=chance.random() < 0.3)
        world = World(tmp_path, 2, run, life)
        victims = kill_at_some_moment(world, chance)
        ending = world.end()
        assert ending.killed & set(victims)
        history.follow(ending.told[0])
    history.follow(World(tmp_path, 2, run, Life(root, KILLS, kind, saves=2)).end().told[0])
    assert len(list_checkpoints(root)) == 2
    assert not leftovers(root) and LOCK not in os.listdir(root)


# --- killed at every step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """Told before a rank kills itself."""

    step: str


def run_until_step(seat: Seat, life: Life, victim: int, step: int) -> None:
    """A run one of whose ranks is killed just before its ``step``-th change of the file system."""

    def die(name: str) -> None:
        seat.tell(Killed(name))
        os.kill(os.getpid(), signal.SIGKILL)

    if seat.world.rank == victim:
        FileSteps(die).arm(step)
    run(seat, life)


def nothing_saved(root: Path) -> None:
    """The run has never been started."""


def one_saved(root: Path) -> None:
    """One checkpoint, of the first life."""
    save_alone(root, Saved(1, 0))


def wreck(root: Path) -> None:
    """All that a crash may leave: a checkpoint moved away for its successor, which is whole too, half a save, a
    tracker's draft, and the lock of a dead process with its drafts."""
    for saved in (Saved(1, 3), Saved(1, 0)):
        save_alone(root, saved)
        shutil.move(root / "iter_0000001", root.parent / str(saved.life))
    shutil.move(root.parent / "0", root / ".iter_0000001.replaced-0123abcd")
    shutil.move(root.parent / "3", root / ".iter_0000001.saving-0123abcd")
    half = root / ".iter_0000002.saving-4567cdef"
    half.mkdir()
    (half / "rank_00000.safetensors").touch()
    (root / f".{TRACKER}.saving-0123abcd").touch()
    lock = RunLock(root)
    text = (root / LOCK).read_text().replace('"process": "', '"process": "another boot')
    lock.release()
    for name, content in {LOCK: text, f"{LOCK}.0123abcd": text, f"{LOCK}.4567cdef": ""}.items():
        (root / name).write_text(content)


# What is there, whether the next iteration or the same is saved, and what a start may find after the kill.
BEGINNINGS: dict[str, tuple[Callable[[Path], None], bool, list[Saved | None]]] = {
    "the first save": (nothing_saved, False, [None, Saved(1, 1)]),
    "the next save": (one_saved, False, [Saved(1, 0), Saved(2, 1)]),
    "the same iteration": (one_saved, True, [Saved(1, 0), Saved(1, 1)]),
    "after a crash": (wreck, False, [Saved(1, 0), Saved(2, 1)]),
    "the same iteration after a crash": (wreck, True, [Saved(1, 0), Saved(1, 1)]),
}


@dataclass(frozen=True)
class Case:
    """A run to be killed at every step of one of its ranks."""

    beginning: str
    size: int = 1
    victim: int = 0

    def __str__(self) -> str:
        return f"{self.beginning}, rank {self.victim} of {self.size}"


CASES = [*(Case(beginning) for beginning in BEGINNINGS), Case("the next save", 2, 1), Case("the same iteration", 2, 1)]


def kill_at_every_step(case: Case, kind: str, directory: Path) -> Iterator[tuple[Path, str, list[object]]]:
    """For every step the directory of a run that was killed there, the step, and what the first rank told."""
    prepare, again, _ = BEGINNINGS[case.beginning]
    prepare(directory / "beginning")
    for step in count(1):
        root = directory / f"step_{step}"
        if (directory / "beginning").exists():
            shutil.copytree(directory / "beginning", root)
        life = Life(root, 1, kind, saves=1, again=again, keep=1)
        ending = World(directory, case.size, run_until_step, life, case.victim, step).end()
        (name,) = [words.step for words in ending.told[case.victim] if isinstance(words, Killed)] or ["the end"]
        yield root, name, ending.told[0]
        if not ending.killed:
            return


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_is_killed_at_any_step_leaves_the_old_checkpoint_or_the_new(
    memory_path: Path, kind: str, case: Case
) -> None:
    _, _, (old, new) = BEGINNINGS[case.beginning]
    found = []
    for root, step, told in kill_at_every_step(case, kind, memory_path):
        lock = RunLock(root)
        found.append(load_newest(root, ALONE))
        assert found[-1] in (old, new), f"killed at {step}"
        if any(isinstance(words, Committed) for words in told):
            assert found[-1] == new, f"killed at {step}"
        iteration = 1 if found[-1] is None else found[-1].iteration + 1
        save_alone(root, Saved(iteration, 2), kind)
        lock.release()
        assert not leftovers(root), f"killed at {step}"
        assert {found[-1], Saved(iteration, 2)} - {None} <= set(all_saved(root)), f"killed at {step}"
        shutil.rmtree(root)
    # First the old one, from one step on the new one, and never the old one again.
    assert found == [old] * found.count(old) + [new] * found.count(new)
    assert old in found and new in found and len(found) >= 5


# --- errors of the system ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """What came of a save that met an error, and of the next that met none."""

    where: object
    sentences: list[str]
    """Of all ranks; empty where the save succeeded nevertheless."""
    there: list[Saved]
    """What a reader finds after the error."""
    left: tuple[set[str], set[str]]
    """Neither checkpoint, tracker nor lock: after the error, and after the next save."""

    def check(self, words: str, old: Saved, new: Saved) -> None:
        """All ranks know of the error; the old checkpoint is there, and the new one all or not at all."""
        assert len(set(self.sentences)) == 1, self
        assert not self.sentences[0] or words in self.sentences[0], self
        assert old in self.there or new in self.there, self
        assert set(self.there) <= {old, new}, self
        assert self.sentences[0] or new in self.there, self
        at_once, later = self.left
        # What remains of a save that failed takes room that may be wanted.
        assert not at_once or new in self.there, self
        assert not later, self


def meet_error(seat: Seat, root: Path, kind: str, new: Saved, where: Callable[[], object]) -> Refused:
    """Save ``new``, which fails, and then another iteration, which does not; all ranks call it."""
    world, saving = seat.world, KINDS[kind]()
    sentences = world.all_gather_object(sentence(lambda: save(saving, root, new, world)))
    met = where()
    there, at_once = all_saved(root), on_first_rank(world, lambda: leftovers(root))
    save(KINDS[kind](), root, Saved(new.iteration + 1, 9), world)
    return Refused(met, sentences, there, (at_once, on_first_rank(world, lambda: leftovers(root))))


def fail_at_every_step(seat: Seat, directory: Path, kind: str, victim: int, new: Saved, code: int) -> None:
    """Save again and again, and let one change of the file system after the other fail on one rank."""
    steps = FileSteps(lambda step: raise_error(code))

    def disarm() -> str | None:
        steps.disarm()
        return steps.struck

    for step in count(1):
        root = directory / f"step_{step}"
        save(KINDS[kind](), root, Saved(1, 0), seat.world)
        steps.arm(step if seat.world.rank == victim else 0)
        refused = meet_error(seat, root, kind, new, disarm)
        if seat.world.all_gather_object(steps.struck)[victim] is None:
            return
        seat.tell(refused)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("new", [Saved(1, 1), Saved(2, 1)], ids=["the same iteration", "the next iteration"])
def test_an_error_at_any_step_is_told_to_all_and_leaves_the_old_checkpoint_or_the_new(
    memory_path: Path, kind: str, victim: int, new: Saved
) -> None:
    ending = World(memory_path, 2, fail_at_every_step, memory_path, kind, victim, new, errno.EIO).end()
    told = ending.told[victim]
    assert len(told) >= 4
    for refused in told:
        refused.check("Input/output error", Saved(1, 0), new)
    # What rank 1 does comes all before the checkpoint is visible.
    assert victim == 0 or not any(new in refused.there for refused in told)
    assert any(refused.sentences[0] for refused in told)


class BrokenDigest:
    """Fails in the thread that takes digests."""

    def update(self, content: object) -> None:
        """Fail."""
        raise_error(errno.EIO)


def fail_while_hashing(seat: Seat, root: Path, kind: str, victim: int) -> None:
    """Save once without and once with an error in the thread."""
    save(KINDS[kind](), root, Saved(1, 0), seat.world)
    with ExitStack() as broken:
        if seat.world.rank == victim:
            broken.enter_context(mock.patch("xxhash.xxh3_128", BrokenDigest))
        seat.tell(meet_error(seat, root, kind, Saved(2, 1), broken.close))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_a_thread_that_writes_is_told_to_all(tmp_path: Path, kind: str, victim: int) -> None:
    ending = World(tmp_path, 2, fail_while_hashing, tmp_path / "run", kind, victim).end()
    (refused,) = ending.told[0]
    refused.check("Input/output error", Saved(1, 0), Saved(2, 1))
    assert f"Rank {victim}: Cannot write" in refused.sentences[0]
    assert refused.there == [Saved(1, 0)]


def save_into_too_little_room(seat: Seat, place: Path, make_room: Callable[[Path], Room], kind: str) -> None:
    """Save with more and more room, until it is enough."""
    try:
        leave = make_room(place)
    except NotAllowed as error:
        seat.tell(error)
        return
    for room in count(0, step=os.statvfs(place).f_bsize):
        root = place / "run"
        save(KINDS[kind](), root, Saved(1, 0), seat.world)
        leave(room)
        refused = meet_error(seat, root, kind, Saved(2, 1), partial(leave, ALL))
        seat.tell(refused)
        if not refused.sentences[0]:
            return
        shutil.rmtree(root)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make_room", [small_disk, small_files])
def test_a_save_that_finds_too_little_room_leaves_the_old_checkpoint(
    memory_path: Path, kind: str, make_room: Callable[[Path], Room]
) -> None:
    place = memory_path / "place"
    place.mkdir()
    (told,) = World(memory_path, 1, save_into_too_little_room, place, make_room, kind).end().told
    if isinstance(told[0], NotAllowed):
        pytest.skip(str(told[0]))
    assert len(told) > 10
    words = "No space left on device): free some space" if make_room is small_disk else "File too large"
    for refused in told:
        refused.check(words, Saved(1, 0), Saved(2, 1))
    assert Saved(2, 1) not in told[0].there and Saved(2, 1) in told[-1].there


def lock_without_room(seat: Seat, place: Path) -> None:
    """Try to lock a directory whose disk is full."""
    leave = small_files(place)
    leave(0)
    words = sentence(lambda: RunLock(place))
    leave(ALL)
    seat.tell((words, os.listdir(place)))


def test_a_lock_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (((words, names),),) = World(tmp_path, 1, lock_without_room, place).end().told
    assert "Cannot lock" in words
    assert names == []


def save_where_it_is_forbidden(seat: Seat, place: Path, how: Callable[[Path], tuple[Path, Forbid]], kind: str) -> None:
    """Save, and once more when nothing may be written any longer."""
    try:
        root, forbid = how(place)
        save(KINDS[kind](), root, Saved(1, 0), seat.world)
        forbid()
    except NotAllowed as error:
        seat.tell(error)
        return
    refusals = [
        sentence(lambda: save(KINDS[kind](), root, Saved(2, 0), seat.world)),
        sentence(lambda: save(KINDS[kind](), root, Saved(1, 1), seat.world)),
        sentence(lambda: RunLock(root)),
    ]
    seat.tell((refusals, load_newest(root, seat.world), all_saved(root), leftovers(root)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("how", "words"),
    [(read_only_disk, "choose a directory that can be written"), (no_permission, "give this user access to it")],
)
def test_a_directory_that_may_only_be_read_is_loaded_from_and_refused_for_saving(
    tmp_path: Path, kind: str, how: Callable[[Path], tuple[Path, Forbid]], words: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    ((told,),) = World(tmp_path, 1, save_where_it_is_forbidden, place, how, kind).end().told
    if isinstance(told, NotAllowed):
        pytest.skip(str(told))
    refusals, newest, there, left = told
    assert all(words in refusal for refusal in refusals), refusals
    assert newest == Saved(1, 0) and there == [Saved(1, 0)] and not left
