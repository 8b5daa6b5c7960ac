"""Spikes of the loss and of the gradient norm.

A value is compared with the values of the last applied iterations, on a logarithmic scale, by its robust z-score: its
distance from their median, divided by their scaled median absolute deviation. Only values above the median count.

Loss and norm are all-reduced, so every rank has the same numbers and comes to the same result without communication.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MAX_SCORE = 6.0
STEPS = 3
"""A spike is a score above :data:`MAX_SCORE` in this many iterations in a row,"""
MAX_FACTOR = 10.0
"""or one value above this many times the largest of the window."""
MIN_SCALE = 0.005
"""Lower limit of the deviation by which a distance is divided, so that a flat curve has no spikes of rounding errors:
with it, a score of 6 is 3 % above the median."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Observation:
    """The comparison of one iteration with the window."""

    iteration: int
    loss: float
    grad_norm: float
    score: float
    """The larger of both robust z-scores; 0 while the window is not full."""
    is_outlier: bool
    """Whether the score is above :data:`MAX_SCORE`, or a value above :data:`MAX_FACTOR` times the largest."""
    first_iteration: int
    """The first of the outliers in a row that end with this iteration; else this iteration."""
    is_spike: bool

    def describe(self) -> str:
        """The numbers for people."""
        return f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}, robust z-score {self.score:.1f}"


class SpikeDetector:
    """Compares each iteration with the last ``window`` applied iterations; finds nothing before there are so many."""

    def __init__(self, window: int) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._grad_norms: deque[float] = deque(maxlen=window)
        self._first_outlier: int | None = None
        """The first of the outliers in a row that ended with the last iteration."""
        self._num_outliers = 0

    def observe(self, iteration: int, loss: float, grad_norm: float) -> Observation:
        """Compare finite numbers with the window, which does not change."""
        score, is_far = 0.0, False
        for value, earlier in ((loss, self._losses), (grad_norm, self._grad_norms)):
            if len(earlier) == earlier.maxlen:
                score = max(score, robust_score(value, earlier))
                is_far = is_far or value > MAX_FACTOR * max(earlier)
        is_outlier = is_far or score > MAX_SCORE
        if not is_outlier:
            self._first_outlier, self._num_outliers = None, 0
            return Observation(iteration, loss, grad_norm, score, False, iteration, False)
        if self._first_outlier is None:
            self._first_outlier = iteration
        self._num_outliers += 1
        is_spike = is_far or self._num_outliers >= STEPS
        return Observation(iteration, loss, grad_norm, score, True, self._first_outlier, is_spike)

    def add(self, loss: float, grad_norm: float) -> None:
        """Add an applied iteration to the window."""
        # Zero has no logarithm, and says nothing about the size of others.
        if loss > 0 and grad_norm > 0:
            self._losses.append(loss)
            self._grad_norms.append(grad_norm)

    def to_json(self) -> dict[str, Any]:
        """The state for :meth:`restore`."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "first_outlier": self._first_outlier,
            "num_outliers": self._num_outliers,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`to_json`, also of a detector with another window."""
        for values, saved in ((self._losses, state["losses"]), (self._grad_norms, state["grad_norms"])):
            values.clear()
            values.extend(map(float, saved))
        first = state["first_outlier"]
        self._first_outlier = None if first is None else int(first)
        self._num_outliers = int(state["num_outliers"])


def robust_score(value: float, earlier: Sequence[float] | deque[float]) -> float:
    """How many deviations the logarithm of ``value`` is above the median of the logarithms of ``earlier``."""
    if value <= 0:
        return 0.0
    logarithms = [math.log(one) for one in earlier]
    middle = median(logarithms)
    deviation = _NORMAL * median(abs(one - middle) for one in logarithms)
    return max(0.0, math.log(value) - middle) / max(deviation, MIN_SCALE)
