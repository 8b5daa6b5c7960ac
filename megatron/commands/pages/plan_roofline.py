"""The roofline of a step's matrix products (Williams, Waterman and Patterson 2009)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.rehearsal.launch_prices import Product
from megatron.planner.step_time.cluster import Cluster
from megatron.reports import svg
from megatron.reports.charts import Axis, plane
from megatron.reports.page import Cell, figure, legend, number, table
from megatron.reports.svg import Point, Scale, duration, percentage

_HEIGHT = 320.0
_LARGEST_DOT = 20.0
"""Radius in pixels."""
_LEAST_NUMBERED = 7.0
"""Radius in pixels of dots with a number."""
_USUAL_WIDTH = 980.0
"""Of the chart, in pixels, on a wide screen; narrow ones have no numbers."""
_LEAST_DRAWN = 1e-3
"""Share of the products' time; the table has them all."""
_RESULT_BYTES = 2


@dataclass(frozen=True)
class Dot:
    """All products of a step with one shape and dtype."""

    shape: str
    dtype: str
    count: float
    intensity: float
    """FLOP per byte of operands and result, each moved once."""
    flops_per_s: float
    seconds: float
    """Of a step."""
    share: float
    """Of the time of all products."""


def dots(products: Sequence[Product]) -> list[Dot]:
    """The products, from the one that takes longest on."""
    total = sum(product.seconds for product in products)
    found = [_dot(product, total) for product in products if product.seconds > 0]
    return sorted(found, key=lambda dot: -dot.seconds)


def _dot(product: Product, total: float) -> Dot:
    m, n, k = product.m, product.n, product.k
    flops = 2.0 * m * n * k
    moved = element_bytes(product.dtype) * (m * k + k * n) + _RESULT_BYTES * m * n
    return Dot(
        f"{m:,} x {n:,} x {k:,}",
        product.dtype.removeprefix("torch."),
        product.count,
        flops / moved,
        flops * product.count / product.seconds,
        product.seconds,
        product.seconds / total,
    )


def is_fp8(dtype: str) -> bool:
    return "8" in dtype


def element_bytes(dtype: str) -> int:
    """Bytes of an operand's element."""
    return 1 if is_fp8(dtype) else 4 if "32" in dtype else 2


def roofline_figure(products: Sequence[Product], cluster: Cluster) -> str:
    """FLOP/s over FLOP/byte, one dot per shape whose area is its share of the time, and a table of the dots."""
    every = dots(products)
    shown = [dot for dot in every if dot.share >= _LEAST_DRAWN]
    roofs = _roofs(shown, cluster)
    ridge = max(peak for _, peak in roofs) / cluster.hbm_bytes_per_s
    intensities = [dot.intensity for dot in shown]
    rates = [dot.flops_per_s for dot in shown]
    y = Scale(min(0.6 * min(rates), roofs[0][1] / 8.0), 1.35 * max(rates + [peak for _, peak in roofs]), is_log=True)
    x = Scale(0.7 * min([*intensities, ridge / 5.0]), 1.5 * max([*intensities, ridge]), is_log=True)
    axes = (
        Axis(x, [(tick, f"{tick:,.0f}") for tick in svg.log_ticks(x.low, x.high)], "FLOP per byte of memory traffic"),
        Axis(y, [(tick, f"{tick / 1e12:,.4g}") for tick in svg.log_ticks(y.low, y.high)], "TFLOP/s"),
    )
    shapes = [shape for name, peak in roofs for shape in _roof(name, peak, cluster, x, y)]
    # Large dots first, so that small ones stay visible; numbers where they do not cover each other.
    shapes += [_circle(rank, dot, x, y) for rank, dot in enumerate(shown, start=1)]
    shapes += _numbers(shown, x, y)
    chart = plane(*axes, _HEIGHT, shapes, "roofline of the products")
    dtypes = dict.fromkeys(dot.dtype for dot in shown)
    colours = [(f"key-dot {_colour(dtype)}", f"products in {dtype}, area by share of their time") for dtype in dtypes]
    return figure(chart, legend(colours)) + _table(every, cluster)


def _roofs(shown: Sequence[Dot], cluster: Cluster) -> list[tuple[str, float]]:
    """(name, peak in FLOP/s) of the dtypes that occur."""
    roofs = [("bf16", cluster.bf16_flops)] if any(not is_fp8(dot.dtype) for dot in shown) else []
    if any(is_fp8(dot.dtype) for dot in shown) and cluster.fp8_flops:
        roofs.append(("FP8", cluster.fp8_flops))
    return roofs or [("bf16", cluster.bf16_flops)]


def _roof(name: str, peak: float, cluster: Cluster, x: Scale, y: Scale) -> list[str]:
    hbm = cluster.hbm_bytes_per_s
    start, ridge = max(x.low, y.low / hbm), peak / hbm
    points = [(start, hbm * start), (ridge, peak), (x.high, peak)]
    top, place = y.pixel(peak, _HEIGHT), x.percent(ridge)
    label = f"{name} peak {peak / 1e12:,.0f} TFLOP/s, from {ridge:,.0f} FLOP/byte on"
    return [
        svg.curve(points, x, y, _HEIGHT, "roof"),
        svg.vertical(place, top, _HEIGHT, "reference"),
        svg.text("100%", top - 7, label, "strong", "end"),
    ]


def _radius(dot: Dot) -> float:
    return max(3.0, _LARGEST_DOT * math.sqrt(dot.share))


def _circle(rank: int, dot: Dot, x: Scale, y: Scale) -> str:
    tip = (
        f"{dot.shape}, {dot.dtype}, {dot.count:,.0f} times\n{dot.flops_per_s / 1e12:,.0f} TFLOP/s at "
        f"{dot.intensity:,.0f} FLOP/byte\n{duration(dot.seconds)}, {percentage(dot.share)} of the products' time"
    )
    place, top = x.percent(dot.intensity), y.pixel(dot.flops_per_s, _HEIGHT)
    return svg.dot(place, top, _radius(dot), f"product {_colour(dot.dtype)}", tip, _link(rank))


def _numbers(shown: Sequence[Dot], x: Scale, y: Scale) -> list[str]:
    """The ranks of large dots, except on a dot close to a numbered one."""
    taken: list[Point] = []
    found = []
    for rank, dot in enumerate(shown, start=1):
        place = _USUAL_WIDTH * x.fraction(dot.intensity), y.pixel(dot.flops_per_s, _HEIGHT)
        if _radius(dot) < _LEAST_NUMBERED or any(math.dist(place, other) < 2 * _LEAST_NUMBERED for other in taken):
            continue
        taken.append(place)
        css = f"on on-{_colour(dot.dtype)} rank sparse"
        found.append(svg.text(x.percent(dot.intensity), place[1] + 3.5, str(rank), css))
    return found


def _colour(dtype: str) -> str:
    return "orange" if is_fp8(dtype) else "blue"


def _link(rank: int) -> str:
    return f"product-{rank}"


def _table(shown: Sequence[Dot], cluster: Cluster) -> str:
    rows = [
        [
            number(str(rank), rank),
            Cell(dot.shape, is_line=True),
            Cell(dot.dtype),
            number(f"{dot.count:,.0f}", dot.count),
            number(f"{dot.intensity:,.0f}", dot.intensity),
            number(f"{dot.flops_per_s / 1e12:,.0f}", dot.flops_per_s),
            number(f"{dot.flops_per_s / _peak(dot, cluster):.0%}", dot.flops_per_s / _peak(dot, cluster)),
            number(duration(dot.seconds), dot.seconds),
            number(percentage(dot.share), dot.share),
        ]
        for rank, dot in enumerate(shown, start=1)
    ]
    headings = ("", "m x n x k", "dtype", "per step", "FLOP/byte", "TFLOP/s", "of peak", "time", "share")
    return table(headings, rows, links=[_link(rank) for rank in range(1, len(rows) + 1)])


def _peak(dot: Dot, cluster: Cluster) -> float:
    return cluster.fp8_flops if is_fp8(dot.dtype) and cluster.fp8_flops else cluster.bf16_flops
