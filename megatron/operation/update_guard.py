"""What happens at a spike, and at a loss or a gradient that is not finite: the policies and their limits.

Everything follows from numbers that all ranks have, so all ranks decide alike without communication.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from megatron.config.operation import OperationConfig
from megatron.features.spikes.flags import Observation, SpikeDetector

MAX_SKIPPED_IN_ROW = 3
MAX_SKIPPED = 10
"""At most so many updates are skipped in :data:`RECENT` iterations."""
RECENT = 1000
DETECTION_DELAY = MAX_SKIPPED_IN_ROW + 1
"""Iterations, at most, from the first of a spike or of skipped updates until a rollback is decided."""

Cause = Literal["spike", "not_finite"]


class Action(Enum):
    """What the training loop does after an iteration."""

    CONTINUE = 0
    ROLL_BACK = 1
    STOP = 2


@dataclass(frozen=True)
class Verdict:
    """The decision after an iteration."""

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

    def __init__(self, config: OperationConfig, stops_at_nan: bool) -> None:
        self._spike_policy, self._nan_policy = config.spike_policy, config.nan_policy
        self._stops_at_nan = stops_at_nan
        self._window = config.spike_window
        self._detector = SpikeDetector(self._window)
        self._seen: Observation | None = None
        """The comparison of the iteration under way, else of the last one."""
        self._reported: int | None = None
        """The first iteration of the spike that was reported last."""
        self._skipped: deque[int] = deque(maxlen=MAX_SKIPPED + 1)
        """The last iterations without an update."""
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
            seen = self._seen = None
        if is_applied:
            assert seen is not None, iteration
            self._num_in_row = 0
            self._detector.add(seen.loss, seen.grad_norm)
            return self._report(iteration, seen)
        if is_fault:
            return self._conclude_fault(iteration)
        if seen is None or not seen.is_spike:
            return Verdict()  # the loss scale falls
        self._count(iteration)
        if self._spike_policy == "rollback":
            message = f"Iteration {seen.first_iteration} begins a spike: iteration {iteration} has {seen.describe()}"
            return Verdict(Action.ROLL_BACK, "spike", seen.first_iteration, message)
        message = f"Iteration {iteration} is a spike: {seen.describe()}"
        return self._limited("spike", iteration, message, "--spike-policy skip", rolls_back=False)

    def _report(self, iteration: int, seen: Observation) -> Verdict:
        """An applied iteration: a spike is reported once."""
        if not seen.is_spike or self._reported == seen.first_iteration:
            return Verdict()
        self._reported = seen.first_iteration
        message = f"Iteration {seen.first_iteration} begins a spike: iteration {iteration} has {seen.describe()}"
        return Verdict(Action.CONTINUE, "spike", seen.first_iteration, message)

    def _conclude_fault(self, iteration: int) -> Verdict:
        if self._nan_policy == "stop" and self._stops_at_nan:
            return Verdict(Action.STOP, "not_finite", iteration)
        self._count(iteration)
        if self._nan_policy == "stop":
            return Verdict()
        message = f"The loss or the gradient of iteration {iteration} is not finite"
        policy = f"--nan-policy {self._nan_policy}"
        return self._limited("not_finite", iteration, message, policy, rolls_back=self._nan_policy == "rollback")

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
