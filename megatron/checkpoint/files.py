"""Files of checkpoints: paths at URLs, errors with a remedy, stable storage, and the digests of the intended content.

A path at a URL has the methods of ``pathlib.Path`` that reading a checkpoint needs. An object store has no directories
and no renames, and writes an object completely or not at all. Errors are :class:`CheckpointError`, since fsspec's file
systems raise different exceptions; a missing object is a ``FileNotFoundError``, as for a ``Path``.

Imports no torch, because the background writer imports this module.
"""

import errno
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import xxhash

from megatron.data.digests import BlockDigests
from megatron.data.storage import file_system
from megatron.errors import CheckpointError, UserError
from megatron.urls import is_url

Progress = Callable[[], None]

REQUEST_BYTES = 32 << 20
"""Bytes per request when a file at a URL is read or written sequentially."""
_WITH_DIRECTORIES = {"file", "local", "sftp", "ssh"}
_LONGEST_REASON = 300

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


class UnreachableError(CheckpointError):
    """The store does not answer or fails; a later attempt may succeed."""


class _Status(NamedTuple):
    st_size: int
    st_mtime_ns: int
    """Modification time by the store's clock; 0 if unknown."""


@dataclass(frozen=True, order=True)
class RemotePath:
    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is a file here, or any file below."""
        with self._explained("read") as (system, path):
            # Not fsspec's exists(), which may take an error for an absence.
            try:
                system.info(path)
            except FileNotFoundError:
                return False
        return True

    def stat(self) -> _Status:
        """Size and modification time of a file."""
        with self._explained("read") as (system, path):
            size, modified_at = int(system.info(path)["size"] or 0), 0
            with suppress(NotImplementedError):
                modified_at = int(system.modified(path).timestamp() * 1e9)
        return _Status(size, modified_at)

    def iterdir(self) -> Iterator["RemotePath"]:
        """Direct children; none if nothing was written here."""
        with self._explained("list") as (system, path):
            try:
                entries = system.ls(path, detail=False)
            except FileNotFoundError:
                entries = []
        names = {entry.rstrip("/").rpartition("/")[2] for entry in entries if entry.rstrip("/") != path.rstrip("/")}
        return (self / name for name in sorted(names))

    def files(self) -> dict[str, int]:
        with self._explained("list") as (system, path):
            try:
                found = system.find(path, detail=True)
            except FileNotFoundError:
                found = {}
        names = {name.removeprefix(path).strip("/"): info for name, info in found.items()}
        return {name: int(info["size"] or 0) for name, info in sorted(names.items()) if name}

    def read_bytes(self) -> bytes:
        with self._explained("read") as (system, path):
            return bytes(system.cat_file(path))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open(self, mode: str = "rb", buffering: int = 0) -> io.FileIO:
        """Open the file for reading by ranges."""
        assert (mode, buffering) == ("rb", 0)
        return cast(io.FileIO, _RangeReader(self, self.stat().st_size))  # its methods for reading

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes ``[start, stop)`` in one request."""
        with self._explained("read") as (system, path):
            return bytes(system.cat_file(path, start=start, end=stop))

    def write_bytes(self, content: bytes) -> None:
        """Write or replace a small file in one request."""
        with self._explained("write", makes_directory=True) as (system, path):
            system.pipe_file(path, content)

    @contextmanager
    def writing(self) -> Iterator[Callable[[bytes], object]]:
        """Write or replace a file sequentially; an error leaves no file."""
        with self._explained("write", makes_directory=True) as (system, path):
            file = system.open(path, "wb")
            try:
                yield file.write
            except BaseException:
                # To close it would make an object of the part that is there.
                with suppress(Exception):
                    file.discard()
                    file.closed = True
                raise
            file.close()

    def remove(self, names: list[str], progress: Progress = lambda: None) -> None:
        """Delete files below, by relative name."""
        for start in range(0, len(names), 1000):
            with self._explained("delete files of") as (system, path):
                system.rm([f"{path.rstrip('/')}/{name}" for name in names[start : start + 1000]])
            progress()

    @contextmanager
    def _explained(self, action: str, makes_directory: bool = False) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it; converts its errors to one sentence with a remedy."""
        try:
            # fsspec keeps the objects of its file systems, with their connections.
            system, path = file_system(self.url)
            # And what it has listed, which others change.
            system.invalidate_cache()
            protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
            # On an object store, to make a directory may make a bucket.
            if makes_directory and protocols & _WITH_DIRECTORIES:
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
            yield system, path
        except (UserError, GeneratorExit):
            raise
        except FileNotFoundError as error:
            if action == "write":
                raise CheckpointError(self._failure(action, error, "check the URL")) from error
            raise FileNotFoundError(f"no such file: {self.url}") from error
        except PermissionError as error:
            remedy = "check the credentials in the environment, and what they permit"
            raise CheckpointError(self._failure(action, error, remedy)) from error
        except Exception as error:
            # botocore, aiohttp and others have classes of their own, with these words in their names.
            names = " ".join(kind.__name__ for kind in type(error).__mro__)
            may_succeed_later = isinstance(error, OSError) or "Connect" in names or "Timeout" in names
            kind = UnreachableError if may_succeed_later else CheckpointError
            raise kind(self._failure(action, error, "check the endpoint, the network and the credentials")) from error

    def _failure(self, action: str, error: Exception, remedy: str) -> str:
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        return f"Cannot {action} {self.url} ({reason}): {remedy}."


class SeekableFile(io.RawIOBase):
    """A file of ``size`` bytes for reading; a subclass has ``readinto``."""

    def __init__(self, size: int) -> None:
        self._size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a position before its beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


class _RangeReader(SeekableFile):
    """Reads exactly the requested ranges, and reads ahead for sequential requests."""

    def __init__(self, path: RemotePath, size: int) -> None:
        super().__init__(size)
        self._path = path
        self._start, self._ahead = 0, b""

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        offset = self._position - self._start
        if not 0 <= offset < len(self._ahead):
            follows = self._position > 0 and offset == len(self._ahead)
            stop = min(self._size, self._position + max(len(target), REQUEST_BYTES if follows else 0))
            if stop <= self._position:
                return 0
            self._start, self._ahead, offset = self._position, self._path.read_range(self._position, stop), 0
        part = self._ahead[offset : offset + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


AnyPath = Path | RemotePath


def path_of(place: str) -> AnyPath:
    return RemotePath(place.rstrip("/")) if is_url(place) else Path(place)


# --- stable storage and digests -----------------------------------------------------------------------------


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
