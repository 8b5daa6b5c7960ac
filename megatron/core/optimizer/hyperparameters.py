"""The optimizer's hyperparameters in one step, and their schedules as functions of consumed samples, as in Megatron-LM:
a batch-size ramp does not speed up the schedules."""

import math
from dataclasses import dataclass

from megatron.config.training import LearningRateConfig, OptimizerConfig
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Hyperparameters:
    """Values of one step, from the schedules of the run."""

    learning_rate: float
    vocabulary_learning_rate: float | None = None
    """Learning rate of the embedding and the output layer (``--decoupled-lr``); None: ``learning_rate``."""
    weight_decay: float | None = None
    """None: the constant weight decay of the optimizer's flags."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then a decay to ``minimum``; lengths in samples."""

    peak: float
    minimum: float
    initial: float
    warmup: float
    decay: int
    """Warm-up and decay together."""
    style: str
    wsd_decay: int = 0
    wsd_style: str = "exponential"

    def __call__(self, samples: int) -> float:
        """Learning rate of the iteration that starts after ``samples`` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))
        style, progress = self.style, (samples - self.warmup) / max(self.decay - self.warmup, 1)
        if style == "WSD":
            start = self.decay - self.wsd_decay
            style, progress = self.wsd_style, max(0, samples - start) / max(self.wsd_decay, 1)
        factors = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "exponential": 2.0 * 0.5**progress - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(progress),
        }
        return self.minimum + factors[style] * (self.peak - self.minimum)


def build_learning_rate_schedule(
    config: LearningRateConfig,
    *,
    train_iters: int | None,
    train_samples: int | None,
    global_batch_size: int,
    planned_samples: int | None = None,
) -> LearningRateSchedule:
    """The schedule of the flags; iterations count as full global batches.

    The decay lasts the whole run by default: ``planned_samples``, which a batch-size ramp makes fewer than
    ``train_iters`` full batches. Raises :class:`ConfigError` if warm-up and annealing exceed the decay.
    """
    assert config.lr is not None
    if train_samples is not None:
        decay = config.lr_decay_samples or train_samples
        warmup: float = config.lr_warmup_samples
        annealing = config.lr_wsd_decay_samples or 0
    else:
        assert train_iters is not None
        decay = planned_samples or train_iters * global_batch_size
        if config.lr_decay_iters is not None:
            decay = config.lr_decay_iters * global_batch_size
        warmup = config.lr_warmup_iters * global_batch_size
        annealing = (config.lr_wsd_decay_iters or 0) * global_batch_size
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay  # a fraction of a sample counts, as in Megatron-LM
    if warmup + annealing > decay:
        unit = "iters" if train_samples is None else "samples"
        raise ConfigError(
            f"The warm-up ({warmup} samples) and the WSD decay ({annealing}) exceed the decay length ({decay} "
            f"samples): lower --lr-warmup-{unit} or --lr-wsd-decay-{unit}, or raise --lr-decay-{unit}."
        )
    return LearningRateSchedule(
        peak=config.lr,
        minimum=config.min_lr,
        initial=config.lr_warmup_init,
        warmup=warmup,
        decay=decay,
        style=config.lr_decay_style,
        wsd_decay=annealing,
        wsd_style=config.lr_wsd_decay_style,
    )


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay goes from ``start`` to ``end`` over ``length`` samples, then stays at ``end``."""

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
