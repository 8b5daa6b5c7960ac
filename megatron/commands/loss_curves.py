"""Curves of runs from their --metrics-jsonl files: plotted, and compared with a reference."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.commands.tool import import_pyplot, run_tool, write_figure
from megatron.errors import ConfigError, DataError
from megatron.metrics.jsonl import History, Point, read_history
from megatron.urls import refuse_urls

# --- plot ----------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PlotConfig:
    """Runs to draw, and the output."""

    metrics: tuple[str, ...]
    """Metrics files, one per run."""
    output: str
    """PNG file to write."""
    names: tuple[str, ...] = ()
    """Names of the runs, one per file (default: their directories, or the file names)."""
    vocab_size: int | None = None
    """Also draw ln(vocabulary size), the loss of an untrained model."""
    smooth: int = 1
    """Draw the training loss as a moving average of this many logged values."""


def name_runs(config: PlotConfig) -> Sequence[str]:
    """The name of each run in the legend."""
    if config.names and len(config.names) != len(config.metrics):
        raise ConfigError(
            f"--names has {len(config.names)} names for {len(config.metrics)} --metrics: use one name per file, or "
            "none."
        )
    # The directory of a file with the usual name, otherwise the file.
    paths = [Path(path) for path in config.metrics]
    return config.names or [path.resolve().parent.name if path.stem == "metrics" else path.stem for path in paths]


def draw(config: PlotConfig) -> None:
    write_figure("--output", config.output, draw_figure(config))


def draw_figure(config: PlotConfig) -> "Figure":
    """Training loss as lines, validation loss as dots; learning rate and gradient norm below."""
    for path in (*config.metrics, config.output):
        refuse_urls({"--output" if path == config.output else "--metrics": path}, "name a local file")
    names = name_runs(config)
    if config.smooth < 1:
        raise ConfigError(f"--smooth {config.smooth} must be at least 1.")
    plt = import_pyplot("--output")
    runs = [read_history(path) for path in config.metrics]
    from matplotlib.ticker import EngFormatter

    in_tokens = all(run.tokens is not None for run in runs)
    heights = {"height_ratios": (4, 1.2, 1.2)}
    figure, (top, middle, bottom) = plt.subplots(
        3, sharex=True, figsize=(8, 7.5), layout="constrained", gridspec_kw=heights
    )
    for run, name in zip(runs, names):
        colour = _draw_losses(top, run, name, config.smooth, in_tokens)
        for axes, key in ((middle, "learning_rate"), (bottom, "grad_norm")):
            axes.plot(*_columns(run.curve(key, in_tokens)), linewidth=1.0, color=colour)
    if config.vocab_size is not None:
        top.axhline(math.log(config.vocab_size), color="grey", linestyle=":", label="ln(vocabulary)")
    figure.suptitle(", ".join(names))
    top.set_ylabel("loss (nats per token)")
    middle.set_ylabel("learning rate")
    bottom.set(xlabel="tokens" if in_tokens else "iteration", ylabel="gradient norm")
    norms = [value for run in runs for _, value in run.curve("grad_norm") if value > 0]
    if norms and max(norms) > 20 * min(norms):
        bottom.set_yscale("log")
    if in_tokens:
        bottom.xaxis.set_major_formatter(EngFormatter(sep=" "))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.25)
    figure.align_ylabels()
    top.legend(frameon=False)
    return figure


def _draw_losses(axes: "Axes", run: History, name: str, smooth: int, in_tokens: bool) -> Any:
    """Draw the losses of a run; returns their colour."""
    places, losses = _columns(run.curve("lm_loss", in_tokens))
    # Means over as many neighbours, from the first whole window on.
    means = [sum(losses[stop - smooth : stop]) / smooth for stop in range(smooth, len(losses) + 1)]
    (line,) = axes.plot(places[smooth - 1 :], means, linewidth=1.2, alpha=0.8, label=f"{name}: training")
    places, losses = _columns(run.curve("validation_loss", in_tokens))
    if places:
        axes.plot(places, losses, "o-", color=line.get_color(), markersize=5, label=f"{name}: validation")
        # To the left of the last point: to its right is the frame.
        axes.annotate(f"{losses[-1]:.3f}", (places[-1], losses[-1]), (-2, 7), textcoords="offset points", ha="right")
    return line.get_color()


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [place for place, _ in points], [value for _, value in points]


main_plot = partial(
    run_tool,
    PlotConfig,
    draw,
    "Draw losses, learning rate and gradient norm of one or more runs from their --metrics-jsonl files to a PNG.",
)


# --- compare -------------------------------------------------------------------------------------------------

COMPARE = """\
Compare the loss curves of runs with a reference run, all from --metrics-jsonl files with every iteration.

Prints a table. The exit code is 1 if a run leaves its band: if its mean loss differs from --reference by more, or its
smoothed curve ever exceeds the reference by more.
"""
"""Text of ``tools/compare_losses.py --help``."""


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
    history = read_history(path)
    records = history.iterations
    if not records or [record["iteration"] for record in records] != list(range(1, len(records) + 1)):
        raise DataError(f"{path} does not have every iteration from 1 on: train with --log-interval 1.")
    missing = [one["iteration"] for one in records if not one.get("skipped") and one["lm_loss"] is None]
    if missing:
        raise DataError(f"{path} has no loss at iteration {missing[0]}, which was not skipped: train anew.")
    validation = [value for _, value in history.curve("validation_loss", in_tokens=False)]
    return Curve(Path(path).stem, [record["lm_loss"] for record in records], validation[-1] if validation else None)


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


main_compare = partial(run_tool, CompareConfig, compare, COMPARE)
