"""A planted fault: a small edit of the source, found by its text."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = ("megatron", "megatron_llama")
"""Packages in which faults are planted."""


@dataclass(frozen=True)
class Fault:
    """Replaces ``old``, which occurs once in the sources, by ``new``."""

    kind: str
    """What goes wrong, in a few words."""
    old: str
    new: str
    tests: tuple[str, ...] = ()
    """Files or folders below ``tests`` that should see it, the likeliest first; empty: those that execute its line."""
    file: str | None = None
    """Where ``old`` is looked for, if it may occur elsewhere, or in no module; otherwise in all sources."""

    def find(self, root: Path) -> tuple[Path, int]:
        """The file and the offset of the text in the repository ``root``."""
        files = [root / self.file] if self.file else sources(root)
        found = [(path, text.index(self.old)) for path in files for text in [read(path)] if self.old in text]
        if len(found) != 1 or read(found[0][0]).count(self.old) != 1:
            places = ", ".join(str(path.relative_to(root)) for path, _ in found) or "no file"
            raise LookupError(f"{self.kind}: its text must occur once in the sources; it is in {places}: {self.old!r}")
        return found[0]

    def plant(self, root: Path) -> Path:
        """Edit the file of the repository ``root``; returns it."""
        path, offset = self.find(root)
        text = read(path)
        planted = text[:offset] + self.new + text[offset + len(self.old) :]
        if path.suffix == ".py":
            ast.parse(planted)
        path.write_text(planted, encoding="utf-8")
        return path


def read(path: Path) -> str:
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, modified: int) -> str:
    return path.read_text(encoding="utf-8")


def sources(root: Path) -> list[Path]:
    """All modules in which faults are planted."""
    return sorted(path for package in SOURCES for path in (root / package).rglob("*.py"))
