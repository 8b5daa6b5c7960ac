"""The factor by which the loss is multiplied before backward, so that gradients stay within fp16's narrow range.

Source: Mixed Precision Training (arXiv 1710.03740, section 3.2). When the dynamic scale changes is as in Megatron-LM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config.precision import PrecisionConfig


@dataclass
class LossScaler:
    """A constant scale."""

    scale: float = 1.0
    """Factor of the next backward pass; the optimizer takes it out again."""

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return False

    def update(self, overflowed: bool) -> bool:
        """Take note of a step, in which gradients ``overflowed`` or not; whether nothing is wrong with it.

        All ranks hear the same, so their scales stay equal without a word.
        """
        return not overflowed

    def to_json(self) -> dict[str, float] | None:
        """The state as a checkpoint keeps it; None where there is none."""
        return None

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Go on from the state of a checkpoint; from None, or with a constant scale, nothing changes."""


@dataclass
class DynamicLossScaler(LossScaler):
    """Halves at overflows and doubles after ``window`` steps without one, since then or since it last doubled.

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
        """It is."""
        return True

    def update(self, overflowed: bool) -> bool:
        """As in the base class; an overflow is wrong only where it should halve a scale that is at its floor."""
        if not overflowed:
            self._count_good_step()
            return True
        self._good_steps = 0
        self._overflows += 1
        if self._overflows < self.hysteresis:
            return True
        before = self.scale
        self.scale = max(self.scale / 2, self.minimum)
        return self.scale < before

    def _count_good_step(self) -> None:
        self._good_steps += 1
        if self._good_steps >= self.window:
            self.scale *= 2
            self._good_steps = self._overflows = 0

    def to_json(self) -> dict[str, float]:
        """Scale and counts."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Take over scale and counts, if there are any; the limits are those of this run."""
        if saved is None:
            return
        self.scale = max(saved["scale"], self.minimum)
        self._good_steps, self._overflows = int(saved["good_steps"]), int(saved["overflows"])


def build_loss_scaler(config: PrecisionConfig) -> LossScaler:
    """The loss scale of the flags."""
    if not config.has_dynamic_loss_scale:
        return LossScaler(1.0 if config.loss_scale is None else config.loss_scale)
    return DynamicLossScaler(
        config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
