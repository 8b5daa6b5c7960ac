"""Files on stable storage with the digests of their intended content, and their verification.

Imports no torch, because the background writer imports this module.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import xxhash

from megatron.checkpoint.files import AnyPath, Progress
from megatron.data.digests import BlockDigests
from megatron.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""Every block of a file has a digest, so that a part of a file can be verified."""
SYNC_BYTES = 64 << 20
"""Bytes after which the kernel is asked to start writing to disk."""

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
def explained(action: str, path: AnyPath) -> Iterator[None]:
    """Convert an ``OSError`` to a :class:`CheckpointError` with the action, the path and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the file system")
        raise CheckpointError(f"Cannot {action} {path} ({error.strerror or error}): {remedy}.") from error


def sync_directory(directory: Path) -> None:
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
    # fsync does not write Python's buffer.
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True)
class WrittenFile:
    """Size and digests of a checkpoint file, as its writer computed them."""

    name: str
    size: int
    digests: tuple[str, ...]
    """XXH3-128 of each block of ``block_bytes``, in hexadecimal; the last block may be shorter."""
    block_bytes: int | None = BLOCK_BYTES
    """None: one digest of the whole file (checkpoints of format version 2)."""

    @classmethod
    def of(cls, name: str, digests: BlockDigests) -> Self:
        return cls(name, digests.size, tuple(digest.hex() for digest in digests.finish()))

    @property
    def digest(self) -> str:
        """One digest to display: the digest of the single block, otherwise XXH3-128 of all digests."""
        return self.digests[0] if len(self.digests) == 1 else xxhash.xxh3_128_hexdigest("".join(self.digests).encode())

    def to_json(self) -> dict[str, Any]:
        if self.block_bytes is None:
            return {"bytes": self.size, "xxh3_128": self.digests[0]}
        return {"bytes": self.size, "block_bytes": self.block_bytes, "xxh3_128": list(self.digests)}

    @classmethod
    def from_json(cls, name: str, record: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; raises ``ValueError`` for an invalid record."""
        size, digests = int(record["bytes"]), record["xxh3_128"]
        if isinstance(digests, str):
            return cls(name, size, (digests,), None)
        file = cls(name, size, tuple(map(str, digests)), int(record["block_bytes"]))
        if file.block_bytes is None or file.block_bytes < 1 or len(file.digests) != -(-size // file.block_bytes):
            raise ValueError(f"{name} has {len(file.digests)} digests for {size} bytes")
        return file


def files_of(manifest: str) -> dict[str, WrittenFile]:
    """The files in the text of a manifest, by name."""
    records = json.loads(manifest)["manifest"]["files"]
    return {name: WrittenFile.from_json(name, record) for name, record in records.items()}


def check_unmodified(original: Path, copied: WrittenFile, written: WrittenFile) -> None:
    """Raise :class:`CheckpointError` if the ``copied`` bytes of ``original`` are not those that were ``written``."""
    if copied != written:
        raise CheckpointError(
            f"{original} was modified after it was written, so it is not mirrored: check it with "
            "tools/inspect_checkpoint.py --verify."
        )


class DigestedFile:
    """Creates the file ``path`` on stable storage, sequentially, and digests its bytes.

    A context manager; ``written`` is set at the end. Errors are ``OSError``.
    """

    written: WrittenFile

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = BlockDigests(BLOCK_BYTES)
        self._syncing: Future[None] | None = None
        self._next_sync = SYNC_BYTES

    # While a block is written, one thread hashes it and another syncs earlier blocks:
    #
    #   caller    write block n ──── │ write block n + 1 ─ │
    #   hash      digest block n ─── │ digest block n + 1  │     each write waits for its digest
    #   sync      fsync of the last SYNC_BYTES ──────────────    each fsync is awaited before the next

    def __enter__(self) -> Self:
        self._file = self._path.open("xb")
        self._workers = ThreadPoolExecutor(2)  # one hashes, one syncs
        return self

    def write(self, content: bytes | memoryview) -> None:
        # The bytes in memory are digested while they are written; both release the interpreter's lock.
        hashed = self._workers.submit(self._digests.update, content)
        self._file.write(content)
        hashed.result()
        if self._file.tell() >= self._next_sync:
            # The system reports an error once: the last sync would not report an error of an earlier sync.
            if self._syncing is not None:
                self._syncing.result()
            # The disk works while more bytes are copied.
            self._syncing = self._workers.submit(os.fsync, self._file.fileno())
            self._next_sync = self._file.tell() + SYNC_BYTES

    def __exit__(self, exception_type: object, *rest: object) -> None:
        """Sync and close the file; after an exception only close it."""
        with self._file, self._workers:
            if exception_type is None:
                if self._syncing is not None:
                    self._syncing.result()
                sync_file(self._file)
                self.written = WrittenFile.of(self._path.name, self._digests)


def check_file(directory: AnyPath, file: WrittenFile) -> None:
    """Raise :class:`CheckpointError` if ``file`` is missing in ``directory`` or has another size."""
    path = directory / file.name
    with explained("read", path):
        size = path.stat().st_size
    if size != file.size:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {file.size:,}: load another checkpoint.")


def verify_file(directory: AnyPath, file: WrittenFile, progress: Progress = lambda: None) -> None:
    """Raise :class:`CheckpointError` if ``file`` is missing in ``directory`` or its digests differ."""
    check_file(directory, file)
    path = directory / file.name
    with explained("read", path), path.open("rb", buffering=0) as content:
        digests = BlockDigests(file.block_bytes).read(content, progress)
    for block, (found, written) in enumerate(zip(digests, file.digests, strict=True)):
        if found.hex() != written:
            raise damaged_block(path, file, block, found.hex())


def damaged_block(path: AnyPath, file: WrittenFile, block: int, digest: str) -> CheckpointError:
    start = block * (file.block_bytes or 0)
    end = min(file.size, start + (file.block_bytes or file.size))
    return CheckpointError(
        f"{path} is damaged (the digest of bytes {start:,} to {end:,} is {digest} but was {file.digests[block]} when "
        "it was written): load another checkpoint."
    )
