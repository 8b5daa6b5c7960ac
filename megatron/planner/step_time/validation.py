"""Errors of the step-time model on published runs: by source and size, of sources that were left out of the fit, after
one measured run of the same software, and of the layouts that it would choose."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from megatron.planner.step_time.fit import errors, fit, measured, predict
from megatron.planner.step_time.published import PublishedRun, sources
from megatron.planner.step_time.workload import Array

SIZES = ((1, 8), (9, 64), (65, 512), (513, 4096), (4097, None))
"""Ranges of GPUs."""
DOUBTFUL: tuple[Mapping[str, str], ...] = (
    {"source": "bloom", "step_time_s": "113.01"},
    {"source": "bloom", "step_time_s": "148.24"},
    {"source": "llm-foundry", "model": "MPT-30B", "seq": "8192"},
    {"source": "torchtitan", "seq": "65536", "gpus": "8"},
    {"source": "nemo-25xx", "step_time_s": "6.2894"},
)
"""Rows whose times contradict other rows of their source. They are fitted, and errors are stated with and without
them."""
_GOOD_CHOICE = 0.02


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


def is_doubtful(one: PublishedRun) -> bool:
    """Whether the row is one of :data:`DOUBTFUL`."""
    return any(all(one.row.get(name) == value for name, value in row.items()) for row in DOUBTFUL)


def without_doubtful(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs whose times do not contradict others."""
    return [one for one in runs if not is_doubtful(one)]


def size_of(one: PublishedRun) -> tuple[int, int | None]:
    """The range of :data:`SIZES` of a run."""
    assert one.run is not None
    gpus = one.run.gpus
    return next((low, high) for low, high in SIZES if high is None or gpus <= high)


def constants_without(runs: Sequence[PublishedRun]) -> dict[str, dict[str, float]]:
    """The constants that are fitted to all sources but one, by that source."""
    return {left: fit([one for one in runs if one.source != left]) for left in sources(runs)}


def left_out(runs: Sequence[PublishedRun], source: str) -> list[PublishedRun]:
    """The rows of a source whose GPU other sources have, too: nothing else could teach the constants of a GPU."""
    known = {one.row["gpu"] for one in runs if one.source != source}
    return [one for one in runs if one.source == source and one.row["gpu"] in known]


def corrected_errors(
    runs: Sequence[PublishedRun], constants: Mapping[str, dict[str, float]], key: Callable[[PublishedRun], Hashable]
) -> dict[str, Array]:
    """The errors by source if one measured run corrects the level of all runs with the same ``key``.

    ``constants`` are those of each source, fitted without it. The correction is the factor between the measured and the
    predicted time of the one run. Every run of a key is corrected by every other one; the error of a run is the median
    over them. A key with a single run has no error.
    """
    found = {}
    for source, own_constants in constants.items():
        own = [one for one in runs if one.source == source]
        level = np.log1p(errors(own, own_constants))
        values = [value for group in _groups(own, key).values() for value in _corrected(level[group])]
        if values:
            found[source] = np.array(values)
    return found


def _groups(runs: Sequence[PublishedRun], key: Callable[[PublishedRun], Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, one in enumerate(runs):
        found[key(one)].append(number)
    return found


def _corrected(level: Array) -> list[float]:
    """The median error of each run, corrected by each other one."""
    others = np.abs(np.expm1(level[:, None] - level[None, :]))[~np.eye(len(level), dtype=bool)]
    return [] if len(level) < 2 else np.median(others.reshape(len(level), -1), axis=1).tolist()


def same_software(one: PublishedRun) -> Hashable:
    """Runs of one source with the same GPU, precision, software with its options, and release."""
    assert one.run is not None
    return (one.source, one.row["gpu"], one.precision, one.run.software, one.release)


def same_job(one: PublishedRun) -> Hashable:
    """Runs of the same software that train the same model with the same sequence length."""
    assert one.run is not None
    run = one.run
    shapes = (run.layers, run.hidden, run.heads, run.kv_heads, run.ffn, run.vocab, run.seq_length)
    return (same_software(one), one.row["model"], shapes)


@dataclass(frozen=True)
class Repeat:
    """Two measurements of the same layout of the same job on the same GPUs, with the same options of the software."""

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
        return "same release" if first.release == second.release else "another release"


def repeats(runs: Sequence[PublishedRun]) -> list[Repeat]:
    """All pairs of rows with the same layout: no model of layouts can tell their times apart."""
    groups = _groups(runs, lambda one: (one.row["gpu"], _without_options(one))).values()
    return [Repeat((runs[first], runs[second])) for group in groups for first, second in combinations(group, 2)]


def _without_options(one: PublishedRun) -> Hashable:
    """The run without what only some releases do."""
    assert one.run is not None
    return replace(one.run, software=replace(one.run.software, has_cuda_graphs=False, main_grad_bytes=0))


@dataclass(frozen=True)
class Sweep:
    """Measured layouts of one job on the same GPUs."""

    description: str
    layouts: int
    regret: float
    """Measured time of the layout that the model finds fastest, relative to the fastest one, less 1."""

    @property
    def is_good(self) -> bool:
        return self.regret <= _GOOD_CHOICE


def sweeps(runs: Sequence[PublishedRun], constants: Mapping[str, dict[str, float]]) -> list[Sweep]:
    """Jobs that were measured in two layouts or more, with the constants of each source.

    Only the layout differs in a sweep: parallel sizes, schedule, microbatch, recompute and sharding. Several
    measurements of a layout count as their median.
    """
    found = []
    for group in _groups(runs, _job_of_sweep).values():
        own = [runs[number] for number in group]
        by_layout = _groups(own, _layout_of)
        if len(by_layout) < 2:
            continue
        times, predicted = measured(own), predict(own, constants[own[0].source])
        seconds = [float(np.median(times[same])) for same in by_layout.values()]
        choice = int(np.argmin([np.median(predicted[same]) for same in by_layout.values()]))
        row = own[0].row
        text = f"{row['source']}, {row['model']}, {row['gpus']} {row['gpu']}, {own[0].precision}"
        found.append(Sweep(text, len(seconds), seconds[choice] / min(seconds) - 1))
    return found


def _job_of_sweep(one: PublishedRun) -> Hashable:
    assert one.run is not None
    run = one.run
    software = replace(
        run.software, sharding="none", keeps_weights_gathered=False, main_grad_bytes=0, has_cuda_graphs=False
    )
    shapes = (run.layers, run.hidden, run.heads, run.kv_heads, run.ffn, run.vocab, run.seq_length)
    stated = (one.source, one.release, one.row["gpu"], one.precision, one.row["model"])
    return (stated, shapes, run.gpus, run.global_batch_size, software)


def _layout_of(one: PublishedRun) -> Hashable:
    assert one.run is not None
    run = one.run
    sizes = (run.tp, run.pp, run.vp, run.cp, run.dp, run.micro_batch_size)
    software = (run.software.sharding, run.software.keeps_weights_gathered)
    return (sizes, run.schedule, run.recompute, software)
