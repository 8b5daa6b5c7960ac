"""What one iteration and one evaluation report, and who listens.

The loop fills one record per logged iteration; every writer (console, JSONL, TensorBoard, wandb) reads the
same record, so that no two of them can disagree.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

_LARGEST_EXPONENT = 20.0
"""Perplexities stop at exp(20): an untrained or broken model must not overflow the report."""

METRICS_WITH_SAMPLE_AXIS = frozenset(
    {
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "lm loss validation",
        "lm loss validation ppl",
        "lm loss test",
        "lm loss test ppl",
    }
)
"""Metrics that TensorBoard also shows over consumed samples, as Megatron-LM's ``... vs samples`` twins."""


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """One logged iteration; means and counts cover the iterations since the last record."""

    iteration: int
    """Iterations done so far; the first one is 1."""
    train_iters: int
    """Length of the run in iterations."""
    consumed_samples: int
    """Training sequences consumed since the start of the run."""
    skipped_samples: int = 0
    """Sequences left out so far because a batch size was rounded down."""
    lm_loss: float | None
    """Mean loss over unmasked tokens; None when every iteration since the last record was skipped."""
    grad_norm: float | None
    """L2 norm of the gradient before clipping; None when the iteration was skipped."""
    learning_rate: float
    loss_scale: float
    """Factor of the loss in the next backward pass."""
    global_batch_size: int
    """Sequences in this iteration."""
    iteration_time_ms: float
    """Wall time per iteration in milliseconds."""
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Model TFLOP/s per device, without recompute."""
    mfu: float | None
    """Model FLOPs utilisation as a fraction of the dense peak; None when the peak is unknown."""
    skipped: int
    """Iterations without an update since the last record."""
    nan_iterations: int
    """Iterations whose loss was not finite since the last record."""
    num_zeros: int | None = None
    """Zeros in the gradient, when counted."""
    params_norm: float | None = None
    """L2 norm of all weights, when computed."""
    world_size: int
    timers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least and greatest milliseconds over ranks by timer name (see ``timers.combine``)."""
    memory: dict[str, float] = field(default_factory=dict)
    """Memory of the writing rank's device, by Megatron-LM's key, when asked for."""
    timer_report: str = ""
    """Text for the console below the iteration's line (see ``timers.format_timer_report``)."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation."""

    iteration: int
    """Iterations trained before this evaluation."""
    consumed_samples: int
    """Training sequences consumed before this evaluation."""
    split: Literal["validation", "test"]
    loss: float
    """Mean loss over unmasked tokens."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss, which is capped at 20 as Megatron-LM caps it."""
        return math.exp(min(_LARGEST_EXPONENT, self.loss))


class MetricsWriter(Protocol):
    """Receives every record of a run, on one rank."""

    def write_iteration(self, record: IterationRecord) -> None:
        """Report one logged iteration."""

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Report one evaluation."""

    def close(self) -> None:
        """Flush and release everything; nothing is written afterwards."""


class IntervalGate:
    """Lets a record pass once a further multiple of ``interval`` iterations has been reached.

    Args:
        interval: iterations between two records that pass.
        resume_iteration: iterations that the loaded checkpoint has behind it.
    """

    def __init__(self, interval: int, resume_iteration: int) -> None:
        self._interval = interval
        self._reached = resume_iteration // interval

    def passes(self, iteration: int) -> bool:
        """Whether the record of ``iteration`` passes; ask once per record, in order."""
        before, self._reached = self._reached, max(self._reached, iteration // self._interval)
        return self._reached > before


def iteration_scalars(record: IterationRecord) -> dict[str, float]:
    """Plottable metrics of one iteration under Megatron-LM's TensorBoard and wandb keys.

    ``iteration-time`` and the ``...-time`` of timers (slowest rank) are seconds and ``throughput`` is TFLOP/s
    per device, as there; ``mfu`` is a fraction.
    """
    optional = {
        "lm loss": record.lm_loss,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "mfu": record.mfu,
    }
    scalars: dict[str, float] = {
        "learning-rate": record.learning_rate,
        "batch-size": record.global_batch_size,
        "loss-scale": record.loss_scale,
        "world-size": record.world_size,
        "iteration-time": record.iteration_time_ms / 1e3,
        "throughput": record.tflops_per_gpu,
        "tokens-per-second-per-gpu": record.tokens_per_s_per_gpu,
        "consumed-samples": record.consumed_samples,
        "skipped-iterations": record.skipped,
    }
    scalars |= {key: value for key, value in optional.items() if value is not None}
    scalars |= record.memory
    return scalars | {f"{name}-time": slowest / 1e3 for name, (_, slowest) in record.timers.items()}


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Plottable metrics of one evaluation under Megatron-LM's keys."""
    key = f"lm loss {record.split}"
    return {key: record.loss, f"{key} ppl": record.perplexity}
