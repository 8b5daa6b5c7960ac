"""Charts of the dry run and of a search: memory and schedule of each pipeline stage, and the layouts of a search."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from megatron.planner.memory import KINDS
from megatron.planner.search.result import PlannedLayout, ScalePoint, SearchResult
from megatron.reports import svg
from megatron.reports.page import Lane, figure, lanes, legend, paragraph
from megatron.reports.svg import (
    Axis,
    Bar,
    Part,
    Point,
    Scale,
    duration,
    gib,
    horizontal_axis,
    nice_ticks,
    plane,
    short,
    stacked_bars,
)

# --- a row for each stage ------------------------------------------------------------------------------------

T = TypeVar("T")
ALLOWANCE_NAME = "allowance"
COLOURS: Mapping[str, str] = {
    "weights": "blue",
    "gradients": "sky",
    "master weights": "violet",
    "moments": "lilac",
    "activations": "teal",
    "logits and loss": "mint",
    "communication buffers": "orange",
    "working memory": "sand",
    ALLOWANCE_NAME: "grey",
}


@dataclass(frozen=True)
class MemoryOfStage:
    """A stage, or neighbouring stages with equal memory."""

    name: str
    detail: str
    by_kind: Mapping[str, int]
    """Bytes, with the allowance."""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def neighbours(stages: Iterable[tuple[int, T]], contents: Callable[[T], object]) -> list[tuple[str, T]]:
    """Neighbouring ones of the numbered ``stages`` with equal ``contents`` as one: their numbers, and the first."""
    rows = []
    for _, group in groupby(stages, key=lambda stage: contents(stage[1])):
        (first, one), *others = group
        rows.append((f"{first}-{others[-1][0]}" if others else str(first), one))
    return rows


def title_of(numbers: str) -> str:
    """Stages by the numbers of :func:`neighbours`."""
    return f"stage{'s' * ('-' in numbers)} {numbers}"


def memory_figure(rows: Sequence[MemoryOfStage], limit: int) -> str:
    """Stacked bars with the GPU's ``limit`` in bytes as a line; the tightest stage is strong."""
    most = max(row.total for row in rows)
    # Room for the label of the limit, or of the longest bar.
    end = max(most, limit) * 1.04
    bars = [_bar(row, limit, row.total == most) for row in rows]
    ticks = [(tick * 2**30, f"{tick:g} GiB") for tick in nice_ticks(0.0, end / 2**30, 6)]
    chart = stacked_bars(bars, ticks, end, (limit, f"GPU: {gib(limit)} GiB"))
    shown = [kind for kind in (*KINDS, ALLOWANCE_NAME) if any(row.by_kind.get(kind) for row in rows)]
    return figure(chart, legend([(COLOURS[kind], kind) for kind in shown]))


def _bar(row: MemoryOfStage, limit: int, is_tightest: bool) -> Bar:
    parts = [
        Part(kind, COLOURS[kind], size, f"{row.name}: {kind}\n{gib(size)} GiB, {size / row.total:.0%}", gib(size))
        for kind in (*KINDS, ALLOWANCE_NAME)
        if (size := row.by_kind.get(kind, 0)) > 0
    ]
    return Bar(row.name, row.detail, f"{gib(row.total)} GiB ({row.total / limit:.0%})", parts, is_tightest)


# --- a search ------------------------------------------------------------------------------------------------

TERMS: Mapping[str, str] = {
    "products": "teal",
    "output layer": "mint",
    "attention": "blue",
    "between products": "sky",
    "recompute": "violet",
    "gaps": "lilac",
    "tensor parallelism": "orange",
    "context parallelism": "sand",
    "expert parallelism": "brown",
    "pipeline messages": "rose",
    "data parallelism": "red",
    "optimizer": "slate",
    "bubble": "grey",
}
"""Colours of the terms of a step's time, in the order in which they are drawn."""
_OTHER_TERM = "brown"
_MOST_BARS = 8
_SLOWEST_SHOWN = 2.0
"""Relative to the fastest layout."""
_PARETO, _ROOFLINE, _CURVE, _SMALL = 340.0, 320.0, 170.0, 84.0
"""Heights in pixels."""


def link_of(number: int) -> str:
    """The name under which a page marks a layout, by rank."""
    return f"layout-{number}"


def choices(one: PlannedLayout) -> str:
    """What a layout's name leaves out."""
    layout = one.layout
    words = [layout.schedule] if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved") else []
    words += [layout.sharding, f"mbs {layout.micro_batch_size}"]
    if layout.recompute != "none":
        words.append(f"recompute {recompute_of(one)}")
    if layout.reduces_in_bf16:
        words.append("gradients in bf16")
    return " · ".join(words)


def recompute_of(one: PlannedLayout) -> str:
    layers = one.layout.recompute_layers
    return one.layout.recompute + (f" ({layers} layer{'s' * (layers != 1)} of a chunk)" if layers else "")


def seconds(value: float) -> str:
    """Seconds of a step with at least three digits."""
    return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def days(count: float) -> str:
    return f"{count:,.1f}" if count < 99.95 else f"{count:,.0f}"


def tip_of(number: int, one: PlannedLayout) -> str:
    low, high = one.interval_s
    return (
        f"{number}: {one.layout.name}\n{choices(one)}\n{seconds(one.step_time_s)} ({seconds(low)} to {seconds(high)}), "
        f"{one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {one.mfu:.1%}\n{gib(one.memory_bytes)} GiB on stage "
        f"{one.tightest_stage}\nlimited by {one.limits}"
    )


# --- memory against time ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mark:
    name: str
    css: str
    radius: float


_CHOSEN = _Mark("first choice", "chosen", 9.0)
_TIE = _Mark("within 2 % of the fastest", "tie", 5.0)
_FRONT = _Mark("fastest with its memory", "front", 4.0)
_OTHER = _Mark("other layouts", "other", 3.0)
_ORDER = (_OTHER, _FRONT, _TIE, _CHOSEN)
"""Later ones are drawn above earlier ones."""
_CELLS = 90
"""Along each axis: of several other layouts in one cell, one is drawn."""


def pareto_figure(result: SearchResult) -> str:
    """Step time over memory; simulated layouts have their rank on them."""
    fastest = min(one.step_time_s for one in result.layouts)
    ranked = list(enumerate(result.layouts, start=1))
    shown = [item for item in ranked if item[1].step_time_s <= _SLOWEST_SHOWN * fastest]
    # Slow layouts would squeeze the interesting ones; a sentence counts them.
    front = _front(shown)
    memory = [one.memory_bytes / 2**30 for _, one in shown]
    limit = result.job.config.dry_run.gpu_memory / 2**30
    slowest = max(one.step_time_s for _, one in shown)
    margin = max(0.08 * (slowest - fastest), 0.02 * fastest)
    x = Scale(max(0.0, min(memory) - 0.06 * limit), max([limit, *memory]) * 1.02)
    y = Scale(max(0.0, fastest - margin), slowest + margin)
    axes = (
        Axis(x, [(tick, f"{tick:g}") for tick in svg.nice_ticks(x.low, x.high, 7)], "GiB on the tightest stage"),
        Axis(y, [(tick, f"{tick:.6g} s") for tick in svg.nice_ticks(y.low, y.high, 6)], "time of a step"),
    )
    # The better a layout, the later it is drawn; of hidden ones a dot is left out.
    marks = _thinned([(_mark(number, one, front), number, one) for number, one in shown], x, y)
    shapes = [
        svg.curve(_steps(front, limit), x, y, _PARETO, "front"),
        svg.vertical(x.percent(limit), 0, _PARETO, "limit"),
        svg.text(x.percent(limit), -6, f"GPU: {limit:g} GiB", "limit", "end"),
    ]
    for mark, number, one in sorted(marks, key=lambda item: (_ORDER.index(item[0]), -item[1])):
        shapes += _dot(mark, number, one, x, y)
    used = [mark for mark in reversed(_ORDER) if any(found == mark for found, *_ in marks)]
    chart = plane(*axes, _PARETO, shapes, "step time over memory")
    num_slower, num_covered = len(ranked) - len(shown), len(shown) - len(marks)
    left_out = []
    if num_slower:
        left_out.append(f"{num_slower:,} layouts that take more than {_SLOWEST_SHOWN:g} times as long are left out")
    if num_covered:
        left_out.append(f"{num_covered:,} dots that others cover are not drawn")
    note = paragraph("; ".join(left_out).capitalize() + ".", "note") if left_out else ""
    return figure(chart, legend([(f"key-dot {mark.css}", mark.name) for mark in used])) + note


def _thinned(
    marks: Sequence[tuple[_Mark, int, PlannedLayout]], x: Scale, y: Scale
) -> list[tuple[_Mark, int, PlannedLayout]]:
    """The marks without layouts, other than the special ones, that would be drawn on a better one."""
    taken: set[tuple[int, int]] = set()
    kept = []
    for mark, number, one in marks:
        cell = (
            round(_CELLS * x.fraction(one.memory_bytes / 2**30)),
            round(_CELLS * y.fraction(one.step_time_s)),
        )
        if mark != _OTHER or one.is_simulated or cell not in taken:
            kept.append((mark, number, one))
        taken.add(cell)
    return kept


def _front(shown: Sequence[tuple[int, PlannedLayout]]) -> dict[int, PlannedLayout]:
    """The layouts by rank that are faster than every one with less memory, from the smallest memory on."""
    front: dict[int, PlannedLayout] = {}
    fastest = math.inf
    for number, one in sorted(shown, key=lambda item: (item[1].memory_bytes, item[1].step_time_s)):
        if one.step_time_s < fastest:
            front[number], fastest = one, one.step_time_s
    return front


def _steps(front: Mapping[int, PlannedLayout], end: float) -> list[Point]:
    points: list[Point] = []
    # Stairs: a time is the best one up to the next layout's memory.
    for one in front.values():
        place = one.memory_bytes / 2**30
        if points:
            points.append((place, points[-1][1]))
        points.append((place, one.step_time_s))
    return [*points, (end, points[-1][1])]


def _mark(number: int, one: PlannedLayout, front: Mapping[int, PlannedLayout]) -> _Mark:
    if number == 1:
        return _CHOSEN
    return _TIE if one.is_tie else _FRONT if number in front else _OTHER


def _dot(mark: _Mark, number: int, one: PlannedLayout, x: Scale, y: Scale) -> list[str]:
    place, top = x.percent(one.memory_bytes / 2**30), y.pixel(one.step_time_s, _PARETO)
    radius = 8.0 if one.is_simulated and number > 1 else mark.radius
    css = mark.css + (" simulated" if one.is_simulated else "")
    shapes = [svg.dot(place, top, radius, css, tip_of(number, one), link_of(number), mark.name)]
    if one.is_simulated or number == 1:
        shapes.append(svg.text(place, top + 3.5, str(number), f"on on-{'slate' if mark == _OTHER else 'teal'} rank"))
    return shapes


# --- where the time goes ---------------------------------------------------------------------------------------


def compared(result: SearchResult) -> list[tuple[int, PlannedLayout]]:
    """(rank, layout) of the layouts that are shown in detail: the simulated ones, and the best ones of other sizes."""
    ranked = list(enumerate(result.layouts, start=1))
    chosen = [item for item in ranked if item[1].is_simulated or item[0] == 1][:_MOST_BARS]
    # Then the best layout of each further (tp, pp, cp, ep).
    sizes = {_sizes(one) for _, one in chosen}
    for number, one in ranked:
        if len(chosen) < _MOST_BARS and _sizes(one) not in sizes:
            chosen.append((number, one))
            sizes.add(_sizes(one))
    return sorted(chosen, key=lambda item: item[0])


def _sizes(one: PlannedLayout) -> tuple[int, ...]:
    layout = one.layout
    return layout.tp, layout.pp, layout.cp, layout.ep


def time_figure(result: SearchResult) -> str:
    """The terms of the best layouts as stacked bars."""
    layouts = compared(result)
    names = _term_names(one.terms for _, one in layouts)
    end = max(one.step_time_s for _, one in layouts) * 1.01
    bars = [_time_bar(number, one, names) for number, one in layouts]
    ticks = [(tick, f"{tick:.6g} s") for tick in svg.nice_ticks(0.0, end, 6)]
    shown = [name for name in names if any(one.terms.get(name, 0) > 0 for _, one in layouts)]
    return figure(stacked_bars(bars, ticks, end), legend([(TERMS.get(name, _OTHER_TERM), name) for name in shown]))


def _term_names(terms: Iterable[Mapping[str, float]]) -> list[str]:
    """The known terms in their order, then the others."""
    found = dict.fromkeys(name for one in terms for name in one)
    return [*(name for name in TERMS if name in found), *(name for name in found if name not in TERMS)]


def _time_bar(number: int, one: PlannedLayout, names: Sequence[str]) -> Bar:
    def part(name: str) -> Part:
        size = one.terms.get(name, 0.0)
        share = size / one.step_time_s
        tip = f"{number}: {one.layout.name}\n{name}: {seconds(size)}, {share:.1%}"
        return Part(name, TERMS.get(name, _OTHER_TERM), size, tip, f"{share:.0%}")

    return Bar(
        f"{number}: {one.layout.name}",
        choices(one),
        seconds(one.step_time_s),
        [part(name) for name in names],
        is_strong=number == 1,
        link=link_of(number),
    )


# --- strong scaling --------------------------------------------------------------------------------------------


def scaling_figure(result: SearchResult) -> str:
    """Tokens per second with and without goodput, days and price over the number of GPUs."""
    points = result.scaling
    x = Scale(points[0].num_gpus * 0.84, points[-1].num_gpus * 1.19, is_log=True)
    charts = [_throughput_lane(points, x), _small_lane("days", points, x, [(p.days, days(p.days)) for p in points])]
    prices = [(point.price, short(point.price)) for point in points if point.price is not None]
    if len(prices) == len(points):
        charts.append(_small_lane("price", points, x, prices))
    else:
        hours = [(point.gpu_hours, short(point.gpu_hours)) for point in points]
        charts.append(_small_lane("GPU-hours", points, x, hours))
    axis = Axis(x, [(float(point.num_gpus), f"{point.num_gpus:,}") for point in points], "GPUs")
    chart = lanes([*charts, Lane("", horizontal_axis(axis))], has_cursor=False)
    entries = [("key-dot teal", "steps alone"), ("key-dot orange", "with failures and saves"), ("dashed", "linear")]
    return figure(chart, legend(entries))


def _throughput_lane(points: Sequence[ScalePoint], x: Scale) -> Lane:
    rates = [(float(point.num_gpus), point.num_gpus * point.tokens_per_s_per_gpu) for point in points]
    kept = [(place, rate * point.goodput) for (place, rate), point in zip(rates, points)]
    # From the smallest number of GPUs on, at its rate per GPU.
    ideal = [(place, rates[0][1] * place / rates[0][0]) for place, _ in rates]
    y = Scale(0.7 * min(rate for _, rate in kept), 1.5 * max(rate for _, rate in ideal), is_log=True)
    ticks = [(tick, short(tick)) for tick in svg.log_ticks(y.low, y.high)]
    curves = ((ideal, "ideal"), (kept, "line warm"), (rates, "line"))
    shapes = [svg.curve(curve, x, y, _CURVE, css) for curve, css in curves]
    for point, (place, rate), (_, useful) in zip(points, rates, kept):
        shapes += [
            svg.dot(x.percent(place), y.pixel(useful, _CURVE), 4, "warm", _tip(point)),
            svg.dot(x.percent(place), y.pixel(rate, _CURVE), 5, "point", _tip(point)),
            svg.text(x.percent(place), y.pixel(rate, _CURVE) - 11, short(rate), "strong"),
        ]
    axis = Axis(y, ticks, "tokens per second")
    return svg.lane(axis, _CURVE, shapes, "tokens per second over the number of GPUs")


def _small_lane(name: str, points: Sequence[ScalePoint], x: Scale, values: Sequence[tuple[float, str]]) -> Lane:
    sizes = [value for value, _ in values]
    y = Scale(0.0, 1.35 * max(sizes))
    places = [(float(point.num_gpus), size) for point, size in zip(points, sizes)]
    shapes = [svg.curve(places, x, y, _SMALL, "line")]
    for point, (place, size), (_, label) in zip(points, places, values):
        top = y.pixel(size, _SMALL)
        shapes += [
            svg.dot(x.percent(place), top, 4, "point", _tip(point)),
            svg.text(x.percent(place), top - 9, label, "strong"),
        ]
    return svg.lane(Axis(y, [(0.0, "0")], name), _SMALL, shapes, f"{name} over the number of GPUs")


def _tip(point: ScalePoint) -> str:
    price = "" if point.price is None else f", price {point.price:,.0f}"
    return (
        f"{point.num_gpus:,} GPUs: {point.layout.name}\n{seconds(point.step_time_s)} per step, "
        f"{point.tokens_per_s_per_gpu:,.0f} tokens/s/GPU\ngoodput {point.goodput:.1%}, a save every "
        f"{duration(point.save_interval_s)}\n{days(point.days)} days, {point.gpu_hours:,.0f} GPU-hours{price}"
    )
