#!/usr/bin/env python3
"""Draw the loss curves of one or more runs from their --metrics-jsonl files to a PNG."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.errors import ConfigError, DataError, UserError
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class PlotConfig:
    """Runs to draw, and the output."""

    metrics: tuple[str, ...]
    """Metrics files, one per run."""
    output: str
    """PNG file to write."""
    names: tuple[str, ...] = ()
    """Names of the runs, one per file (default: the file names)."""
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
    return config.names or [Path(path).stem for path in config.metrics]


def draw(config: PlotConfig) -> None:
    """Training loss as lines, validation loss as dots."""
    for path in (*config.metrics, config.output):
        refuse_urls({"--output" if path == config.output else "--metrics": path}, "name a local file")
    names = name_runs(config)
    if config.smooth < 1:
        raise ConfigError(f"--smooth {config.smooth} must be at least 1.")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for path, label in zip(config.metrics, names):
        iterations, losses = read_curve(path, "lm_loss")
        places, means = iterations[config.smooth - 1 :], moving_mean(losses, config.smooth)
        (line,) = axes.plot(places, means, linewidth=1.2, alpha=0.8, label=f"{label}: training")
        iterations, losses = read_curve(path, "validation_loss")
        if iterations:
            axes.plot(iterations, losses, "o-", color=line.get_color(), markersize=5, label=f"{label}: validation")
            axes.annotate(f"{losses[-1]:.3f}", (iterations[-1], losses[-1]), (4, 6), textcoords="offset points")
    if config.vocab_size is not None:
        axes.axhline(math.log(config.vocab_size), color="grey", linestyle=":", label="ln(vocabulary)")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.output, dpi=150)


def main() -> int:
    """Draw; the exit code."""
    try:
        draw(tyro.cli(PlotConfig, description=__doc__))
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
