"""The fit of the constants of the step-time model to measured times, and its errors.

The fit is damped Gauss-Newton on the logarithms of the constants, with Huber's loss on the logarithms of the times, and
log-normal priors. Errors are those of sources that were left out of it, after one measured run of the same software,
and of the layouts that the model would choose.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from benchmarks.published import table
from benchmarks.published.table import groups, run_of
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
        # A Gauss-Newton step: rows with a large error weigh less (Huber), priors pull towards the start.
        error = residuals(point)
        jacobian = _jacobian(residuals, point, error)
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-12)) / _SIGMA**2
        curvature = jacobian.T @ (weight[:, None] * jacobian) + np.diag(1 / spread**2)
        slope = jacobian.T @ (weight * error) + (point - start) / spread**2
        # Damp more until the objective falls (Levenberg-Marquardt).
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
    return np.array([one.seconds for one in runs if one.seconds is not None])


def errors(runs: Sequence[PublishedRun], constants: Constants) -> Array:
    """Relative errors of the predicted times of measured runs."""
    return predict(runs, constants) / measured(runs) - 1


_GOOD_CHOICE = 0.02
_TIE = 1e-6
"""Layouts whose predicted times differ by less are equally good to the model."""


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


def constants_without(runs: Sequence[PublishedRun]) -> dict[str, dict[str, float]]:
    """The constants that are fitted to all sources but one, by that source."""
    return {left: fit([one for one in runs if one.source != left]) for left in table.sources(runs)}


def left_out(runs: Sequence[PublishedRun], source: str) -> list[PublishedRun]:
    """The rows of a source whose GPU other sources have, too: nothing else could teach the constants of a GPU."""
    known = {one.row["gpu"] for one in runs if one.source != source}
    return [one for one in runs if one.source == source and one.row["gpu"] in known]


def errors_of_copies(runs: Sequence[PublishedRun], known: Sequence[PublishedRun]) -> Array:
    """Relative errors of ``runs`` that have twins among the ``known`` ones, if the median of the twins' tokens per
    second and GPU is their prediction."""
    rates = _tokens_per_s_per_gpu(known)
    twins = {key: np.median(rates[group]) for key, group in groups(known, table.same_replica).items()}
    return np.array([rate / twins[table.same_replica(one)] for one, rate in zip(runs, _tokens_per_s_per_gpu(runs))]) - 1


def _tokens_per_s_per_gpu(runs: Sequence[PublishedRun]) -> Array:
    tokens = [one.global_batch_size * one.seq_length / one.gpus for one in map(run_of, runs)]
    return np.array(tokens) / measured(runs)


def corrected_errors(
    runs: Sequence[PublishedRun], constants: Mapping[str, Constants], key: Callable[[PublishedRun], Hashable]
) -> dict[str, Array]:
    """The errors by source if one measured run corrects the level of all runs with the same ``key``.

    ``constants`` has for each source the constants that were fitted without it. The correction is the factor between
    the measured and the predicted time of the one run. Every run of a key is corrected by every other one; the error of
    a run is the median over them. A key with a single run has no error.
    """
    found = {}
    for source, own_constants in constants.items():
        own = [one for one in runs if one.source == source]
        level = np.log1p(errors(own, own_constants))
        values = [value for group in groups(own, key).values() for value in _corrected(level[group])]
        if values:
            found[source] = np.array(values)
    return found


def _corrected(level: Array) -> list[float]:
    """The median error of each run, corrected by each other one."""
    # [runs, runs - 1]: the error of each run with the level of each other one.
    others = np.abs(np.expm1(level[:, None] - level[None, :]))[~np.eye(len(level), dtype=bool)]
    return [] if len(level) < 2 else np.median(others.reshape(len(level), -1), axis=1).tolist()


@dataclass(frozen=True)
class Repeat:
    """Two measurements of the same layout of the same job on the same GPUs."""

    runs: tuple[PublishedRun, PublishedRun]

    @property
    def difference(self) -> float:
        """Relative difference of the longer time from the shorter one."""
        times = measured(self.runs)
        return float(times.max() / times.min() - 1)

    @property
    def kind(self) -> str:
        """What else may differ."""
        first, second = self.runs
        if first.source != second.source:
            return "another source"
        return "same release" if table.release(first) == table.release(second) else "another release"


def repeats(runs: Sequence[PublishedRun]) -> list[Repeat]:
    """All pairs of rows with the same layout."""
    pairs = (pair for group in groups(runs, table.same_layout).values() for pair in combinations(group, 2))
    return [Repeat((runs[first], runs[second])) for first, second in pairs]


@dataclass(frozen=True)
class Sweep:
    """Measured layouts of one job on the same GPUs; arrays ``[layouts]``."""

    seconds: Array
    predicted: Array

    @property
    def spread(self) -> float:
        """The slowest layout relative to the fastest one, less 1."""
        return float(self.seconds.max() / self.seconds.min() - 1)

    @property
    def regret(self) -> float:
        """The measured time of the layout that is predicted fastest, relative to the fastest one, less 1; the mean over
        layouts with the same prediction."""
        chosen = self.predicted <= self.predicted.min() * (1 + _TIE)
        return float(self.seconds[chosen].mean() / self.seconds.min() - 1)

    @property
    def is_good(self) -> bool:
        return self.regret <= _GOOD_CHOICE


def sweeps(
    runs: Sequence[PublishedRun], predicted: Callable[[Sequence[PublishedRun]], Array], least_spread: float = 0.02
) -> list[Sweep]:
    """Jobs that were measured in layouts whose times differ by more than ``least_spread``: repeated
    measurements of one layout differ by less. ``predicted`` has the seconds of runs of one source.

    Only the layout differs in a sweep: parallel sizes, schedule, microbatch, recompute and sharding. Several
    measurements of a layout count as their median.
    """
    found = []
    for group in groups(runs, _job_of_sweep).values():
        own = [runs[number] for number in group]
        layouts = list(groups(own, _layout_of).values())
        times, guesses = measured(own), predicted(own)
        one = Sweep(*(np.array([np.median(values[same]) for same in layouts]) for values in (times, guesses)))
        if one.spread > least_spread:
            found.append(one)
    return found


def _job_of_sweep(one: PublishedRun) -> Hashable:
    run = run_of(one)
    software = replace(run.software, sharding="none", keeps_weights_gathered=False, main_grad_bytes=0)
    stated = (one.source, table.release(one), one.row["gpu"], table.precision(one), one.row["model"])
    return (stated, table.model_of_row(one), run.gpus, run.global_batch_size, software)


def _layout_of(one: PublishedRun) -> Hashable:
    run = run_of(one)
    sizes = (run.tp, run.pp, run.vp, run.cp, run.dp, run.micro_batch_size)
    software = (run.software.sharding, run.software.keeps_weights_gathered)
    return (sizes, run.schedule, run.recompute, software)
