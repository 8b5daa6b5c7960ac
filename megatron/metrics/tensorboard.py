"""TensorBoard's event files."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError
from megatron.flags import values_of
from megatron.metrics.writer import (
    EvaluationRecord,
    IntervalGate,
    IterationRecord,
    MetricsWriter,
    NeverFatal,
    ReportedRun,
    WriterFlags,
    evaluation_scalars,
    has_sample_axis,
)
from megatron.urls import refuse_urls

_VS_SAMPLES = " vs samples"  # ends the tags of points over samples
_EVENT_SUFFIX = ".pretrain"
_HEADER, _CHECKSUM = 12, 4  # bytes around the payload of a record
WINDOW = 1 << 16  # bytes in which a bisection looks for a record; a point has some 60


@dataclass(frozen=True)
class TensorBoardFlags(WriterFlags):
    tensorboard_dir: str | None = None
    """Directory for TensorBoard events; enables the TensorBoard writer."""

    def check(self) -> None:
        remedy = "use a local directory, because object stores cannot append to files"
        refuse_urls(values_of(self, "tensorboard_dir"), remedy)

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        if self.tensorboard_dir is None:
            return None
        writer = TensorBoardWriter(self.tensorboard_dir, run.plot_interval, run.resume_iteration)
        return NeverFatal(writer, "--tensorboard-dir", run.warn)


class TensorBoardWriter:
    """Writes Megatron-LM's TensorBoard keys, many also over samples (``lm loss vs samples``).

    On resume, points beyond the checkpoint are cut from the event files of earlier processes. TensorBoard's own
    ``purge_step`` drops every tag from that step on, and so all points over samples, whose steps are larger.

    There is at most one point per ``interval`` iterations. A run from the start (``resume_iteration`` 0) hides the
    points of an earlier run in the same directory. Raises :class:`ConfigError` if the tensorboard package is missing,
    or the directory cannot be written to.
    """

    def __init__(self, directory: str | Path, interval: int, resume_iteration: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard-dir needs TensorBoard: pip install tensorboard.") from error
        self._gate = IntervalGate(interval, resume_iteration)
        if resume_iteration > 0:
            for path in sorted(Path(directory).glob(f"events.out.tfevents.*{_EVENT_SUFFIX}")):
                rewind_events(path, resume_iteration)
        try:
            self._writer: Any = SummaryWriter(
                log_dir=str(directory),
                purge_step=0 if resume_iteration == 0 else None,
                flush_secs=30,
                filename_suffix=_EVENT_SUFFIX,
            )
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {directory} cannot be written to ({error.strerror}): use another directory."
            ) from error

    def write_iteration(self, record: IterationRecord) -> None:
        self._write(self._gate.scalars(record), record.iteration, record.consumed_samples)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        self._write(evaluation_scalars(record), record.iteration, record.consumed_samples)

    def _write(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, iteration)
        # Points over samples come last: rewind_events recognises a stale iteration by its first point.
        for key in filter(has_sample_axis, scalars):
            self._writer.add_scalar(key + _VS_SAMPLES, scalars[key], consumed_samples)

    def close(self) -> None:
        self._writer.close()


def rewind_events(path: Path, resume_iteration: int) -> None:
    """Cut an event file before its first point beyond ``resume_iteration``, or before a torn record.

    All records after the first stale point are stale, so bisection finds it without reading the points of a long run.
    """
    # A record of the file:  | length: 8 bytes, little endian | checksum: 4 | payload | checksum: 4 |
    with path.open("r+b") as file:
        file.seek(start_of_search(file, resume_iteration))
        while True:
            start = file.tell()
            header = file.read(_HEADER)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else 0
            payload = file.read(length + _CHECKSUM)
            is_whole = length > 0 and len(payload) == length + _CHECKSUM
            event = _parse_event(payload[:length]) if is_whole else None
            if event is None or (_is_over_iterations(event) and event.step > resume_iteration):
                file.truncate(start)
                return


def start_of_search(file: BinaryIO, resume_iteration: int) -> int:
    """Start of a record that is not stale, shortly before the first stale or torn record."""
    # | fresh ... fresh | ? ... ? | stale ... stale |  the middle part halves in each round
    fresh, stale = 0, os.fstat(file.fileno()).st_size
    while stale - fresh > WINDOW:
        middle = (fresh + stale) // 2
        start = _first_point_after(file, middle, resume_iteration)
        if start is None:
            stale = middle
        else:
            fresh = start
    return fresh


def _first_point_after(file: BinaryIO, position: int, resume_iteration: int) -> int | None:
    """Start of the first point over iterations from ``position`` on; None if it is stale, or there is none nearby."""
    file.seek(position)
    content = file.read(2 * WINDOW)
    at = _first_record(content)
    while at is not None and at + _HEADER <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        following = at + _HEADER + length + _CHECKSUM
        if following > len(content):
            return None
        event = _parse_event(content[at + _HEADER : at + _HEADER + length])
        if event is None:
            return None
        if _is_over_iterations(event):
            return None if event.step > resume_iteration else position + at
        at = following
    return None


def _first_record(content: bytes) -> int | None:
    """Place of the first record in ``content``, which the checksum of its length identifies."""
    from tensorboard.summary.writer.record_writer import masked_crc32c

    for at in range(min(WINDOW, len(content) - _HEADER)):
        length, checksum = struct.unpack_from("<QI", content, at)
        if 0 < length < WINDOW and masked_crc32c(content[at : at + 8]) == checksum:
            return at
    return None


def _is_over_iterations(event: Any) -> bool:
    return any(not value.tag.endswith(_VS_SAMPLES) for value in event.summary.value)


def _parse_event(payload: bytes) -> Any:
    """TensorBoard's event; None for other bytes."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(payload)
    except DecodeError:
        return None
