#!/usr/bin/env python3
"""Write the source of Python's standard library as jsonl, one document per file: a real corpus on every machine."""

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3"}


def source_files(root: Path) -> Iterator[Path]:
    """The modules under ``root``, in a fixed order, without tests and installed packages."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - _LEFT_OUT)
        yield from (Path(directory, name) for name in sorted(names) if name.endswith(".py"))


def main(output: Path) -> None:
    """Write the documents, shuffled deterministically so that every split sees all of the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files(root)]
    # Every seventeenth file, then the next ones: neighbours in the library end up apart.
    texts = [text for start in range(17) for text in texts[start::17] if text.strip()]
    partial = output.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    partial.rename(output)
    print(f"{len(texts)} documents, {output.stat().st_size / 1e6:.1f} MB of source in {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
