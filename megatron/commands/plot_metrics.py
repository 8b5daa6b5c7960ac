"""Draw losses, learning rate and gradient norm of one or more runs from their --metrics-jsonl files to a PNG."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from megatron.commands.tool import check_matplotlib
from megatron.errors import ConfigError, DataError, UserError
from megatron.metrics.jsonl import History, Point, read_history
from megatron.urls import refuse_urls

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


def read_curve(path: str, key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of ``key``, where a record has it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check --metrics.") from error
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    points = [(record["iteration"], record[key]) for record in records if record.get(key) is not None]
    return [iteration for iteration, _ in points], [value for _, value in points]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Means over ``window`` neighbours, from the first whole window on."""
    return [sum(values[stop - window : stop]) / window for stop in range(window, len(values) + 1)]


def name_runs(config: PlotConfig) -> Sequence[str]:
    """What the legend calls each run."""
    if config.names and len(config.names) != len(config.metrics):
        raise ConfigError(
            f"--names has {len(config.names)} names for {len(config.metrics)} --metrics: use one name per file, or "
            "none."
        )
    return config.names or [_name(Path(path)) for path in config.metrics]


def _name(path: Path) -> str:
    """The directory of a file with the usual name, otherwise the file."""
    return path.resolve().parent.name if path.stem == "metrics" else path.stem


def draw(config: PlotConfig) -> None:
    """Write the figure of ``config`` to its output."""
    figure = draw_figure(config)
    import matplotlib.pyplot as plt

    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.output, dpi=150)
    plt.close(figure)


def draw_figure(config: PlotConfig) -> "Figure":
    """Training loss as lines, validation loss as dots; learning rate and gradient norm below."""
    for path in (*config.metrics, config.output):
        refuse_urls({"--output" if path == config.output else "--metrics": path}, "name a local file")
    names = name_runs(config)
    if config.smooth < 1:
        raise ConfigError(f"--smooth {config.smooth} must be at least 1.")
    check_matplotlib("--output")
    runs = [read_history("--metrics", path) for path in config.metrics]
    import matplotlib
    import matplotlib.ticker

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
        bottom.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.25)
    figure.align_ylabels()
    top.legend(frameon=False)
    return figure


def _draw_losses(axes: "Axes", run: History, name: str, smooth: int, in_tokens: bool) -> Any:
    """Draw the losses of a run; returns their colour."""
    places, losses = _columns(run.curve("lm_loss", in_tokens))
    means = moving_mean(losses, smooth)
    (line,) = axes.plot(places[smooth - 1 :], means, linewidth=1.2, alpha=0.8, label=f"{name}: training")
    places, losses = _columns(run.curve("validation_loss", in_tokens))
    if places:
        axes.plot(places, losses, "o-", color=line.get_color(), markersize=5, label=f"{name}: validation")
        # To the left of the last point: to its right is the frame.
        axes.annotate(f"{losses[-1]:.3f}", (places[-1], losses[-1]), (-2, 7), textcoords="offset points", ha="right")
    return line.get_color()


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [place for place, _ in points], [value for _, value in points]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; the exit code."""
    try:
        draw(tyro.cli(PlotConfig, args=arguments, description=__doc__))
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    return 0
