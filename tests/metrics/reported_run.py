"""Records as a run reports them, and a terminal for them."""

import io
from typing import Any

from megatron.metrics.writer import EvaluationRecord, IterationRecord, ReportedRun


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def iteration_record(iteration: int = 5, **changes: Any) -> IterationRecord:
    metrics: dict[str, float | None] = {
        "lm_loss": 6.912345,
        "grad_norm": 1.2341,
        "learning_rate": 1e-4,
        "loss_scale": 1.0,
        "global_batch_size": 16,
        "iteration_time_ms": 123.42,
        "tokens_per_s_per_gpu": 512.04,
        "tflops_per_gpu": 0.12,
        "mfu": 0.41234,
        "skipped": 0,
    }
    values: dict[str, Any] = {
        "iteration": iteration,
        "consumed_samples": 16 * iteration,
        "train_iters": 100,
        "world_size": 2,
        "time": 1_800_000_000.5,
        "elapsed_s": 60.25,
    }
    facts = {name: changes.pop(name) for name in list(changes) if name in IterationRecord.__dataclass_fields__}
    return IterationRecord(**(values | facts), metrics=metrics | changes)


def evaluation_record(iteration: int, loss: float = 4.512345, **changes: Any) -> EvaluationRecord:
    values: dict[str, Any] = {"split": "validation", "loss": loss, "time": 1_800_000_001.5, "elapsed_s": 61.25}
    values |= {"iteration": iteration, "consumed_samples": 16 * iteration}
    return EvaluationRecord(**(values | changes))


def reported_run(**changes: Any) -> ReportedRun:
    """A run from the start without checkpoints."""
    facts: dict[str, Any] = {
        "save_directory": None,
        "flags": {},
        "resume_iteration": 0,
        "plot_interval": 1,
        "train_iters": 100,
        "stream": io.StringIO(),
        "environment": {},
    }
    return ReportedRun(**(facts | changes))
