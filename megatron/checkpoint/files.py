"""Files on stable storage, each with the digest of what was meant to be written; checked by it afterwards.

Nothing here needs torch: the process that writes in the background imports this.
"""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import xxhash

from megatron.config.errors import CheckpointError

_BLOCK = 4 << 20  # bytes read at a time
SYNC_BYTES = 64 << 20
"""So much is copied to the system before the disk is told to begin with it."""

_REMEDIES = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "free some space or choose another directory",
    errno.EACCES: "give this user access to it or choose another directory",
    errno.EPERM: "give this user access to it or choose another directory",
    errno.EROFS: "choose a directory that can be written",
    errno.ENOENT: "every rank must see the whole checkpoint, so use a file system that all nodes share",
    errno.EEXIST: "something else has this name, so move it away",
    errno.EISDIR: "something else has this name, so move it away",
    errno.ENOTDIR: "a part of this path is a file, so choose another directory",
}


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`CheckpointError` that says what failed, where, and what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the file system")
        raise CheckpointError(f"Cannot {action} {path} ({error.strerror or error}): {remedy}.") from error


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory: they order its changes themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_text_durably(path: Path, text: str) -> None:
    """Create ``path`` with ``text`` on stable storage; the caller syncs the directory."""
    with path.open("xb") as file:
        file.write(text.encode())
        sync_file(file)


def sync_file(file: IO[bytes]) -> None:
    """Bring what was written to ``file`` to stable storage."""
    # The flush must come first: fsync knows nothing of what Python still holds in its buffer.
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint, as the rank that wrote it knows it."""

    name: str
    size: int
    digest: str
    """XXH3-128 of its bytes, in hexadecimal."""


class DigestedFile:
    """Creates the file ``path`` on stable storage, piece by piece, and digests it meanwhile.

    A context manager; ``written`` is known after it. Errors are ``OSError``.
    """

    written: WrittenFile
    """The file, once it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128()
        self._syncing: Future[None] | None = None
        self._next_sync = SYNC_BYTES

    def __enter__(self) -> Self:
        """Create the file, which must not be there yet."""
        self._file = self._path.open("xb")
        # One hashes, one syncs.
        self._workers = ThreadPoolExecutor(2)
        return self

    def write(self, content: bytes | memoryview) -> None:
        """Write the next bytes."""
        # The digest is of what is meant to be written, taken while it is; both let other threads run meanwhile.
        hashed = self._workers.submit(self._digest.update, content)
        self._file.write(content)
        hashed.result()
        if self._file.tell() >= self._next_sync:
            self._wait_for_sync()
            # The disk works while more is copied, rather than after all is.
            self._syncing = self._workers.submit(os.fsync, self._file.fileno())
            self._next_sync = self._file.tell() + SYNC_BYTES

    def _wait_for_sync(self) -> None:
        # The system tells of an error once: the last sync would know nothing of that of an earlier one.
        if self._syncing is not None:
            self._syncing.result()

    def __exit__(self, exception_type: object, *rest: object) -> None:
        """Sync and close the file; after an exception only close it."""
        with self._file, self._workers:
            if exception_type is None:
                self._wait_for_sync()
                sync_file(self._file)
                self.written = WrittenFile(self._path.name, self._file.tell(), self._digest.hexdigest())


def seal(content: str) -> str:
    """A JSON ``content`` behind its own digest."""
    return f"{_seal_head(content)}{content}}}"


def is_sealed(text: str) -> bool:
    """Whether ``text`` is what :func:`seal` makes of the content in it."""
    length = len(_seal_head(""))
    return text[:length] == _seal_head(text[length:-1]) and text[-1:] == "}"


def _seal_head(content: str) -> str:
    return f'{{"xxh3_128": "{xxhash.xxh3_128_hexdigest(content.encode())}", "manifest": '


def check_file(directory: Path, file: WrittenFile) -> None:
    """Raise :class:`CheckpointError` when ``file`` is missing from ``directory`` or has another size."""
    path = directory / file.name
    with explained("read", path):
        size = path.stat().st_size
    if size != file.size:
        raise CheckpointError(f"{path} has {size:,} bytes but was written with {file.size:,}: load another checkpoint.")


def verify_file(directory: Path, file: WrittenFile) -> None:
    """Raise :class:`CheckpointError` when ``file`` is missing from ``directory``, or has other bytes than were
    written."""
    check_file(directory, file)
    path = directory / file.name
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK))
    with explained("read", path), path.open("rb", buffering=0) as content:
        while length := content.readinto(buffer):
            digest.update(buffer[:length])
    if digest.hexdigest() != file.digest:
        raise CheckpointError(
            f"{path} is damaged (its digest is {digest.hexdigest()} but was {file.digest} when it was written): load "
            "another checkpoint."
        )
