"""The directory with a run's checkpoints, local or at a URL: a checkpoint appears and disappears atomically.

A checkpoint is written under a hidden name and renamed when it is complete, so a directory named ``iter_...`` is
complete. The directories decide; the tracker is for people and scripts, and is never required.

An object store has no rename: at a URL the manifest, written last, makes a directory a checkpoint. ``iter_0000100``
copied from a URL to a directory is a checkpoint like any other. Imports no torch.
"""

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from megatron.checkpoint.files import (
    BLOCK_BYTES,
    REQUEST_BYTES,
    AnyPath,
    Progress,
    RemotePath,
    WrittenFile,
    check_unmodified,
    explained,
    files_of,
    sync_directory,
    verify_file,
    write_text_durably,
)
from megatron.checkpoint.lock import check_token
from megatron.data.digests import BlockDigests, is_sealed, seal
from megatron.errors import CheckpointError

_logger = logging.getLogger(__name__)

PathT = TypeVar("PathT", bound=AnyPath)
Note = Callable[[str], None]

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
_OF_ATTEMPT = re.compile(r"rank_\d+\.([0-9a-f]{8})\.safetensors|\.written-([0-9a-f]{8})/.*")
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
            sync_directory(directory.parent)  # or a power failure may keep the deletions, and not the name
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


# --- at a URL -----------------------------------------------------------------------------------------------

# What is at the URL:
#
#   iter_0000100/rank_00003.1f6c0a9e.safetensors     rank 3's file, uploaded by the attempt 1f6c0a9e
#   iter_0000100/.written-1f6c0a9e/rank_00003.json   rank 3's file was uploaded and read back; deleted at the end
#   iter_0000100/manifest.json                       the commit, written last
#   latest_checkpointed_iteration.txt                the tracker
#
# The invariants:
#
# - An object whose name has an attempt is written by this attempt only, so two attempts never share an object.
# - ``manifest.json`` is one object, which is replaced as a whole. It names files of one attempt only, which were read
#   back from the store and compared with their digests before. Until it is written, the iteration has no checkpoint or
#   the earlier one with its files unchanged; afterwards it has the new one.
# - Without a manifest there is no checkpoint. The next save deletes files that no manifest names. Deleting a checkpoint
#   begins with its manifest.


@dataclass(frozen=True)
class Attempt:
    """One attempt to upload the checkpoint of ``iteration``; ranks share its ``token``."""

    root: RemotePath
    iteration: int
    token: str

    @property
    def target(self) -> RemotePath:
        return iteration_directory(self.root, self.iteration)

    def name_of(self, file: str) -> str:
        stem, dot, suffix = file.rpartition(".")
        return f"{stem}.{self.token}{dot}{suffix}"

    def _marker_of(self, file: str) -> str:
        return f".written-{self.token}/{file.rpartition('.')[0]}.json"

    def upload(self, source: Path, progress: Progress) -> None:
        """Upload the file ``source``, read it back, and write a marker for :meth:`publish`."""
        target, digests = self.target / self.name_of(source.name), BlockDigests(BLOCK_BYTES)
        with target.writing() as write, explained("read", source), source.open("rb", buffering=0) as original:
            while block := original.read(REQUEST_BYTES):
                digests.update(block)
                write(block)
                progress()
        file = WrittenFile.of(target.name, digests)
        verify_file(self.target, file, progress)
        (self.target / self._marker_of(source.name)).write_bytes(json.dumps(file.to_json()).encode())

    def missing(self, files: Collection[str]) -> set[str]:
        """The ``files`` without a marker."""
        there = self.target.files()
        return {file for file in files if self._marker_of(file) not in there}

    def publish(self, manifest: Path, progress: Progress) -> None:
        """Write the manifest once no file is :meth:`missing`; then delete files that it does not name."""
        with explained("read", manifest):
            text, written_at = manifest.read_text(), manifest.stat().st_mtime_ns
        files = files_of(text)
        for name, file in files.items():
            uploaded = json.loads((self.target / self._marker_of(name)).read_bytes())
            check_unmodified(manifest.with_name(name), WrittenFile.from_json(name, uploaded), file)
            progress()
        there = self.target.files()
        for name, file in files.items():
            if there.get(self.name_of(name)) != file.size:
                raise CheckpointError(
                    f"{self.target / self.name_of(name)} was deleted or changed after it was uploaded: let no "
                    "other run save to this URL."
                )
        content = renamed(text, self.name_of, written_at).encode()
        (self.target / MANIFEST).write_bytes(content)
        if (self.target / MANIFEST).read_bytes() != content:
            raise CheckpointError(f"{self.target / MANIFEST} is not what was written there: check the store.")
        (self.root / TRACKER).write_bytes(str(self.iteration).encode())
        self.target.remove(leftovers(there, {self.name_of(name) for name in files}), progress)


def renamed(manifest: str, name_of: Callable[[str], str], written_at: int) -> str:
    """The manifest of a copy with renamed files."""
    if not is_sealed("manifest", manifest):
        raise CheckpointError("The manifest of the original is damaged, so it is not mirrored.")
    content: dict[str, Any] = json.loads(manifest)["manifest"]
    content["files"] = {name_of(name): file for name, file in content["files"].items()}
    for tensor in content["tensors"].values():
        # Format versions before 8 name the file of each chunk; later ones say where it is in the list of files.
        for chunk in tensor["chunks"] if isinstance(tensor["chunks"], list) else ():
            chunk["file"] = name_of(chunk["file"])
    return seal("manifest", json.dumps({**content, SOURCE_SAVED_AT: written_at}, separators=(",", ":")))


def leftovers(there: Collection[str], named: Collection[str], but: str = "") -> list[str]:
    """Files of attempts that are not in ``named`` and not of the attempt ``but``."""
    found = ((name, _OF_ATTEMPT.fullmatch(name)) for name in there if name not in named)
    return [name for name, match in found if match and but not in match.groups()]


@dataclass
class Housekeeping:
    """Deletes leftovers of failed attempts at a URL, and checkpoints that retention does not keep."""

    root: RemotePath
    _clean: set[int] = field(default_factory=set)

    def clear(self, token: str, progress: Progress) -> None:
        """Delete leftovers of attempts other than ``token``, at every iteration that was not found clean before."""
        for directory in self.root.iterdir():
            iteration = iteration_of(directory)
            if iteration is None or iteration in self._clean:
                continue
            there = directory.files()
            superfluous = leftovers(there, named=(), but=token)
            if MANIFEST in there and superfluous:
                try:
                    superfluous = leftovers(there, _files_of(directory), but=token)
                except CheckpointError:
                    superfluous = []  # the files of a damaged checkpoint stay
            directory.remove(superfluous, progress)
            if MANIFEST in there:
                self._clean.add(iteration)
            progress()

    def retain(self, newest: int, last: int | None, interval: int | None, note: Note, progress: Progress) -> None:
        """Delete checkpoints that ``--save-retain-last`` and ``--save-retain-interval`` do not keep.

        A manifest is written after its files were read back, so a checkpoint counts as good if its files have their
        sizes; reading all of them again would take as long as loading.
        """
        retention = Retention(last, interval, partial(self._check_sizes, progress))
        retention.confirm(newest)
        there = [iteration for iteration in saved_iterations(self.root) if iteration <= newest]
        for iteration in retention.superfluous(there):
            directory = iteration_directory(self.root, iteration)
            directory.remove([MANIFEST])
            directory.remove(list(directory.files()), progress)
            self._clean.discard(iteration)
            note(f"deleted checkpoint {directory}")

    def _check_sizes(self, progress: Progress, iteration: int) -> None:
        directory = iteration_directory(self.root, iteration)
        there = directory.files()
        for name, size in _files_of(directory).items():
            if there.get(name) != size:
                raise CheckpointError(f"{directory / name} is not as it was written.")
        progress()


def _files_of(directory: RemotePath) -> dict[str, int]:
    """The files in a manifest, with their sizes."""
    try:
        text = (directory / MANIFEST).read_text()
        if not is_sealed("manifest", text):
            raise ValueError("its digest does not match its content")
        return {name: file.size for name, file in files_of(text).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is damaged ({error}): delete that checkpoint.") from error
