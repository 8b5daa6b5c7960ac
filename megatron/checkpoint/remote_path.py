"""A path at a URL, with the methods of ``pathlib.Path`` that reading a checkpoint needs. Imports no torch.

An object store has no directories and no renames, and writes an object completely or not at all. Errors are
:class:`CheckpointError`, since fsspec's file systems raise different exceptions; a missing object is a
``FileNotFoundError``, as for a ``Path``.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron.data.storage import file_system
from megatron.errors import CheckpointError, UserError
from megatron.urls import is_url

BLOCK = 32 << 20
"""Bytes per request when a file is read or written sequentially."""
_WITH_DIRECTORIES = {"file", "local", "sftp", "ssh"}
_LONGEST_REASON = 300

Progress = Callable[[], None]


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
            stop = min(self._size, self._position + max(len(target), BLOCK if follows else 0))
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
