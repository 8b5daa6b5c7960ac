"""The loss scale, which keeps gradients within fp16's range.

Source: Mixed Precision Training (arXiv 1710.03740, section 3.2). The dynamic scale follows Megatron-LM's rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config.compute import PrecisionConfig


@dataclass
class LossScaler:
    """A constant scale."""

    scale: float = 1.0
    """Factor of the loss in the next backward pass; the optimizer divides the gradients by it."""

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return False

    def update(self, overflowed: bool) -> bool:
        """Record whether gradients ``overflowed`` in a step, the same on all ranks; returns whether that is normal."""
        return not overflowed

    def to_json(self) -> dict[str, float] | None:
        """The state for a checkpoint; None for a constant scale."""
        return None

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Restore the state of a checkpoint if there is one; a constant scale does not change."""


@dataclass
class DynamicLossScaler(LossScaler):
    """Halves at overflows and doubles after ``window`` steps without an overflow or a doubling.

    The first ``hysteresis - 1`` overflows after a doubling (or the start) only skip their steps.
    """

    minimum: float = field(kw_only=True)
    window: int = field(kw_only=True)
    hysteresis: int = field(kw_only=True)
    _good_steps: int = field(default=0, init=False)
    _overflows: int = field(default=0, init=False)
    """Since the last doubling."""

    @property
    def is_dynamic(self) -> bool:
        return True

    def update(self, overflowed: bool) -> bool:
        """Only an overflow at the minimum of the scale is not normal."""
        if not overflowed:
            self._good_steps += 1
            if self._good_steps >= self.window:
                self.scale *= 2
                self._good_steps = self._overflows = 0
            return True
        self._good_steps = 0
        self._overflows += 1
        if self._overflows < self.hysteresis:
            return True
        before = self.scale
        self.scale = max(self.scale / 2, self.minimum)
        return self.scale < before

    def to_json(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def restore(self, saved: Mapping[str, float] | None) -> None:
        if saved is None:
            return
        self.scale = max(saved["scale"], self.minimum)
        self._good_steps, self._overflows = int(saved["good_steps"]), int(saved["overflows"])


def build_loss_scaler(config: PrecisionConfig) -> LossScaler:
    if not config.has_dynamic_loss_scale:
        return LossScaler(1.0 if config.loss_scale is None else config.loss_scale)
    return DynamicLossScaler(
        config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
