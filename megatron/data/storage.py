"""Read files at local paths or URLs (s3://, gs://, https://, memory:// ...) with fsspec.

Files ending in .gz and .zst are decompressed.
"""

import glob
import gzip
import io
import os
from typing import IO, Any, BinaryIO, NamedTuple, cast

from megatron.errors import DataError
from megatron.urls import is_url

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


class SourceFile(NamedTuple):
    """A file and its size in bytes, as stored."""

    path: str
    size: int


def is_compressed(path: str) -> bool:
    return path.endswith(_COMPRESSIONS)


def without_compression(path: str) -> str:
    for suffix in _COMPRESSIONS:
        path = path.removesuffix(suffix)
    return path


def find_files(pattern: str) -> list[SourceFile]:
    """The files of a path, glob or directory (recursive), sorted by name."""
    if is_url(pattern):
        return _find_remote_files(pattern)
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


def _find_remote_files(pattern: str) -> list[SourceFile]:
    system, place = file_system(pattern)
    try:
        if any(sign in place for sign in "*?["):
            found = system.glob(place, detail=True)
        elif system.isfile(place):
            found = {place: system.info(place)}
        else:
            found = system.find(place, detail=True)
    except OSError as error:
        raise DataError(f"{pattern} cannot be listed ({error}): check the URL and the access to it.") from error
    files = [(path, info) for path, info in sorted(found.items()) if info["type"] == "file"]
    return [SourceFile(system.unstrip_protocol(path), int(info["size"] or 0)) for path, info in files]


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
