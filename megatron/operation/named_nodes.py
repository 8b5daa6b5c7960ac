"""Nodes that were named as the cause of a failure, and those that are left out because of it.

    RUN_DIR/named_nodes.jsonl    one JSON object each time: {"host", "reason", "attempt", "time"}

The file survives a requeue of the job. A node that two attempts have named is a suspect: a launcher gives its ranks the
last numbers, so that they become spares if there are any. After a repair, remove its lines from the file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.operation.causes import Cause

FILE = "named_nodes.jsonl"
CAUSES = frozenset({Cause.HANG, Cause.STOPPED_PROCESS, Cause.SILENT_CORRUPTION, Cause.STRAGGLER, Cause.NODE_LOST})
"""Causes that may lie in the node: not an exception of the program, nor lack of memory."""
TIMES = 2
"""A node is a suspect when so many attempts have named it."""


@dataclass(frozen=True)
class Naming:
    """A node was named."""

    host: str
    reason: str
    """Cause class of the failure, for example ``hang``."""
    attempt: str
    """A name of the attempt that is the same on all nodes: several launchers may name a node for one failure."""
    time: float
    """Seconds since the epoch."""

    @staticmethod
    def from_json(values: Any) -> "Naming | None":
        """The inverse of ``asdict``; None for anything else."""
        if not isinstance(values, Mapping):
            return None
        texts = [values.get(name) for name in ("host", "reason", "attempt")]
        time = values.get("time")
        if not all(isinstance(text, str) for text in texts) or not isinstance(time, int | float):
            return None
        host, reason, attempt = (str(text) for text in texts)
        return Naming(host, reason, attempt, float(time))


class NamedNodes:
    """What a launcher knows of named nodes: from the file, from itself, and from other launchers."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._namings: dict[tuple[str, str], Naming] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the file again: another launcher may have added to it."""
        if self._directory is not None:
            self.add(read(self._directory / FILE))

    @property
    def namings(self) -> list[Naming]:
        """Every naming, at most one for each node and attempt."""
        return list(self._namings.values())

    def add(self, namings: Iterable[Naming]) -> None:
        """Also know ``namings``, which others have recorded."""
        for naming in namings:
            self._namings.setdefault((naming.host, naming.attempt), naming)

    def name(self, naming: Naming, directory: Path | None) -> None:
        """Record ``naming``, also in ``directory`` if it is known; a file system that fails does not end the job."""
        if (naming.host, naming.attempt) in self._namings:
            return
        self.add([naming])
        if directory is not None:
            with suppress(OSError):
                append(directory / FILE, naming)

    def suspects(self) -> dict[str, list[str]]:
        """The reasons for which each suspect was named."""
        reasons: dict[str, list[str]] = {}
        for naming in sorted(self._namings.values(), key=lambda naming: naming.time):
            reasons.setdefault(naming.host, []).append(naming.reason)
        return {host: found for host, found in reasons.items() if len(found) >= TIMES}


def read(path: Path) -> list[Naming]:
    """The content of the file; lines that are damaged are left out, which must not stop a job."""
    found = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                naming = Naming.from_json(json.loads(line))
                found += [naming] if naming is not None else []
    return found


def append(path: Path, naming: Naming) -> None:
    """Add a line with one write, since launchers of several nodes share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(asdict(naming)) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
