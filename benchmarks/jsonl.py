"""Files of JSON lines."""

import json
from pathlib import Path
from typing import Any


def complete_records(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file that another process may be writing: what has no newline yet is left out."""
    if not file.exists():
        return []
    complete, _, _ = file.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()]
