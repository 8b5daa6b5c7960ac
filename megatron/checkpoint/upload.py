"""A checkpoint at a URL: how it comes and goes without ever being torn, though an object store has no rename.

    URL/iter_0000100/rank_00003.1f6c0a9e.safetensors     what rank 3 wrote, uploaded by the attempt 1f6c0a9e
    URL/iter_0000100/manifest.json                       the commit, written last
    URL/iter_0000100/.written-1f6c0a9e/rank_00003.json   rank 3's file is uploaded and was read back; deleted at last
    URL/latest_checkpointed_iteration.txt                a hint

The invariants:

- An object whose name holds an attempt is written by this attempt alone, so two attempts never share one.
- ``manifest.json`` is one object, which is replaced whole. It names files of one attempt only, each of which has been
  read back from the store and had its digest before the manifest was written. Before that moment the iteration has no
  checkpoint, or the earlier one, whose files nobody has touched; after it, the new one.
- Without a manifest nothing is a checkpoint. What no manifest names is deleted by the next save; to delete a
  checkpoint begins with its manifest.

Copied to a directory, ``iter_0000100`` is a checkpoint as any other. Nothing here needs torch.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import MANIFEST, SOURCE_SAVED_AT, TRACKER, iteration_directory, saved_iterations
from megatron.checkpoint.files import BlockDigests, WrittenFile, explained, is_sealed, seal, verify_file
from megatron.checkpoint.remote_path import BLOCK, Progress, RemotePath
from megatron.checkpoint.retention import Retention
from megatron.errors import CheckpointError

_ITERATION = re.compile(r"iter_(\d{7,})")
_OF_ATTEMPT = re.compile(r"rank_\d+\.([0-9a-f]{8})\.safetensors|\.written-([0-9a-f]{8})/.*")

Note = Callable[[str], None]


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
        """The uploaded name of the original's ``file``."""
        stem, dot, suffix = file.rpartition(".")
        return f"{stem}.{self.token}{dot}{suffix}"

    def _marker_of(self, file: str) -> str:
        return f".written-{self.token}/{file.rpartition('.')[0]}.json"

    def upload(self, source: Path, progress: Progress) -> None:
        """Upload the file ``source``, read it back, and write a marker for :meth:`publish`."""
        file = copy_digested(source, self.target / self.name_of(source.name), progress)
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
        files = json.loads(text)["manifest"]["files"]
        for name, record in files.items():
            written = json.loads((self.target / self._marker_of(name)).read_bytes())
            if WrittenFile.from_json(name, written) != WrittenFile.from_json(name, record):
                raise CheckpointError(
                    f"{manifest.with_name(name)} was modified after it was written, so it is not mirrored: check it "
                    "with tools/inspect_checkpoint.py --verify."
                )
            progress()
        there = self.target.files()
        for name, record in files.items():
            if there.get(self.name_of(name)) != record["bytes"]:
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


def copy_digested(source: Path, target: RemotePath, progress: Progress) -> WrittenFile:
    """Copy the file ``source`` to ``target``; size and digests are of the bytes read from ``source``."""
    digests, size = BlockDigests(), 0
    with target.writing() as write, explained("read", source), source.open("rb", buffering=0) as original:
        while block := original.read(BLOCK):
            digests.update(block)
            write(block)
            size += len(block)
            progress()
    return WrittenFile(target.name, size, digests.finish())


def renamed(manifest: str, name_of: Callable[[str], str], written_at: int) -> str:
    """The manifest of a copy with renamed files."""
    if not is_sealed(manifest):
        raise CheckpointError("The manifest of the original is damaged, so it is not mirrored.")
    content: dict[str, Any] = json.loads(manifest)["manifest"]
    content["files"] = {name_of(name): file for name, file in content["files"].items()}
    for tensor in content["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = name_of(chunk["file"])
    return seal(json.dumps({**content, SOURCE_SAVED_AT: written_at}))


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
            match = _ITERATION.fullmatch(directory.name)
            if match and int(match[1]) not in self._clean:
                there = directory.files()
                directory.remove(self._leftovers(directory, there, token), progress)
                if MANIFEST in there:
                    self._clean.add(int(match[1]))
                progress()

    @staticmethod
    def _leftovers(directory: RemotePath, there: Mapping[str, int], token: str) -> list[str]:
        candidates = leftovers(there, named=(), but=token)
        if MANIFEST not in there or not candidates:
            return candidates
        try:
            return leftovers(there, _files_of(directory), but=token)
        except CheckpointError:
            # What a damaged checkpoint consists of stays.
            return []

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
        if not is_sealed(text):
            raise ValueError("its digest does not match its content")
        return {name: file["bytes"] for name, file in json.loads(text)["manifest"]["files"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is damaged ({error}): delete that checkpoint.") from error
