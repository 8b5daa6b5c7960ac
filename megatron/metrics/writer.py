"""The protocol of metrics writers, and how a run opens them, on one rank.

An error of a file, of TensorBoard or of wandb does not end the run: it prints one warning and disables the writer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from megatron.metrics.writer import EvaluationRecord, IterationRecord


class MetricsWriter(Protocol):
    """Receives every record of a run, on one rank. A subclass may leave a method out, which then does nothing."""

    def write_iteration(self, record: IterationRecord) -> None:
        """Write one logged iteration."""
        return

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Write one evaluation."""
        return

    def close(self) -> None:
        """Flush and close; nothing is written afterwards."""
        return


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """What writers need to know of a run."""

    stream: TextIO
    """The console."""
    train_iters: int
    resume_iteration: int
    """Iterations of the loaded checkpoint; 0 for a run from the start."""
    plot_interval: int
    """Least iterations between two points of TensorBoard and of wandb."""
    save_directory: str | None
    """``--save``."""
    flags: Mapping[str, Any]
    """The flags of the run by group; must hold no secret."""
    environment: Mapping[str, str]
    """The process environment, for wandb's key and mode."""

    def warn(self, sentence: str) -> None:
        print_above_bar(self.stream, sentence)


def print_above_bar(stream: TextIO, text: str) -> None:
    """Print lines above the progress bar, if there is one."""
    tqdm.write(text, file=stream)
    stream.flush()


@dataclass(frozen=True)
class WriterFlags:
    """The flags of one writer; a base class of ``LoggingConfig`` (megatron/config/operation.py)."""

    def check(self) -> None:
        """Raise :class:`ConfigError` for an invalid value."""

    def check_environment(self, environment: Mapping[str, str]) -> None:
        """Raise :class:`ConfigError` where the environment lacks something that the writer needs."""

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        """The writer, or None where the flags do not enable it. Raises :class:`ConfigError` where it cannot write."""
        raise NotImplementedError


def writer_flags(flags: WriterFlags) -> list[type[WriterFlags]]:
    """The writers among the base classes of ``flags``, the last base class first."""
    bases = reversed(type(flags).__mro__)
    return [
        base for base in bases if issubclass(base, WriterFlags) and "open_writer" in vars(base) and base != WriterFlags
    ]


def build_writers(flags: WriterFlags, run: ReportedRun) -> list[MetricsWriter]:
    """Open every writer that ``flags`` enable; call it on one rank only."""
    opened = [base.open_writer(flags, run) for base in writer_flags(flags)]
    return [writer for writer in opened if writer is not None]


class NeverFatal:
    """Turns the first error of ``writer`` into a warning that names ``flag``, and writes nothing afterwards."""

    def __init__(self, writer: MetricsWriter, flag: str, warn: Callable[[str], None]) -> None:
        self._writer: MetricsWriter | None = writer
        self._flag = flag
        self._warn = warn

    def write_iteration(self, record: IterationRecord) -> None:
        self._attempt(lambda writer: writer.write_iteration(record))

    def write_evaluation(self, record: EvaluationRecord) -> None:
        self._attempt(lambda writer: writer.write_evaluation(record))

    def close(self) -> None:
        self._attempt(lambda writer: writer.close())

    def _attempt(self, action: Callable[[MetricsWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except Exception as error:
            self._writer = None
            self._warn(f"WARNING: {self._flag} is disabled for the rest of this run: {error}. Training continues.")
