"""The directory that holds a run's checkpoints, and how one comes and goes without ever being torn.

    DIR/iter_0000100/                            a complete checkpoint
    DIR/latest_checkpointed_iteration.txt        the tracker: "100"
    DIR/.iter_0000200.saving-1f6c0a9e/           being written, or left by a crash
    DIR/.iter_0000100.replaced-83d2b7c4/         making room for a second checkpoint of the same iteration

A checkpoint is written under a hidden name and renamed when it is complete, so what is called ``iter_...`` is
complete. The directories are the truth; the tracker is for people and scripts, and is never needed.

Saving an iteration again takes two renames, the old one away and the new one in. A crash between them leaves
both complete under hidden names: readers then find the old one under its ``replaced`` name, and the next
save renames it back.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron.checkpoint.storage import (
    MANIFEST,
    explained,
    read_manifest,
    sync_directory,
    write_text_durably,
)
from megatron.config.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"

_COMPLETE = re.compile(r"iter_(\d{7,})")
_SAVING = re.compile(r"\.iter_(\d{7,})\.saving-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.iter_(\d{7,})\.replaced-[0-9a-f]{8}")
_TRACKER_DRAFT = re.compile(r"\.latest_checkpointed_iteration\.txt\.saving-[0-9a-f]{8}")

_logger = logging.getLogger(__name__)


def iteration_directory(root: Path, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` belongs."""
    return root / f"iter_{iteration:07d}"


def locate_checkpoint(root: Path, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lies, which a crash may have left under its ``replaced`` name."""
    directory = iteration_directory(root, iteration)
    if not _exists(directory):
        for path, number in _matching(root, _REPLACED):
            if number == iteration and _exists(path / MANIFEST):
                return path
    return directory


def list_checkpoints(root: Path) -> list[int]:
    """The iterations whose checkpoint has a readable manifest, in ascending order."""
    return [iteration for iteration in _iterations(root) if _defect(root, iteration) is None]


def find_checkpoint(
    root: Path, step: int | None = None, known_bad: Collection[int] = (), fall_back: bool = True
) -> int | None:
    """The iteration to load: ``step`` if given, else the highest that has a readable manifest.

    Iterations ``known_bad`` are passed over. Without ``fall_back`` none is: the highest must be readable.

    After a return to an older checkpoint, those of the abandoned continuation do not count: they are above the
    tracker's iteration but were written before the tracker.

    None when ``root`` does not exist or nothing was ever saved there. Raises :class:`CheckpointError` when
    ``step`` is not there, and when nothing readable is left of what was saved: a damaged directory must not
    look like a fresh start. Ask on one rank and tell the others, so that all load the same.
    """
    if step is not None:
        return _requested(root, step)
    iterations = _iterations(root)
    for iteration in reversed(_without_abandoned(root, iterations)):
        if iteration in known_bad:
            continue
        defect = _defect(root, iteration)
        if defect is None:
            return iteration
        if not fall_back:
            raise defect
        _logger.warning("Passing over the checkpoint of iteration %d: %s", iteration, defect)
    if iterations or _exists(root / TRACKER):
        raise CheckpointError(
            f"{root} was saved to but holds no readable checkpoint: restore one there, or choose another "
            "directory to start afresh."
        )
    return None


def _without_abandoned(root: Path, iterations: list[int]) -> list[int]:
    """``iterations`` without those that the run left behind when it went back to an older one."""
    try:
        tracked, tracked_at = int((root / TRACKER).read_text()), (root / TRACKER).stat().st_mtime_ns
        saved = {number: (locate_checkpoint(root, number) / MANIFEST).stat().st_mtime_ns for number in iterations}
    except (OSError, ValueError):
        return iterations
    if tracked not in saved:
        return iterations
    kept = [number for number in iterations if number <= tracked or saved[number] >= tracked_at]
    if kept != iterations:
        left = ", ".join(str(number) for number in iterations if number not in kept)
        _logger.warning("Iterations %s were abandoned for an older checkpoint; going on from %d", left, kept[-1])
    return kept


def _requested(root: Path, step: int) -> int:
    if step not in _iterations(root):
        there = ", ".join(map(str, list_checkpoints(root))) or "none"
        raise CheckpointError(f"{root} has no checkpoint of iteration {step}; it has: {there}.")
    defect = _defect(root, step)
    if defect is not None:
        raise defect
    return step


def _defect(root: Path, iteration: int) -> CheckpointError | None:
    """Why the manifest of ``iteration`` cannot be read; None when it can."""
    try:
        read_manifest(locate_checkpoint(root, iteration))
    except CheckpointError as error:
        return error
    return None


def _iterations(root: Path) -> list[int]:
    """The iterations that have a directory, readable or not, in ascending order."""
    found = {number for _, number in _matching(root, _COMPLETE)}
    found.update(number for path, number in _matching(root, _REPLACED) if _exists(path / MANIFEST))
    return sorted(found)


def _matching(root: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, int]]:
    """The entries of ``root`` whose name has the form ``pattern``, with the iteration in the name."""
    if not _exists(root):
        return
    with explained("read", root):
        paths = sorted(root.iterdir())
    for path in paths:
        match = pattern.fullmatch(path.name)
        if match:
            yield path, int(match[1])


def _exists(path: Path) -> bool:
    with explained("read", path):
        return path.exists()


def new_saving_directory(root: Path, iteration: int) -> Path:
    """Clear what earlier saves left in ``root`` and make a fresh directory there for a checkpoint."""
    with explained("write", root):
        root.mkdir(parents=True, exist_ok=True)
        sync_directory(root.parent)
        clear_leftovers(root)
        directory = root / f".{iteration_directory(root, iteration).name}.saving-{secrets.token_hex(4)}"
        # Not by tempfile: its directories are closed to everybody else, and this one stays.
        directory.mkdir()
    return directory


def commit(saving: Path, root: Path, iteration: int) -> None:
    """Turn the complete directory ``saving`` into the checkpoint of ``iteration``, instead of an earlier one.

    ``saving`` must be on stable storage. After a failure before the last rename, the earlier checkpoint is
    back in its place.
    """
    final = iteration_directory(root, iteration)
    with explained("write", final):
        replaced = _move_away(final)
        try:
            os.rename(saving, final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, final)
            raise
        sync_directory(root)
    write_tracker(root, iteration)
    if replaced is not None:
        remove_checkpoint(replaced)


def _move_away(final: Path) -> Path | None:
    replaced = final.with_name(f".{final.name}.replaced-{secrets.token_hex(4)}")
    try:
        os.rename(final, replaced)
    except FileNotFoundError:
        return None
    return replaced


def write_tracker(root: Path, iteration: int) -> None:
    """Replace the tracker in one step."""
    draft = root / f".{TRACKER}.saving-{secrets.token_hex(4)}"
    with explained("write", root / TRACKER):
        write_text_durably(draft, str(iteration))
        os.replace(draft, root / TRACKER)
        sync_directory(root)


def clear_leftovers(root: Path) -> None:
    """Remove what a crash left in ``root``, and put back a checkpoint whose replacement it interrupted.

    Only for the one run that saves to ``root``: it would also remove the save in progress of another.
    """
    for path, iteration in list(_matching(root, _REPLACED)):
        final = iteration_directory(root, iteration)
        if _exists(path / MANIFEST) and not _exists(final):
            os.rename(path, final)
        else:
            remove_checkpoint(path)
    for path, _ in list(_matching(root, _SAVING)):
        remove_checkpoint(path)
    for path in root.iterdir():
        if _TRACKER_DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove_checkpoint(directory: Path) -> None:
    """Delete a checkpoint or what is left of one; what cannot be deleted stays for the next attempt."""
    if directory.is_symlink():
        directory.unlink(missing_ok=True)
        return
    # The manifest goes first: without it, half a directory cannot pass for a checkpoint.
    try:
        (directory / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(directory, ignore_errors=True)
