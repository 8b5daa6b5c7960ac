"""Whatever befalls a run while it saves: no corrupt checkpoint is accepted, no committed one is lost, no process
remains, and nothing that was left behind stays.

Chance is drawn afresh each time; a test that fails prints FAULT_SEED, and with that variable set it draws the same.
"""

import errno
import os
import random
import shutil
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
from megatron.checkpoint.lock import LOCK, acquire
from megatron.core.run_on_ranks import run_on_rank0
from megatron.errors import CheckpointError
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
    Blow,
    Forbid,
    NotAllowed,
    RankStruck,
    Room,
    WriterStruck,
    no_permission,
    raise_error,
    read_only_disk,
    small_disk,
    small_files,
)

pytestmark = pytest.mark.slow(reason="kills and errors at every step of a save")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often a run is killed at random moments."""
    return 50 if request.config.getoption("--whole-matrix") else 15


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one, for tests that save hundreds of times: the steps are the same, but a
    sync takes no time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def save_alone(root: Path, saved: Saved) -> None:
    """Save a checkpoint from this process."""
    save("sync", root, saved, ALONE)


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
    """Kill one rank or all; those that were to be killed."""
    if chance.random() < 0.15:
        # A rank that waits for another to come would wait long: torchrun ends all.
        time.sleep(chance.uniform(0.0, 0.2))
        victims: tuple[int, ...] = (0, 1)
    else:
        world.wait_for_words(chance.randint(1, 3))
        time.sleep(chance.uniform(0.0, 0.1))
        victims = chance.choice([(0,), (1,), (0, 1)])
    world.kill(victims)
    return victims


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_at_random_moments_loses_nothing(
    tmp_path: Path, chance: random.Random, kills: int, kind: str
) -> None:
    """One directory, one start after the other; sometimes the iteration that was loaded is saved once more."""
    root = tmp_path / "run"
    history = History(root)
    for number in range(kills):
        life = Life(root, number, kind, again=chance.random() < 0.3)
        world = World(tmp_path, 2, run, life)
        victims = kill_at_some_moment(world, chance)
        ending = world.end()
        assert ending.killed & set(victims)
        history.follow(ending.told[0])
    history.follow(World(tmp_path, 2, run, Life(root, kills, kind, saves=2)).end().told[0])
    assert len(list_checkpoints(root)) == 2
    assert not leftovers(root) and LOCK not in os.listdir(root)


# --- killed at every step ------------------------------------------------------------------------------------


# Where the steps of a save are made, most of them.
STRUCK: dict[str, Callable[[], RankStruck | WriterStruck]] = {"sync": RankStruck, "async": WriterStruck}


def run_until_step(seat: Seat, life: Life, victim: int, blow: Blow) -> None:
    """A run one of whose ranks is killed just before a change of the file system."""
    if seat.world.rank == victim:
        STRUCK[life.kind]().arm(blow)
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
    lock = acquire(root)
    text = (root / LOCK).read_text().replace("/", "/9", 1)  # the start of the process
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
    """A run to be killed at every step of one of its ranks, or of what writes for it."""

    kind: str
    beginning: str
    size: int = 1
    victim: int = 0

    def __str__(self) -> str:
        return f"{self.kind}, {self.beginning}, rank {self.victim} of {self.size}"


CASES = [
    *(Case("sync", beginning) for beginning in BEGINNINGS),
    Case("sync", "the next save", 2, 1),
    Case("sync", "the same iteration", 2, 1),
    Case("async", "the same iteration"),
    Case("async", "the next save", 2, 1),
]


def kill_at_every_step(case: Case, directory: Path) -> Iterator[tuple[Path, str, list[object]]]:
    """For every step the directory of a run that was killed there, the step, and what the first rank told."""
    prepare, again, _ = BEGINNINGS[case.beginning]
    prepare(directory / "beginning")
    for step in count(1):
        root, report = directory / f"step_{step}", directory / "report"
        if (directory / "beginning").exists():
            shutil.copytree(directory / "beginning", root)
        life = Life(root, 1, case.kind, saves=1, again=again, keep=1)
        blow = Blow(step, report, is_deadly=True)
        ending = World(directory, case.size, run_until_step, life, case.victim, blow).end()
        yield root, report.read_text() if report.exists() else "the end", ending.told[0]
        if not ending.killed:
            return
        report.unlink()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_is_killed_at_any_step_leaves_the_old_checkpoint_or_the_new(memory_path: Path, case: Case) -> None:
    _, _, (old, new) = BEGINNINGS[case.beginning]
    found = []
    for root, step, told in kill_at_every_step(case, memory_path):
        lock = acquire(root)
        found.append(load_newest(root, ALONE))
        assert found[-1] in (old, new), f"killed at {step}"
        if any(isinstance(words, Committed) for words in told):
            assert found[-1] == new, f"killed at {step}"
        iteration = 1 if found[-1] is None else found[-1].iteration + 1
        save_alone(root, Saved(iteration, 2))
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

    sentences: list[str]
    """Of all ranks; empty where the save succeeded nevertheless."""
    there: list[Saved]
    """What a reader finds after the error."""
    left: tuple[set[str], set[str]]
    """Neither checkpoint, tracker nor lock: after the error, and after the next save."""

    def check(self, where: object, words: str, old: Saved, new: Saved) -> None:
        """All ranks know of the error; the old checkpoint is there, and the new one all or not at all."""
        assert len(set(self.sentences)) == 1, (where, self)
        assert not self.sentences[0] or words in self.sentences[0], (where, self)
        assert old in self.there or new in self.there, (where, self)
        assert set(self.there) <= {old, new}, (where, self)
        assert self.sentences[0] or new in self.there, (where, self)
        at_once, later = self.left
        # What remains of a save that failed takes room that may be wanted.
        assert not at_once or new in self.there, (where, self)
        assert not later, (where, self)


def meet_error(seat: Seat, root: Path, kind: str, new: Saved, mend: Callable[[], object]) -> Refused:
    """Save ``new``, which fails until ``mend`` is called, and then another iteration; all ranks call it."""
    world = seat.world
    sentences = world.all_gather_object(sentence(lambda: save(kind, root, new, world)))
    mend()
    there, at_once = all_saved(root), run_on_rank0(world, lambda: leftovers(root))
    save("sync", root, Saved(new.iteration + 1, 9), world)
    return Refused(sentences, there, (at_once, run_on_rank0(world, lambda: leftovers(root))))


def fail_at_every_step(seat: Seat, directory: Path, kind: str, victim: int, new: Saved) -> None:
    """Save again and again, and let one change of the file system after the other fail on one rank."""
    world, struck = seat.world, STRUCK[kind]()
    for step in count(1):
        root, report = directory / f"step_{step}", directory / f"report_{step}"
        save("sync", root, Saved(1, 0), world)
        if world.rank == victim:
            struck.arm(Blow(step, report, is_deadly=False))
        refused = meet_error(seat, root, kind, new, struck.disarm)
        if not run_on_rank0(world, report.exists):
            return
        seat.tell((report.read_text(), refused))


@pytest.mark.parametrize(
    ("kind", "victim", "new"),
    [
        ("sync", 0, Saved(1, 1)),
        ("sync", 0, Saved(2, 1)),
        ("sync", 1, Saved(2, 1)),
        ("async", 0, Saved(1, 1)),
        ("async", 1, Saved(2, 1)),
    ],
    ids=str,
)
def test_an_error_at_any_step_is_told_to_all_and_leaves_the_old_checkpoint_or_the_new(
    memory_path: Path, kind: str, victim: int, new: Saved
) -> None:
    ending = World(memory_path, 2, fail_at_every_step, memory_path, kind, victim, new).end()
    for step, refused in ending.told[0]:
        refused.check(step, "Input/output error", Saved(1, 0), new)
        # What rank 1 does comes all before the checkpoint is visible.
        assert victim == 0 or new not in refused.there, step
    assert len([step for step, refused in ending.told[0] if refused.sentences[0]]) >= 4


class BrokenDigest:
    """Fails in the thread that takes digests."""

    def update(self, content: object) -> None:
        """Fail."""
        raise_error(errno.EIO)


def fail_while_hashing(seat: Seat, root: Path, victim: int) -> None:
    """Save once without and once with an error in the thread."""
    save("sync", root, Saved(1, 0), seat.world)
    with ExitStack() as broken:
        if seat.world.rank == victim:
            broken.enter_context(mock.patch("xxhash.xxh3_128", BrokenDigest))
        seat.tell(meet_error(seat, root, "sync", Saved(2, 1), broken.close))


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_a_thread_that_writes_is_told_to_all(tmp_path: Path, victim: int) -> None:
    ending = World(tmp_path, 2, fail_while_hashing, tmp_path / "run", victim).end()
    (refused,) = ending.told[0]
    refused.check("hashing", "Input/output error", Saved(1, 0), Saved(2, 1))
    assert f"Rank {victim}: Cannot write" in refused.sentences[0]
    assert refused.there == [Saved(1, 0)]


def save_into_too_little_room(seat: Seat, place: Path, make_room: Callable[[Path], Room], kind: str, step: int) -> None:
    """Save with more and more room, until it is enough."""
    try:
        leave = make_room(place)
    except NotAllowed as error:
        seat.tell(error)
        return
    for room in count(0, step):
        root = place / "run"
        save(kind, root, Saved(1, 0), seat.world)
        leave(room)
        refused = meet_error(seat, root, kind, Saved(2, 1), partial(leave, ALL))
        seat.tell(refused)
        if not refused.sentences[0]:
            return
        shutil.rmtree(root)


# A limit on files is one on the memory shared with a background writer as well, which also takes its time to start.
@pytest.mark.parametrize(
    ("kind", "make_room", "step"),
    [("sync", small_disk, 4096), ("async", small_disk, 5 * 4096), ("sync", small_files, 4096)],
)
def test_a_save_that_finds_too_little_room_leaves_the_old_checkpoint(
    memory_path: Path, kind: str, make_room: Callable[[Path], Room], step: int
) -> None:
    place = memory_path / "place"
    place.mkdir()
    (told,) = World(memory_path, 1, save_into_too_little_room, place, make_room, kind, step).end().told
    if isinstance(told[0], NotAllowed):
        pytest.skip(str(told[0]))
    assert len(told) > 5
    words = "No space left on device): free some space" if make_room is small_disk else "File too large"
    for number, refused in enumerate(told):
        refused.check(number, words, Saved(1, 0), Saved(2, 1))
    assert Saved(2, 1) not in told[0].there and Saved(2, 1) in told[-1].there


def lock_without_room(seat: Seat, place: Path) -> None:
    """Try to lock a directory whose disk is full."""
    leave = small_files(place)
    leave(0)
    words = sentence(lambda: acquire(place))
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
        save(kind, root, Saved(1, 0), seat.world)
        forbid()
    except NotAllowed as error:
        seat.tell(error)
        return
    refusals = [
        sentence(lambda: save(kind, root, Saved(2, 0), seat.world)),
        sentence(lambda: save(kind, root, Saved(1, 1), seat.world)),
        sentence(lambda: acquire(root)),
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
