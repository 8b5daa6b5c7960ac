"""XXH3 digests: of the blocks of a file, and of a JSON text in the text itself. Imports no torch and no NumPy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Literal, Protocol

import xxhash

BLOCK_BYTES = 1 << 20  # of the blocks of FileDigests
_READ_BYTES = 4 << 20
_DIGEST_BYTES = 8  # of XXH3-64


class BlockDigests:
    """Computes the digests of a file's blocks from its bytes in order; with ``block_bytes`` None, of all bytes."""

    def __init__(self, block_bytes: int | None, algorithm: Literal["xxh3_64", "xxh3_128"] = "xxh3_128") -> None:
        self.size = 0  # bytes so far
        self._block_bytes = block_bytes
        self._digests: list[bytes] = []
        self._current = getattr(xxhash, algorithm)()

    def update(self, content: bytes | bytearray | memoryview) -> None:
        rest = memoryview(content).cast("B")
        while rest:
            # Up to the end of the block that was begun.
            part = rest if self._block_bytes is None else rest[: self._block_bytes - self.size % self._block_bytes]
            self._current.update(part)
            self.size += len(part)
            rest = rest[len(part) :]
            if self._block_bytes is not None and self.size % self._block_bytes == 0:
                self._digests.append(self._current.digest())
                self._current.reset()

    def read(self, file: IO[bytes], progress: Callable[[], object] = lambda: None) -> list[bytes]:
        """Digest the rest of an open file; returns the digests of all blocks."""
        buffer = memoryview(bytearray(_READ_BYTES))
        while length := file.readinto(buffer):  # type: ignore[attr-defined]
            self.update(buffer[:length])
            progress()
        return self.finish()

    def finish(self) -> list[bytes]:
        """The digests of all blocks; the last block may be shorter."""
        is_complete = self._block_bytes is not None and self.size % self._block_bytes == 0
        return self._digests if is_complete else [*self._digests, self._current.digest()]


def new_digests() -> BlockDigests:
    """The digests of a file's blocks, for :class:`FileDigests`."""
    return BlockDigests(BLOCK_BYTES, "xxh3_64")


@dataclass(frozen=True)
class FileDigests:
    """Size and digests of a file as it was written."""

    size: int  # bytes
    # XXH3-64 of each block of BLOCK_BYTES bytes, one after another; the last block may be shorter
    digests: bytes

    @classmethod
    def of(cls, digests: BlockDigests) -> "FileDigests":
        return cls(digests.size, b"".join(digests.finish()))

    @classmethod
    def decode(cls, record: dict[str, int | str]) -> "FileDigests":
        """The inverse of :meth:`encode`; raises ``KeyError``, ``TypeError`` or ``ValueError`` for another object."""
        size, digests = int(record["bytes"]), bytes.fromhex(str(record["blocks"]))
        if len(digests) != -(-size // BLOCK_BYTES) * _DIGEST_BYTES:
            raise ValueError(f"{len(digests) / _DIGEST_BYTES:g} blocks for {size} bytes")
        return cls(size, digests)

    def encode(self) -> dict[str, int | str]:
        return {"bytes": self.size, "blocks": self.digests.hex()}

    @property
    def num_blocks(self) -> int:
        return len(self.digests) // _DIGEST_BYTES

    def range_of(self, block: int) -> tuple[int, int]:
        """First byte and end of a block."""
        start = block * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.size)

    def matches(self, block: int, content: bytes | bytearray | memoryview) -> bool:
        start = block * _DIGEST_BYTES
        return xxhash.xxh3_64_digest(content) == self.digests[start : start + _DIGEST_BYTES]


class Writable(Protocol):
    def write(self, content: bytes, /) -> int: ...


class DigestedWriter:
    """Writes to ``file``, with the digests of its blocks from the bytes in memory."""

    def __init__(self, file: Writable) -> None:
        self._file, self.digests = file, new_digests()

    def write(self, content: bytes, /) -> int:
        self.digests.update(content)
        return self._file.write(content)


# A sealed text is one JSON object; the digest is that of CONTENT, byte for byte:
#
#   {"xxh3_128": "0123...", "NAME": CONTENT}


def seal(name: str, content: str) -> str:
    """A JSON object with the XXH3-128 digest of ``content``, and the JSON text ``content`` under ``name``."""
    return f"{_head(name, content)}{content}}}"


def is_sealed(name: str, text: str) -> bool:
    """Whether the digest in ``text`` matches its content."""
    length = len(_head(name, ""))
    return text[:length] == _head(name, text[length:-1]) and text[-1:] == "}"


def _head(name: str, content: str) -> str:
    return f'{{"xxh3_128": "{xxhash.xxh3_128_hexdigest(content.encode())}", "{name}": '
