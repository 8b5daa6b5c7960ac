"""Metrics writers: the records that each receives, their points in plots, the protocol of a writer, and how a run opens
them, on one rank.

An error of a file, of TensorBoard or of wandb does not end the run: it prints one warning and disables the writer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO

from tqdm import tqdm

_LARGEST_EXPONENT = 20.0  # perplexities stop at exp(20): an untrained or broken model must not overflow the report

# Prefix of metrics of single layers, as in Megatron-LM, for example moe/z_loss_layer_3.
LAYER_METRICS = "moe/"


def is_detail(name: str) -> bool:
    """Whether a metric is for plots alone, not for the console: its name has a prefix like :data:`LAYER_METRICS`."""
    return "/" in name


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """One logged iteration; means and counts cover the iterations since the last record."""

    iteration: int
    """Iterations done so far; the first one is 1."""
    consumed_samples: int
    """Training sequences consumed since the start of the run."""
    metrics: Mapping[str, float | None]
    """Values by their names in the JSONL file, in its order; None where this iteration has no value. Every writer shows
    all of them, but the console no details (:func:`is_detail`)."""
    train_iters: int
    """Length of the run in iterations."""
    skipped_samples: int = 0
    """Sequences left out so far because a batch size was rounded down."""
    nan_iterations: int = 0
    """Iterations whose loss was not finite since the last record."""
    time: float
    """Seconds since the epoch."""
    elapsed_s: float
    """Seconds since this process began to train."""
    world_size: int
    timers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Least and greatest milliseconds over ranks by timer name (see ``timers.combine``)."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Memory of the writing rank's device by Megatron-LM's key, with ``--log-memory-to-tensorboard``."""
    timer_report: str = ""
    """Text for the console below the iteration's line (see ``timers.format_timer_report``)."""


@dataclass(frozen=True, kw_only=True)
class SetLoss:
    """The loss of one set of an evaluation."""

    loss: float
    """Mean loss over unmasked tokens, in nats."""
    num_tokens: int = 0
    """Unmasked tokens."""
    num_bytes: int | None = None
    """UTF-8 bytes of their text; None if they are not known."""

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for a byte of the text; None if the bytes are not known."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes if self.num_bytes else None

    @property
    def perplexity(self) -> float:
        """Exponential of the loss, which is capped at 20 as Megatron-LM caps it."""
        return math.exp(min(_LARGEST_EXPONENT, self.loss))


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(SetLoss):
    """One evaluation; the figures are over the tokens of all sets."""

    iteration: int
    """Iterations trained before this evaluation."""
    consumed_samples: int
    """Training sequences consumed before this evaluation."""
    split: Literal["validation", "test"]
    sets: Mapping[str, SetLoss] = field(default_factory=dict)
    """The sets by name; empty if the split is one set without a name."""
    is_periodic: bool = True
    """Whether ``--eval-interval`` is the reason for this evaluation."""
    is_final: bool = False
    """Whether it follows the last iteration of a complete run, or takes the place of training (``--skip-train``)."""
    time: float
    """Seconds since the epoch."""
    elapsed_s: float
    """Seconds since this process began to train."""


# Keys of metrics where they are not the name with hyphens. Metrics of single layers have their names as keys.
_KEYS = {
    "global_batch_size": "batch-size",
    "lm_loss": "lm loss",
    "iteration_time_ms": "iteration-time",
    "tflops_per_gpu": "throughput",
    "tokens_per_s_per_gpu": "tokens-per-second-per-gpu",
    "skipped": "skipped-iterations",
    "load_balancing_loss": "load_balancing_loss",
    "z_loss": "z_loss",
    "lm_z_loss": "lm z_loss",
    "max_attention_logit": "max_attention_logit",
}

_SAMPLED = ("learning-rate", "batch-size", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm")


def has_sample_axis(key: str) -> bool:
    """Whether TensorBoard also shows ``key`` over consumed samples, as Megatron-LM's ``... vs samples`` twins."""
    # Losses too, but those of named test sets.
    return key in _SAMPLED or (key.startswith("lm loss") and not key.startswith("lm loss test-"))


def iteration_scalars(record: IterationRecord) -> dict[str, float]:
    """The points of one iteration; ``iteration-time`` and the ``...-time`` of timers (slowest rank) are seconds."""
    scalars: dict[str, float] = {"world-size": record.world_size, "consumed-samples": record.consumed_samples}
    for name, value in record.metrics.items():
        if value is not None:
            scalars[name if is_detail(name) else _KEYS.get(name, name.replace("_", "-"))] = value
    if "iteration-time" in scalars:
        scalars["iteration-time"] /= 1e3
    timers = {f"{name}-time": slowest / 1e3 for name, (_, slowest) in record.timers.items()}
    return scalars | dict(record.memory) | timers


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """The points over all sets, and the points of each set with its name behind the split, as in Megatron-LM."""
    scalars: dict[str, float] = {}
    for suffix, one in {"": record, **{f"-{name}": one for name, one in record.sets.items()}}.items():
        split = record.split + suffix
        scalars |= {f"lm loss {split}": one.loss, f"lm loss {split} ppl": one.perplexity}
        if one.bits_per_byte is not None:
            scalars[f"bits-per-byte {split}"] = one.bits_per_byte
    return scalars


class IntervalGate:
    """Selects the first record at or after each multiple of ``interval`` iterations."""

    def __init__(self, interval: int, resume_iteration: int) -> None:
        self._interval = interval
        self._reached = resume_iteration // interval
        self._latest: dict[str, float] = {}

    def scalars(self, record: IterationRecord) -> dict[str, float]:
        """The points of a record that passes, of each key the latest value since the last one; else none."""
        self._latest |= iteration_scalars(record)
        if not self.passes(record.iteration):
            return {}
        scalars, self._latest = self._latest, {}
        return scalars

    def passes(self, iteration: int) -> bool:
        """Whether the record of ``iteration`` passes; ask once per record, in order."""
        # interval 10, records at 8, 12, 19, 31: reached 0, 1, 1, 3, so that 12 and 31 pass
        before, self._reached = self._reached, max(self._reached, iteration // self._interval)
        return self._reached > before


# --- writers --------------------------------------------------------------------------------------------------


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
