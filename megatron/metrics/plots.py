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
    "lm_z_loss": "lm z_loss",
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


def has_sample_axis(key: str) -> bool:
    """Whether TensorBoard also shows ``key`` over consumed samples; so it does the losses of named validation sets."""
    return key in METRICS_WITH_SAMPLE_AXIS or key.startswith("lm loss validation-")


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

    def passes(self, iteration: int) -> bool:
        """Whether the record of ``iteration`` passes; ask once per record, in order."""
        before, self._reached = self._reached, max(self._reached, iteration // self._interval)
        return self._reached > before
