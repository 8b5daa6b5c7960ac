"""The planner's report: one HTML page of a layout search. The roofline of the step's matrix products follows Williams,
Waterman and Patterson (2009)."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.commands.pages.plan_charts import (
    choices,
    compared,
    days,
    link_of,
    pareto_figure,
    recompute_of,
    scaling_figure,
    seconds,
    short,
    time_figure,
)
from megatron.commands.pages.stage_charts import Tail, equal_neighbours, memory_figure, schedule_figure
from megatron.planner.rehearsal.launch_prices import Product
from megatron.planner.search.result import PlannedLayout, SearchResult, command
from megatron.planner.step_time.cluster import Cluster
from megatron.reports import svg
from megatron.reports.charts import Axis, plane
from megatron.reports.page import (
    Cell,
    Tile,
    copyable,
    figure,
    fold,
    legend,
    notes,
    number,
    page,
    paragraph,
    plural,
    section,
    table,
    tiles,
)
from megatron.reports.svg import Point, Scale, duration, gib, percentage
from megatron.schedules.registry import build_schedule
from megatron.schedules.schedule import Schedule
from megatron.schedules.simulator import Durations, simulate

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


_MOST_ROWS = 100
_AFTER_THE_PASSES = {"data parallelism": "red", "optimizer": "violet"}
"""Terms after the schedule, and their colours."""
_REST = "rest of the step"


def plan_page(result: SearchResult) -> str:
    """The HTML file."""
    parts = [
        tiles(_tiles(result)),
        notes(result.warnings),
        _choice(result),
        section("Memory against time", pareto_figure(result), note=_pareto_note(result)),
        section("Where the time goes", time_figure(result), note="Seconds of a step by cause."),
        *_rehearsed(result),
        _scaling(result),
        section("Layouts", _layout_table(result), note=_table_note(result)),
    ]
    return page(_title(result), _subtitle(result), [part for part in parts if part], footer=_footer(result))


def _title(result: SearchResult) -> str:
    job = result.job
    return f"{job.name} on {job.num_gpus:,} GPUs ({job.cluster.name})"


def _subtitle(result: SearchResult) -> str:
    job = result.job
    return (
        f"{job.global_batch_size:,} sequences of {job.seq_length:,} tokens per step · {job.precision} · "
        f"{result.num_enumerated:,} layouts, {result.num_fitting:,} fit, {len(result.ties):,} within 2 % of the fastest"
    )


def _footer(result: SearchResult) -> str:
    return (
        f"Searched in {result.seconds:.0f} s. Times are predictions of a model fitted to published runs "
        "(docs/planner.md), not measurements. MFU counts causal attention."
    )


def _tiles(result: SearchResult) -> list[Tile]:
    best, cost, job = result.best, result.cost, result.job
    low, high = best.interval_s
    limit = job.config.dry_run.gpu_memory
    return [
        Tile("time of a step", seconds(best.step_time_s), f"{seconds(low)} to {seconds(high)}", is_main=True),
        Tile("tokens/s per GPU", f"{best.tokens_per_s_per_gpu:,.0f}", f"MFU {best.mfu:.1%}"),
        Tile(
            "tightest stage",
            f"{gib(best.memory_bytes)} GiB",
            f"{best.memory_bytes / limit:.0%}, stage {best.tightest_stage}",
        ),
        Tile("pipeline bubble", f"{best.bubble_fraction:.1%}", "of the step"),
        Tile(f"days to {_tokens(job.tokens)} tokens", days(cost.days), f"goodput {percentage(cost.goodput)}"),
        Tile("GPU-hours", short(cost.gpu_hours), "" if cost.price is None else f"price {short(cost.price)}"),
    ]


def _tokens(count: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:,.0f}"


def _choice(result: SearchResult) -> str:
    """The first layout with its flags, and the flags of the next ones."""
    best = result.best
    parts = [paragraph(choices(best), "note"), copyable(shlex.join(command(result.job, best)))]
    limits = f"Limited by {best.limits}. To change that: {best.advice}."
    parts.append(paragraph(limits))
    if best.layout.reduces_in_bf16:
        parts.append(notes(["This layout changes the numerics: gradients are accumulated and reduced in bf16."]))
    others = [
        fold(f"{rank}: {one.name}, {choices(one)}, {seconds(one.step_time_s)}", _flags(result, one))
        for rank, one in compared(result)[1:]
    ]
    if others:
        parts.append(fold(f"Flags of {plural(len(others), 'other layout')}", *others))
    return section(f"First choice: {best.name}", *parts)


def _flags(result: SearchResult, one: PlannedLayout) -> str:
    return copyable(shlex.join(command(result.job, one))) + paragraph(f"Limited by {one.limits}.", "note")


def _pareto_note(result: SearchResult) -> str:
    rehearsed = sum(one.is_rehearsed for one in result.layouts)
    return f"Layouts that fit. {plural(rehearsed, 'layout')} with a number: memory by the dry run, else by the units."


def _rehearsed(result: SearchResult) -> list[str]:
    """What only a rehearsed layout has: the timeline, memory by kind, and products."""
    found = next(((rank, one) for rank, one in enumerate(result.layouts, start=1) if one.passes is not None), None)
    if found is None:
        return []
    rank, one = found
    assert one.passes is not None
    of_layout = f"Layout {rank}, {one.name}"
    limit = result.job.config.dry_run.gpu_memory
    memory = memory_figure(equal_neighbours(list(enumerate(one.memory_by_stage))), limit)
    return [
        section(
            "Timeline of a step",
            _timeline(result, one),
            note=f"{of_layout}: the passes of the {one.layout.schedule} schedule with the durations of its units.",
        ),
        section("Memory by stage", memory, note=f"{of_layout}: at the peak of a step, by the dry run."),
        section(
            "Roofline of the products",
            roofline_figure(one.passes.products, result.job.cluster),
            note=f"{of_layout}: the matrix products of a rank, m x n x k, with their prices.",
        ),
    ]


def _timeline(result: SearchResult, one: PlannedLayout) -> str:
    assert one.passes is not None
    layout = one.layout
    count = result.job.global_batch_size // (layout.micro_batch_size * layout.dp)

    def build(num_microbatches: int) -> Schedule:
        return build_schedule(layout.schedule, layout.pp, num_microbatches, layout.vp if layout.vp > 1 else None)

    forward, backward, weight = (tuple(times) for times in zip(*one.passes.by_virtual_stage))
    durations = Durations(forward, backward, weight)
    tail = [Tail(name, colour, one.terms.get(name, 0.0)) for name, colour in _AFTER_THE_PASSES.items()]
    # What a step takes once, such as the host's work between two steps.
    passes = simulate(build(count), durations).makespan
    rest = one.step_time_s - passes - sum(term.seconds for term in tail)
    return schedule_figure(build, count, durations, [*tail, Tail(_REST, "lilac", max(0.0, rest))])


def _scaling(result: SearchResult) -> str:
    if len(result.scaling) < 2:
        return ""
    job = result.job
    note = (
        f"The best layout on each number of GPUs, with the same batch. {_tokens(job.tokens)} tokens; a failure in "
        f"{job.gpu_hours_per_failure:,.0f} GPU-hours."
    )
    headings = ["GPUs", "layout", "time of a step", "tokens/s/GPU", "goodput", "save every", "days", "GPU-hours"]
    rows = [
        [
            number(f"{point.num_gpus:,}", point.num_gpus),
            Cell(point.name, is_line=True),
            number(seconds(point.step_time_s), point.step_time_s),
            number(f"{point.tokens_per_s_per_gpu:,.0f}", point.tokens_per_s_per_gpu),
            number(percentage(point.goodput), point.goodput),
            number(duration(point.save_interval_s), point.save_interval_s),
            number(days(point.days), point.days),
            number(f"{point.gpu_hours:,.0f}", point.gpu_hours),
        ]
        for point in result.scaling
    ]
    if any(point.price is not None for point in result.scaling):
        headings.append("price")
        for row, point in zip(rows, result.scaling):
            row.append(number("" if point.price is None else f"{point.price:,.0f}", point.price))
    return section("Strong scaling", scaling_figure(result), table(headings, rows), note=note)


def _table_note(result: SearchResult) -> str:
    shown = min(len(result.layouts), _MOST_ROWS)
    count = f"The first {shown:,} of {len(result.layouts):,}." if shown < len(result.layouts) else ""
    return f"{count} Ties, within 2 % of the fastest, come first, from the simplest on.".strip()


def _layout_table(result: SearchResult) -> str:
    names = "rank", "layout", "", "schedule", "sharding", "mbs", "recompute"
    figures = "step", "tokens/s/GPU", "MFU", "GiB", "bubble", "limited by", "interval"
    shown = list(enumerate(result.layouts[:_MOST_ROWS], start=1))
    return table(
        (*names, *figures), [_row(rank, one) for rank, one in shown], links=[link_of(rank) for rank, _ in shown]
    )


def _row(rank: int, one: PlannedLayout) -> Sequence[Cell]:
    layout = one.layout
    low, high = one.interval_s
    sharding = layout.sharding + (", bf16 gradients" if layout.reduces_in_bf16 else "")
    return [
        number(str(rank), rank),
        Cell(one.name, is_line=True),
        Cell("tie", mood="good") if one.is_tie else Cell(""),
        Cell(layout.schedule if layout.pp > 1 else ""),
        Cell(sharding, is_line=True),
        number(str(layout.micro_batch_size), layout.micro_batch_size),
        Cell(recompute_of(one), is_line=True),
        number(seconds(one.step_time_s), one.step_time_s),
        number(f"{one.tokens_per_s_per_gpu:,.0f}", one.tokens_per_s_per_gpu),
        number(f"{one.mfu:.1%}", one.mfu),
        number(gib(one.memory_bytes), one.memory_bytes),
        number(f"{one.bubble_fraction:.1%}", one.bubble_fraction),
        Cell(one.limits.removesuffix(" of the step"), is_line=True),
        number(f"{seconds(low)} to {seconds(high)}", low),
    ]
