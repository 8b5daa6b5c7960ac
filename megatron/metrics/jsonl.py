"""The metrics file, one JSON object per record: how it is written, and read again as curves over tokens."""

import bisect
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.flags import values_of
from megatron.metrics.writer import (
    EvaluationRecord,
    IterationRecord,
    MetricsWriter,
    NeverFatal,
    ReportedRun,
    WriterFlags,
)
from megatron.urls import refuse_urls

# Key of the description of the run in the first record of a process.
RUN = "run"


@dataclass(frozen=True)
class JsonlFlags(WriterFlags):
    metrics_jsonl: str | None = None
    """File that receives one JSON object per logged iteration and per evaluation."""

    def check(self) -> None:
        refuse_urls(values_of(self, "metrics_jsonl"), "use a local file, and copy it afterwards")

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        if self.metrics_jsonl is None:
            return None
        return NeverFatal(JsonlWriter(self.metrics_jsonl, run.resume_iteration, run.flags), "--metrics-jsonl", run.warn)


class JsonlWriter:
    """Appends one JSON object per record to a file, each line flushed as it is written.

    On resume the file is first cut back to the iteration of the checkpoint. A run from the start (``resume_iteration``
    0) renames an existing file to ``PATH.previous``. Raises :class:`ConfigError` if the file cannot be written, or is
    not a metrics file.

    The first record of an iteration that a process writes has ``run``, too: the number of ranks and the flags by group.
    """

    def __init__(self, path: str | Path, resume_iteration: int, flags: Mapping[str, Any] | None = None) -> None:
        path = Path(path)
        self._flags = flags
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _rewind_jsonl(path, resume_iteration)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--metrics-jsonl {path} cannot be written ({reason}): choose another file.") from error

    def write_iteration(self, record: IterationRecord) -> None:
        run = {} if self._flags is None else {RUN: {"world_size": record.world_size, "flags": self._flags}}
        self._flags = None
        self._append(record, {"consumed_samples": record.consumed_samples, **record.metrics}, run)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        values = {}
        # The figures over all sets, and the figures of each set by ".../name".
        for suffix, one in {"": record, **{f"/{name}": one for name, one in record.sets.items()}}.items():
            values[f"{record.split}_loss{suffix}"] = one.loss
            if one.bits_per_byte is not None:
                values[f"{record.split}_bits_per_byte{suffix}"] = one.bits_per_byte
        self._append(record, values)

    def _append(
        self,
        record: IterationRecord | EvaluationRecord,
        values: Mapping[str, Any],
        last: Mapping[str, Any] | None = None,
    ) -> None:
        times = {"time": record.time, "elapsed_s": record.elapsed_s}
        line = {"iteration": record.iteration, **values, **times, **(last or {})}
        self._file.write(json.dumps(_strict(line), allow_nan=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _strict(value: Any) -> Any:
    """``value`` without NaN and infinity, which strict JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _strict(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rewind_jsonl(path: Path, resume_iteration: int) -> None:
    """Cut a metrics file back to ``resume_iteration``, in place.

    The iterations of its records do not decrease, so only the lines after the checkpoint are read, from the end.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    is_new_run = resume_iteration == 0
    with path.open("r+b") as file:
        # | records up to the checkpoint | records after it, a torn line |   read from the end
        # ................................^ end: the file is cut here
        num_others, has_records, end, kept = 0, False, 0, b"\n"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            stop = len(content)
            while stop:
                start = content.rfind(b"\n", 0, stop - 1) + 1
                line = content[start:stop]
                iteration = _record(line.decode("utf-8", errors="replace")).get("iteration")
                has_records = has_records or isinstance(iteration, int)
                if isinstance(iteration, int) and (is_new_run or iteration <= resume_iteration):
                    end, kept = stop, line
                    break
                num_others += 1
                stop = start
        # A crash may leave a single damaged line; several lines without a record are another kind of file.
        if num_others > 1 and not has_records:
            raise ConfigError(f"--metrics-jsonl {path} is not a metrics file: use another one.")
        if not is_new_run:
            file.truncate(end)
            if not kept.endswith(b"\n"):
                file.seek(end)
                file.write(b"\n")
    if is_new_run:
        os.replace(path, path.with_name(path.name + ".previous"))


Point = tuple[float, float]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """The records of a run by iteration, and the tokens up to each of them."""

    iterations: Sequence[Record]
    evaluations: Sequence[Record]
    tokens: Sequence[float] | None
    """Tokens up to each record of an iteration; None if the file does not say how long a sequence is."""

    def curve(self, key: str, in_tokens: bool = True) -> list[Point]:
        """(tokens or iterations, value) of every record with a finite value."""
        records = [*self.iterations, *self.evaluations]
        points = [
            (self.place(record, in_tokens), float(record[key])) for record in records if _is_number(record.get(key))
        ]
        return sorted(points)

    def place(self, record: Record, in_tokens: bool = True) -> float:
        """The place of a record on the horizontal axis: its tokens, or its iteration."""
        iteration = float(record["iteration"])
        if not in_tokens or self.tokens is None:
            return iteration
        # An evaluation has the tokens of the record of its iteration, or is interpolated between two records.
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


def read_history(path: str, flag: str = "--metrics") -> History:
    """Read a metrics file, which ``flag`` names; a torn line is left out. Raises :class:`DataError`."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            found = (_record(line, _WITH_SHARED_KEYS.decode) for line in lines)
            records = [record for record in found if _is_number(record.get("iteration"))]
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
    value: Any = record
    for key in (RUN, "flags", group, name):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Keys are the same strings in every record, which halves the memory of a history and costs a fifth of the time.
_WITH_SHARED_KEYS = json.JSONDecoder(object_pairs_hook=lambda pairs: {sys.intern(key): value for key, value in pairs})


def _record(line: str, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """The object of a line; empty for a line that is not a whole record."""
    try:
        found = parse(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class ValidationHistory(MetricsWriter):
    """A metrics writer that keeps the validation losses of this process.

    With ``metrics_jsonl``, the file of ``--metrics-jsonl``, it also reads the losses of earlier processes.
    """

    def __init__(self, metrics_jsonl: str | None) -> None:
        self._path = metrics_jsonl
        self._losses: dict[int, float] = {}

    def write_evaluation(self, record: EvaluationRecord) -> None:
        if record.split == "validation":
            self._losses[record.iteration] = record.loss

    def best(self) -> tuple[int, float] | None:
        """Iteration and loss of the best evaluation so far; None without one that is finite."""
        losses: dict[int, float] = {}
        if self._path is not None:
            with suppress(OSError), Path(self._path).open(encoding="utf-8", errors="replace") as lines:
                # Only the few lines of evaluations are decoded.
                for record in (_record(line) for line in lines if '"validation_loss"' in line):
                    with suppress(KeyError, TypeError, ValueError):
                        losses[int(record["iteration"])] = float(record["validation_loss"])
        losses = {iteration: loss for iteration, loss in (losses | self._losses).items() if math.isfinite(loss)}
        return min(losses.items(), key=lambda item: item[1], default=None)
