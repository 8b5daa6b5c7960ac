"""The flags for spikes and for numbers that are not finite, and the decision after each iteration.

A value is compared with the values of the last applied iterations, on a logarithmic scale, by its robust z-score: its
distance from their median, divided by their scaled median absolute deviation. Only values above the median count.

Loss and norm are all-reduced, so every rank has the same numbers and comes to the same decision without communication.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, values_of

MAX_SCORE = 6.0
STEPS = 3
"""A spike is a score above :data:`MAX_SCORE` in this many iterations in a row,"""
MAX_FACTOR = 10.0
"""or one value above this many times the largest of the window."""
MIN_SCALE = 0.005
"""Lower limit of the deviation by which a distance is divided, so that a flat curve has no spikes of rounding errors:
with it, a score of 6 is 3 % above the median."""
# Standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
MAX_SKIPPED_IN_ROW = 3
MAX_SKIPPED = 10
"""Limit of the updates that are skipped in :data:`RECENT` iterations."""
RECENT = 1000
DETECTION_DELAY = MAX_SKIPPED_IN_ROW + 1
"""Iterations, at most, from the first of a spike or of skipped updates until a rollback is decided."""

Cause = Literal["spike", "not_finite"]


@dataclass(frozen=True)
class SpikeFlags:
    """Spikes, and numbers that are not finite."""

    nan_policy: Literal["stop", "skip", "rollback"] = "stop"
    """At a loss or gradient that is not finite: stop, as --check-for-nan-in-loss-and-grad describes; or skip the update
    on all ranks and count it, until more than 3 in a row or more than 10 of the last 1,000 are skipped, and then exit
    with code 93 (skip) or return to an earlier checkpoint (rollback)."""
    spike_policy: Literal["log", "skip", "rollback"] = "log"
    """At a spike (--spike-window): log it; skip the update on all ranks, with the limits of --nan-policy; or return at
    once to a checkpoint from before the spike (rollback), which needs --save and --save-interval."""
    spike_window: int = 100
    """Number of updates with which each loss and gradient norm is compared. A spike is a robust z-score of a logarithm
    above 6 in three iterations in a row, or one value above 10 times the largest of the window. There are no spikes
    before so many updates."""
    rollback_margin: int = 50
    """A rollback leaves out the samples from this many iterations before the spike until the iteration at which it was
    noticed."""
    max_rollbacks: int = 3
    """Rollbacks of the whole run, after which the next one ends it with exit code 93."""

    @property
    def rolls_back(self) -> bool:
        """Whether a policy returns to earlier checkpoints."""
        return "rollback" in (self.nan_policy, self.spike_policy)

    @property
    def decides_by_norm(self) -> bool:
        """Whether a policy decides by the gradient norm of an iteration whether there is an update."""
        return self.spike_policy != "log" or self.nan_policy != "stop"

    def check(self) -> None:
        require_at_least(10, values_of(self, "spike_window"))
        require_at_least(1, values_of(self, "max_rollbacks"))
        require_at_least(0, values_of(self, "rollback_margin"))
        dependent = changed_flags(self, "rollback_margin", "max_rollbacks")
        require_flag("--spike-policy rollback or --nan-policy rollback", self.rolls_back, dependent)

    def check_spikes_in_run(self, stops_at_nan: bool, has_saves: bool, saves_in_part: Sequence[str]) -> None:
        """Check against flags of other groups.

        ``stops_at_nan`` is ``--check-for-nan-in-loss-and-grad``; ``has_saves``: whether the run saves at intervals;
        ``saves_in_part``: the flags that leave a part of the state out of its checkpoints.
        """
        if self.nan_policy != "stop" and not stops_at_nan:
            raise ConfigError(
                f"--nan-policy {self.nan_policy} and --no-check-for-nan-in-loss-and-grad, which skips without limit, "
                "exclude each other: remove one of them."
            )
        if not self.rolls_back:
            return
        policy = "--spike-policy" if self.spike_policy == "rollback" else "--nan-policy"
        if not has_saves:
            raise ConfigError(
                f"{policy} rollback needs checkpoints to return to: add --save and --save-interval, or use {policy} "
                "skip."
            )
        if saves_in_part:
            raise ConfigError(
                f"{policy} rollback needs checkpoints with the whole state of the run: remove {saves_in_part[0]}, or "
                f"use {policy} skip."
            )


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
        # The first of the outliers in a row that ended with the last iteration.
        self._first_outlier: int | None = None
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
    """The deviations by which the logarithm of ``value`` is above the median of the logarithms of ``earlier``."""
    if value <= 0:
        return 0.0
    logarithms = [math.log(one) for one in earlier]
    middle = median(logarithms)
    deviation = _NORMAL * median(abs(one - middle) for one in logarithms)
    return max(0.0, math.log(value) - middle) / max(deviation, MIN_SCALE)


class Action(Enum):
    """What the training loop does after an iteration."""

    CONTINUE = 0
    ROLL_BACK = 1
    STOP = 2


@dataclass(frozen=True)
class Verdict:
    """The decision of :class:`UpdateGuard` after an iteration."""

    action: Action = Action.CONTINUE
    cause: Cause | None = None
    """None if there is nothing to report."""
    first_iteration: int = 0
    """Where the spike, or the row of skipped updates, began."""
    message: str | None = None
    """A sentence for the log, or the beginning of the error."""


class UpdateGuard:
    """Finds spikes, counts skipped updates, and applies ``--spike-policy`` and ``--nan-policy``.

    ``stops_at_nan`` is ``--check-for-nan-in-loss-and-grad``: without it and without a policy, iterations that are not
    finite are skipped without limit.
    """

    def __init__(self, config: SpikeFlags, stops_at_nan: bool) -> None:
        self._spike_policy, self._nan_policy = config.spike_policy, config.nan_policy
        self._stops_at_nan = stops_at_nan
        self._window = config.spike_window
        self._detector = SpikeDetector(self._window)
        # The comparison of the iteration under way, else of the last one.
        self._seen: Observation | None = None
        # The first iteration of the spike that was reported last.
        self._reported: int | None = None
        # The last iterations without an update.
        self._skipped: deque[int] = deque(maxlen=MAX_SKIPPED + 1)
        self._first_in_row = 0
        self._num_in_row = 0
        self.num_skipped = 0
        """Updates that were skipped so far."""

    def accepts(self, iteration: int, loss: float, grad_norm: float) -> bool:
        """Whether to apply the update of ``iteration``; called before it, if loss and norm are finite."""
        self._seen = self._detector.observe(iteration, loss, grad_norm)
        return self._spike_policy == "log" or not self._seen.is_spike

    def conclude(self, iteration: int, is_applied: bool, is_fault: bool) -> Verdict:
        """The decision after ``iteration``, whose update was applied, rejected by :meth:`accepts`, or not possible.

        ``is_fault``: the loss or the gradient was not finite, and a lower loss scale cannot correct that.
        """
        seen = self._seen
        if seen is not None and seen.iteration != iteration:
            seen = self._seen = None  # numbers that are not finite are not compared
        spike = Verdict()
        if seen is not None and seen.is_spike:
            message = f"Iteration {seen.first_iteration} begins a spike: iteration {iteration} has {seen.describe()}"
            spike = Verdict(Action.CONTINUE, "spike", seen.first_iteration, message)
        # Applied: a spike is reported once.
        if is_applied:
            assert seen is not None, iteration
            self._num_in_row = 0
            self._detector.add(seen.loss, seen.grad_norm)
            if not seen.is_spike or self._reported == seen.first_iteration:
                return Verdict()
            self._reported = seen.first_iteration
            return spike
        # Not finite, and not because of the loss scale: --nan-policy.
        if is_fault:
            if self._nan_policy == "stop" and self._stops_at_nan:
                return Verdict(Action.STOP, "not_finite", iteration)
            self._count(iteration)
            if self._nan_policy == "stop":
                return Verdict()
            message = f"The loss or the gradient of iteration {iteration} is not finite"
            policy = f"--nan-policy {self._nan_policy}"
            return self._limited("not_finite", iteration, message, policy, rolls_back=self._nan_policy == "rollback")
        # An overflow: the loss scale falls.
        if seen is None or not seen.is_spike:
            return Verdict()
        # Rejected as a spike: --spike-policy.
        self._count(iteration)
        if self._spike_policy == "rollback":
            return replace(spike, action=Action.ROLL_BACK)
        message = f"Iteration {iteration} is a spike: {seen.describe()}"
        return self._limited("spike", iteration, message, "--spike-policy skip", rolls_back=False)

    def _count(self, iteration: int) -> None:
        if self._num_in_row == 0:
            self._first_in_row = iteration
        self._num_in_row += 1
        self.num_skipped += 1
        self._skipped.append(iteration)

    def _limited(self, cause: Cause, iteration: int, message: str, policy: str, rolls_back: bool) -> Verdict:
        """Skip within the limits; beyond them roll back or stop."""
        recent = sum(one > iteration - RECENT for one in self._skipped)
        if self._num_in_row > MAX_SKIPPED_IN_ROW:
            excess = f"{self._num_in_row} updates in a row were skipped, more than {MAX_SKIPPED_IN_ROW}"
        elif recent > MAX_SKIPPED:
            excess = f"{recent} of the last {RECENT} updates were skipped, more than {MAX_SKIPPED}"
        else:
            return Verdict(Action.CONTINUE, cause, self._first_in_row, f"{message}; its update is skipped ({policy})")
        action = Action.ROLL_BACK if rolls_back else Action.STOP
        return Verdict(action, cause, self._first_in_row, f"{message}, and {excess} ({policy})")

    def forget(self) -> None:
        """Compare with none of the iterations so far."""
        self._detector = SpikeDetector(self._window)

    def metrics(self) -> dict[str, float]:
        """Values for the record of the last iteration; none while there is nothing unusual."""
        metrics: dict[str, float] = {}
        if self._seen is not None and self._seen.is_outlier:
            metrics["spike"] = self._seen.score
        if self.num_skipped:
            metrics["skipped_updates"] = self.num_skipped
        return metrics

    def to_json(self) -> dict[str, Any]:
        """The state for :meth:`restore`; JSON keeps every bit of the numbers."""
        return {
            **self._detector.to_json(),
            "skipped": list(self._skipped),
            "first_in_row": self._first_in_row,
            "num_in_row": self._num_in_row,
            "num_skipped": self.num_skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`to_json`."""
        self._detector.restore(state)
        self._skipped.clear()
        self._skipped.extend(map(int, state["skipped"]))
        self._first_in_row, self._num_in_row = int(state["first_in_row"]), int(state["num_in_row"])
        self.num_skipped = int(state["num_skipped"])
