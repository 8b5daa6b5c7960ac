"""Charts that several reports have: stacked bars, boxes over time, and a plane with two axes.

Colours are names of CSS classes in ``charts.css``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron.reports import svg
from megatron.reports.page import Lane, lanes
from megatron.reports.svg import Scale

_BAR, _ROW = 24.0, 20.0
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


@dataclass(frozen=True)
class Limit:
    """A line across all bars."""

    value: float
    label: str


def stacked_bars(
    bars: Sequence[Bar], ticks: Sequence[tuple[float, str]], end: float, limit: Limit | None = None
) -> str:
    """Horizontal bars from 0 to ``end`` with ``(value, label)`` ticks below them."""
    scale = Scale(0.0, end)
    rows = "".join(_bar(bar, scale, [tick for tick, _ in ticks], limit) for bar in bars)
    axis = f'<div class="label"></div>{horizontal_axis(Axis(scale, ticks, ""))}<div class="total"></div>'
    above = ""
    if limit is not None:
        place, anchor = scale.percent(limit.value), "end" if scale.fraction(limit.value) > 0.5 else "start"
        label = svg.svg(16, svg.text(place, 12, limit.label, "limit", anchor))
        above = f'<div class="label"></div>{label}<div class="total"></div>'
    return f'<div class="bars">{above}{rows}{axis}</div>'


def _bar(bar: Bar, scale: Scale, ticks: Sequence[float], limit: Limit | None) -> str:
    css = " strong" if bar.is_strong else ""
    # Lines reach over the gap to the next row.
    shapes = [svg.vertical(scale.percent(tick), -4, _BAR + 4, "grid") for tick in ticks]
    start = 0.0  # parts touch each other
    for part in bar.parts:
        shapes += _part(part, start, scale)
        start += part.size
    if limit is not None:
        shapes.append(svg.vertical(scale.percent(limit.value), -4, _BAR + 4, "limit"))
    detail = f"<small>{escape(bar.detail)}</small>" if bar.detail else ""
    chart = svg.svg(_BAR, *shapes, label=f"{bar.label}: {bar.total}")
    return (
        f"<div{svg.attributes('row', link=bar.link)}>"
        f'<div class="label{css}">{escape(bar.label)}{detail}</div>{chart}'
        f'<div class="total{css}">{escape(bar.total)}</div></div>'
    )


def _part(part: Part, start: float, scale: Scale) -> list[str]:
    end = start + part.size
    if part.size <= 0:
        return []
    css = f"pass {part.colour}"
    width = scale.width(start, end)
    shapes = [svg.rect(scale.percent(start), 0, width, _BAR, css, part.tip, part=part.name)]
    if part.text and scale.fraction(end) - scale.fraction(start) >= _LEAST_LABELLED:
        middle = scale.percent((start + end) / 2)
        shapes.append(svg.text(middle, _BAR / 2 + 4, part.text, f"on on-{part.colour}"))
    return shapes


def _anchor(fraction: float) -> str:
    return "start" if fraction < 0.02 else "end" if fraction > 0.94 else "middle"


@dataclass(frozen=True)
class Box:
    """What a row of a timeline does from ``start`` to ``end``."""

    start: float
    end: float
    part: str
    """The name of the part in the legend."""
    colour: str
    shade: int = 0
    """0 to 3, from full colour to the lightest."""
    text: str = ""
    tip: str = ""


def boxes_over_time(rows: Sequence[tuple[str, Sequence[Box]]], axis: "Axis", label: str) -> str:
    """A row of boxes for each ``(name, boxes)`` above one time axis."""
    charts = [Lane(name, _row(boxes, axis.scale, f"{label}, {name}")) for name, boxes in rows]
    return lanes([*charts, Lane("", horizontal_axis(axis))], css="rows")


def _row(boxes: Sequence[Box], scale: Scale, label: str) -> str:
    shapes = [svg.rect("0", 0, "100%", _ROW, "idle-row", radius=2)]
    for box in boxes:
        css = f"pass {box.colour}" + (f" shade-{min(box.shade, 3)}" if box.shade else "")
        shapes.append(
            svg.rect(scale.percent(box.start), 0, scale.width(box.start, box.end), _ROW, css, box.tip, part=box.part)
        )
        # A number is written only where it fits its box.
        if box.text and (box.end - box.start) / scale.high >= _LEAST_NUMBERED * (1 + len(box.text)) / 2:
            on = f"on on-{box.colour}" if box.shade < 2 else "strong"
            shapes.append(svg.text(scale.percent((box.start + box.end) / 2), 14, box.text, f"{on} pass-number"))
    return svg.svg(_ROW, *shapes, label=label)


@dataclass(frozen=True)
class Axis:
    """An axis of a plane, with ``(value, label)`` ticks."""

    scale: Scale
    ticks: Sequence[tuple[float, str]]
    title: str


def seconds_axis(end: float) -> Axis:
    """Time from 0 to ``end``."""
    ticks = [(tick, svg.duration(tick) if 0 < end < 2.0 else svg.tick_label(tick)) for tick in svg.duration_ticks(end)]
    return Axis(Scale(0.0, end), ticks, "")


def plane(x: Axis, y: Axis, height: float, shapes: Sequence[str], label: str) -> str:
    """A chart with two axes; ``shapes`` are placed by the scales."""
    grid = [svg.horizontal(y.scale.pixel(value, height), "grid") for value, _ in y.ticks]
    grid += [svg.vertical(x.scale.percent(value), 0, height, "grid") for value, _ in x.ticks]
    chart = svg.svg(height, *grid, *shapes, label=label)
    values = [(y.scale.pixel(value, height), text) for value, text in y.ticks]
    return lanes([Lane(y.title, chart, values), Lane("", horizontal_axis(x))], has_cursor=False)


def horizontal_axis(axis: Axis) -> str:
    """A line with ticks, their labels, and the title below."""
    shapes = [svg.horizontal(1, "axis")]
    for index, (value, label) in enumerate(axis.ticks):
        place, anchor = axis.scale.percent(value), _anchor(axis.scale.fraction(value))
        # The last label may have the unit: a narrow screen shows it, and every other one.
        css = "sparse" if (len(axis.ticks) - 1 - index) % 2 else ""
        shapes += [svg.vertical(place, 1, 5, "axis"), svg.text(place, 18, label, css, anchor)]
    if axis.title:
        shapes.append(svg.text("100%", 35, axis.title, "title", "end"))
    return svg.svg(39 if axis.title else 22, *shapes)
