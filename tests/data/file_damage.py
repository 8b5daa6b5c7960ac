"""Ways in which a file of a corpus or of a cache can be other than it was written; a seed decides on the place."""

import os
import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], None]


def _overwrite(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def flip(path: Path | str, bit: int) -> None:
    """The bit with this number; flipped again, the file is as before."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flip_a_bit(path: Path, chance: random.Random) -> None:
    """One bit anywhere."""
    flip(path, chance.randrange(8 * path.stat().st_size))


def cut(path: Path, chance: random.Random) -> None:
    """The end is missing."""
    os.truncate(path, chance.randrange(path.stat().st_size))


def grow(path: Path, chance: random.Random) -> None:
    """More behind the end."""
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 5000)))


def zero_a_block(path: Path, chance: random.Random) -> None:
    """A block that never reached the disk."""
    size = path.stat().st_size
    start = chance.randrange(size) // 4096 * 4096
    _overwrite(path, start, bytes(min(4096, size - start)))


def lose(path: Path, chance: random.Random) -> None:
    """The file is missing."""
    path.unlink()


def spoil_the_header(path: Path, chance: random.Random) -> None:
    """Random bytes among the first."""
    size = min(path.stat().st_size, 128)
    length = chance.randint(1, 8)
    _overwrite(path, chance.randrange(max(size - length, 1)), chance.randbytes(min(length, size)))


def spoil_some_bytes(path: Path, chance: random.Random) -> None:
    """Random bytes anywhere."""
    size = path.stat().st_size
    length = min(chance.randint(1, 64), size)
    _overwrite(path, chance.randrange(size - length + 1), chance.randbytes(length))


DAMAGES: dict[str, Damage] = {
    "flip": flip_a_bit,
    "cut": cut,
    "grow": grow,
    "zeroed block": zero_a_block,
    "missing": lose,
    "bad header": spoil_the_header,
    "random bytes": spoil_some_bytes,
}
