"""Errors of the step-time model on published runs: of sources that were left out of the fit, after one measured run of
the same software, and of the layouts that it would choose."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from benchmarks.published.fit import errors, fit, measured
from benchmarks.published.table import (
    groups,
    model_of_row,
    precision,
    release,
    run_of,
    same_layout,
    same_replica,
    sources,
)
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.published import PublishedRun
from megatron.planner.step_time.workload import Array

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
    return {left: fit([one for one in runs if one.source != left]) for left in sources(runs)}


def left_out(runs: Sequence[PublishedRun], source: str) -> list[PublishedRun]:
    """The rows of a source whose GPU other sources have, too: nothing else could teach the constants of a GPU."""
    known = {one.row["gpu"] for one in runs if one.source != source}
    return [one for one in runs if one.source == source and one.row["gpu"] in known]


def errors_of_copies(runs: Sequence[PublishedRun], known: Sequence[PublishedRun]) -> Array:
    """Relative errors of ``runs`` that have twins among the ``known`` ones, if the median of the twins' tokens per
    second and GPU is their prediction."""
    rates = _tokens_per_s_per_gpu(known)
    twins = {key: np.median(rates[group]) for key, group in groups(known, same_replica).items()}
    return np.array([rate / twins[same_replica(one)] for one, rate in zip(runs, _tokens_per_s_per_gpu(runs))]) - 1


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
    others = np.abs(np.expm1(level[:, None] - level[None, :]))[~np.eye(len(level), dtype=bool)]
    return [] if len(level) < 2 else np.median(others.reshape(len(level), -1), axis=1).tolist()


@dataclass(frozen=True)
class Repeat:
    """Two measurements of the same layout of the same job on the same GPUs."""

    runs: tuple[PublishedRun, PublishedRun]

    @property
    def difference(self) -> float:
        """Of the longer time from the shorter one, relative."""
        times = measured(self.runs)
        return float(times.max() / times.min() - 1)

    @property
    def kind(self) -> str:
        """What else may differ."""
        first, second = self.runs
        if first.source != second.source:
            return "another source"
        return "same release" if release(first) == release(second) else "another release"


def repeats(runs: Sequence[PublishedRun]) -> list[Repeat]:
    """All pairs of rows with the same layout."""
    pairs = (pair for group in groups(runs, same_layout).values() for pair in combinations(group, 2))
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
    stated = (one.source, release(one), one.row["gpu"], precision(one), one.row["model"])
    return (stated, model_of_row(one), run.gpus, run.global_batch_size, software)


def _layout_of(one: PublishedRun) -> Hashable:
    run = run_of(one)
    sizes = (run.tp, run.pp, run.vp, run.cp, run.dp, run.micro_batch_size)
    software = (run.software.sharding, run.software.keeps_weights_gathered)
    return (sizes, run.schedule, run.recompute, software)
