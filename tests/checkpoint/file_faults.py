"""Ways in which a file system fails a process: at a chosen step, for want of room, or for want of permission."""

import ctypes
import errno
import json
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# Audit events of what changes names in a file system; Python raises them before it acts.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


@dataclass(frozen=True)
class Blow:
    """What hits a process at its ``step``-th change of the file system: SIGKILL, or an error of the system."""

    step: int
    report: Path
    """The file that will hold the name of the step, if it comes so far."""
    is_deadly: bool

    def strike(self, pids: Sequence[int], step: str) -> None:
        """Hit now: kill ``pids``, or raise the error."""
        self.report.write_text(step)
        if not self.is_deadly:
            raise_error(errno.EIO)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class FileSteps:
    """Counts what this process does to files and strikes just before one of the steps.

    A step is a file created, a name changed, a file half written, or a sync. Cannot be undone: for processes of a
    test's own. Nothing is counted until :meth:`arm`.
    """

    _blow: Blow
    _victims: Sequence[int]

    def __init__(self) -> None:
        self._left = 0
        self._is_acting = False
        self._sync = os.fsync
        os.fsync = self._synced  # type: ignore[assignment]
        sys.addaudithook(self._audited)

    def arm(self, blow: Blow, victims: Sequence[int] = ()) -> None:
        """Strike the ``victims``, by default this process, at the step of ``blow``, counted from here from 1."""
        self._left, self._blow, self._victims = blow.step, blow, victims or [os.getpid()]

    def disarm(self) -> None:
        """Strike no more."""
        self._left = 0

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & os.O_CREAT):
            self._reach(f"{event} {' '.join(str(argument) for argument in arguments[:2])}")

    def _synced(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._reach(f"half of {path}", lambda: os.truncate(descriptor, os.fstat(descriptor).st_size // 2))
        self._reach(f"fsync {path}")
        self._sync(descriptor)

    def _reach(self, step: str, prepare: Callable[[], None] = lambda: None) -> None:
        if self._is_acting or self._left == 0:
            return
        self._left -= 1
        if self._left == 0:
            self._is_acting = True
            try:
                prepare()
                self._blow.strike(self._victims, step)
            finally:
                self._is_acting = False


class WriterStruck:
    """Strikes in the background writers that this process starts: a deadly blow hits both."""

    _VARIABLE = "TEST_FAULT_BLOW"

    def arm(self, blow: Blow) -> None:
        """Hit the next one that is started."""
        # There Python finds a module that it runs before any other.
        os.environ["PYTHONPATH"] = str(Path(__file__).parent / "in_writer")
        os.environ[self._VARIABLE] = json.dumps([blow.step, str(blow.report), blow.is_deadly])

    def disarm(self) -> None:
        """Spare those that are started from now on."""
        os.environ.pop(self._VARIABLE, None)

    @classmethod
    def heed(cls) -> None:
        """In a writer: arm what its rank wants."""
        if cls._VARIABLE in os.environ:
            step, report, is_deadly = json.loads(os.environ[cls._VARIABLE])
            FileSteps().arm(Blow(step, Path(report), is_deadly), [os.getppid(), os.getpid()])


def raise_error(code: int) -> NoReturn:
    """Fail as the system does."""
    raise OSError(code, os.strerror(code))


# --- mounts of this process alone ----------------------------------------------------------------------------

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
NOBODY = 65534


class NotAllowed(Exception):
    """This process may not do what the test needs."""


def mount_small(place: Path, size: int) -> None:
    """Mount a file system of ``size`` bytes at ``place``, which only this process and its children see."""
    _own_mounts()
    _call("mount", b"small", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode())


def _own_mounts() -> None:
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", _CLONE_NEWNS)
    except NotAllowed:
        # Some systems let everybody mount in a user namespace of his own.
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def _call(name: str, *arguments: object) -> None:
    """A function of the C library; :class:`NotAllowed` when it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise NotAllowed(f"{name}: {os.strerror(ctypes.get_errno())}")


# --- room ----------------------------------------------------------------------------------------------------

Room = Callable[[int], None]
"""Leaves so many bytes that can be written."""
ALL = -1
"""As many as there are."""


def small_disk(place: Path, size: int = 1 << 20) -> Room:
    """A file system of its own at ``place``, filled as far as is wanted."""
    mount_small(place, size)
    ballast = place / "ballast"

    def leave(size: int) -> None:
        ballast.unlink(missing_ok=True)
        if size != ALL:
            status = os.statvfs(place)
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_bsize - size)

    return leave


def small_files(place: Path) -> Room:
    """No file may be larger than what is left; works everywhere."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if size == ALL else size, most))

    return leave


# --- permission ----------------------------------------------------------------------------------------------


def forbid_writing(root: Path) -> None:
    """Make the working directory's ``root`` one that is not ours to write; a superuser, whom no permission stops,
    becomes somebody else, who needs no way to this place."""
    root.chmod(0o555)
    if os.access(root, os.W_OK):
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        except OSError as error:
            raise NotAllowed(f"setuid: {error}") from error
    if os.access(root, os.W_OK):
        raise NotAllowed("no permission stops this process")
