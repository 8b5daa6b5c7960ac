"""The fit of the constants of the step-time model to measured times.

Damped Gauss-Newton on the logarithms of the constants, with Huber's loss on the logarithms of the times, and
log-normal priors.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.prices import CONSTANTS, Constants, starts
from megatron.planner.step_time.published import PublishedRun, predict
from megatron.planner.step_time.workload import Array, Workload

_HUBER = 0.04  # relative error from which on it counts linearly
_SIGMA = 0.03  # expected relative error of a row
_ITERATIONS, _TRIALS, _LARGEST_STEP, _DIFFERENCE = 40, 8, 0.5, 1e-4


def fitted_names() -> list[str]:
    """The constants that a fit changes; the others are stated."""
    return [name for name, constant in CONSTANTS.items() if constant.spread > 0]


def fit(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """The constants that fit the measured times of ``runs`` best."""
    model, names = StepTimeModel(Workload([one.run for one in runs if one.run is not None])), fitted_names()
    target = np.log(measured(runs))
    start = np.log([CONSTANTS[name].start for name in names])
    spread = np.array([CONSTANTS[name].spread for name in names])

    def constants(point: Array) -> dict[str, float]:
        return starts() | dict(zip(names, np.exp(point).tolist()))

    def residuals(point: Array) -> Array:
        return np.asarray(np.log(model.price(constants(point)).total) - target)

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
    return constants(point)


def _jacobian(residuals: Callable[[Array], Array], point: Array, error: Array) -> Array:
    columns = [(residuals(point + _DIFFERENCE * unit) - error) / _DIFFERENCE for unit in np.eye(len(point))]
    return np.stack(columns, axis=1)


def measured(runs: Sequence[PublishedRun]) -> Array:
    """The seconds of the runs that have been measured."""
    return np.array([one.seconds for one in runs if one.seconds is not None])


def errors(runs: Sequence[PublishedRun], constants: Constants) -> Array:
    """Relative errors of the predicted times of measured runs."""
    return predict(runs, constants) / measured(runs) - 1
