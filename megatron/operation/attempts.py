"""Attempts that fail without a new checkpoint, counted in the run directory, and the end of a run that has too many.

    RUN_DIR/failed_attempts.json    {"newest_iteration": 40, "failed": 2}

An attempt counts from its start until it ends successfully, so a killed one remains counted. Restarts by a launcher and
starts by a scheduler count alike.
"""

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.errors import NoProgressError

FILE = "failed_attempts.json"


@dataclass(frozen=True)
class FailedAttempts:
    """Content of the file."""

    newest_iteration: int | None
    """Iteration of the newest checkpoint when these attempts began; None without a checkpoint."""
    failed: int
    """Consecutive failed attempts from there."""


class AttemptCounter:
    """Counts this attempt as failed until :meth:`take_back`; used on one rank."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._path = directory / FILE
        self._limit = limit
        self._before = FailedAttempts(None, 0)

    def begin(self, newest_iteration: int | None) -> None:
        """Count an attempt that begins at the checkpoint of ``newest_iteration``.

        Raises :class:`NoProgressError` at the limit, and :class:`OSError` if the count cannot be written.
        """
        found = read(self._path)
        failed = found.failed if found is not None and found.newest_iteration == newest_iteration else 0
        if failed >= self._limit:
            where = "without a checkpoint" if newest_iteration is None else f"at iteration {newest_iteration}"
            raise NoProgressError(
                f"{failed} consecutive attempts started {where} and ended without a new checkpoint "
                f"(--max-failed-attempts {self._limit}): find the cause in their logs, then remove {self._path} and "
                "start again."
            )
        self._before = FailedAttempts(newest_iteration, failed)
        write(self._path, FailedAttempts(newest_iteration, failed + 1))

    def take_back(self, newest_iteration: int | None) -> None:
        """Do not count this attempt: it completed, was stopped on request, or needs a correction by the user.

        Earlier attempts still count, unless ``newest_iteration`` (of the newest checkpoint now) has changed.
        """
        with suppress(OSError):
            if self._before.failed and self._before.newest_iteration == newest_iteration:
                write(self._path, self._before)
            else:
                self._path.unlink(missing_ok=True)


def take_back_running(directory: Path) -> None:
    """Do not count the attempt under way: it is stopped on request, and may be killed before its end."""
    found = read(directory / FILE)
    with suppress(OSError):
        if found is not None and found.failed > 1:
            write(directory / FILE, FailedAttempts(found.newest_iteration, found.failed - 1))
        elif found is not None:
            (directory / FILE).unlink()


def read(path: Path) -> FailedAttempts | None:
    """The content of the file; None if it is missing or damaged, which must not stop a run."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        newest, failed = content["newest_iteration"], content["failed"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(failed) is not int or type(newest) not in (int, type(None)):
        return None
    return FailedAttempts(newest, failed)


def write(path: Path, attempts: FailedAttempts) -> None:
    """Replace the file atomically."""
    draft = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            json.dump(asdict(attempts), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
