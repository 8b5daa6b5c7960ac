"""The planner's report: one HTML page of a layout search."""

import shlex
from collections.abc import Sequence

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
from megatron.commands.pages.plan_report import roofline_figure
from megatron.commands.pages.stage_charts import Tail, equal_neighbours, memory_figure, schedule_figure
from megatron.planner.search.result import PlannedLayout, SearchResult, command
from megatron.reports.page import (
    Cell,
    Tile,
    copyable,
    fold,
    notes,
    number,
    page,
    paragraph,
    plural,
    section,
    table,
    tiles,
)
from megatron.reports.svg import duration, gib, percentage
from megatron.schedules.registry import build_schedule
from megatron.schedules.schedule import Schedule
from megatron.schedules.simulator import Durations, simulate

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
