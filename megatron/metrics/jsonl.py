"""The metrics file: one JSON object per record."""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError
from megatron.flags import values_of
from megatron.metrics.record import EvaluationRecord, IterationRecord
from megatron.metrics.writer import MetricsWriter, NeverFatal, ReportedRun, WriterFlags
from megatron.urls import refuse_urls

RUN = "run"
"""Key of the description of the run in the first record of a process."""


@dataclass(frozen=True)
class JsonlFlags(WriterFlags):
    """The metrics file."""

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
            raise ConfigError(f"--metrics-jsonl {path} cannot be written: {reason}.") from error

    def write_iteration(self, record: IterationRecord) -> None:
        run = {} if self._flags is None else {RUN: {"world_size": record.world_size, "flags": self._flags}}
        self._flags = None
        self._append(record, {"consumed_samples": record.consumed_samples, **record.metrics}, run)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        self._append(record, _evaluation_values(record))

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


def _evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    """The figures over all sets, and the figures of each set by ``…/name``."""
    values = {}
    for suffix, one in {"": record, **{f"/{name}": one for name, one in record.sets.items()}}.items():
        values[f"{record.split}_loss{suffix}"] = one.loss
        if one.bits_per_byte is not None:
            values[f"{record.split}_bits_per_byte{suffix}"] = one.bits_per_byte
    return values


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
        num_others, has_records, end, kept = 0, False, 0, b"\n"
        for start, line in _lines_from_the_end(file):
            iteration = _iteration_of(line)
            has_records = has_records or iteration is not None
            if iteration is not None and (is_new_run or iteration <= resume_iteration):
                end, kept = start + len(line), line
                break
            num_others += 1
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


def _lines_from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Start and content of every line of a file that is not empty, the last line first."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = len(content)
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            yield start, content[start:end]
            end = start


def _iteration_of(line: bytes) -> int | None:
    """Iteration of a record; None for a line that is not a whole record."""
    try:
        record = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    iteration = record.get("iteration") if isinstance(record, dict) else None
    return iteration if isinstance(iteration, int) else None
