"""Results of processes: errors in a figure's place, and files of JSON lines."""

import json
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 160


def error_line(error: Exception) -> str:
    """The first line of an error, cut to a length that a table can show."""
    line = str(error).strip().partition("\n")[0]
    # A KeyError's text is the key.
    return (line if " " in line else f"{type(error).__name__} {line}".strip())[:MOST_CHARACTERS]


def complete_records(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file that another process may be writing: what has no newline yet is left out."""
    if not file.exists():
        return []
    complete, _, _ = file.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()]
