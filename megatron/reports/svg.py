"""Charts as SVG: scales, shapes, and the charts that several reports have (stacked bars, boxes over time, a plane).

Horizontal positions are percentages and vertical ones pixels, so a chart fills any width while its text and its lines
keep their size. Curves are paths, which have no percentages: they are drawn in a stretched coordinate system
(:func:`curve`) with lines of constant width. Colours are names of CSS classes in ``charts.css``.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron.reports.page import Lane, lanes

Point = tuple[float, float]
_HERE = Path(__file__).parent
_STRETCHED = 1000.0
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY = 86400


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high``, mapped to 0 … 1; logarithmic where ``is_log``."""

    low: float
    high: float
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Position of a value, without the limits 0 and 1."""
        low, high = self._shown(self.low), self._shown(self.high)
        return (self._shown(value) - low) / (high - low) if high > low else 0.5

    def percent(self, value: float) -> str:
        """Position as an SVG length, within the chart."""
        return f"{100.0 * min(1.0, max(0.0, self.fraction(value))):.3f}%"

    def width(self, start: float, end: float) -> str:
        """Length from ``start`` to ``end`` as an SVG length."""
        first, last = (min(1.0, max(0.0, self.fraction(value))) for value in (start, end))
        return f"{100.0 * max(0.0, last - first):.3f}%"

    def pixel(self, value: float, height: float) -> float:
        """Distance from the top of a chart of ``height`` whose greatest value is at the top; also outside of it."""
        return height * (1.0 - self.fraction(value))

    def _shown(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    # The next 1, 2, 2.5 or 5 times a power of ten.
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in _NICE if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def duration_ticks(high_s: float, count: int = 8) -> list[float]:
    """About ``count`` durations from 0 to ``high_s``, in round seconds, minutes, hours or days."""
    raw = high_s / count
    step = next((float(seconds) for seconds in _SECONDS if seconds >= raw), None)
    if step is None:
        days = next(days for days in (1, 2, 5, 7, 14, 28, 56, 112, 364, 10**6) if days * _DAY >= raw)
        step = float(days * _DAY)
    elif high_s < 2.0:
        return nice_ticks(0.0, high_s, count)
    return [index * step for index in range(math.floor(high_s / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between ``low`` and ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]


def svg(height: float, *shapes: str, label: str = "") -> str:
    """A chart that fills the width of its container."""
    role = f' role="img" aria-label="{escape(label)}"' if label else ' aria-hidden="true"'
    return f'<svg class="chart" height="{height:g}"{role}>{"".join(shapes)}</svg>'


def picture(width: float, height: float, *shapes: str, style: str = "") -> str:
    """A chart as a file of its own, on white paper, in the light colours of the pages."""
    css = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "charts.css"))
    light = dict(reversed(re.findall(r"--(\w+): (#\w{6})", css)))  # those of the dark page follow in the files
    rules = (_HERE / "picture.css").read_text(encoding="utf-8") + style
    rules = re.sub(r"var\(--(\w+)\)", lambda found: light[found[1]], rules)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<style>\n{rules}</style>",
        paper,
        *shapes,
        "</svg>\n",
    )
    return "\n".join(parts)


def placed(x: float, y: float, width: float, chart: str) -> str:
    """A chart at (x, y) of a picture, ``width`` pixels wide."""
    return f'<svg x="{x:g}" y="{y:g}" width="{width:.2f}" overflow="visible">{chart}</svg>'


def attributes(css: str = "", tip: str = "", link: str = "", part: str = "") -> str:
    """CSS classes, the text that appears on hovering, what is marked together, and the entry of the legend."""
    found = (("class", css), ("data-tip", tip), ("data-link", link), ("data-part", part))
    return "".join(f' {name}="{escape(value)}"' for name, value in found if value)


def rect(
    x: str,
    y: float,
    width: str,
    height: float,
    css: str = "",
    tip: str = "",
    radius: float = 0.0,
    part: str = "",
    opacity: float = 1.0,
) -> str:
    look = f' rx="{radius:g}"' * (radius > 0) + f' fill-opacity="{opacity:.3g}"' * (opacity < 1)
    return f'<rect x="{x}" y="{y:g}" width="{width}" height="{height:g}"{look}{attributes(css, tip, part=part)}/>'


def vertical(x: str, top: float, bottom: float, css: str = "", tip: str = "") -> str:
    return f'<line x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"{attributes(css, tip)}/>'


def horizontal(y: float, css: str = "") -> str:
    return f'<line x1="0" x2="100%" y1="{y:g}" y2="{y:g}"{attributes(css)}/>'


def dot(x: str, y: float, radius: float, css: str = "", tip: str = "", link: str = "", part: str = "") -> str:
    return f'<circle cx="{x}" cy="{y:.1f}" r="{radius:.3g}"{attributes(css, tip, link, part)}/>'


def text(x: str, y: float, content: str, css: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y:g}" text-anchor="{anchor}"{attributes(css)}>{escape(content)}</text>'


def marker(x: str, y: float, css: str = "", tip: str = "") -> str:
    """A downward triangle with its tip at (x, y)."""
    return f'<svg x="{x}" y="{y:g}" class="overflowing"><path d="M0 0 L-5 -9 L5 -9 Z"{attributes(css, tip)}/></svg>'


def curve(points: Sequence[Point], x: Scale, y: Scale, height: float, css: str = "") -> str:
    """A line through ``points``; a point that is not finite interrupts it."""
    commands: list[str] = []
    is_new = True
    for horizontal_value, value in points:
        if not math.isfinite(value):
            # The next point starts a new line (M instead of L).
            is_new = True
            continue
        place = f"{_STRETCHED * x.fraction(horizontal_value):.1f} {y.pixel(value, height):.2f}"
        commands.append(("M" if is_new else "L") + place)
        is_new = False
    path = f'<path d="{" ".join(commands)}" vector-effect="non-scaling-stroke"{attributes(css)}/>'
    return _stretched(path, height)


def area(points: Sequence[Point], x: Scale, y: Scale, height: float, css: str = "") -> str:
    """The area below a line."""
    return band([(place, y.low, value) for place, value in points], x, y, height, css)


def _stretched(path: str, height: float) -> str:
    size = f'width="100%" height="{height:g}" viewBox="0 0 {_STRETCHED:g} {height:g}"'
    return f'<svg {size} preserveAspectRatio="none">{path}</svg>'


def band(points: Sequence[tuple[float, float, float]], x: Scale, y: Scale, height: float, css: str = "") -> str:
    """The area between the lower and the upper value of ``(x, lower, upper)``."""
    if len(points) < 2:
        return ""
    upper = [f"{_STRETCHED * x.fraction(place):.1f} {y.pixel(high, height):.2f}" for place, _, high in points]
    lower = [f"{_STRETCHED * x.fraction(place):.1f} {y.pixel(low, height):.2f}" for place, low, _ in reversed(points)]
    path = f'<path d="M{" L".join(upper + lower)} Z"{attributes(css)}/>'
    return _stretched(path, height)


@dataclass(frozen=True)
class Thinned:
    """A curve with fewer points: the means of stretches, and their least and greatest values."""

    means: Sequence[Point]
    extremes: Sequence[tuple[float, float, float]]
    """(x, least, greatest); empty if no point was left out."""


def thin(points: Sequence[Point], count: int = 400) -> Thinned:
    """At most ``count`` stretches of ``points`` with finite values."""
    if len(points) <= count:
        return Thinned(list(points), ())
    size = math.ceil(len(points) / count)  # points of a stretch
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    places = [sum(point[0] for point in group) / len(group) for group in groups]
    means = [sum(point[1] for point in group) / len(group) for group in groups]
    least = [min(point[1] for point in group) for group in groups]
    greatest = [max(point[1] for point in group) for group in groups]
    return Thinned(list(zip(places, means)), list(zip(places, least, greatest)))


def duration(seconds: float) -> str:
    """A duration in words of at most two units: ``3 d 4 h``, ``12 min``, ``4.2 s``, ``85 ms``."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0 s"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = seconds / 60.0
    if minutes < 99.5:
        return f"{minutes:.1f} min" if minutes < 9.95 else f"{minutes:.0f} min"
    hours = round(minutes / 60.0, 1)
    if hours < 48.0:
        return f"{hours:.1f} h" if hours < 9.95 else f"{hours:.0f} h"
    days, rest = divmod(round(hours), 24)
    return f"{days} d {rest} h" if rest and days < 10 else f"{hours / 24.0:.0f} d"


def tick_label(seconds: float) -> str:
    """A duration on an axis, in one unit."""
    for size, unit in ((_DAY, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s" if seconds else "0"


def gib(size: float) -> str:
    """Bytes in GiB, with at least three significant digits unless 0."""
    value = size / 2**30
    return f"{value:,.2f}" if size == 0 or value >= 1 else f"{value:.3g}"


def short(value: float, digits: int = 3, prefixes: str = "TGMk") -> str:
    """A number with so many digits, and a prefix from 1,000 on."""
    for size, prefix in zip((1e12, 1e9, 1e6, 1e3), prefixes, strict=True):
        if value >= (1 - 0.5 * 10**-digits) * size:
            return f"{value / size:.{digits}g} {prefix}"
    return f"{value:.{digits}g}"


def percentage(share: float) -> str:
    """94.5 %, and 99.97 % where one digit would round to 100."""
    digits = 2 if 0.9995 > share >= 0.9945 or 0.0 < share < 0.0005 else 1
    return f"{100.0 * share:.{digits}f} %"


# --- charts --------------------------------------------------------------------------------------------------

_BAR, ROW = 24.0, 20.0
"""Heights in pixels."""
_LEAST_LABELLED = 0.085
"""Share of a chart's width from which on a part has its size written on it."""
_LEAST_NUMBERED = 0.016


@dataclass(frozen=True)
class Part:
    """A part of a bar."""

    name: str
    """The name of the part in the legend."""
    colour: str
    size: float
    tip: str = ""
    text: str = ""
    """Text on the part, if it is wide enough."""


@dataclass(frozen=True)
class Bar:
    """A row of a chart of stacked bars."""

    label: str
    detail: str
    """Smaller than the label."""
    total: str
    parts: Sequence[Part]
    is_strong: bool = False
    link: str = ""
    """Rows and dots of the page with the same link are marked together."""


Limit = tuple[float, str]
"""Value and label of a line across all bars."""


def stacked_bars(
    bars: Sequence[Bar], ticks: Sequence[tuple[float, str]], end: float, limit: Limit | None = None
) -> str:
    """Horizontal bars from 0 to ``end`` with ``(value, label)`` ticks below them."""
    scale = Scale(0.0, end)
    rows = "".join(_bar(bar, scale, [tick for tick, _ in ticks], limit) for bar in bars)
    axis = f'<div class="label"></div>{horizontal_axis(Axis(scale, ticks, ""))}<div class="total"></div>'
    above = ""
    if limit is not None:
        value, label = limit
        anchor = "end" if scale.fraction(value) > 0.5 else "start"
        label = svg(16, text(scale.percent(value), 12, label, "limit", anchor))
        above = f'<div class="label"></div>{label}<div class="total"></div>'
    return f'<div class="bars">{above}{rows}{axis}</div>'


def _bar(bar: Bar, scale: Scale, ticks: Sequence[float], limit: Limit | None) -> str:
    css = " strong" if bar.is_strong else ""
    # Lines reach over the gap to the next row.
    shapes = [vertical(scale.percent(tick), -4, _BAR + 4, "grid") for tick in ticks]
    start = 0.0  # parts touch each other
    for part in bar.parts:
        shapes += _part(part, start, scale)
        start += part.size
    if limit is not None:
        shapes.append(vertical(scale.percent(limit[0]), -4, _BAR + 4, "limit"))
    detail = f"<small>{escape(bar.detail)}</small>" if bar.detail else ""
    chart = svg(_BAR, *shapes, label=f"{bar.label}: {bar.total}")
    return (
        f"<div{attributes('row', link=bar.link)}>"
        f'<div class="label{css}">{escape(bar.label)}{detail}</div>{chart}'
        f'<div class="total{css}">{escape(bar.total)}</div></div>'
    )


def _part(part: Part, start: float, scale: Scale) -> list[str]:
    end = start + part.size
    if part.size <= 0:
        return []
    css = f"pass {part.colour}"
    width = scale.width(start, end)
    shapes = [rect(scale.percent(start), 0, width, _BAR, css, part.tip, part=part.name)]
    if part.text and scale.fraction(end) - scale.fraction(start) >= _LEAST_LABELLED:
        middle = scale.percent((start + end) / 2)
        shapes.append(text(middle, _BAR / 2 + 4, part.text, f"on on-{part.colour}"))
    return shapes


@dataclass(frozen=True)
class Box:
    """What a row of a timeline does from ``start`` to ``end``."""

    start: float
    end: float
    part: str
    """The name of the part in the legend."""
    colour: str
    shade: float = 0.0
    """0 to 1, from full colour to the lightest."""
    text: str = ""
    tip: str = ""


def boxes_over_time(rows: Sequence[tuple[str, Sequence[Box]]], axis: "Axis", label: str) -> str:
    """A row of boxes for each ``(name, boxes)`` above one time axis."""
    charts = [Lane(name, row_of_boxes(boxes, axis.scale, f"{label}, {name}")) for name, boxes in rows]
    return lanes([*charts, Lane("", horizontal_axis(axis))], css="rows")


def row_of_boxes(boxes: Sequence[Box], scale: Scale, label: str, least_numbered: float = _LEAST_NUMBERED) -> str:
    """A chart of ``ROW`` pixels; ``least_numbered`` is the share of its width from which on a box has its number."""
    shapes = [rect("0", 0, "100%", ROW, "idle-row", radius=2)]
    for box in boxes:
        place, width = scale.percent(box.start), scale.width(box.start, box.end)
        shapes.append(
            rect(place, 0, width, ROW, f"pass {box.colour}", box.tip, part=box.part, opacity=opacity(box.shade))
        )
        # A number is written only where it fits its box.
        if box.text and (box.end - box.start) / scale.high >= least_numbered * (1 + len(box.text)) / 2:
            on = f"on on-{box.colour}" if box.shade < 0.5 else "strong"
            shapes.append(text(scale.percent((box.start + box.end) / 2), 14, box.text, f"{on} pass-number"))
    return svg(ROW, *shapes, label=label)


def opacity(shade: float) -> float:
    """Opacity of the fill: half of the full colour for the lightest shade."""
    return 1.0 - 0.5 * shade


@dataclass(frozen=True)
class Axis:
    """An axis of a chart, with ``(value, label)`` ticks."""

    scale: Scale
    ticks: Sequence[tuple[float, str]]
    title: str


def seconds_axis(end: float) -> Axis:
    """Time from 0 to ``end``."""
    ticks = [(tick, duration(tick) if 0 < end < 2.0 else tick_label(tick)) for tick in duration_ticks(end)]
    return Axis(Scale(0.0, end), ticks, "")


def plane(x: Axis, y: Axis, height: float, shapes: Sequence[str], label: str) -> str:
    """A chart with two axes; ``shapes`` are placed by the scales."""
    grid = [vertical(x.scale.percent(value), 0, height, "grid") for value, _ in x.ticks]
    chart = lane(y, height, [*grid, *shapes], label)
    return lanes([chart, Lane("", horizontal_axis(x))], has_cursor=False)


def lane(y: Axis, height: float, shapes: Sequence[str], label: str) -> Lane:
    """A chart with a line across it at each tick of its vertical axis, under the title of the axis."""
    values = [(y.scale.pixel(value, height), text) for value, text in y.ticks]
    grid = [horizontal(place, "grid") for place, _ in values]
    return Lane(y.title, svg(height, *grid, *shapes, label=label), values)


def horizontal_axis(axis: Axis) -> str:
    """A line with ticks, their labels, and the title below."""
    shapes = [horizontal(1, "axis")]
    for index, (value, label) in enumerate(axis.ticks):
        place, fraction = axis.scale.percent(value), axis.scale.fraction(value)
        anchor = "start" if fraction < 0.02 else "end" if fraction > 0.94 else "middle"
        # The last label may have the unit: a narrow screen shows it, and every other one.
        css = "sparse" if (len(axis.ticks) - 1 - index) % 2 else ""
        shapes += [vertical(place, 1, 5, "axis"), text(place, 18, label, css, anchor)]
    if axis.title:
        shapes.append(text("100%", 35, axis.title, "title", "end"))
    return svg(39 if axis.title else 22, *shapes)
