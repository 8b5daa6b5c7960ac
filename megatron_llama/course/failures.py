"""Checks exercise 8: what the reader of checkpoints finds after a crash at every step of a save."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron.checkpoint.directory import MANIFEST, TRACKER, iteration_directory, saved_iterations
from megatron.checkpoint.files import BLOCK_BYTES, WrittenFile
from megatron.checkpoint.finding import find_checkpoint, verify_share
from megatron.checkpoint.manifest import Manifest, encode_manifest
from megatron.data.digests import BlockDigests
from megatron.errors import CheckpointError
from megatron_llama.course.disk import CRASHES, Crash, Disk, Tree
from megatron_llama.course.lesson import Wrong

OLD, NEW = 100, 200


def check(answer: ModuleType) -> str:
    """Crash after every step of a save beside an earlier one, and of the first save; raises :class:`Wrong`."""
    checked: list[Tree] = []
    count = steps = 0
    for before in (saved(OLD), {}):
        disk = Disk(before)
        answer.save(disk, NEW, *contents(NEW))
        steps += len(disk.steps)
        check_end(disk, NEW, "save")
        for number, moment in enumerate(disk.moments):
            count += len(moment)
            for crash, tree in zip(CRASHES, moment):
                if tree not in checked:
                    checked.append(tree)
                    found = After(disk.steps[:number], crash, tree).check(OLD if before else None)
                    check_next_save(answer, disk.steps[:number], crash, tree, NEW if found != NEW else NEW + OLD)
        for crash, tree in zip(CRASHES, disk.moments[-1]):
            if newest(tree) != NEW or tree.get(TRACKER, (b"", 0))[0] != str(NEW).encode():
                raise Wrong(
                    f"save has returned, and {crash.name} takes the checkpoint or the tracker away again: names are on "
                    "stable storage after a sync of their directory, so sync the root after the last rename."
                )
    return (
        f"In {count} crashes, {len(CRASHES)} kinds after each of {steps} steps of two saves, the reader has found a "
        f"whole checkpoint, the new one as soon as save has returned; {len(checked)} different disks, and each takes "
        "the next save."
    )


# --- what is saved -------------------------------------------------------------------------------------------


def contents(iteration: int) -> tuple[dict[str, bytes], bytes]:
    """The files and the manifest of a checkpoint."""
    files = {f"rank_{rank:05d}.safetensors": f"tensors {iteration} of rank {rank}".encode() for rank in range(2)}
    written = []
    for name, content in files.items():
        digests = BlockDigests(BLOCK_BYTES)
        digests.update(content)
        written.append(WrittenFile.of(name, digests))
    return files, encode_manifest(Manifest({}, written, {"iteration": iteration})).encode()


def saved(iteration: int) -> Tree:
    """A disk with one checkpoint."""
    files, manifest = contents(iteration)
    name = iteration_directory(Path(), iteration).name
    of_checkpoint = {f"{name}/{file}": content for file, content in {**files, MANIFEST: manifest}.items()}
    everything: dict[str, bytes | None] = {name: None, **of_checkpoint, TRACKER: str(iteration).encode()}
    return {path: (content, time) for time, (path, content) in enumerate(everything.items())}


# --- what is found -------------------------------------------------------------------------------------------


def newest(tree: Tree) -> int | None:
    """The iteration that a run would load, with all its files; None without a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        root = put(tree, Path(directory))
        iteration = find_checkpoint(root)
        if iteration is not None:
            verify_share(root, iteration, 0, 1)
    return iteration


def put(tree: Tree, root: Path) -> Path:
    """Write ``tree`` to ``root``, with the order of its times, which the reader compares."""
    for path, (content, time) in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
            os.utime(root / path, (time, time))
    return root


@dataclass(frozen=True)
class After:
    """A disk after the ``steps`` and a crash."""

    steps: list[str]
    crash: Crash
    tree: Tree

    def __str__(self) -> str:
        when = f"After {self.steps[-1]}" if self.steps else "Before the first step"
        return f"{when}, {self.crash.name} leaves"

    def check(self, old: int | None) -> int | None:
        """The iteration that a reader finds; raises :class:`Wrong`."""
        self._check_names()
        try:
            found = newest(self.tree)
        except CheckpointError:
            found = None
        if found not in (old, NEW):
            raise Wrong(
                f"{self} no checkpoint to load: delete the earlier one only when the new one has its final name, on "
                "stable storage."
            )
        self._check_tracker()
        return found

    def _check_names(self) -> None:
        """Everything with a final name must be whole."""
        with tempfile.TemporaryDirectory() as directory:
            root = put(self.tree, Path(directory))
            for iteration in saved_iterations(root):
                try:
                    verify_share(root, iteration, 0, 1)
                except CheckpointError:
                    name = iteration_directory(root, iteration).name
                    raise Wrong(f"{self} {name} in sight and not whole: {self._why(iteration, name)}.") from None

    def _why(self, iteration: int, name: str) -> str:
        """How a directory with a final name became one that is not whole."""
        if iteration != NEW:
            return "half of a deletion is a damaged checkpoint, so rename it to a hidden name first"
        if not any(step.startswith("rename(") and step.endswith(f", {name})") for step in self.steps):
            return "write to a hidden name, and rename when all is written, because a rename is all or nothing"
        manifest = self.tree.get(f"{name}/{MANIFEST}")
        if manifest is None and self.crash.loses_names:
            return "the rename survives and the names in the directory do not, so sync the draft before the rename"
        if manifest is None:
            return (
                "the manifest says which files there must be, so it is written before the rename, which is the commit"
            )
        if not manifest[0]:
            return "the manifest has its name and no bytes, so sync it like every other file before the rename"
        return "files have their names and no bytes, so sync the content of each before the rename"

    def _check_tracker(self) -> None:
        """The tracker must name a checkpoint that is there."""
        if TRACKER not in self.tree:
            return
        content = self.tree[TRACKER][0] or b""
        if not content and self.crash.loses_contents:
            raise Wrong(f"{self} an empty tracker: its draft needs a sync before the rename, like any file.")
        if content not in (str(OLD).encode(), str(NEW).encode()):
            raise Wrong(
                f"{self} a tracker with the content {content.decode(errors='replace')!r}: write a draft and rename it, "
                "because a file that is overwritten is neither the old nor the new one for a while."
            )
        if iteration_directory(Path(), int(content)).name not in self.tree:
            hint = "other programs load what it names, so commit the checkpoint first"
            if int(content) == OLD:
                hint = "move it on before the earlier checkpoint is deleted"
            if self.crash.keeps_last_rename:
                hint = f"{self.steps[-1]} may reach the disk before the rename before it, so sync the root between"
            raise Wrong(f"{self} a tracker with {int(content)}, which is not there: {hint}.")


def check_next_save(answer: ModuleType, steps: list[str], crash: Crash, tree: Tree, iteration: int) -> None:
    """The run that starts after the crash saves ``iteration``."""
    disk = Disk(tree)
    after = f"the save of iteration {iteration} after {steps[-1] if steps else 'nothing'} and {crash.name.rstrip(',')}"
    try:
        answer.save(disk, iteration, *contents(iteration))
    except OSError as error:
        raise Wrong(
            f"In {after}, {type(error).__name__} is raised ({error}): remove what a crash has left before a save "
            "begins."
        ) from error
    check_end(disk, iteration, after)


def check_end(disk: Disk, iteration: int, what: str) -> None:
    """One checkpoint and the tracker are left."""
    name = iteration_directory(Path(), iteration).name
    tree, left = disk.moments[-1][0], {*disk.names()} - {name, TRACKER}
    if name not in tree and any(step.endswith(f", {name})") for step in disk.steps):
        raise Wrong(f"At the end of {what} there is no {name}, which it has committed: delete the earlier ones alone.")
    if name not in tree:
        raise Wrong(f"At the end of {what} there is no {name}: rename the draft to the name that readers look for.")
    if tree.get(TRACKER, (b"", 0))[0] != str(iteration).encode():
        raise Wrong(f"At the end of {what} the tracker is not {iteration}: other programs load what it names.")
    hidden = sorted(one for one in left if one.startswith("."))
    if hidden:
        raise Wrong(
            f"At the end of {what} there is still {hidden[0]}: nobody else deletes hidden names, and every crash would "
            "leave another terabyte."
        )
    if left:
        raise Wrong(
            f"At the end of {what} there is still {sorted(left)[0]}: a checkpoint in every few minutes fills any disk, "
            "so delete the earlier ones when the new one is safe."
        )
