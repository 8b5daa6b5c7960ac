"""Digests of a corpus in ``P.digests.json``, next to ``P.bin`` and ``P.idx``: XXH3-64 of every block of both files.

The tools that write a corpus compute the digests from the bytes in memory. A block has 1 MiB: large enough that the
digests of a terabyte are 16 MB of text, small enough to locate damage. The file has a digest of its own text.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.data.digests import BlockDigests, is_sealed, seal
from megatron.data.storage import open_stored, write_atomically
from megatron.errors import DataError

BLOCK_BYTES = 1 << 20
FORMAT_VERSION = 1
SUFFIX = ".digests.json"

_KEY = "digests"


@dataclass(frozen=True)
class FileDigests:
    """Size and digests of a file as it was written."""

    size: int  # bytes
    # [blocks] XXH3-64 of each block of BLOCK_BYTES bytes; the last may be shorter
    blocks: npt.NDArray[np.uint64]

    def range_of(self, block: int) -> tuple[int, int]:
        """First byte and end of a block."""
        start = block * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.size)

    def matches(self, block: int, content: bytes | bytearray | memoryview) -> bool:
        return xxhash.xxh3_64_intdigest(content) == int(self.blocks[block])


@dataclass(frozen=True)
class CorpusDigests:
    tokens: FileDigests  # of P.bin
    index: FileDigests  # of P.idx

    def fingerprint(self) -> str:
        """One digest for the whole corpus: XXH3-128 of all sizes and digests, in hexadecimal."""
        digest = xxhash.xxh3_128()
        for file in (self.tokens, self.index):
            digest.update(file.size.to_bytes(8, "big"))
            digest.update(file.blocks.astype(">u8").tobytes())
        return digest.hexdigest()


def new_digests() -> BlockDigests:
    return BlockDigests(BLOCK_BYTES, "xxh3_64")


def file_digests(digests: BlockDigests) -> FileDigests:
    return FileDigests(digests.size, np.frombuffer(b"".join(digests.finish()), ">u8").astype(np.uint64))


def digests_path(prefix: str) -> str:
    """Path of the digests of a corpus; a URL for a remote corpus."""
    return f"{prefix}{SUFFIX}"


def encode_digests(digests: CorpusDigests) -> str:
    files = {".bin": digests.tokens, ".idx": digests.index}
    records = {kind: encode_file(file) for kind, file in files.items()}
    head = {"format_version": FORMAT_VERSION, "algorithm": "XXH3-64", "block_bytes": BLOCK_BYTES}
    return seal(_KEY, json.dumps({**head, "files": records}))


def decode_digests(text: str) -> CorpusDigests:
    """The inverse of :func:`encode_digests`; raises ``ValueError`` for an invalid text."""
    try:
        document = json.loads(text)[_KEY]
        if document["format_version"] != FORMAT_VERSION or document["block_bytes"] != BLOCK_BYTES:
            raise ValueError(
                f"format version {document['format_version']} with blocks of {document['block_bytes']} bytes, where "
                f"this code reads version {FORMAT_VERSION} with {BLOCK_BYTES}"
            )
        if not is_sealed(_KEY, text):
            raise ValueError("its digest does not match its content")
        files = document["files"]
        return CorpusDigests(decode_file(files[".bin"]), decode_file(files[".idx"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


def encode_file(file: FileDigests) -> dict[str, int | str]:
    # Big endian, so that the text of a block is the usual hexadecimal form of its digest.
    return {"bytes": file.size, "blocks": file.blocks.astype(">u8").tobytes().hex()}


def decode_file(record: dict[str, int | str]) -> FileDigests:
    """The inverse of :func:`encode_file`; raises ``KeyError``, ``TypeError`` or ``ValueError`` for another object."""
    size, blocks = int(record["bytes"]), np.frombuffer(bytes.fromhex(str(record["blocks"])), ">u8")
    if len(blocks) != -(-size // BLOCK_BYTES):
        raise ValueError(f"{len(blocks)} blocks for {size} bytes")
    return FileDigests(size, blocks.astype(np.uint64))


def read_digests(prefix: str) -> CorpusDigests | None:
    """The digests of a corpus; None if there are none. Raises :class:`DataError` for a damaged file."""
    path = digests_path(prefix)
    try:
        with open_stored(path) as file:
            return decode_digests(file.read().decode())
    except FileNotFoundError:
        return None
    except ValueError as error:  # also of a text that is not UTF-8
        raise DataError(
            f"{path} is damaged ({error}): copy it again, or write it again with tools/inspect_dataset.py {prefix} "
            "--write-digests."
        ) from error
    except DataError:
        raise
    except Exception as error:  # every remote file system has its own
        raise DataError(f"{path} cannot be read ({error}): make it readable, or remove it.") from error


def write_digests(prefix: str, digests: CorpusDigests) -> None:
    """Write the digests of a local corpus atomically; errors are ``OSError``."""
    text = encode_digests(digests).encode()
    write_atomically(digests_path(prefix), lambda file: file.write(text))


def compute_digests(prefix: str) -> CorpusDigests:
    """The digests of the present files of a local corpus; reads them completely. Errors are ``OSError``."""
    found = []
    for kind in (".bin", ".idx"):
        digests = new_digests()
        with open(f"{prefix}{kind}", "rb", buffering=0) as file:
            digests.read(file)
        found.append(file_digests(digests))
    return CorpusDigests(*found)


def corpus_fingerprint(prefix: str) -> str | None:
    """The fingerprint in the digests file of a corpus, which is not read; None if there is no such file."""
    digests = read_digests(prefix)
    return None if digests is None else digests.fingerprint()


def check_file(path: str, digests: FileDigests, blocks: Iterable[int] | None = None, name: str | None = None) -> None:
    """Compare ``blocks`` of the local file ``path``; errors name ``name`` (``path`` may be a copy)."""
    try:
        with open(path, "rb", buffering=0) as file:

            def read(start: int, size: int) -> bytes:
                file.seek(start)
                return file.read(size)

            check_blocks(name or path, digests, os.fstat(file.fileno()).st_size, read, blocks)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable.") from error


def check_blocks(
    path: str,
    digests: FileDigests,
    size: int,
    read: Callable[[int, int], bytes | bytearray],
    blocks: Iterable[int] | None = None,
) -> None:
    """Raise :class:`DataError` if the ``size`` of the file ``path``, or one of ``blocks`` (default: all), differs from
    ``digests``. ``read(start, size)`` returns bytes of the file."""
    check_size(path, digests, size)
    for block in range(len(digests.blocks)) if blocks is None else blocks:
        start, stop = digests.range_of(block)
        damage = damage_of(path, digests, block, read(start, stop - start))
        if damage is not None:
            raise DataError(f"{damage}: {remedy_of(path)}.")


def check_size(path: str, digests: FileDigests, size: int) -> None:
    """Raise :class:`DataError` if ``size`` differs from ``digests``."""
    if size != digests.size:
        raise DataError(f"{path} has {size} bytes instead of {digests.size}: {remedy_of(path)}.")


def damage_of(path: str, digests: FileDigests, block: int, content: bytes | bytearray) -> str | None:
    """The beginning of a sentence if the ``content`` of a block is damaged; None if its digest matches."""
    if digests.matches(block, content):
        return None
    start, stop = digests.range_of(block)
    beside = os.path.basename(digests_path(os.path.splitext(path)[0]))
    return f"{path} is damaged in bytes {start} to {stop} (block {block}), whose digest is not the one in {beside}"


def remedy_of(path: str) -> str:
    prefix = os.path.splitext(path)[0]
    return (
        f"copy it again; or, if another program wrote it since, write the digests anew with tools/inspect_dataset.py "
        f"{prefix} --write-digests"
    )
