"""Whatever befalls a run while it saves: no corrupt checkpoint is accepted, no committed one is lost, no process
remains, and nothing that was left behind stays."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from megatron.checkpoint.directory import TRACKER, Retention, locate_checkpoint, remove_checkpoint
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.checkpoint.lock import LOCK
from megatron.core.control import run_on_all_ranks, run_on_rank0
from tests.checkpoint.directories import acquire
from tests.checkpoint.fault_run import (
    ALONE,
    KINDS,
    Saved,
    Saving,
    Seat,
    World,
    all_saved,
    leftovers,
    load_newest,
    save,
    sentence,
)
from tests.checkpoint.file_faults import (
    ALL,
    Blow,
    FileSteps,
    NotAllowed,
    Room,
    WriterStruck,
    forbid_writing,
    small_disk,
    small_files,
)

pytestmark = pytest.mark.slow(reason="kills and errors at every step of a save")


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


# --- killed at every step ------------------------------------------------------------------------------------


# Where the steps of a save are made, most of them.
STRUCK: dict[str, Callable[[], FileSteps | WriterStruck]] = {"sync": FileSteps, "async": WriterStruck}


def run_until_step(seat: Seat, root: Path, kind: str, again: bool, victim: int, blow: Blow) -> None:
    """A run that takes the lock, loads the newest checkpoint, saves the next or ``again`` the same, and deletes older
    ones; one of its ranks is killed just before a change of the file system."""
    world = seat.world
    if world.rank == victim:
        STRUCK[kind]().arm(blow)
    with ExitStack() as stack:
        if world.rank == 0:
            stack.callback(acquire(root).release)
        found = load_newest(root, world)
        saving = stack.enter_context(closing(Saving(kind, world)))
        saved = Saved(1 if found is None else found.iteration + (not again), 1)
        saving.save(root, saved)
        seat.tell(saved)
        retention = Retention(
            1,
            None,
            lambda iteration: run_on_all_ranks(world, partial(verify_share, root, iteration, world.rank, world.size)),
        )
        for old in retention.superfluous(run_on_rank0(world, partial(list_checkpoints, root))):
            if world.rank == 0:
                remove_checkpoint(locate_checkpoint(root, old))


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
        blow = Blow(step, report, is_deadly=True)
        ending = World(directory, case.size, run_until_step, root, case.kind, again, case.victim, blow).end()
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
        if told:
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


def save_where_it_is_forbidden(seat: Seat, place: Path, kind: str) -> None:
    """Save, and once more when nothing may be written any longer."""
    os.umask(0o022)
    place.chmod(0o755)
    os.chdir(place)
    root = Path("run")
    save(kind, root, Saved(1, 0), seat.world)
    try:
        forbid_writing(root)
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
def test_a_directory_that_may_only_be_read_is_loaded_from_and_refused_for_saving(tmp_path: Path, kind: str) -> None:
    ((told,),) = World(tmp_path, 1, save_where_it_is_forbidden, tmp_path, kind).end().told
    if isinstance(told, NotAllowed):
        pytest.skip(str(told))
    refusals, newest, there, left = told
    assert all("give this user access to it" in refusal for refusal in refusals), refusals
    assert newest == Saved(1, 0) and there == [Saved(1, 0)] and not left
