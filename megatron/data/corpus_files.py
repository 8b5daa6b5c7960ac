"""Write the files of a corpus: ``P.bin``, ``P.idx`` and their digests appear together, when all are complete."""

import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Self

from megatron.data.corpus_digests import CorpusDigests, digests_path, encode_digests, file_digests, new_digests
from megatron.data.digests import DigestedWriter, Writable
from megatron.errors import DataError

_logger = logging.getLogger(__name__)

_KINDS = (".bin", ".idx")
_WRITE_BACK_BYTES = 64 << 20


def warn_of_overwriting(prefix: str) -> None:
    """Log a warning with the existing files that a new corpus replaces."""
    existing = []
    for path in (f"{prefix}{kind}" for kind in _KINDS):
        if os.path.exists(path):
            status = os.stat(path)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.st_mtime))
            existing.append(f"{path} ({status.st_size:,} bytes, written {written})")
    if existing:
        _logger.warning(
            "WARNING: overwriting %s: use another --output-prefix to keep the old corpus.", " and ".join(existing)
        )


class NewCorpus:
    """The files of an unfinished corpus, under temporary names; a context manager, which removes them after an
    exception. File-system errors are :class:`DataError`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        suffix = f".{uuid.uuid4().hex[:8]}.incomplete"
        self._temporary = {kind: f"{prefix}{kind}{suffix}" for kind in _KINDS}
        warn_of_overwriting(prefix)
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._bin_file: BinaryIO = open(self._temporary[".bin"], "wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise self._cannot_write(error) from error
        self._tokens = DigestedWriter(self._bin_file, new_digests())
        self._written_back = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *rest: object) -> None:
        if error_type is not None:
            self.abort()

    def write_tokens(self, content: bytes) -> None:
        """Append to ``P.bin``."""
        try:
            self._tokens.write(content)
            self._begin_write_back()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _begin_write_back(self) -> None:
        """Let Linux write the new bytes to the disk now, and not all when ``commit`` waits for them."""
        start, end = self._written_back, self._tokens.digests.size
        if end - start >= _WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._bin_file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
            self._written_back = end

    def commit(self, write_index: Callable[[Writable], object]) -> None:
        """Complete ``P.bin``, write ``P.idx`` with ``write_index``, and rename all files."""
        try:
            _close_on_disk(self._bin_file)
            with open(self._temporary[".idx"], "wb") as index_file:
                index = DigestedWriter(index_file, new_digests())
                write_index(index)
                _close_on_disk(index_file)
            self._rename(CorpusDigests(file_digests(self._tokens.digests), file_digests(index.digests)))
        except OSError as error:
            raise self._cannot_write(error) from error

    def _rename(self, digests: CorpusDigests) -> None:
        # Readers open P.idx first: it is renamed last, so that no reader combines old and new files.
        digests_file = digests_path(self.prefix)
        temporary = f"{self._temporary['.bin']}.digests"
        try:
            with open(temporary, "wb") as file:
                file.write(encode_digests(digests).encode())
                _close_on_disk(file)
            with suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.idx")
            os.replace(self._temporary[".bin"], f"{self.prefix}.bin")
            os.replace(temporary, digests_file)
            os.replace(self._temporary[".idx"], f"{self.prefix}.idx")
        finally:
            with suppress(FileNotFoundError):
                os.remove(temporary)

    def abort(self) -> None:
        """Remove the unfinished files."""
        with suppress(OSError):  # a full disk has no space for the buffer
            self._bin_file.close()
        for path in self._temporary.values():
            with suppress(FileNotFoundError):
                os.remove(path)

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(f"{self.prefix}.bin and .idx cannot be written ({error.strerror}): choose another output.")


def _close_on_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
