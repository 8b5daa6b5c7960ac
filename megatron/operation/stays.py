"""``RUN_DIR/stays.json``: the longest stays in each section of the last attempts, from which the watchdog of the next
attempt learns its limits."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "stays.json"
_SCHEMA = 1
_ATTEMPTS = 20
"""Attempts that are kept."""
_COMMAND = "command"


def command_key(words: Sequence[str], world_size: int) -> str:
    """Another one for every command: nothing is learned from attempts of another model, batch or number of ranks."""
    return hashlib.sha256("\0".join([str(world_size), *words]).encode(errors="surrogateescape")).hexdigest()[:16]


def longest_stays(directory: Path | None, key: str) -> dict[str, float]:
    """The longest stay by section in the attempts of the command ``key``; empty without a file."""
    longest: dict[str, float] = {}
    for attempt in _read(directory):
        if attempt.get(_COMMAND) == key:
            for label, seconds in attempt.items():
                if isinstance(seconds, int | float) and seconds >= 0:
                    longest[label] = max(float(seconds), longest.get(label, 0.0))
    return longest


def write_stays(directory: Path, key: str, attempt: str, stays: Mapping[str, float]) -> None:
    """Write the ``stays`` of the attempt under way, which has the name ``attempt``; raises :class:`OSError`."""
    others = [one for one in _read(directory) if one.get("attempt") != attempt]
    own = {"attempt": attempt, _COMMAND: key, **{label: round(seconds, 3) for label, seconds in stays.items()}}
    text = json.dumps({"schema": _SCHEMA, "attempts": [*others, own][-_ATTEMPTS:]})
    draft = directory / f".{FILE}.draft"  # one name, which the next attempt replaces if a launcher is killed here
    try:
        draft.write_text(text + "\n", encoding="utf-8")
        os.replace(draft, directory / FILE)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _read(directory: Path | None) -> list[dict[str, Any]]:
    """What the file has of each attempt; a damaged file teaches nothing."""
    if directory is not None:
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads((directory / FILE).read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("schema") == _SCHEMA and isinstance(found.get("attempts"), list):
                return [one for one in found["attempts"] if isinstance(one, dict)]
    return []
