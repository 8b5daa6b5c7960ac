"""The records of a metrics file as curves over tokens."""

import bisect
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.metrics.jsonl import RUN

Point = tuple[float, float]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """The records of a run by iteration, and the tokens up to each of them."""

    iterations: Sequence[Record]
    evaluations: Sequence[Record]
    tokens: Sequence[float] | None
    """Of each record of an iteration; None if the file does not say how long a sequence is."""

    def curve(self, key: str, in_tokens: bool = True) -> list[Point]:
        """(tokens or iterations, value) of every record with a finite value."""
        records = [*self.iterations, *self.evaluations]
        points = [
            (self.place(record, in_tokens), float(record[key])) for record in records if _is_number(record.get(key))
        ]
        return sorted(points)

    def place(self, record: Record, in_tokens: bool = True) -> float:
        """Where a record is on the horizontal axis."""
        iteration = float(record["iteration"])
        if not in_tokens or self.tokens is None:
            return iteration
        # An evaluation has the tokens of the record of its iteration, or of a place between two records.
        known, tokens = self._known
        after = bisect.bisect_left(known, iteration)
        if after >= len(known):
            return tokens[-1]
        before = max(after - 1, 0)
        share = (iteration - known[before]) / (known[after] - known[before]) if known[after] > known[before] else 1.0
        return tokens[before] + share * (tokens[after] - tokens[before])

    @cached_property
    def _known(self) -> tuple[Sequence[float], Sequence[float]]:
        """Iterations, and the tokens up to each of them, from the start of the run."""
        return [0.0, *[float(one["iteration"]) for one in self.iterations]], [0.0, *(self.tokens or ())]

    def flag(self, group: str, name: str, default: Any) -> Any:
        """The value of a flag in the last process that wrote the file."""
        for record in reversed(self.iterations):
            value = _flag(record, group, name)
            if value is not None:
                return value
        return default


def read_history(flag: str, path: str) -> History:
    """Read a metrics file; a torn line is left out. Raises :class:`DataError` that names ``flag``."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            records = [record for record in map(_record, lines) if _is_number(record.get("iteration"))]
            is_empty = os.fstat(lines.fileno()).st_size == 0
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read ({error.strerror}): check the path.") from error
    iterations = [record for record in records if "lm_loss" in record]
    evaluations = [record for record in records if "lm_loss" not in record]
    losses = ("lm_loss", "validation_loss")
    if not any(_is_number(record.get(key)) for record in records for key in losses):
        what = "is empty" if is_empty else "has no losses"
        raise DataError(
            f"{flag} {path} {what}: name the file that --metrics-jsonl of the run wrote, after its first record."
        )
    return History(iterations, evaluations, _tokens(iterations))


def _tokens(iterations: Sequence[Record]) -> list[float] | None:
    """Tokens up to each record: the samples since the one before, times the sequence length of its process."""
    found: list[float] = []
    length, samples, tokens = None, 0, 0.0
    for record in iterations:
        length = _flag(record, "data", "seq_length") or length
        if length is None or not _is_number(record.get("consumed_samples")):
            return None
        tokens += length * max(0, record["consumed_samples"] - samples)
        samples = record["consumed_samples"]
        found.append(tokens)
    return found or None


def _flag(record: Record, group: str, name: str) -> Any:
    run = record.get(RUN)
    flags = run.get("flags") if isinstance(run, dict) else None
    values = flags.get(group) if isinstance(flags, dict) else None
    return values.get(name) if isinstance(values, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _record(line: str) -> dict[str, Any]:
    try:
        found = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_shared_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are the same strings in every record, which halves the memory of a history."""
    return {sys.intern(key): value for key, value in pairs}


_DECODER = json.JSONDecoder(object_pairs_hook=_with_shared_keys)
