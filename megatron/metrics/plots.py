"""A record as points of TensorBoard and wandb, under Megatron-LM's keys."""

from megatron.metrics.record import EvaluationRecord, IterationRecord, is_detail

_KEYS = {
    "global_batch_size": "batch-size",
    "lm_loss": "lm loss",
    "iteration_time_ms": "iteration-time",
    "tflops_per_gpu": "throughput",
    "tokens_per_s_per_gpu": "tokens-per-second-per-gpu",
    "skipped": "skipped-iterations",
    "load_balancing_loss": "load_balancing_loss",
    "z_loss": "z_loss",
}
"""Keys of metrics where they are not the name with hyphens. Metrics of single layers have their names as keys."""

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
    key = f"lm loss {record.split}"
    return {key: record.loss, f"{key} ppl": record.perplexity}


class IntervalGate:
    """Selects the first record at or after each multiple of ``interval`` iterations."""

    def __init__(self, interval: int, resume_iteration: int) -> None:
        self._interval = interval
        self._reached = resume_iteration // interval

    def passes(self, iteration: int) -> bool:
        """Whether the record of ``iteration`` passes; ask once per record, in order."""
        before, self._reached = self._reached, max(self._reached, iteration // self._interval)
        return self._reached > before
