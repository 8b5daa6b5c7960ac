"""Weight decay as a function of consumed samples, as in Megatron-LM."""

import math
from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class WeightDecaySchedule:
    """From ``start`` to ``end`` over ``length`` samples, then ``end``."""

    start: float
    end: float
    style: str
    length: int

    def __call__(self, samples: int) -> float:
        """Weight decay of the iteration that starts after ``samples`` samples."""
        progress = min(1.0, samples / max(self.length, 1))
        fraction = progress if self.style == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + fraction * (self.end - self.start)


def build_weight_decay_schedule(config: OptimizerConfig, planned_samples: int) -> WeightDecaySchedule | None:
    """The schedule of the flags over the whole run; None if weight decay is constant."""
    if config.weight_decay_incr_style == "constant":
        return None
    assert config.start_weight_decay is not None and config.end_weight_decay is not None
    return WeightDecaySchedule(
        config.start_weight_decay, config.end_weight_decay, config.weight_decay_incr_style, planned_samples
    )
