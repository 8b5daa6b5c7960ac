"""Where metrics go: the console, a JSONL file, TensorBoard and wandb.

All writers live on one rank. Whatever watches a run must not be able to end it: an error of a file, of
TensorBoard or of wandb becomes one warning on the console, and that writer falls silent.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from megatron.config.errors import ConfigError
from megatron.config.logging import LoggingConfig
from megatron.training.metrics import (
    METRICS_WITH_SAMPLE_AXIS,
    EvaluationRecord,
    IntervalGate,
    IterationRecord,
    MetricsWriter,
    evaluation_scalars,
    iteration_scalars,
)
from megatron.training.wandb_writer import WandbWriter, check_wandb_credentials, wandb_run_id

_VS_SAMPLES = " vs samples"
_EVENT_SUFFIX = ".pretrain"


def format_console_line(record: IterationRecord, now: datetime, log_throughput: bool = True) -> str:
    """One iteration as Megatron-LM prints it, field for field, so that existing log parsers read it.

    tokens/s and MFU, which Megatron-LM does not print, stand after the throughput field.
    """
    fields = [
        f"[{now:%Y-%m-%d %H:%M:%S}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
    ]
    if record.skipped_samples > 0:
        fields.append(f"skipped samples: {record.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {record.iteration_time_ms:.1f}")
    if log_throughput:
        fields += _throughput_fields(record)
    fields.append(f"learning rate: {record.learning_rate:.6E}")
    fields.append(f"global batch size: {record.global_batch_size:5d}")
    if record.lm_loss is not None:
        fields.append(f"lm loss: {record.lm_loss:.6E}")
    fields.append(f"loss scale: {record.loss_scale:.1f}")
    if record.grad_norm is not None:
        fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {record.skipped:3d}")
    fields.append(f"number of nan iterations: {record.nan_iterations:3d}")
    return "".join(f" {text} |" for text in fields)


def _throughput_fields(record: IterationRecord) -> list[str]:
    fields = [
        f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_gpu:.1f}",
        f"tokens/s per GPU: {record.tokens_per_s_per_gpu:.1f}",
    ]
    if record.mfu is not None:
        fields.append(f"MFU: {100 * record.mfu:.2f}%")
    return fields


def format_evaluation_lines(record: EvaluationRecord) -> str:
    """One evaluation as Megatron-LM prints it: a line between two rules of dashes."""
    place = f"iteration {record.iteration}" + (" on test set" if record.split == "test" else "")
    figures = f"lm loss value: {record.loss:.6E} | lm loss PPL: {record.perplexity:.6E}"
    line = f" validation loss at {place} | {figures} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


class ConsoleWriter:
    """Prints Megatron-LM's lines to a stream, above the progress bar where there is one."""

    def __init__(self, stream: TextIO, log_throughput: bool) -> None:
        self._stream = stream
        self._log_throughput = log_throughput

    def write_text(self, text: str) -> None:
        """Print lines above the progress bar."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()

    def write_iteration(self, record: IterationRecord) -> None:
        """Print the iteration's line, and the timers of all ranks below it."""
        self.write_text(format_console_line(record, datetime.now(), self._log_throughput))
        if record.timer_report:
            self.write_text(record.timer_report)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Print the evaluation between its rules."""
        self.write_text(format_evaluation_lines(record))

    def close(self) -> None:
        """Flush; the stream belongs to the caller."""
        self._stream.flush()


class ProgressBar:
    """A calm bar over iterations with the last loss and tokens/s, for a person at a terminal."""

    def __init__(self, stream: TextIO, train_iters: int, resume_iteration: int) -> None:
        self._bar = tqdm(
            total=train_iters,
            initial=resume_iteration,
            file=stream,
            unit="it",
            dynamic_ncols=True,
            mininterval=0.5,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def advance(self, iteration: int) -> None:
        """Move to ``iteration``; cheap enough for every iteration, drawn at most twice a second."""
        self._bar.update(iteration - self._bar.n)

    def write_iteration(self, record: IterationRecord) -> None:
        """Move to the record's iteration and show its loss and rate."""
        loss = "skipped" if record.lm_loss is None else f"{record.lm_loss:.4f}"
        rate = f"{record.tokens_per_s_per_gpu:,.0f}/GPU"
        self._bar.set_postfix({"loss": loss, "tokens/s": rate}, refresh=False)
        self.advance(record.iteration)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Nothing: the console shows evaluations."""

    def close(self) -> None:
        """Leave the bar where it stands and move on to the next line."""
        self._bar.close()


def _json_line(values: Mapping[str, float | None]) -> str:
    """Strict JSON at full precision: a number that JSON cannot hold (NaN, infinity) becomes null."""
    strict = {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
    return json.dumps(strict, allow_nan=False) + "\n"


class JsonlWriter:
    """Appends one JSON object per record to a file, each line flushed as it is written.

    On resume the file is first put back to the iteration of the checkpoint, so that it always tells the
    history of the weights in memory. A run from the start sets an existing file aside as ``PATH.previous``.

    Args:
        path: the file; missing directories are made.
        resume_iteration: iterations that the loaded checkpoint has behind it; 0 for a run from the start.

    Raises:
        ConfigError: when the file cannot be written, or is no metrics file.
    """

    def __init__(self, path: str | Path, resume_iteration: int) -> None:
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _rewind_jsonl(path, resume_iteration)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--metrics-jsonl {path} cannot be written: {reason}.") from error

    def write_iteration(self, record: IterationRecord) -> None:
        """Append the iteration; ``mfu`` is a fraction."""
        self._append(
            {
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                "lm_loss": record.lm_loss,
                "grad_norm": record.grad_norm,
                "learning_rate": record.learning_rate,
                "loss_scale": record.loss_scale,
                "global_batch_size": record.global_batch_size,
                "iteration_time_ms": record.iteration_time_ms,
                "tokens_per_s_per_gpu": record.tokens_per_s_per_gpu,
                "tflops_per_gpu": record.tflops_per_gpu,
                "mfu": record.mfu,
                "skipped": record.skipped,
            }
        )

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Append the evaluation as ``validation_loss`` or ``test_loss``."""
        self._append({"iteration": record.iteration, f"{record.split}_loss": record.loss})

    def _append(self, values: Mapping[str, float | None]) -> None:
        self._file.write(_json_line(values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rewind_jsonl(path: Path, resume_iteration: int) -> None:
    """Put a metrics file back to ``resume_iteration``; either all of it happens or nothing."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as old:
        iterations = [_iteration_of(line) for line in old]
    # One damaged line may be all that a crash left; several and nothing else are somebody's other file.
    if len(iterations) > 1 and all(iteration is None for iteration in iterations):
        raise ConfigError(f"--metrics-jsonl {path} is not a metrics file: name another one.")
    if resume_iteration == 0:
        if iterations:
            os.replace(path, path.with_name(path.name + ".previous"))
        return
    partial = path.with_name(path.name + ".partial")
    with path.open(encoding="utf-8", errors="replace") as old, partial.open("w", encoding="utf-8") as new:
        for line, iteration in zip(old, iterations, strict=True):
            if iteration is not None and iteration <= resume_iteration:
                new.write(line.rstrip("\n") + "\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(partial, path)


def _iteration_of(line: str) -> int | None:
    """Iteration of a record; None for a line that is no whole record, such as one torn by a crash."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    iteration = record.get("iteration") if isinstance(record, dict) else None
    return iteration if isinstance(iteration, int) else None


class TensorBoardWriter:
    """Writes Megatron-LM's TensorBoard keys, many also over samples (``lm loss vs samples``).

    On resume, points beyond the checkpoint are cut from the event files of the earlier runs. TensorBoard's
    own ``purge_step`` cannot do it: it drops every tag from that step on, and so the whole history of the
    twins over samples, whose steps are much larger than the iteration.

    Args:
        directory: where event files go.
        interval: iterations between two points (records in between are passed over).
        resume_iteration: iterations that the loaded checkpoint has behind it; 0 for a run from the start,
            which hides the points of an earlier run in the same directory.

    Raises:
        ConfigError: when the tensorboard package is missing, or the directory cannot be written to.
    """

    def __init__(self, directory: str | Path, interval: int, resume_iteration: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard-dir needs TensorBoard: pip install tensorboard.") from error
        self._gate = IntervalGate(interval, resume_iteration)
        if resume_iteration > 0:
            for path in sorted(Path(directory).glob(f"events.out.tfevents.*{_EVENT_SUFFIX}")):
                _rewind_events(path, resume_iteration)
        try:
            self._writer: Any = SummaryWriter(
                log_dir=str(directory),
                purge_step=0 if resume_iteration == 0 else None,
                flush_secs=30,
                filename_suffix=_EVENT_SUFFIX,
            )
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {directory} cannot be written to ({error.strerror}): name another directory."
            ) from error

    def write_iteration(self, record: IterationRecord) -> None:
        """Write a point of every metric, unless the interval passes over it."""
        if self._gate.passes(record.iteration):
            self._write(iteration_scalars(record), record.iteration, record.consumed_samples)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Write the loss and perplexity of the split."""
        self._write(evaluation_scalars(record), record.iteration, record.consumed_samples)

    def _write(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, iteration)
        # The twins come last: _rewind_events recognises a stale iteration by its first point.
        for key in METRICS_WITH_SAMPLE_AXIS.intersection(scalars):
            self._writer.add_scalar(key + _VS_SAMPLES, scalars[key], consumed_samples)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _rewind_events(path: Path, resume_iteration: int) -> None:
    """Cut an event file before its first point beyond ``resume_iteration``, or before a torn record.

    The file is a sequence of records: length (8 bytes, little endian), its checksum (4), payload, checksum
    (4). Points are in the order of time, so that everything after the first stale one is stale.
    """
    with path.open("r+b") as file:
        while True:
            start = file.tell()
            header = file.read(12)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else 0
            payload = file.read(length + 4)
            if len(payload) < length + 4 or _is_stale(payload[:length], resume_iteration):
                file.truncate(start)
                return


def _is_stale(payload: bytes, resume_iteration: int) -> bool:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        event = Event.FromString(payload)
    except DecodeError:
        return True
    over_iterations = any(not value.tag.endswith(_VS_SAMPLES) for value in event.summary.value)
    return bool(over_iterations and event.step > resume_iteration)


class _NeverFatal:
    """Turns the first error of a writer into a warning, and the writer into a silent one."""

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
            self._warn(f"WARNING: {self._flag} gets no more records in this run: {error}. Training goes on.")


def build_writers(
    config: LoggingConfig,
    *,
    save_directory: str | None,
    run_config: Mapping[str, Any],
    resume_iteration: int,
    train_iters: int,
    stream: TextIO,
    environment: Mapping[str, str] = os.environ,
) -> list[MetricsWriter]:
    """Open every writer that the flags ask for; call it on one rank only.

    The loop hands each writer one record per ``--log-interval`` and one per evaluation.

    Args:
        save_directory: ``--save``, where the wandb run id is kept; None without checkpoints.
        run_config: the run's flags, for wandb; must hold no secret.
        resume_iteration: iterations that the loaded checkpoint has behind it; 0 for a run from the start.
        train_iters: length of the run, for the progress bar.
        stream: the console.
        environment: the process environment, for wandb's key and mode.

    Raises:
        ConfigError: on a file that cannot be written, a missing package, or wandb without a key.
    """
    check_wandb_credentials(config, environment)
    console = ConsoleWriter(stream, config.log_throughput)
    writers: list[MetricsWriter] = [console]
    interval = config.tensorboard_log_interval
    if config.metrics_jsonl is not None:
        jsonl = JsonlWriter(config.metrics_jsonl, resume_iteration)
        writers.append(_NeverFatal(jsonl, "--metrics-jsonl", console.write_text))
    if config.tensorboard_dir is not None:
        tensorboard = TensorBoardWriter(config.tensorboard_dir, interval, resume_iteration)
        writers.append(_NeverFatal(tensorboard, "--tensorboard-dir", console.write_text))
    if config.wandb_project is not None:
        directory = Path(config.wandb_save_dir or save_directory or ".")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--wandb-save-dir {directory} cannot be made ({error.strerror}): name another directory."
            ) from error
        writers.append(
            WandbWriter(
                project=config.wandb_project,
                name=config.wandb_exp_name,
                entity=config.wandb_entity,
                directory=directory,
                run_id=wandb_run_id(save_directory, resume_iteration, environment),
                run_config=run_config,
                interval=interval,
                resume_iteration=resume_iteration,
                warn=console.write_text,
            )
        )
    if config.progress_bar or (config.progress_bar is None and stream.isatty()):
        writers.append(ProgressBar(stream, train_iters, resume_iteration))
    return writers
