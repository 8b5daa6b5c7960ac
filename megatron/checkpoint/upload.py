"""A checkpoint at a URL: it appears and disappears atomically, although an object store has no rename.

``iter_0000100`` copied to a directory is a checkpoint like any other. Imports no torch.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import (
    MANIFEST,
    SOURCE_SAVED_AT,
    TRACKER,
    Retention,
    iteration_directory,
    iteration_of,
    saved_iterations,
)
from megatron.checkpoint.files import (
    BLOCK,
    BLOCK_BYTES,
    Progress,
    RemotePath,
    WrittenFile,
    check_unmodified,
    explained,
    files_of,
    verify_file,
)
from megatron.data.digests import BlockDigests, is_sealed, seal
from megatron.errors import CheckpointError

_OF_ATTEMPT = re.compile(r"rank_\d+\.([0-9a-f]{8})\.safetensors|\.written-([0-9a-f]{8})/.*")

Note = Callable[[str], None]

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
            while block := original.read(BLOCK):
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
