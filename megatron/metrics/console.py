"""The console: Megatron-LM's lines, or one short line for each record on a terminal, and the progress bar."""

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TextIO

from tqdm import tqdm

from megatron.metrics.writer import (
    EvaluationRecord,
    IterationRecord,
    MetricsWriter,
    ReportedRun,
    WriterFlags,
    is_detail,
    print_above_bar,
)
from megatron.reports.svg import duration

_THROUGHPUT = ("tflops_per_gpu", "tokens_per_s_per_gpu", "mfu")

# Megatron-LM's fields in its order; nothing may stand between them, because log parsers match their sequence.
_MEGATRON_FIELDS = {
    "iteration_time_ms": "elapsed time per iteration (ms): {:.1f}",
    "tflops_per_gpu": "throughput per GPU (TFLOP/s/GPU): {}",
    "learning_rate": "learning rate: {:.6E}",
    "global_batch_size": "global batch size: {:5d}",
    "lm_loss": "lm loss: {:.6E}",
    "load_balancing_loss": "load_balancing_loss: {:.6E}",
    "z_loss": "z_loss: {:.6E}",
    "lm_z_loss": "lm z_loss: {:.6E}",
    "loss_scale": "loss scale: {:.1f}",
    "grad_norm": "grad norm: {:.3f}",
    "num_zeros": "num zeros: {:.0f}",
    "params_norm": "params norm: {:.3f}",
    "max_attention_logit": "max attention logit: {:.3f}",
    "skipped": "number of skipped iterations: {:3d}",
}

# Fields after Megatron-LM's. Metrics that are not listed follow them, without those of single layers.
_OWN_FIELDS = {
    "tokens_per_s_per_gpu": "tokens/s per GPU: {:.1f}",
    "mfu": "MFU: {:.2%}",
    "expert_load_max": "expert load max: {:.3f}",
    "effective_time": "effective time: {:.2%}",
    "peak_memory_gib": "peak memory (GiB): {:.2f}",
}


@dataclass(frozen=True)
class ConsoleFlags(WriterFlags):
    log_throughput: bool = True
    """Log TFLOP/s per GPU, tokens/s and MFU."""
    log_format: Literal["compact", "megatron"] | None = None
    """Lines of the console: one short line for each record (compact), or Megatron-LM's line with all fields (megatron)
    (default: compact on a terminal, megatron in files and pipes)."""

    def is_compact(self, stream: TextIO) -> bool:
        """Whether ``stream`` gets short lines."""
        return stream.isatty() if self.log_format is None else self.log_format == "compact"

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        if self.is_compact(run.stream):
            return CompactConsoleWriter(run.stream, self.log_throughput, run.train_iters)
        return ConsoleWriter(run.stream, self.log_throughput)


def format_console_line(record: IterationRecord, now: datetime, log_throughput: bool = True) -> str:
    """One iteration as Megatron-LM prints it, field for field, and then our own fields: existing parsers read it."""
    fields = [
        f"[{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
    ]
    if record.skipped_samples > 0:
        fields.append(f"skipped samples: {record.skipped_samples:12d}")
    hidden = () if log_throughput else _THROUGHPUT
    metrics = {name: value for name, value in record.metrics.items() if value is not None and name not in hidden}
    for name, text in _MEGATRON_FIELDS.items():
        if name in metrics:
            value = metrics[name]
            fields.append(text.format(format_throughput(value) if name == "tflops_per_gpu" else value))
    fields.append(f"number of nan iterations: {record.nan_iterations:3d}")
    others = (name for name in metrics if not is_detail(name) and name not in _MEGATRON_FIELDS)
    for name in dict.fromkeys((*_OWN_FIELDS, *others)):
        if name in metrics:
            default = name.replace("_", " ") + (": {:d}" if isinstance(metrics[name], int) else ": {:.6E}")
            fields.append(_OWN_FIELDS.get(name, default).format(metrics[name]))
    return "".join(f" {text} |" for text in fields)


def format_throughput(tflops: float) -> str:
    """One decimal, as Megatron-LM prints it; below 1, as on a CPU, two significant digits and never an exponent."""
    if not 0.0 < tflops < 0.95:
        return f"{tflops:.1f}"
    return f"{tflops:.{1 - math.floor(math.log10(tflops))}f}"


def format_evaluation_lines(record: EvaluationRecord) -> str:
    """One evaluation as Megatron-LM prints it: a line between two rules of dashes, for every set and for all together.

    Megatron-LM names the split after the last iteration only. An evaluation that is both has both lines. Bits per byte
    follow Megatron-LM's fields.
    """
    places = [""] if record.is_periodic else []
    if record.is_final:
        places.append(f" on {record.split} set")
    lines = []
    for name, one in {**{f"-{name}": one for name, one in record.sets.items()}, "": record}.items():
        figures = f"lm loss value: {one.loss:.6E} | lm loss PPL: {one.perplexity:.6E} | "
        if one.bits_per_byte is not None:
            figures += f"bits per byte: {one.bits_per_byte:.6E} | "
        lines += [f" validation{name} loss at iteration {record.iteration}{place} | {figures}" for place in places]
    return "\n".join(text for line in lines for rule in ["-" * (len(line) + 1)] for text in (rule, line, rule))


@dataclass
class ConsoleWriter:
    """Prints Megatron-LM's lines above the progress bar, if there is one."""

    stream: TextIO
    log_throughput: bool

    def write_iteration(self, record: IterationRecord) -> None:
        print_above_bar(self.stream, self._line(record))
        if record.timer_report:
            print_above_bar(self.stream, record.timer_report)

    def _line(self, record: IterationRecord) -> str:
        return format_console_line(record, datetime.now(), self.log_throughput)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        print_above_bar(self.stream, format_evaluation_lines(record))

    def close(self) -> None:
        self.stream.flush()


def format_compact_line(record: IterationRecord, left_s: float | None, log_throughput: bool = True) -> str:
    """One iteration, in at most 100 columns if nothing is unusual."""
    metrics = record.metrics
    loss, norm, rate = metrics["lm_loss"], metrics.get("grad_norm"), metrics["learning_rate"]
    fields = [
        f"{record.iteration:{len(str(record.train_iters))}d}/{record.train_iters}",
        "loss  none " if loss is None else f"loss {loss:6.4f}",
        f"lr {rate:.2e}",
        "grad  none" if norm is None else f"grad {norm:5.3f}",
    ]
    if log_throughput:
        fields.append(f"{metrics['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU")
        if metrics.get("mfu") is not None:
            fields.append(f"MFU {metrics['mfu']:.1%}")
    if left_s is not None:
        fields.append(f"{duration(left_s)} left")
    # What a person should see: skipped updates, losses that are not finite, spikes.
    unusual: dict[str, float | None] = {"skipped": metrics["skipped"], "not finite": record.nan_iterations}
    fields += [f"{name} {count:.0f}" for name, count in unusual.items() if count]
    spike = metrics.get("spike")
    return "  ".join([*fields, f"spike {spike:.1f}"] if spike else fields)


@dataclass
class CompactConsoleWriter(ConsoleWriter):
    """Prints one short line for each record above the progress bar, if there is one."""

    train_iters: int
    _first: IterationRecord | None = field(default=None, init=False)

    def _line(self, record: IterationRecord) -> str:
        self._first = self._first or record
        # At the mean speed since the first record, with evaluations and saves.
        iterations, seconds = record.iteration - self._first.iteration, record.elapsed_s - self._first.elapsed_s
        if iterations <= 0:
            iterations, seconds = 1, (record.metrics["iteration_time_ms"] or 0.0) / 1e3
        remaining = self.train_iters - record.iteration
        left_s = remaining * seconds / iterations if remaining > 0 else None
        return format_compact_line(record, left_s, self.log_throughput)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        figures = f"loss {record.loss:.4f}  perplexity {record.perplexity:.4g}"
        print_above_bar(self.stream, f"{record.split} at iteration {record.iteration}  {figures}")


@dataclass(frozen=True)
class ProgressBarFlags(WriterFlags):
    progress_bar: bool | None = None
    """Show a progress bar (default: only on a terminal)."""

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        is_shown = run.stream.isatty() if self.progress_bar is None else self.progress_bar
        return ProgressBar(run.stream, run.train_iters, run.resume_iteration) if is_shown else None


class ProgressBar(MetricsWriter):
    """A bar over iterations with the last loss and tokens/s, drawn at most twice a second."""

    def __init__(self, stream: TextIO, train_iters: int, resume_iteration: int) -> None:
        self._bar = tqdm(
            total=train_iters,
            initial=resume_iteration,
            file=stream,
            unit="it",
            dynamic_ncols=True,
            mininterval=0.5,
            delay=1e-9,  # no frame before the first record: the lines that describe the run come first
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def write_iteration(self, record: IterationRecord) -> None:
        loss = record.metrics["lm_loss"]
        rate = f"{record.metrics['tokens_per_s_per_gpu']:,.0f}/GPU"
        self._bar.set_postfix({"loss": "skipped" if loss is None else f"{loss:.4f}", "tokens/s": rate}, refresh=False)
        self._bar.update(record.iteration - self._bar.n)

    def close(self) -> None:
        self._bar.close()
