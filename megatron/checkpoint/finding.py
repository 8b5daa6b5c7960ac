"""Find checkpoints and the one to load; read the state of one, and verify its files."""

import json
import logging
import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import islice

from megatron.checkpoint.directory import (
    MANIFEST,
    SOURCE_SAVED_AT,
    TRACKER,
    exists,
    iteration_of,
    locate_checkpoint,
    saved_iterations,
)
from megatron.checkpoint.files import AnyPath, RemotePath, explained, verify_file
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.schema import SavedState, upgrade
from megatron.errors import CheckpointError

_logger = logging.getLogger(__name__)

_MOST_LOOKED_INTO = 100
"""Directories below a wrong one in which its checkpoints are looked for."""


def list_checkpoints(root: AnyPath) -> list[int]:
    """Iterations with a readable manifest, in ascending order."""
    return [iteration for iteration in saved_iterations(root) if _defect(root, iteration) is None]


def find_checkpoint(
    root: AnyPath,
    step: int | None = None,
    known_bad: Collection[int] = (),
    fall_back: bool = True,
    copied_from: AnyPath | None = None,
) -> int | None:
    """The iteration to load: ``step`` if given, else the highest that has a readable manifest.

    Iterations ``known_bad`` are skipped. Without ``fall_back`` the highest must be readable.

    After a return to an older checkpoint, the checkpoints of the abandoned continuation do not count: they are above
    the tracker's iteration but were written before the tracker. If ``root`` has copies, the tracker of the directory
    that they are ``copied_from`` counts as well, since it may be newer.

    Returns None if ``root`` does not exist or has no checkpoints. Raises :class:`CheckpointError` if ``step`` does not
    exist, and if no saved checkpoint is readable: a damaged directory must not start a new run. Call it on one rank and
    broadcast the result, so that all ranks load the same.
    """
    iterations = saved_iterations(root)
    if step is not None:
        if not iterations and (meant := _what_was_meant(root)) is not None:
            raise CheckpointError(f"{root} {meant}.")
        if step not in iterations:
            there = ", ".join(map(str, list_checkpoints(root))) or "none"
            raise CheckpointError(f"{root} has no checkpoint of iteration {step}; it has: {there}.")
        if (defect := _defect(root, step)) is not None:
            raise defect
        return step
    kept = _without_abandoned(root, iterations, root)
    if copied_from is not None:
        kept = _without_abandoned(root, kept, copied_from)
    for iteration in reversed(kept):
        if iteration in known_bad:
            continue
        defect = _defect(root, iteration)
        if defect is None:
            return iteration
        if not fall_back:
            raise defect
        _logger.warning("Skipping the checkpoint of iteration %d: %s", iteration, defect)
    if iterations or exists(root / TRACKER):
        raise CheckpointError(
            f"{root} was saved to but has no readable checkpoint: restore one there, or choose another "
            "directory to start from the beginning."
        )
    return None


def missing_checkpoint(root: AnyPath, flag: str = "--load", remedy: str = "check the path") -> CheckpointError:
    """The error of a ``root`` without checkpoints."""
    return CheckpointError(f"{flag} {root} {_what_was_meant(root, flag) or f'has no checkpoint: {remedy}'}.")


def _what_was_meant(root: AnyPath, flag: str = "--load") -> str | None:
    """A clause that names the directory of checkpoints beside ``root``, if there is one."""
    if (iteration := iteration_of(root)) is not None:
        step = f" --ckpt-step {iteration}" if flag == "--load" else ""
        return f"is the directory of one checkpoint: use {flag} {root.parent}{step} instead"
    if (below := directory_below(root)) is not None:
        return f"has no checkpoint, but {below} has: use {flag} {below} instead"
    return None


def directory_below(root: AnyPath) -> AnyPath | None:
    """The first directory directly below ``root`` that has checkpoints."""
    if not exists(root):
        return None
    with explained("read", root):
        found: Iterable[AnyPath] = root.iterdir()
        children = sorted(islice(found, _MOST_LOOKED_INTO), key=str)
    for child in children:
        with suppress(CheckpointError):  # a directory that cannot be read
            if (isinstance(child, RemotePath) or child.is_dir()) and saved_iterations(child):
                return child
    return None


def _without_abandoned(root: AnyPath, iterations: list[int], tracker_of: AnyPath) -> list[int]:
    """``iterations`` without those that were abandoned when the run returned to an older one, by the tracker."""
    tracker = tracker_of / TRACKER
    try:
        tracked = int(tracker.read_text())
        # At a URL the time is the manifest's, since the store's clock differs from the run's clock.
        at_url = isinstance(tracker_of, RemotePath)
        tracked_at = _saved_at(tracker_of, tracked) if at_url else tracker.stat().st_mtime_ns
    except (OSError, ValueError):
        return iterations
    if tracked not in saved_iterations(tracker_of):
        return iterations
    kept = [number for number in iterations if number <= tracked or _saved_at(root, number) >= tracked_at]
    if kept != iterations:
        left = ", ".join(str(number) for number in iterations if number not in kept)
        _logger.warning("Iterations %s in %s were abandoned for iteration %d", left, root, tracked)
    return kept


def _saved_at(root: AnyPath, iteration: int) -> float:
    """Time at which the manifest of ``iteration`` was written, in ns; infinite if unknown.

    At a URL, the time of the original's manifest, so that times of one file system are compared.
    """
    manifest = locate_checkpoint(root, iteration) / MANIFEST
    try:
        if isinstance(manifest, RemotePath):
            original = json.loads(manifest.read_text())["manifest"].get(SOURCE_SAVED_AT)
            return float(manifest.stat().st_mtime_ns if original is None else original)
        return manifest.stat().st_mtime_ns
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return math.inf


def _defect(root: AnyPath, iteration: int) -> CheckpointError | None:
    """The reason why the manifest of ``iteration`` cannot be used; None if it can."""
    try:
        read_checkpoint(root, iteration)
    except CheckpointError as error:
        return error
    return None


def verify_share(root: AnyPath, iteration: int, rank: int, size: int) -> None:
    """Compare the share of files of ``rank`` of ``size`` with their digests; no collective.

    All ranks together read every file once, each about equally many bytes. Raises :class:`CheckpointError`.
    """
    directory, manifest = locate_checkpoint(root, iteration), read_checkpoint(root, iteration)
    load = [0] * size
    for file in sorted(manifest.files().values(), key=lambda file: (-file.size, file.name)):
        holder = min(range(size), key=load.__getitem__)
        load[holder] += file.size
        if holder == rank:
            verify_file(directory, file)


def read_run_state(root: AnyPath, iteration: int) -> SavedState:
    """The saved state of ``iteration``, upgraded to the current schema; no collective."""
    manifest = read_checkpoint(root, iteration)
    return upgrade(manifest.state, manifest.format_version)
