"""The directory with a run's checkpoints: a checkpoint appears and disappears atomically.

A checkpoint is written under a hidden name and renamed when it is complete, so a directory named ``iter_...`` is
complete. The directories decide; the tracker is for people and scripts, and is never required.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from megatron.checkpoint.files import AnyPath, RemotePath, explained, sync_directory, write_text_durably
from megatron.checkpoint.lock import check_token
from megatron.errors import CheckpointError

_logger = logging.getLogger(__name__)

PathT = TypeVar("PathT", bound=AnyPath)

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
SOURCE_SAVED_AT = "source_saved_at_ns"
"""Key in the manifest of an uploaded copy: save time of the original, by its file system's clock."""

#   DIR/iter_0000100/                            a complete checkpoint
#   DIR/latest_checkpointed_iteration.txt        the tracker: "100"
#   DIR/.iter_0000200.saving-1f6c0a9e/           being written, or left by a crash
#   DIR/.iter_0000100.replaced-83d2b7c4/         making room for a second checkpoint of the same iteration
#   DIR/.iter_0000050.removing-5e0c91d7/         being deleted, or left by a crash
#   DIR/iter_0000300.rolled_back/                abandoned when the run returned to an earlier checkpoint
#
# Saving an iteration again takes two renames: the old checkpoint away, then the new one in. A crash between them leaves
# both complete under hidden names: readers find the old one under its ``replaced`` name, and the next save renames it
# back.
_COMPLETE = re.compile(r"iter_(\d{7,})")
_SAVING = re.compile(r"\.iter_(\d{7,})\.saving-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced-[0-9a-f]{8}")
_REMOVING = re.compile(r"\.iter_(\d{7,})\.removing-[0-9a-f]{8}")
_TRACKER_DRAFT = re.compile(r"\.latest_checkpointed_iteration\.txt\.saving-[0-9a-f]{8}")


def hidden_path(path: Path, kind: str) -> Path:
    """A new hidden name next to ``path``."""
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def iteration_directory(root: PathT, iteration: int) -> PathT:
    """Final directory of the checkpoint of ``iteration``."""
    return cast(PathT, root / f"iter_{iteration:07d}")


def iteration_of(directory: AnyPath) -> int | None:
    """The iteration in the name of a checkpoint's directory; None for another name."""
    match = _COMPLETE.fullmatch(directory.name)
    return None if match is None else int(match[1])


def locate_checkpoint(root: PathT, iteration: int) -> PathT:
    """Present directory of the checkpoint of ``iteration``; after a crash possibly its ``replaced`` name."""
    directory = iteration_directory(root, iteration)
    if not exists(directory):
        for path, number in _matching(root, _REPLACED):
            if number == iteration and exists(path / MANIFEST):
                return path
    return directory


def saved_iterations(root: AnyPath) -> list[int]:
    """Iterations with a directory, readable or not, in ascending order; at a URL, with a manifest."""
    # At a URL nothing is renamed: a directory without a manifest is not a checkpoint.
    needs_manifest = isinstance(root, RemotePath)
    complete = _matching(root, _COMPLETE)
    found = {number for path, number in complete if not needs_manifest or exists(path / MANIFEST)}
    found.update(number for path, number in _matching(root, _REPLACED) if exists(path / MANIFEST))
    return sorted(found)


def _matching(root: PathT, pattern: re.Pattern[str]) -> Iterator[tuple[PathT, int]]:
    """Entries of ``root`` whose name matches ``pattern``, with the iteration in the name."""
    if not exists(root):
        return
    with explained("read", root):
        paths = cast(list[PathT], sorted(root.iterdir(), key=str))
    for path in paths:
        match = pattern.fullmatch(path.name)
        if match:
            yield path, int(match[1])


def exists(path: AnyPath) -> bool:
    """Whether ``path`` exists; raises :class:`CheckpointError` if this cannot be determined."""
    with explained("read", path):
        return path.exists()


def new_saving_directory(root: Path, iteration: int) -> Path:
    """Remove leftovers of earlier saves in ``root`` and create a directory for a new checkpoint."""
    with explained("write", root):
        root.mkdir(parents=True, exist_ok=True)
        sync_directory(root.parent)
        clear_leftovers(root)
        directory = hidden_path(iteration_directory(root, iteration), "saving")
        # Not by tempfile, whose directories other users cannot read: this one stays.
        directory.mkdir()
    return directory


def commit(saving: Path, root: Path, iteration: int, manifest: str, lock_token: str | None = None) -> None:
    """Make the directory ``saving`` the checkpoint of ``iteration``, replacing an earlier one.

    All files except the ``manifest`` must be on stable storage. A failure before the last rename restores the earlier
    checkpoint. With a ``lock_token``, only the run whose lock on ``root`` has it may rename.
    """
    with explained("write", saving / MANIFEST):
        write_text_durably(saving / MANIFEST, manifest)
        sync_directory(saving)
    if lock_token is not None:
        check_token(root, lock_token)
    final = iteration_directory(root, iteration)
    with explained("write", final):
        replaced = hidden_path(final, "replaced")
        with suppress(FileNotFoundError):
            os.rename(final, replaced)
        try:
            os.rename(saving, final)
        except OSError:
            with suppress(FileNotFoundError):
                os.rename(replaced, final)
            raise
        sync_directory(root)
    draft = hidden_path(root / TRACKER, "saving")
    with explained("write", root / TRACKER):
        write_text_durably(draft, str(iteration))
        os.replace(draft, root / TRACKER)
        sync_directory(root)
    remove_checkpoint(replaced)


def clear_leftovers(root: Path) -> None:
    """Remove leftovers of a crash in ``root``, and restore a checkpoint whose replacement was interrupted."""
    # Only the run that saves to the directory calls this: it would also remove the running save of another.
    for path, iteration in list(_matching(root, _REPLACED)):
        final = iteration_directory(root, iteration)
        if exists(path / MANIFEST) and not exists(final):
            os.rename(path, final)
        else:
            remove_checkpoint(path)
    for path, _ in [*_matching(root, _SAVING), *_matching(root, _REMOVING)]:
        remove_checkpoint(path)
    for path in root.iterdir():
        if _TRACKER_DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def set_aside(root: Path, iteration: int) -> None:
    """Rename the checkpoint of ``iteration``, so that no run loads it; one that was renamed before is deleted."""
    directory = locate_checkpoint(root, iteration)
    renamed = iteration_directory(root, iteration).with_name(f"{iteration_directory(root, iteration).name}.rolled_back")
    with explained("write", renamed):
        if renamed.exists():
            remove_checkpoint(renamed)
        os.rename(directory, renamed)
        sync_directory(root)


def remove_checkpoint(directory: Path) -> None:
    """Delete a checkpoint or its remains; what cannot be deleted stays for the next attempt."""
    if directory.is_symlink():
        directory.unlink(missing_ok=True)
        return
    try:
        if _COMPLETE.fullmatch(directory.name):
            # Under its own name, its remains after a crash would count as a damaged checkpoint, which stays.
            hidden = hidden_path(directory, "removing")
            os.rename(directory, hidden)
            directory = hidden
        # The manifest first: without it, the rest of the directory is not a checkpoint.
        (directory / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(directory, ignore_errors=True)


# --- new directories -----------------------------------------------------------------------------------------


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """A hidden directory next to ``target``, renamed to ``target`` at the end, or removed after an error.

    Raises :class:`CheckpointError` if ``target`` exists and is not an empty directory. Leftovers of a killed conversion
    to ``target`` are removed.
    """
    check_free(target)
    with explained("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        leftover = re.compile(re.escape(f".{target.name}.saving-") + "[0-9a-f]{8}")
        for path in target.parent.iterdir():
            if leftover.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        saving = hidden_path(target, "saving")
        saving.mkdir()
    try:
        yield saving
        with explained("write", target):
            sync_directory(saving)
            os.rename(saving, target)
            sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise


def check_free(target: Path) -> None:
    """Raise :class:`CheckpointError` if ``target`` exists and is not an empty directory."""
    with explained("write", target):
        in_the_way = target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
    if in_the_way:
        raise CheckpointError(f"{target} already exists and is not overwritten: choose another directory.")


# --- retention ----------------------------------------------------------------------------------------------


@dataclass
class Retention:
    """Keeps the newest ``last`` good checkpoints (default: one) and those at multiples of ``interval``.

    ``verify`` compares a checkpoint with its digests and raises :class:`CheckpointError`; a good result is remembered.
    """

    last: int | None
    interval: int | None
    verify: Callable[[int], None]
    _good: set[int] = field(default_factory=set)

    def confirm(self, iteration: int) -> None:
        """Record that the checkpoint of ``iteration`` has been verified."""
        self._good.add(iteration)

    def superfluous(self, iterations: Sequence[int]) -> list[int]:
        """The ``iterations`` (ascending) that may be deleted."""
        missing = self.last or 1
        newest_first = iterations[::-1]
        milestones = {one for one in iterations if self.interval is not None and one % self.interval == 0}
        if milestones.issuperset(newest_first[missing:]):
            return []  # without verification, which reads everything
        for place, iteration in enumerate(newest_first):
            if iteration not in self._good:
                try:
                    self.verify(iteration)
                except CheckpointError as error:
                    _logger.warning(
                        "The checkpoint of iteration %d is kept, but counts for nothing: %s", iteration, error
                    )
                    continue
                self._good.add(iteration)
            missing -= 1
            if missing == 0:
                return [older for older in newest_first[place + 1 :] if older not in milestones]
        return []
