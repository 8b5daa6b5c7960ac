"""Compare the loss curves of runs with a reference run, all from --metrics-jsonl files with every iteration.

Prints a table. The exit code is 1 if a run leaves its band: if its mean loss differs from --reference by more, or its
smoothed curve ever exceeds the reference by more.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.commands.loss_curves import read_curve
from megatron.commands.tool import run_tool
from megatron.errors import ConfigError, DataError
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class CompareConfig:
    """Runs to compare, and allowed differences."""

    reference: str
    """Metrics file of the reference run."""
    metrics: tuple[str, ...]
    """Metrics files of the other runs; the name of a run is the name of its file."""
    bands: tuple[float, ...]
    """Allowed difference in percent, per run: of the mean loss, and of the smoothed loss above the reference; inf only
    reports."""
    window: int = 20
    """Iterations of the moving average; each mean includes as many before."""


@dataclass(frozen=True)
class Curve:
    """The losses of one run."""

    name: str
    losses: list[float | None]  # training loss of every iteration; None if it was skipped
    validation: float | None  # the last validation loss


@dataclass(frozen=True)
class Distance:
    """Relative differences of a curve from another; inf if a loss is not finite."""

    mean: float  # of the means of the whole runs
    lowest: float  # smallest and largest of the smoothed curves
    highest: float

    def is_within(self, band: float) -> bool:
        """Whether the mean differs by no more than ``band``, and the smoothed curve never exceeds the other by more."""
        # A curve that is lower for a while learns faster, which is no fault of its numbers.
        return abs(self.mean) <= band and self.highest <= band


def read_run(path: str) -> Curve:
    """The curve in a metrics file, which must have every iteration from the first on."""
    iterations, skipped = read_curve(path, "skipped")
    losses = dict(zip(*read_curve(path, "lm_loss")))
    if not iterations or iterations != list(range(1, len(iterations) + 1)):
        raise DataError(f"{path} does not have every iteration from 1 on: train with --log-interval 1.")
    missing = [iteration for iteration, skips in zip(iterations, skipped) if not skips and iteration not in losses]
    if missing:
        raise DataError(f"{path} has no loss at iteration {missing[0]}, which was not skipped: train anew.")
    _, validation = read_curve(path, "validation_loss")
    return Curve(Path(path).stem, [losses.get(n) for n in iterations], validation[-1] if validation else None)


def distance_between(curve: Curve, reference: Curve, window: int) -> Distance:
    """The distance of all iterations, and of means over ``window`` iterations, from the first whole window on."""

    def relative(pairs: Sequence[tuple[float | None, float | None]]) -> float:
        # Without what either run has skipped, so that both means are of the same samples.
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        found, wanted = (sum(values) for values in zip(*both)) if both else (math.inf, 1.0)
        difference = found / wanted - 1.0
        return difference if math.isfinite(difference) else math.inf

    pairs = list(zip(curve.losses, reference.losses))
    smoothed = [relative(pairs[stop - window : stop]) for stop in range(window, len(pairs) + 1)]
    return Distance(relative(pairs), min(smoothed), max(smoothed))


def check(config: CompareConfig, reference: Curve, curves: Sequence[Curve]) -> None:
    """Raise :class:`UserError` unless the runs can be compared with these flags."""
    if len(config.bands) != len(config.metrics):
        raise ConfigError(f"--bands has {len(config.bands)} values for {len(config.metrics)} --metrics: give one each.")
    wrong = [band for band in config.bands if not band > 0.0]
    if wrong:
        raise ConfigError(f"--bands {wrong[0]:g} is no width: give a percentage above 0, or inf.")
    if not 1 <= config.window <= len(reference.losses):
        raise ConfigError(
            f"--window {config.window} does not fit in the {len(reference.losses)} iterations of --reference: "
            "choose one between 1 and that."
        )
    for curve in curves:
        if len(curve.losses) != len(reference.losses):
            raise DataError(
                f"{curve.name} has {len(curve.losses)} iterations, {reference.name} {len(reference.losses)}: "
                "compare runs of the same length."
            )


def row(curve: Curve, window: int, distance: Distance | None, band: float) -> str:
    """A line of the table, ``band`` in percent; ``distance`` is None for the reference itself."""
    last = [loss for loss in curve.losses[-window:] if loss is not None]
    mean = sum(last) / len(last) if last else math.nan
    validation = "-" if curve.validation is None else f"{curve.validation:.4f}"
    cells = [curve.name, f"{mean:.4f}", validation, str(curve.losses.count(None))]
    if distance is None:
        cells += ["-", "-", "-"]
    else:
        width = "none" if band == math.inf else f"{band:g} %"
        cells += [f"{distance.mean:+.2%}", f"{distance.lowest:+.2%} to {distance.highest:+.2%}", width]
    return f"| {' | '.join(cells)} |"


def compare(config: CompareConfig) -> int:
    """Print the table; 1 if a run leaves its band."""
    for flag, path in (("--reference", config.reference), *(("--metrics", path) for path in config.metrics)):
        refuse_urls({flag: path}, "copy the file to a local path")
    reference, curves = read_run(config.reference), [read_run(path) for path in config.metrics]
    check(config, reference, curves)
    print(f"| | loss, mean of the last {config.window} | validation loss | skipped | mean of all | smoothed | band |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(row(reference, config.window, None, math.inf))
    outside = []
    for curve, band in zip(curves, config.bands):
        distance = distance_between(curve, reference, config.window)
        print(row(curve, config.window, distance, band))
        if band < math.inf and not distance.is_within(band / 100.0):
            outside.append(curve.name)
    if outside:
        print(f"ERROR: outside its band: {', '.join(outside)}.", file=sys.stderr)
    return 1 if outside else 0


main = partial(run_tool, CompareConfig, compare, __doc__)
