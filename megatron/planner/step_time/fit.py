"""Fit the constants of the step-time model to published runs.

    python -m megatron.planner.step_time.fit --write    # fitted.json, with the rows used
    python -m megatron.planner.step_time.fit            # errors alone: fitted, held back, each source left out

Damped Gauss-Newton on the logarithms of the constants, with Huber's loss on the logarithms of the times, and
log-normal priors. Rows are held back by a digest of what describes them, not by hand.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.planner.step_time.constants import CONSTANTS, starts
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.published import PublishedRun, fitted_and_held_back, read_published, sources
from megatron.planner.step_time.workload import Array, Workload

FITTED = Path(__file__).with_name("fitted.json")
_HUBER = 0.04  # relative error from which on it counts linearly
_SIGMA = 0.03  # expected relative error of a row
_ITERATIONS, _TRIALS, _LARGEST_STEP, _DIFFERENCE = 40, 8, 0.5, 1e-4


def fit(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """The constants that fit the measured times of ``runs`` best."""
    model, names = _model(runs), list(CONSTANTS)
    target = np.log(_measured(runs))
    start = np.log([CONSTANTS[name].start for name in names])
    spread = np.array([CONSTANTS[name].spread for name in names])

    def residuals(point: Array) -> Array:
        return np.asarray(np.log(model.price(dict(zip(names, np.exp(point)))).total) - target)

    def objective(point: Array) -> float:
        error = np.abs(residuals(point))
        huber = np.where(error < _HUBER, error**2 / 2, _HUBER * (error - _HUBER / 2))
        return float(huber.sum() / _SIGMA**2 + (((point - start) / spread) ** 2).sum() / 2)

    point, damping = start.copy(), 1.0
    best = objective(point)
    for _ in range(_ITERATIONS):
        error = residuals(point)
        jacobian = _jacobian(residuals, point, error)
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-12)) / _SIGMA**2
        curvature = jacobian.T @ (weight[:, None] * jacobian) + np.diag(1 / spread**2)
        slope = jacobian.T @ (weight * error) + (point - start) / spread**2
        for _ in range(_TRIALS):
            damped = curvature + damping * 0.1 * np.diag(np.diag(curvature))
            step = np.clip(np.linalg.solve(damped, -slope), -_LARGEST_STEP, _LARGEST_STEP)
            value = objective(point + step)
            if value < best:
                damping = max(damping / 3, 1e-3)
                break
            damping *= 4
        else:
            break
        point, is_converged, best = point + step, best - value < 1e-5 * abs(best), value
        if is_converged:
            break
    return dict(zip(names, np.exp(point).tolist()))


def _jacobian(residuals: Callable[[Array], Array], point: Array, error: Array) -> Array:
    columns = [(residuals(point + _DIFFERENCE * unit) - error) / _DIFFERENCE for unit in np.eye(len(point))]
    return np.stack(columns, axis=1)


def _model(runs: Sequence[PublishedRun]) -> StepTimeModel:
    return StepTimeModel(Workload([one.run for one in runs if one.run is not None]))


def _measured(runs: Sequence[PublishedRun]) -> Array:
    return np.array([one.seconds for one in runs if one.seconds is not None])


def predict(runs: Sequence[PublishedRun], constants: dict[str, float]) -> Array:
    """The seconds of runs that can be priced."""
    return _model(runs).price(constants).total


def errors(runs: Sequence[PublishedRun], constants: dict[str, float]) -> Array:
    """Relative errors of the predicted times of measured runs."""
    return predict(runs, constants) / _measured(runs) - 1


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of some rows."""

    rows: int
    median: float
    p90: float
    mean: float
    """Signed."""

    @classmethod
    def of(cls, values: Array) -> "Errors":
        size = np.abs(values)
        return cls(len(values), float(np.median(size)), float(np.percentile(size, 90)), float(values.mean()))

    def __str__(self) -> str:
        return f"{self.rows:5d} {self.median:9.1%} {self.p90:9.1%} {self.mean:+9.1%}"


def leave_one_out(runs: Sequence[PublishedRun]) -> dict[str, Errors]:
    """The errors of each source by constants that were fitted to the others.

    Rows are left out whose GPU or whose software (attention kernels, sharding) no other source has: nothing could have
    taught their constants.
    """
    found = {}
    for source in sources(runs):
        others = [one for one in runs if one.source != source]
        known = {kind for one in others for kind in _regime(one)}
        own = [one for one in runs if one.source == source and _regime(one) <= known]
        if own:
            found[source] = Errors.of(errors(own, fit(others)))
    return found


def _regime(one: PublishedRun) -> set[tuple[str, str]]:
    """What a row needs to have been measured elsewhere."""
    assert one.run is not None
    return {("gpu", one.row["gpu"])}


def after_one_run(runs: Sequence[PublishedRun], constants: dict[str, float]) -> dict[str, float]:
    """Median error by source if one run of the source has corrected the level, over all choices of that run."""
    found = {}
    for source in sources(runs):
        own = [one for one in runs if one.source == source]
        if len(own) > 2:
            level = np.log1p(errors(own, constants))
            pairs = np.abs(np.expm1(level[:, None] - level[None, :]))
            found[source] = float(np.median(pairs[~np.eye(len(own), dtype=bool)]))
    return found


def load_fitted() -> dict[str, float]:
    """The fitted constants that the planner uses."""
    constants: dict[str, float] = json.loads(FITTED.read_text(encoding="utf-8"))["constants"]
    return constants


def main(arguments: Sequence[str]) -> int:
    """Fit, and print the errors; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron.planner.step_time.fit", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the constants to {FITTED.name}")
    options = parser.parse_args(arguments)
    runs = read_published()
    known, held_back = fitted_and_held_back(runs)
    constants = fit(known)
    print(f"{'':24}{'rows':>5} {'median':>9} {'p90':>9} {'mean':>9}")
    print(f"{'at the priors':24}{Errors.of(errors(known, starts()))}")
    print(f"{'fitted':24}{Errors.of(errors(known, constants))}")
    for source in sources(known):
        print(f"  {source:22}{Errors.of(errors([one for one in known if one.source == source], constants))}")
    print(f"{'held back':24}{Errors.of(errors(held_back, constants))}")
    for source, error in leave_one_out(known).items():
        print(f"  without {source:14}{error}")
    for source, median in after_one_run(known, constants).items():
        print(f"  after one run of {source:22}{median:9.1%}")
    if options.write:
        record = {"constants": constants, "rows": [one.number for one in known]}
        FITTED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {FITTED}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
