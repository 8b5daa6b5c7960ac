"""Files at local paths or URLs (s3://, gs://, https://, memory:// ...), with fsspec; and files that are written once.

Files are listed, read, and copied once; files ending in .gz and .zst are decompressed.

One process, of this job or another, builds a result on a shared file system while the others wait for its lease
(``operation/lease.py``). The lease only saves work: if a live owner is taken for dead, both build the same bytes, and
files appear atomically.
"""

import glob
import gzip
import hashlib
import io
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar, cast

from megatron.errors import DataError
from megatron.operation.lease import RENEWAL, Claim, Lease, Owner, clear_drafts
from megatron.urls import is_url

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_PACKAGE_OF_SCHEME = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
_COMPRESSIONS = (".gz", ".zst")
# What file systems call the property that changes with the content; the first that a file has counts.
_VERSION_FIELDS = ("ETag", "etag", "md5Hash", "crc32c", "mtime", "LastModified", "last_modified", "updated", "created")
_COPY_BYTES = 1 << 26  # bytes
_POLL = 0.2  # seconds between two looks at a lock
_SUFFIX = ".incomplete"


class SourceFile(NamedTuple):
    path: str
    size: int  # bytes, as stored


def without_compression(path: str) -> str:
    for suffix in _COMPRESSIONS:
        path = path.removesuffix(suffix)
    return path


def find_files(pattern: str) -> list[SourceFile]:
    """The files of a path, glob or directory (recursive), sorted by name."""
    if is_url(pattern):
        system, place = file_system(pattern)
        try:
            if any(sign in place for sign in "*?["):
                found = system.glob(place, detail=True)
            elif system.isfile(place):
                found = {place: system.info(place)}
            else:
                found = system.find(place, detail=True)
        except Exception as error:  # every file system has its own
            raise DataError(f"{pattern} cannot be listed ({error}): check the URL and the access to it.") from error
        files = [(path, info) for path, info in sorted(found.items()) if info["type"] == "file"]
        return [SourceFile(system.unstrip_protocol(path), int(info["size"] or 0)) for path, info in files]
    if os.path.isfile(pattern):
        return [SourceFile(pattern, os.path.getsize(pattern))]
    if os.path.isdir(pattern):
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(pattern) for name in names]
    else:
        paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    return [SourceFile(path, os.path.getsize(path)) for path in sorted(paths)]


def open_stored(path: str) -> BinaryIO:
    """Open the stored bytes of a file for reading and seeking; raises OSError or :class:`DataError`."""
    if not is_url(path):
        return open(path, "rb")
    system, place = file_system(path)
    return cast(BinaryIO, system.open(place, "rb"))


def decompressed(path: str, stored: BinaryIO) -> IO[bytes]:
    """The decompressed content of an open file, by its name."""
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=stored))
    if path.endswith(".zst"):
        try:
            import pyarrow
        except ImportError as error:
            raise DataError(f"{path} needs the package pyarrow: pip install pyarrow.") from error
        return io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd"), 1 << 20)
    return stored


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    scheme = url.split("://", 1)[0]
    try:
        import fsspec

        system, place = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGE_OF_SCHEME.get(scheme, "fsspec")
        raise DataError(f"{url} needs a package that is not installed: pip install {package}.") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{url} cannot be opened ({error}): check the URL.") from error
    return system, str(place)


class RemoteFile:
    """A file in an object store or remote file system, read by ranges. Errors are :class:`DataError`."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._system, self._path = file_system(url)
            information = self._system.info(self._path)
            self.size = int(information["size"])
        except Exception as error:  # every file system has its own
            raise self._cannot_read(error) from error
        # The version changes with the content.
        named = next((information[name] for name in _VERSION_FIELDS if information.get(name) is not None), "")
        self.version = f"{self.size} {named}"

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes at each (position, size), requested concurrently if the file system supports it."""
        wanted = [(start, start + size) for start, size in ranges if size]
        try:
            starts, ends = [start for start, _ in wanted], [end for _, end in wanted]
            found = self._system.cat_ranges([self._path] * len(wanted), starts, ends, on_error="raise")
        except Exception as error:
            raise self._cannot_read(error) from error
        for (start, end), content in zip(wanted, found, strict=True):
            if len(content) != end - start:
                raise DataError(f"{self.url} was truncated while it was read: copy it there again.")
        contents = iter(found)
        return [next(contents) if size else b"" for _, size in ranges]

    def copy_to(self, directory: str) -> str:
        """Copy this version to a local ``directory``, in one process while others wait; returns the path."""
        key = hashlib.md5(f"{self.url} {self.version}".encode(), usedforsecurity=False).hexdigest()
        path = os.path.join(directory, f"{key}-{os.path.basename(self._path)}")

        def find() -> str | None:
            return path if os.path.exists(path) and os.path.getsize(path) == self.size else None

        def write_parts(file: BinaryIO) -> None:
            # In parts: an index of billions of documents has tens of gigabytes.
            for start in range(0, self.size, _COPY_BYTES):
                file.write(self.read_ranges([(start, min(_COPY_BYTES, self.size - start))])[0])

        def download() -> str:
            write_atomically(path, write_parts)
            return path

        try:
            return load_or_build_once(path, find, download)
        except OSError as error:
            raise DataError(
                f"Cannot write a copy of {self.url} to {directory} ({error.strerror or error}): use a writable "
                "directory with --object-storage-cache-path or --data-cache-path."
            ) from error

    def _cannot_read(self, error: Exception) -> DataError:
        if isinstance(error, DataError):
            return error
        if isinstance(error, FileNotFoundError):
            return DataError(
                f"{self.url} does not exist: set --data-path to prefixes without .bin or .idx, and copy both files "
                "there."
            )
        reason = " ".join(str(error).split()) or type(error).__name__
        return DataError(f"{self.url} cannot be read ({reason}): check the address, the network and your credentials.")


# --- results that are built once ----------------------------------------------------------------------------

# Two processes need the same result:
#
#   A   load: nothing   take the lease STEM.lock   load again, build and store         release STEM.lock
#   B   load: nothing   A has the lease            load every 0.2 s, watch the lease         load: found
#
# If A dies, the lease becomes stale, on one host at once: B takes it over, and builds.


def load_or_build_once(
    stem: str,
    load: Callable[[], T | None],
    build: Callable[[], T],
    *,
    lease_s: float = 120.0,
    renewal_s: float = RENEWAL,
) -> T:
    """The result of ``load``, or of ``build``, which stores it; one process at a time builds under a ``stem``.

    The others wait until ``load`` succeeds, or the building process has ended or has not renewed its lease of
    ``lease_s`` seconds: long, since a shuffle of billions blocks the interpreter for a while. Raises :class:`OSError`
    if the directory is not writable.
    """
    lock, is_waiting = Path(f"{stem}.lock"), False
    claim = Claim(lock, lease_s, renewal_s, needs_links=False, on_stale=partial(_remove_leftovers, stem))
    while (found := load()) is None:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lease = claim.poll()
        if isinstance(lease, Lease):
            try:
                found = load()  # it may have been completed just before the lease was free
                return build() if found is None else found
            finally:
                lease.release()
        if not is_waiting:
            _logger.info("Waiting for another process to build %s", stem)
            is_waiting = True
        time.sleep(_POLL)
    return found


def _remove_leftovers(stem: str, owner: Owner | None) -> None:
    """Remove the temporary files of a builder that has certainly ended."""
    if owner is None:
        return
    _logger.warning("Process %d on %s has not completed %s: building it again", owner.pid, owner.host, stem)
    if owner.fate() == "gone":
        clear_drafts(Path(f"{stem}.lock"))
        for path in glob.glob(f"{glob.escape(stem)}*.{owner.pid}-*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                os.remove(path)


def write_atomically(path: str, write: Callable[[BinaryIO], T], sync: bool = True) -> T:
    """Write a temporary file with ``write``, sync it, and rename it; returns the result of ``write``.

    Without ``sync`` a power failure may leave a damaged file, which its reader must detect.
    """
    temporary = f"{path}.{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
    try:
        with open(temporary, "wb") as file:
            result = write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        return result
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)
