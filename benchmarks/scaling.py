#!/usr/bin/env python3
"""How what the host does grows with ranks, parameters, documents and iterations, by simulation on one machine.

    python benchmarks/scaling.py [--largest] [--only checkpoint,start] [--picture docs/images/scaling.png] [--json OUT]

The parts: ``checkpoint`` (plans of saves and loads, the manifest), ``start`` (the topology, objects gathered at start),
``planner`` (dry run and search for a layout), ``data`` (order of documents, opening, blends) and ``metrics`` (a run of
a million iterations). Each prints its points and their order of growth: the exponent p of size^p through the points. An
order beyond what a curve allows ends the command with 1. ``--largest`` goes to 16,384 ranks and 1 billion documents;
the metrics take 9 minutes then, the data 6 minutes and 9 GB. Without it the sizes are small.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib import scaling_checkpoint, scaling_data, scaling_metrics, scaling_start
from benchmarks.lib.scaling_curve import KINDS, Curve, order_of_growth
from megatron.commands.tool import run_tool
from megatron.errors import ConfigError
from megatron.urls import refuse_urls

PARTS: Mapping[str, Callable[[bool], list[Curve]]] = {
    "checkpoint": scaling_checkpoint.curves,
    "start": scaling_start.start_curves,
    "planner": scaling_start.planner_curves,
    "data": scaling_data.curves,
    "metrics": scaling_metrics.curves,
}


@dataclass(frozen=True)
class Arguments:
    largest: bool = False
    """Go to the largest sizes."""
    only: str = ",".join(PARTS)
    """Parts to measure."""
    picture: Path | None = None
    """Draw the curves."""
    json: Path | None = None
    """Write the points."""


def table(curves: Sequence[Curve]) -> list[str]:
    """One row of Markdown per curve: its largest point and its orders."""
    rows = ["| what | at | seconds | bytes | order of seconds | of bytes | goal |", "|---|---|---|---|---|---|---|"]
    for curve in curves:
        last = curve.points[-1]
        orders = [order_of_growth(curve, kind) for kind in KINDS]
        cells = [
            curve.name,
            f"{last.size:,.0f} {curve.unit}",
            f"{last.seconds:.3g}" if last.seconds else "",
            readable(last.bytes) if last.bytes else "",
            *("" if math.isnan(order) else f"{order:.2f}" for order in orders),
            curve.goal,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def readable(size: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def too_steep(curves: Sequence[Curve]) -> list[str]:
    """Curves that grow faster than they may."""
    return [
        f"{curve.name}: {kind} grow with the power {order:.2f} of {curve.unit}, more than {curve.order:.2f}"
        for curve in curves
        for kind in KINDS
        if (order := order_of_growth(curve, kind)) > curve.order + 0.1
    ]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Both quantities of all curves over size, in panels by unit, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = Counter(curve.unit for curve in curves)
    heights = [max(2.2, 0.25 * count) for count in counts.values()]
    pyplot.rcParams["svg.fonttype"] = "none"
    figure, axes = pyplot.subplots(
        len(counts), 2, figsize=(16, sum(heights) + 0.6 * len(counts)), height_ratios=heights, squeeze=False
    )
    colors = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    for row, unit in zip(axes, counts):
        for axis, kind in zip(row, KINDS):
            # Curves beyond the colours are dashed.
            axis.set_prop_cycle(color=2 * colors, linestyle=["-"] * len(colors) + ["--"] * len(colors))
            for curve in curves:
                points = [(point.size, getattr(point, kind)) for point in curve.points if getattr(point, kind) > 0]
                if curve.unit == unit and points:
                    order = order_of_growth(curve, kind)
                    label = curve.name if math.isnan(order) else f"{curve.name}  (order {order:.2f})"
                    axis.plot(*zip(*points), marker="o", markersize=3, linewidth=1.2, label=label)
            axis.set(xscale="log", yscale="log", xlabel=unit, ylabel=kind)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def measure_all(config: Arguments) -> int:
    """Measure, and report; the exit code is 1 if a curve is too steep."""
    chosen = config.only.split(",")
    refuse_urls({"--picture": config.picture, "--json": config.json}, "name a local file")
    if unknown := sorted(set(chosen) - set(PARTS)):
        raise ConfigError(f"--only {','.join(unknown)} is no part: choose from {', '.join(PARTS)}.")
    curves: list[Curve] = []
    for name in chosen:
        start = time.monotonic()
        found = PARTS[name](config.largest)
        curves += found
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print("\n".join(table(curves)))
    if config.json is not None:
        config.json.write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n")
    if config.picture is not None:
        draw(curves, config.picture)
    steep = too_steep(curves)
    print("\n".join(steep))
    return 1 if steep else 0


main = partial(run_tool, Arguments, measure_all, __doc__)

if __name__ == "__main__":
    sys.exit(main())
