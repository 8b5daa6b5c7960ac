"""One archive of a session's directory, small enough to be copied from the machine as one file."""

import gzip
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

MOST_BYTES = 15 * 2**20
"""Of the archive."""
LEFT_OUT = "left_out.txt"
"""The file in the archive that names what it does not have."""
_MOST_READ, _FAST = 256 * 2**20, 2**20
"""Larger files are not compressed to see whether they fit; compressed fast, because the session waits."""


def write_archive(directory: Path, archive: Path, most_bytes: int = MOST_BYTES) -> None:
    """Replace ``archive`` by one of the files of ``directory``, the smallest first, as many as ``most_bytes`` hold.

    Every file is a gzip member of its own, so its compressed size is known before it is added.
    """
    partial = archive.with_name(f".{archive.name}.partial")
    files = [file for file in directory.rglob("*") if file.is_file() and file not in (archive, partial)]
    left_out: list[str] = []
    with partial.open("wb") as output:
        for file in sorted(files, key=lambda file: file.stat().st_size):
            size = file.stat().st_size
            member = b"" if left_out or size > _MOST_READ else _member(directory, file)
            if member and output.tell() + len(member) <= most_bytes:
                output.write(member)
            else:
                left_out.append(f"{file.relative_to(directory)}: {size} bytes\n")
        if left_out:
            output.write(_entry(LEFT_OUT, "".join(left_out).encode()))
        output.write(gzip.compress(bytes(2 * tarfile.BLOCKSIZE)))  # the end of a tar archive
    os.replace(partial, archive)


def _member(directory: Path, file: Path) -> bytes:
    return _entry(str(file.relative_to(directory)), file.read_bytes())


def _entry(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    padding = bytes(-len(content) % tarfile.BLOCKSIZE)
    return gzip.compress(info.tobuf() + content + padding, compresslevel=6 if len(content) < _FAST else 1)


def read_archive(archive: Path, directory: Path, names: Sequence[str]) -> None:
    """Extract the files ``names`` of ``archive``, if it has them, into ``directory``."""
    with tarfile.open(archive, "r:gz") as tar:
        for name in set(names) & set(tar.getnames()):
            tar.extract(name, directory, filter="data")
