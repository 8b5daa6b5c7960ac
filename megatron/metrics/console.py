"""Megatron-LM's lines on the console."""

from dataclasses import dataclass
from datetime import datetime
from typing import TextIO

from megatron.metrics.record import EvaluationRecord, IterationRecord, is_detail
from megatron.metrics.writer import MetricsWriter, ReportedRun, WriterFlags, print_above_bar

_THROUGHPUT = {
    "tflops_per_gpu": "throughput per GPU (TFLOP/s/GPU): {:.1f}",
    "tokens_per_s_per_gpu": "tokens/s per GPU: {:.1f}",
    "mfu": "MFU: {:.2%}",
}
"""Megatron-LM prints the first of them."""

_FIELDS = {
    "iteration_time_ms": "elapsed time per iteration (ms): {:.1f}",
    **_THROUGHPUT,
    "learning_rate": "learning rate: {:.6E}",
    "global_batch_size": "global batch size: {:5d}",
    "lm_loss": "lm loss: {:.6E}",
    "load_balancing_loss": "load_balancing_loss: {:.6E}",
    "z_loss": "z_loss: {:.6E}",
    "loss_scale": "loss scale: {:.1f}",
    "grad_norm": "grad norm: {:.3f}",
    "num_zeros": "num zeros: {:.0f}",
    "params_norm": "params norm: {:.3f}",
    "expert_load_max": "expert load max: {:.3f}",
    "effective_time": "effective time: {:.2%}",
}
"""Megatron-LM's fields in its order; metrics that are not listed follow them, without those of single layers."""
_LAST_FIELD = "skipped"


@dataclass(frozen=True)
class ConsoleFlags(WriterFlags):
    """The console."""

    log_throughput: bool = True
    """Log TFLOP/s per GPU, tokens/s and MFU."""

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        return ConsoleWriter(run.stream, self.log_throughput)


def format_console_line(record: IterationRecord, now: datetime, log_throughput: bool = True) -> str:
    """One iteration as Megatron-LM prints it, field for field, so that existing log parsers read it."""
    fields = [
        f"[{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
    ]
    if record.skipped_samples > 0:
        fields.append(f"skipped samples: {record.skipped_samples:12d}")
    shown = (name for name in record.metrics if not is_detail(name))
    for name in dict.fromkeys((*_FIELDS, *shown)):
        value = record.metrics.get(name)
        if value is not None and name != _LAST_FIELD and (log_throughput or name not in _THROUGHPUT):
            default = name.replace("_", " ") + (": {:d}" if isinstance(value, int) else ": {:.6E}")
            fields.append(_FIELDS.get(name, default).format(value))
    fields.append(f"number of skipped iterations: {record.metrics[_LAST_FIELD]:3d}")
    fields.append(f"number of nan iterations: {record.nan_iterations:3d}")
    return "".join(f" {text} |" for text in fields)


def format_evaluation_lines(record: EvaluationRecord) -> str:
    """One evaluation as Megatron-LM prints it: a line between two rules of dashes."""
    place = f"iteration {record.iteration}" + (" on test set" if record.split == "test" else "")
    figures = f"lm loss value: {record.loss:.6E} | lm loss PPL: {record.perplexity:.6E}"
    line = f" validation loss at {place} | {figures} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


@dataclass
class ConsoleWriter:
    """Prints Megatron-LM's lines above the progress bar, if there is one."""

    stream: TextIO
    log_throughput: bool

    def write_iteration(self, record: IterationRecord) -> None:
        print_above_bar(self.stream, format_console_line(record, datetime.now(), self.log_throughput))
        if record.timer_report:
            print_above_bar(self.stream, record.timer_report)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        print_above_bar(self.stream, format_evaluation_lines(record))

    def close(self) -> None:
        self.stream.flush()
