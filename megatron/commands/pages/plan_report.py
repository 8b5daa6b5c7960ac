"""The planner's report: tables on the console, and one HTML page of a layout search.

The roofline of the step's matrix products follows Williams, Waterman and Patterson (2009).
"""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.commands.pages.plan_charts import (
    MemoryOfStage,
    choices,
    compared,
    days,
    link_of,
    memory_figure,
    neighbours,
    pareto_figure,
    recompute_of,
    scaling_figure,
    seconds,
    time_figure,
    title_of,
)
from megatron.commands.pages.schedule_chart import Tail, schedule_figure
from megatron.explorer.options import fragment_of
from megatron.operation.simulated_run import RunModel
from megatron.planner.rehearsal.launch_prices import Product
from megatron.planner.search.result import PlannedLayout, SearchResult, command, first_of_families
from megatron.planner.step_time.workload import Cluster
from megatron.reports import page as html
from megatron.reports import svg
from megatron.reports.svg import Axis, Point, Scale, duration, gib, percentage, plane, short
from megatron.schedules.catalog import build_schedule
from megatron.schedules.schedule import Schedule
from megatron.schedules.simulator import Durations, simulate

_HEIGHT = 320.0
_LARGEST_DOT = 20.0
"""Radius in pixels."""
_LEAST_NUMBERED = 7.0
"""Radius in pixels of dots with a number."""
_USUAL_WIDTH = 980.0
"""Pixels of the chart on a wide screen; narrow ones have no numbers."""
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
    """Seconds of a step."""
    share: float
    """Share of the time of all products."""

    @property
    def is_fp8(self) -> bool:
        return "8" in self.dtype

    @property
    def colour(self) -> str:
        return "orange" if self.is_fp8 else "blue"

    @property
    def radius(self) -> float:
        return max(3.0, _LARGEST_DOT * math.sqrt(self.share))


def dots(products: Sequence[Product]) -> list[Dot]:
    """The products, from the one that takes longest on."""
    total = sum(product.seconds for product in products)
    found = []
    for one in products:
        if one.seconds > 0:
            m, n, k, flops = one.m, one.n, one.k, 2.0 * one.m * one.n * one.k
            element = 1 if "8" in one.dtype else 4 if "32" in one.dtype else 2  # bytes of an operand's
            intensity = flops / (element * (m * k + k * n) + _RESULT_BYTES * m * n)
            rate = flops * one.count / one.seconds
            shape = f"{m:,} x {n:,} x {k:,}"
            found.append(Dot(shape, one.dtype, one.count, intensity, rate, one.seconds, one.seconds / total))
    return sorted(found, key=lambda dot: -dot.seconds)


def roofline_figure(products: Sequence[Product], cluster: Cluster) -> str:
    """FLOP/s over FLOP/byte, one dot per shape whose area is its share of the time, and a table of the dots."""
    every = dots(products)
    shown = [dot for dot in every if dot.share >= _LEAST_DRAWN]
    # (name, FLOP/s) of the formats that occur
    roofs = [("FP8", cluster.fp8_flops)] if any(dot.is_fp8 for dot in shown) and cluster.fp8_flops else []
    if not (roofs and all(dot.is_fp8 for dot in shown)):
        roofs.insert(0, ("bf16", cluster.bf16_flops))
    # The axes show the ridge, where memory-bound products become compute-bound, and all dots.
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
    colours = {f"products in {dot.dtype}, area by share of their time": f"key-dot {dot.colour}" for dot in shown}
    return html.figure(chart, html.legend((css, name) for name, css in colours.items())) + _table(every, cluster)


def _roof(name: str, peak: float, cluster: Cluster, x: Scale, y: Scale) -> list[str]:
    hbm = cluster.hbm_bytes_per_s
    # Rising with the memory's rate up to the ridge, then flat at the peak.
    start, ridge = max(x.low, y.low / hbm), peak / hbm
    points = [(start, hbm * start), (ridge, peak), (x.high, peak)]
    top, place = y.pixel(peak, _HEIGHT), x.percent(ridge)
    label = f"{name} peak {peak / 1e12:,.0f} TFLOP/s, from {ridge:,.0f} FLOP/byte on"
    return [
        svg.curve(points, x, y, _HEIGHT, "roof"),
        svg.vertical(place, top, _HEIGHT, "reference"),
        svg.text("100%", top - 7, label, "strong", "end"),
    ]


def _circle(rank: int, dot: Dot, x: Scale, y: Scale) -> str:
    tip = (
        f"{dot.shape}, {dot.dtype}, {dot.count:,.0f} times\n{dot.flops_per_s / 1e12:,.0f} TFLOP/s at "
        f"{dot.intensity:,.0f} FLOP/byte\n{duration(dot.seconds)}, {percentage(dot.share)} of the products' time"
    )
    place, top = x.percent(dot.intensity), y.pixel(dot.flops_per_s, _HEIGHT)
    return svg.dot(place, top, dot.radius, f"product {dot.colour}", tip, _link(rank))


def _numbers(shown: Sequence[Dot], x: Scale, y: Scale) -> list[str]:
    """The ranks of large dots, except on a dot close to a numbered one."""
    taken: list[Point] = []
    found = []
    for rank, dot in enumerate(shown, start=1):
        place = _USUAL_WIDTH * x.fraction(dot.intensity), y.pixel(dot.flops_per_s, _HEIGHT)
        if dot.radius < _LEAST_NUMBERED or any(math.dist(place, other) < 2 * _LEAST_NUMBERED for other in taken):
            continue
        taken.append(place)
        css = f"on on-{dot.colour} rank sparse"
        found.append(svg.text(x.percent(dot.intensity), place[1] + 3.5, str(rank), css))
    return found


def _link(rank: int) -> str:
    return f"product-{rank}"


def _table(shown: Sequence[Dot], cluster: Cluster) -> str:
    peaks = {False: cluster.bf16_flops, True: cluster.fp8_flops or cluster.bf16_flops}
    rows = [
        [
            html.number(str(rank), rank),
            html.Cell(dot.shape, is_line=True),
            html.Cell(dot.dtype),
            html.number(f"{dot.count:,.0f}", dot.count),
            html.number(f"{dot.intensity:,.0f}", dot.intensity),
            html.number(f"{dot.flops_per_s / 1e12:,.0f}", dot.flops_per_s),
            html.number(f"{dot.flops_per_s / peaks[dot.is_fp8]:.0%}", dot.flops_per_s / peaks[dot.is_fp8]),
            html.number(duration(dot.seconds), dot.seconds),
            html.number(percentage(dot.share), dot.share),
        ]
        for rank, dot in enumerate(shown, start=1)
    ]
    headings = ("", "m x n x k", "dtype", "per step", "FLOP/byte", "TFLOP/s", "of peak", "time", "share")
    return html.table(headings, rows, links=[_link(rank) for rank in range(1, len(rows) + 1)])


_MOST_ROWS = 100
_AFTER_THE_PASSES = {"data parallelism": "red", "optimizer": "violet"}
"""Terms after the schedule, and their colours."""
_REST = "rest of the step"


def plan_page(result: SearchResult) -> str:
    job, count = result.job, len(result.layouts)
    title = f"{job.name} on {job.num_gpus:,} GPUs ({job.cluster.name})"
    subtitle = (
        f"{job.global_batch_size:,} sequences of {job.seq_length:,} tokens per step · {job.precision} · "
        f"{result.num_enumerated:,} layouts, {count:,} fit, {len(result.ties):,} within 2 % of the fastest"
    )
    footer = (
        f"Searched in {result.seconds:.0f} s. Times are predictions of a model fitted to published runs "
        "(docs/planner.md), not measurements. MFU counts causal attention."
    )
    simulated = html.plural(sum(one.is_simulated for one in result.layouts), "layout")
    fitting = f"Layouts that fit. {simulated} with a number: memory by the dry run, else by the units."
    first = f"The first {_MOST_ROWS:,} of {count:,}. " if count > _MOST_ROWS else ""
    ties = "Ties, within 2 % of the fastest, come first, from the simplest on. ~: memory without the dry run."
    links = [link_of(rank) for rank in range(1, min(count, _MOST_ROWS) + 1)]
    parts = [
        html.tiles(_tiles(result)),
        html.notes(result.warnings),
        _choice(result),
        html.section("Memory against time", pareto_figure(result), note=fitting),
        html.section("Where the time goes", time_figure(result), note="Seconds of a step by cause."),
        *_of_simulated(result),
        _scaling(result),
        html.section("Layouts", html.table(*_layout_rows(result.layouts[:_MOST_ROWS]), links=links), note=first + ties),
    ]
    return html.page(title, subtitle, [part for part in parts if part], footer=footer)


def _tiles(result: SearchResult) -> list[html.Tile]:
    best, cost, job = result.best, result.cost, result.job
    low, high = best.interval_s
    limit = job.config.dry_run.gpu_memory
    return [
        html.Tile("time of a step", seconds(best.step_time_s), f"{seconds(low)} to {seconds(high)}", is_main=True),
        html.Tile("tokens/s per GPU", f"{best.tokens_per_s_per_gpu:,.0f}", f"MFU {best.mfu:.1%}"),
        html.Tile(
            "tightest stage",
            f"{gib(best.memory_bytes)} GiB",
            f"{best.memory_bytes / limit:.0%}, stage {best.tightest_stage}",
        ),
        html.Tile("pipeline bubble", f"{best.bubble_fraction:.1%}", "of the step"),
        html.Tile(
            f"days to {_tokens(job.operation.tokens)} tokens", days(cost.days), f"goodput {percentage(cost.goodput)}"
        ),
        html.Tile("GPU-hours", short(cost.gpu_hours), "" if cost.price is None else f"price {short(cost.price)}"),
    ]


def _explorer(result: SearchResult) -> str:
    """The best layout on the explorer's page, and the command that writes this page."""
    job = result.job
    if job.config.model.model is None:
        return ""  # the explorer has presets
    address = "explorer.html" + fragment_of(job, result.best.layout)
    make = f"python tools/explore.py --out explorer.html --models {job.name} --seq-lengths {job.seq_length}"
    make += f" --clusters {job.cluster.name} --precisions {job.precision}"
    return html.fold(
        "Move this layout in the explorer",
        f"<p>{html.link('Open this layout', address)} once this command has written the page beside this one:</p>",
        html.paragraph(make, "note"),
    )


def simulation_command(result: SearchResult) -> str:
    """What simulates the failures and restarts of a run of the best layout."""
    job, one = result.job, result.best
    words = f"megatron-llama simulate-run --gpus {job.num_gpus} --gpus-per-node {job.cluster.node_size}"
    words += f" --step-s {one.step_time_s:.4g} --steps {math.ceil(job.operation.tokens / job.tokens_per_step)}"
    words += f" --save-s {job.operation.save_s:g} --gpu-hours-per-failure {job.gpu_hours_per_failure:g}"
    phases = {name: getattr(RunModel, f"{name}_s") for name in ("notice", "decide", "start", "load", "warm_up")}
    if (longer := job.operation.restart_s / sum(phases.values())) != 1.0:  # each phase by the same factor
        words += "".join(f" --{name.replace('_', '-')}-s {longer * time:g}" for name, time in phases.items())
    return words


def _tokens(count: float) -> str:
    return short(count, prefixes="TBMk")


def _choice(result: SearchResult) -> str:
    """The first layout with its flags, and the flags of the next ones."""
    best = result.best
    parts = [html.paragraph(choices(best), "note"), html.copyable(shlex.join(command(result.job, best)))]
    parts.append(html.paragraph(f"Limited by {best.limits}. To change that: {best.advice}."))
    simulation = html.copyable(f"{simulation_command(result)} --html simulated.html")
    parts += [_explorer(result), html.fold("Simulate the failures and restarts of this run", simulation)]
    if best.layout.reduces_in_bf16:
        parts.append(html.notes(["This layout changes the numerics: gradients are accumulated and reduced in bf16."]))
    others = []
    for rank, one in compared(result)[1:]:
        flags = html.copyable(shlex.join(command(result.job, one))) + html.paragraph(
            f"Limited by {one.limits}.", "note"
        )
        others.append(html.fold(f"{rank}: {one.layout.name}, {choices(one)}, {seconds(one.step_time_s)}", flags))
    if others:
        parts.append(html.fold(f"Flags of {html.plural(len(others), 'other layout')}", *others))
    return html.section(f"First choice: {best.layout.name}", *parts)


def _of_simulated(result: SearchResult) -> list[str]:
    """What only a simulated layout has: the timeline, memory by kind, and products."""
    found = next(((rank, one) for rank, one in enumerate(result.layouts, start=1) if one.passes is not None), None)
    if found is None:
        return []
    rank, one = found
    assert one.passes is not None
    of_layout = f"Layout {rank}, {one.layout.name}"
    limit = result.job.config.dry_run.gpu_memory
    stages = neighbours(enumerate(one.memory_by_stage), dict)
    memory = memory_figure([MemoryOfStage(title_of(name), "", by_kind) for name, by_kind in stages], limit)
    return [
        html.section(
            "Timeline of a step",
            _timeline(result, one),
            note=f"{of_layout}: the passes of the {one.layout.schedule} schedule with the durations of its units.",
        ),
        html.section("Memory by stage", memory, note=f"{of_layout}: at the peak of a step, by the dry run."),
        html.section(
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
    durations = Durations(forward, backward, weight)  # seconds by virtual stage
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
        f"The best layout on each number of GPUs, with the same batch. {_tokens(job.operation.tokens)} tokens; a "
        f"failure in {job.gpu_hours_per_failure:,.0f} GPU-hours."
    )
    return html.section("Strong scaling", scaling_figure(result), html.table(*_scaling_rows(result)), note=note)


def _scaling_rows(result: SearchResult) -> tuple[list[str], list[list[html.Cell]]]:
    """Headings and rows of the runs on each number of GPUs."""
    headings = ["GPUs", "layout", "time of a step", "tokens/s/GPU", "goodput", "save every", "days", "GPU-hours"]
    rows = []
    for point in result.scaling:
        interval = point.save_interval_s
        steps = max(1, round(interval / point.step_time_s))
        rows.append(
            [
                html.number(f"{point.num_gpus:,}", point.num_gpus),
                html.Cell(point.layout.name, is_line=True),
                html.number(seconds(point.step_time_s), point.step_time_s),
                html.number(f"{point.tokens_per_s_per_gpu:,.0f}", point.tokens_per_s_per_gpu),
                html.number(percentage(point.goodput), point.goodput),
                html.number(f"{duration(interval)} ({steps:,} steps)", interval),
                html.number(days(point.days), point.days),
                html.number(f"{point.gpu_hours:,.0f}", point.gpu_hours),
            ]
        )
    # Without a price there is no column of prices.
    if any(point.price is not None for point in result.scaling):
        headings.append("price")
        for row, point in zip(rows, result.scaling):
            row.append(html.number("" if point.price is None else f"{point.price:,.0f}", point.price))
    return headings, rows


def _layout_rows(layouts: Iterable[PlannedLayout]) -> tuple[tuple[str, ...], list[list[html.Cell]]]:
    """Headings and rows of ranked layouts."""
    names = "rank", "layout", "", "schedule", "sharding", "mbs", "recompute"
    figures = "step", "tokens/s/GPU", "MFU", "GiB", "bubble", "limited by", "interval"
    rows = []
    for rank, one in enumerate(layouts, start=1):
        layout, (low, high) = one.layout, one.interval_s
        sharding = layout.sharding + (", bf16 gradients" if layout.reduces_in_bf16 else "")
        rows.append(
            [
                html.number(str(rank), rank),
                html.Cell(layout.name, is_line=True),
                html.Cell("tie", mood="good") if one.is_tie else html.Cell(""),
                html.Cell(layout.schedule if layout.pp > 1 else ""),
                html.Cell(sharding, is_line=True),
                html.number(str(layout.micro_batch_size), layout.micro_batch_size),
                html.Cell(recompute_of(one), is_line=True),
                html.number(seconds(one.step_time_s), one.step_time_s),
                html.number(f"{one.tokens_per_s_per_gpu:,.0f}", one.tokens_per_s_per_gpu),
                html.number(f"{one.mfu:.1%}", one.mfu),
                html.number(gib(one.memory_bytes) + ("" if one.is_simulated else " ~"), one.memory_bytes),
                html.number(f"{one.bubble_fraction:.1%}", one.bubble_fraction),
                html.Cell(one.limits.removesuffix(" of the step"), is_line=True),
                html.number(f"{seconds(low)} to {seconds(high)}", low),
            ]
        )
    return (*names, *figures), rows


# --- the console ---------------------------------------------------------------------------------------------

_TABLE_TITLE = (
    "layouts: ties are within 2 % of the fastest, the simplest first; ~ memory without the dry run; without variants "
    "that differ in recompute, in chunks per stage or in the sharding of gradients"
)


def print_result(result: SearchResult, console: Console, top: int) -> None:
    """The ranked layouts, the best one in full, and the cost of a run."""
    job = result.job
    summary = (
        f"{job.name} on {job.num_gpus:,} GPUs of {job.cluster.name}: {job.global_batch_size:,} sequences of "
        f"{job.seq_length:,} tokens, {job.precision}\n"
        f"{result.num_enumerated:,} layouts, of which {len(result.layouts):,} fit and {len(result.ties):,} are within "
        f"2 % of the fastest; {result.seconds:.0f} s\n"
    )
    of_runs = f"a run over {job.operation.tokens:.3g} tokens, a failure in {job.gpu_hours_per_failure:,.0f} GPU-hours"
    headings, rows = _layout_rows(islice(first_of_families(result.layouts), top))
    # The last column, the interval, would make it too wide: the best layout's is stated below.
    layouts = _console_table(_TABLE_TITLE, headings[:-1], rows)
    runs = _console_table(of_runs, *_scaling_rows(result))
    warnings = [Text(f"WARNING: {warning}", style="yellow") for warning in result.warnings]
    for part in (Text(summary), layouts, _best(result), runs, *warnings):
        console.print(part)


def _console_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[html.Cell]]) -> Table:
    """The columns with ``headings`` of a table of the page."""
    table = Table(title=title, title_justify="left")
    for heading, cell in zip(headings, rows[0]):
        table.add_column(heading, justify="right" if cell.is_number else "left")
    for row in rows:
        table.add_row(*(cell.text for cell in row[: len(headings)]))
    return table


def _best(result: SearchResult) -> Text:
    """The first layout in sentences."""
    one, job = result.best, result.job
    low, high = one.interval_s
    rows = [
        f"\nbest: {one.layout.name}, {one.step_time_s:.3f} s per step ({low:.3f} to {high:.3f}), "
        f"{one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {one.mfu:.1%} of {job.peak_flops / 1e12:,.0f} TFLOP/s",
        f"memory: {one.memory_bytes / 2**30:.1f} of {job.config.dry_run.gpu_memory / 2**30:g} GiB on stage "
        f"{one.tightest_stage}, {'by the dry run' if one.is_simulated else 'by its units'}; bubble "
        f"{one.bubble_fraction:.1%}",
        f"limited by {one.limits}. To change that: {one.advice}.",
    ]
    rows += [sentence for sentence in [_numerics(result)] if sentence]
    rows += ["\n" + shlex.join(command(job, one)), "\nits failures and restarts: " + simulation_command(result)]
    return Text("\n".join(rows))


def _numerics(result: SearchResult) -> str:
    """The gain of the best layout with gradients in bf16, or a warning that the first one has them."""
    text = "gradients that are accumulated and reduced in bf16 (--grad-reduce-in-bf16), which changes the numerics"
    if result.best.layout.reduces_in_bf16:
        return f"It has {text}."
    narrow = [one for one in result.layouts if one.layout.reduces_in_bf16]
    faster = min(narrow, key=lambda one: one.step_time_s, default=None)
    if faster is None or faster.step_time_s >= result.best.step_time_s:
        return ""
    gain = 1 - faster.step_time_s / result.best.step_time_s
    return f"{gain:.1%} faster: {faster.layout.name} with {text}."
