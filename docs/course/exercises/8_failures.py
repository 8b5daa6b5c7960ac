"""Exercise 8: a checkpoint that no crash loses. The page is docs/course/8_failures.md.

Fill the hole, then: megatron-llama course check 8
"""

from collections.abc import Mapping

from megatron.checkpoint.directory import MANIFEST, TRACKER
from megatron_llama.course.disk import Disk


def final_name(iteration: int) -> str:
    """The directory of a checkpoint, such as ``iter_0000200``. Readers take it for whole."""
    return f"iter_{iteration:07d}"


def hidden_name(iteration: int, kind: str) -> str:
    """A name that readers do not look at; ``kind`` is ``saving`` or ``removing``."""
    return f".{final_name(iteration)}.{kind}-00000000"


def careless_save(disk: Disk, iteration: int, files: Mapping[str, bytes], manifest: bytes) -> None:
    """A save as a first version has it. Given, as an example of :class:`Disk`: most crashes lose something."""
    directory = final_name(iteration)
    for name in disk.names():
        if name.startswith("iter_"):
            disk.remove(name)
    disk.make_directory(directory)
    for name, content in files.items():
        disk.write(f"{directory}/{name}", content)
    disk.write(f"{directory}/{MANIFEST}", manifest)
    disk.write(TRACKER, str(iteration).encode())


def save(disk: Disk, iteration: int, files: Mapping[str, bytes], manifest: bytes) -> None:
    """Save the checkpoint of ``iteration``, point the tracker to it, and delete the earlier ones.

    After every step of yours the process may be killed or the power may fail. Then

    - the newest checkpoint is the earlier one or this one, and after the return this one;
    - a directory with a final name has all files and the manifest, with all their bytes;
    - the tracker, if it is there, has the number of a checkpoint that is there;
    - the next save succeeds, and leaves one checkpoint and the tracker, and no hidden name.

    ``disk`` writes nothing to stable storage unless it is asked: ``sync`` of a file for its content, ``sync`` of a
    directory for the names in it. A rename is one step.
    """
    raise NotImplementedError("fill this hole")
