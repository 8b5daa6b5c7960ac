"""The findings of a comparison as text, as a page, and in JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron.comparison.finding import Comparison, Difference, Verdict
from megatron.reports.page import Cell, Lane, Tile, figure, lanes, legend, page, paragraph, section, table, tiles
from megatron.reports.svg import Axis, Scale, curve, dot, lane, log_ticks, nice_ticks, plane, svg, text, vertical

_TITLES = {
    "flags": "Flags",
    "versions": "Versions",
    "environment": "Environment",
    "kernels": "Kernels",
    "data": "Data",
    "weights": "Weights",
    "curves": "Curves",
    "operations": "Operations",
}
_STATE = {True: "no difference", False: "not compared as a whole"}
_SHOWN = 20
_HEIGHT, _LEAST = 240.0, 1e-17
_STYLE = """
circle.found, .legend i.found { fill: var(--accent); background: var(--accent); }
circle.expected, .legend i.expected { fill: var(--orange); background: var(--orange); }
path.expected { fill: none; stroke: var(--orange); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
line.first { stroke: var(--bad); stroke-dasharray: 4 3; }
.label { fill: var(--soft); font-size: 11px; }
.tiles .tile.main { grid-column: 1 / -1; }
"""


def to_text(verdict: Verdict, names: tuple[str, str]) -> str:
    """What the command prints: the verdict, then each part."""
    lines = [f"A  {names[0]}", f"B  {names[1]}", "", verdict.sentence, ""]
    for part in verdict.parts:
        count = len(part.differences)
        state = "no difference" if part.is_complete else "not compared"
        if count:
            state = f"{count} difference{'s' * (count != 1)}"
        lines.append(f"{part.part:12} {state:15} {part.compared}")
    harmless = [one for part in verdict.parts for one in part.differences if not one.changes_loss]
    headings: dict[str, Sequence[Difference]] = {
        "cause": verdict.causes,
        "differs, not tried" if verdict.kind == "unclear" else "differs, does not explain": verdict.others,
        "differs, changes rounding at most": [one for one in harmless if one.part != "weights"],
        "follows from the steps before": [one for one in harmless if one.part == "weights"],
    }
    for title, found in headings.items():
        if found:
            lines += ["", f"{title}:", *(f"  {line}" for one in found[:_SHOWN] for line in _lines(one))]
            lines += [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "\n".join(lines)


def _lines(one: Difference) -> Iterator[str]:
    sides = f"  A: {one.a}  B: {one.b}" if one.a or one.b else ""
    yield f"{one.what}{sides}"
    if one.remark:
        yield f"    {one.remark}"


def to_json(verdict: Verdict, names: tuple[str, str]) -> str:
    content = {"a": names[0], "b": names[1], "exit_code": verdict.exit_code, **asdict(verdict)}
    return json.dumps(_finite(content), indent=1) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def to_page(verdict: Verdict, names: tuple[str, str]) -> str:
    """The page: verdict, cause, and a section for each part."""
    label = {"equal": "equal", "rounding": "rounding", "cause": "a cause is named", "unclear": "not decided"}
    parts = [tiles([Tile("verdict", label[verdict.kind], is_main=True)]), paragraph(verdict.sentence)]
    others = "Differs, not tried" if verdict.kind == "unclear" else "Differs, does not explain"
    for title, found in (("The cause", verdict.causes), (others, verdict.others)):
        if found:
            parts.append(section(title, _table(found)))
    agreeing = [part for part in verdict.parts if not part.differences and not part.figures]
    rows = [[Cell(_TITLES[one.part]), Cell(_STATE[one.is_complete]), Cell(one.compared)] for one in agreeing]
    parts += [_section(part) for part in verdict.parts if part not in agreeing]
    parts += [section("The other parts", table(["part", "result", "compared"], rows))] if rows else []
    return page("Why does my loss differ?", f"A {names[0]}, B {names[1]}", parts, more_style=_STYLE)


def _table(found: Sequence[Difference]) -> str:
    rows = [[Cell(f"{one.what}: {one.remark}" if one.remark else one.what), Cell(one.a), Cell(one.b)] for one in found]
    for row, one in zip(rows, found):
        if one.part in ("flags", "kernels", "environment") and not one.changes_loss:
            row[0] = Cell(f"{one.what} (rounding at most)")
    return table(["what", "A", "B"], rows)


def _section(part: Comparison) -> str:
    shown = [_table(part.differences)] if part.differences else []
    figures = part.figures or {}
    if "tokens" in figures:
        shown.append(_tokens(figures["tokens"]))
    if figures.get("iterations"):
        shown.append(_curves(figures))
    if figures.get("rows"):
        shown.append(_operations(figures["rows"], figures["first"]))
    if not part.differences:
        shown.insert(0, paragraph(f"{_STATE[part.is_complete].capitalize()}."))
    return section(_TITLES[part.part], *shown, note=part.compared)


def _tokens(tokens: Mapping[str, Any]) -> str:
    """The neighbours of the first token that differs."""
    rows = [
        [
            Cell(str(tokens["first"] + place), tokens["first"] + place),
            Cell(str(a), mood="" if a == b else "bad"),
            Cell(str(b), mood="" if a == b else "bad"),
        ]
        for place, (a, b) in enumerate(zip(tokens["a"], tokens["b"]))
    ]
    return table(["position", "A", "B"], rows, is_sortable=False)


def _curves(figures: Mapping[str, Any]) -> str:
    """The relative difference of the losses, and the spread that rounding explains."""
    places, points = figures["iterations"], []
    for place, a, b in zip(places, figures["a"], figures["b"]):
        points.append((float(place), max(abs(a - b) / max(abs(a), 1e-300), _LEAST)))
    band = [(float(place), expected) for place, expected in zip(places, figures["expected"])]
    x = Scale(min(places), max(max(places), min(places) + 1))
    y = _axis([value for _, value in points + band])
    shapes = [curve(band, x, y.scale, _HEIGHT, "expected"), curve(points, x, y.scale, _HEIGHT, "line")]
    if (first := figures.get("first")) is not None:
        shapes.append(vertical(x.percent(first), 0, _HEIGHT, "first", f"iteration {first:g}: the first beyond"))
    across = Axis(x, [(tick, f"{tick:g}") for tick in nice_ticks(x.low, x.high) if tick.is_integer()], "iteration")
    chart = plane(across, y, _HEIGHT, shapes, "relative difference of the losses")
    colours = [("found", "relative difference of the losses"), ("expected", "what rounding explains")]
    return figure(chart, legend(colours))


def _operations(rows: Sequence[Mapping[str, Any]], first: int | None) -> str:
    """The difference of every tensor in the order of the step, and what is expected."""
    values = [(max(row["distance"], _LEAST), max(row["expected"], _LEAST)) for row in rows]
    y = _axis([value for pair in values for value in pair])
    shapes = []
    for number, (row, (distance, expected)) in enumerate(zip(rows, values)):
        x = f"{100 * (number + 0.5) / len(rows):.3f}%"
        tip = f"{row['direction']} {row['name']}\ndifference {row['distance']:.2e}, expected {row['expected']:.1e}"
        shapes.append(dot(x, _pixel(expected, y), 1.5, "expected"))
        shapes.append(dot(x, _pixel(distance, y), 3.5, "found", tip))
        if number == first:
            shapes.append(vertical(x, 0, _HEIGHT, "first"))
    names = [(row["direction"], number) for number, row in enumerate(rows)]
    starts = dict(reversed(names))
    marks = [
        text(
            f"{100 * number / len(rows):.2f}%",
            14 * (1 + place % 3),
            direction.replace("_", " "),
            "label",
            "start",
        )
        for place, (direction, number) in enumerate(starts.items())
    ]
    upper = lane(y, _HEIGHT, shapes, "differences of operations in the order of a step")
    chart = lanes([upper, Lane("", svg(48, *marks))], has_cursor=False)
    return figure(chart, legend([("found", "relative difference"), ("expected", "expected error")]))


def _axis(values: Sequence[float]) -> Axis:
    """A logarithmic axis of the finite ones of ``values``."""
    finite = [value for value in values if math.isfinite(value) and value > 0] or [_LEAST, 1.0]
    scale = Scale(min(finite) / 2, max(max(finite), min(finite) * 10) * 2, is_log=True)
    ticks = [tick for tick in log_ticks(scale.low, scale.high) if math.log10(tick).is_integer()]
    return Axis(scale, [(tick, f"{tick:.0e}") for tick in ticks[:: max(1, len(ticks) // 6)]], "")


def _pixel(value: float, y: Axis) -> float:
    """The place of a value; one that is not finite is at the top."""
    return y.scale.pixel(value if math.isfinite(value) else y.scale.high, _HEIGHT)
