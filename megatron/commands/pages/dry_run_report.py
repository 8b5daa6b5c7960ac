"""The report of a dry run: JSON, tables on the console, and a page in one file."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron.commands.pages.plan_charts import ALLOWANCE_NAME, MemoryOfStage, memory_figure, neighbours, title_of
from megatron.commands.pages.schedule_chart import schedule_figure
from megatron.config.dry_run import ALLOWANCE
from megatron.core.topology import EXPERT_AXES
from megatron.planner.launches import Link, expert_placement_advice, is_in_node
from megatron.planner.memory import KINDS, Kind
from megatron.planner.plan import Plan, StagePlan
from megatron.reports import page as html
from megatron.reports.svg import Bar, Part, gib, nice_ticks, stacked_bars

_COLORS: dict[Kind, str] = {
    "weights": "blue",
    "gradients": "cyan",
    "master weights": "magenta",
    "moments": "bright_magenta",
    "activations": "green",
    "logits and loss": "yellow",
    "communication buffers": "red",
    "working memory": "bright_red",
}
_AXES: Mapping[str, tuple[str, str]] = {
    "tp": ("tensor parallel", "orange"),
    "cp": ("context parallel", "sand"),
    "pp": ("pipeline parallel", "rose"),
    "dp": ("data parallel", "red"),
    "etp": ("expert tensor parallel", "brown"),
    "ep": ("expert parallel", "violet"),
    "edp": ("expert data parallel", "lilac"),
}
_LINKS: Mapping[Link, tuple[str, str]] = {"in node": ("inside a node", "teal"), "across": ("across nodes", "red")}
"""Names and colours."""
_BAR_WIDTH = 48
TO_SEARCH = "to search the layouts that fit"


def warnings(plan: Plan) -> list[str]:
    """Sentences about a layout that another one would improve."""
    if plan.run.architecture.num_experts is None:
        return []
    advice = expert_placement_advice(plan.run.grid, plan.run.node_size)
    return [] if advice is None else [advice]


def groups(plan: Plan) -> dict[str, dict[str, Any]]:
    """Facts by axis: size, number of groups, the group of the first simulated rank, whether all are in a node each."""
    grid, rank = plan.run.grid, plan.stages[0].rank
    described = {}
    for axis in ("tp", "cp", "pp", "dp", *(EXPERT_AXES if plan.run.architecture.num_experts is not None else ())):
        members = grid.group(rank, (axis,))
        described[axis] = {
            "size": len(members),
            "groups": grid.world_size // len(members),
            "ranks": list(members),
            "in_node": all(is_in_node(ranks, plan.run.node_size) for ranks in grid.groups((axis,))),
        }
    return described


def _layout(plan: Plan) -> tuple[tuple[str, ...], list[list[html.Cell]]]:
    """Headings and rows of the axes: size, number of groups, and the ranks of a group, at most eight."""
    rows = []
    for axis, group in groups(plan).items():
        ranks = list(map(str, group["ranks"]))
        shown = ranks if len(ranks) <= 8 else [*ranks[:3], "…", ranks[-1]]
        numbers = [html.number(f"{group[key]:,}", group[key]) for key in ("size", "groups")]
        stays = html.Cell("yes" if group["in_node"] else "no")
        rows.append([html.Cell(f"{_AXES[axis][0]} ({axis})"), *numbers, stays, html.Cell(" ".join(shown))])
    return ("axis", "size", "groups", "stays in a node", f"group of rank {plan.stages[0].rank}"), rows


def as_json(plan: Plan, plan_command: str | None, fitting_load: float | None, seconds: float) -> dict[str, Any]:
    """The report; docs/dry_run.md explains its fields."""
    run = plan.run
    has_experts = run.architecture.num_experts is not None

    def by_stage(value: Callable[[StagePlan], Any]) -> dict[str, Any]:
        return {str(stage.stage): value(stage) for stage in plan.stages}

    return {
        "num_gpus": run.grid.world_size,
        "total_parameters": run.architecture.num_parameters(),
        "active_parameters": run.architecture.num_active_parameters(),
        "parameters_per_rank": by_stage(lambda stage: stage.num_parameters),
        "layout": groups(plan),
        "layers": [list(layers) for layers in run.layers],
        "ranks": by_stage(lambda stage: stage.rank),
        "rehearsed_ranks": by_stage(lambda stage: stage.simulated_rank),
        "memory_bytes": by_stage(lambda stage: {**stage.peak.by_kind, "allowance": ALLOWANCE, "total": stage.needed}),
        "peak_during": by_stage(lambda stage: stage.peak.during),
        "steady_bytes": by_stage(lambda stage: stage.steady.total),
        "host_bytes": by_stage(lambda stage: stage.on_host),
        "gpu_memory_bytes": plan.limit,
        "fits": plan.fits,
        "tightest_stage": plan.tightest.stage,
        "missing_bytes": max(0, plan.tightest.needed - plan.limit),
        "expert_load": run.config.dry_run.dry_run_expert_load if has_experts else None,
        "largest_fitting_expert_load": fitting_load,
        "warnings": warnings(plan),
        "plan_command": plan_command,
        "global_batch_size": run.global_batch_size,
        "num_microbatches": run.num_microbatches,
        "rehearsed_microbatches": by_stage(lambda stage: stage.simulated_microbatches),
        "extrapolated": by_stage(lambda stage: stage.is_extrapolated),
        "bubble_fraction": run.bubble_fraction(),
        "model_flops_per_step": run.flops_per_step,
        "model_flops_per_token": run.flops_per_token,
        "bytes_sent": by_stage(lambda stage: stage.sent_by_axis),
        "bytes_sent_by_link": by_stage(lambda stage: dict(stage.sent_by_link)),
        "seconds": seconds,
    }


def print_report(plan: Plan, plan_command: str | None, fitting_load: float | None, console: Console) -> None:
    # The verdict is last, where a terminal shows it.
    tables = _layout_table(plan), _memory_table(plan), _bars(plan), _traffic_table(plan)
    notes = [Text(f"\nWARNING: {warning}", style="yellow") for warning in warnings(plan)]
    console.print(Group(_summary(plan), *tables, *notes, _verdict(plan, plan_command, fitting_load)))


def _summary(plan: Plan) -> Text:
    run = plan.run
    name = run.config.model.model or "model"
    active = f" ({run.architecture.num_active_parameters():,} active)" if run.architecture.num_experts else ""
    lines = [
        f"{name}: {run.architecture.num_parameters():,} parameters{active} on {run.grid.world_size:,} ranks, "
        f"{run.config.precision.name}, {run.config.parallel.sharding_strategy}",
        f"step: {run.global_batch_size:,} sequences of {run.config.seq_length:,} tokens, {run.num_microbatches} "
        f"microbatches of {run.config.micro_batch_size} on every rank; {run.flops_per_step:.4g} model FLOPs",
        f"pipeline: {run.grid.pp} stages, layers {_counts(run.layers)}; bubble "
        f"{run.bubble_fraction():.1%} (by FLOPs; messages take no time)",
    ]
    return Text("\n".join(lines))


def _counts(layers: Sequence[Sequence[int]]) -> str:
    """Layers of every stage; ``2 of 3 x 4`` are two stages with three chunks of four layers each."""
    words = [(chunk_sizes(chunks), len(list(equal))) for chunks, equal in groupby(layers)]
    return " | ".join(f"{count} of {stage}" if count > 1 else stage for stage, count in words)


def chunk_sizes(layers: Sequence[int]) -> str:
    """Layers of the chunks of a stage; ``3 x 4`` are three chunks of four."""
    words = [(size, len(list(equal))) for size, equal in groupby(layers)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in words)


def _neighbours(plan: Plan, contents: Callable[[StagePlan], object]) -> list[tuple[str, StagePlan]]:
    return neighbours(((stage.stage, stage) for stage in plan.stages), contents)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _layout_table(plan: Plan) -> Table:
    headings, rows = _layout(plan)
    table = _table("\nlayout", headings)
    for row in rows:
        table.add_row(*(cell.text for cell in row))
    return table


def _memory(stage: StagePlan) -> object:
    return stage.layers, stage.num_parameters, stage.peak.by_kind, stage.peak.during


def _memory_table(plan: Plan) -> Table:
    shown = [kind for kind in KINDS if any(stage.peak.by_kind.get(kind) for stage in plan.stages)]
    kinds = [kind.replace(" ", "\n") for kind in shown]
    columns = ["stage", "rank", "layers", "parameters", *kinds, "allowance", "total"]
    table = _table("\nmemory of a rank at its peak, GiB", columns)
    for name, stage in _neighbours(plan, _memory):
        sizes = [gib(stage.peak.by_kind.get(kind, 0)) for kind in shown]
        table.add_row(
            name,
            str(stage.rank),
            chunk_sizes(stage.layers),
            f"{stage.num_parameters:,}",
            *sizes,
            gib(ALLOWANCE),
            Text(gib(stage.needed), style="" if stage.needed <= plan.limit else "bold red"),
        )
    return table


def _bars(plan: Plan) -> Text:
    text = Text("\n")
    scale = max(plan.limit, plan.tightest.needed) / _BAR_WIDTH
    for name, stage in _neighbours(plan, _memory):
        text.append(f"{name:>5} ")
        # Round the ends of the parts, not their widths, so that the widths add up.
        end = filled = 0
        for kind, size in stage.peak.by_kind.items():
            end += size
            width = round(end / scale) - filled
            text.append("█" * width, style=_COLORS[kind])
            filled += width
        text.append("░" * (round(stage.needed / scale) - filled))
        text.append(f" {stage.needed / plan.limit:.0%} ({stage.peak.during})\n")
    for kind, color in _COLORS.items():
        text.append("█ ", style=color)
        text.append(f"{kind}  ")
    return text.append("░ allowance")


def _traffic_table(plan: Plan) -> Table:
    axes = sorted({axis for stage in plan.stages for axis in stage.sent_by_axis if axis != "several"})
    columns = ["stage", *axes, "in node", "across"]
    table = _table("\nsent by a rank per step, GiB", columns)
    for name, stage in _neighbours(plan, lambda stage: (stage.sent_by_axis, stage.sent_by_link)):
        by_axis = [gib(stage.sent_by_axis.get(axis, 0)) for axis in axes]
        by_link = [gib(stage.sent_by_link.get(link, 0)) for link in ("in node", "across")]
        table.add_row(name, *by_axis, *by_link)
    return table


def host_sentence(plan: Plan) -> str:
    """The optimizer state in host memory, with its copies; empty without it."""
    most, ranks = max(stage.on_host for stage in plan.stages), min(plan.run.node_size, plan.run.grid.world_size)
    text = f"host memory of the optimizer: at most {gib(most)} GiB of a rank, {gib(ranks * most)} GiB of a node"
    return text if most else ""


def expert_load_sentence(plan: Plan, fitting_load: float | None) -> str:
    """What is assumed of the load of the experts, and what still fits; empty where it does not matter."""
    run = plan.run
    if run.architecture.num_experts is None or run.grid.ep == 1:
        return ""
    assumed = run.config.dry_run.dry_run_expert_load
    text = f"assumed expert load: {assumed:g}" + (", which is balanced" if assumed == 1 else "")
    if fitting_load is None:
        return text
    if fitting_load == run.architecture.largest_expert_load(run.grid.ep):
        return f"{text}; fits with every load, at most {fitting_load:g}"
    return f"{text}; fits up to an expert load of {max(assumed, math.floor(100 * fitting_load) / 100):g}"


def _verdict(plan: Plan, plan_command: str | None, fitting_load: float | None) -> Text:
    tightest = plan.tightest
    limit, needed, distance = (gib(size) for size in (plan.limit, tightest.needed, abs(tightest.needed - plan.limit)))
    # With --dry-run-rank the other stages are unknown.
    is_alone = len(plan.stages) < plan.run.grid.pp
    where = f"{'looked at alone:' if is_alone else 'tightest on'} stage {tightest.stage} (rank {tightest.rank})"
    if plan.fits:
        text = Text(f"\nfits {limit} GiB: {where}, which needs {needed} and leaves {distance}", style="bold green")
    else:
        sentence = f"\ndoes not fit {limit} GiB: {where}, which needs {needed} GiB, {distance} too many"
        text = Text(sentence, style="bold red").append(f"\n{TO_SEARCH}: {plan_command}", style="not bold")
    sentences = host_sentence(plan), expert_load_sentence(plan, fitting_load if plan.fits else None)
    return text.append("".join(f"\n{sentence}" for sentence in sentences if sentence), style="not bold")


def dry_run_page(plan: Plan, plan_command: str | None, fitting_load: float | None, seconds: float) -> str:
    """The HTML file; ``plan_command`` searches a layout if this one does not fit, and ``fitting_load`` is the largest
    load of the experts that fits."""
    run = plan.run
    memory = [
        MemoryOfStage(
            title_of(name),
            f"{chunk_sizes(stage.layers)} layers",
            dict(stage.peak.by_kind) | {ALLOWANCE_NAME: ALLOWANCE},
        )
        for name, stage in _neighbours(plan, lambda stage: (stage.layers, stage.num_parameters, stage.peak.by_kind))
    ]
    schedule = schedule_figure(run.schedule, run.num_microbatches, run.pass_durations(), is_in_seconds=False)
    of_schedule = (
        f"{run.schedule(1).name}, {html.plural(run.num_microbatches, 'microbatch', 'es')}. The time of a pass is "
        "proportional to its FLOPs; messages take no time."
    )
    of_memory = "At the peak of a step; stages with equal memory are one row."
    parts = [
        html.tiles(_tiles(plan)),
        _page_verdict(plan, plan_command, fitting_load),
        html.section("Memory by stage", memory_figure(memory, plan.limit), note=of_memory),
        html.section("Bytes sent", _traffic(plan), note="By a rank of each stage in one step."),
        html.section("Schedule", schedule, note=of_schedule),
        html.section("Layout", html.table(*_layout(plan), is_sortable=False)),
        html.section("Stages", _stage_table(plan)),
    ]
    title = f"{run.config.model.model or 'model'} on {run.grid.world_size:,} ranks: dry run"
    subtitle = (
        f"{run.config.precision.name} · {run.config.parallel.sharding_strategy} · {run.global_batch_size:,} sequences "
        f"of {run.config.seq_length:,} tokens per step · {run.num_microbatches} microbatches of "
        f"{run.config.micro_batch_size} per rank"
    )
    footer = (
        f"{html.plural(len({one.simulated_rank for one in plan.stages}), 'rank')} simulated in {seconds:.0f} s. The "
        f"allowance of {gib(ALLOWANCE)} GiB is for the CUDA context, the buffers of libraries and fragmentation."
    )
    return html.page(title, subtitle, parts, footer=footer)


def _tiles(plan: Plan) -> list[html.Tile]:
    run, tightest = plan.run, plan.tightest
    architecture = run.architecture
    active = f"{architecture.num_active_parameters() / 1e9:,.1f} B active" if architecture.num_experts else ""
    room = plan.limit - tightest.needed
    return [
        html.Tile(
            "tightest stage",
            f"{gib(tightest.needed)} GiB",
            f"stage {tightest.stage}, {gib(abs(room))} GiB {'free' if room >= 0 else 'too many'}",
            is_main=True,
        ),
        html.Tile("parameters", f"{architecture.num_parameters() / 1e9:,.2f} B", active),
        html.Tile("pipeline bubble", f"{run.bubble_fraction():.1%}", "of the stages' time"),
        html.Tile("model FLOPs per step", f"{run.flops_per_step:.3g}", f"{run.flops_per_token:.3g} per token"),
        html.Tile("ranks", f"{run.grid.world_size:,}", _sizes(plan)),
    ]


def _sizes(plan: Plan) -> str:
    grid = plan.run.grid
    sizes = {"TP": grid.tp, "PP": grid.pp, "CP": grid.cp, "DP": grid.dp}
    if plan.run.architecture.num_experts is not None:
        sizes |= {"ETP": grid.etp, "EP": grid.ep}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP")


def _page_verdict(plan: Plan, plan_command: str | None, fitting_load: float | None) -> str:
    """Whether it fits, the command that searches what fits, and warnings."""
    sentences = host_sentence(plan), expert_load_sentence(plan, fitting_load if plan.fits else None)
    found = html.notes([*warnings(plan), *filter(None, sentences)])
    if plan_command is None:
        return found
    tightest = plan.tightest
    sentence = (
        f"Does not fit: stage {tightest.stage} needs {gib(tightest.needed)} GiB, "
        f"{gib(tightest.needed - plan.limit)} more than a GPU has."
    )
    return html.notes([sentence]) + found + html.section(TO_SEARCH.capitalize(), html.copyable(plan_command))


def _traffic(plan: Plan) -> str:
    """Two charts: by axis, and by link."""
    rows = _neighbours(plan, lambda stage: (stage.sent_by_axis, stage.sent_by_link))
    axes = {axis: _AXES[axis] for axis in _AXES if any(stage.sent_by_axis.get(axis) for _, stage in rows)}
    if not axes:
        return html.paragraph("A rank sends nothing.")
    # Both charts have one scale: bytes by link add up to those by axis, and to single numbers that all ranks exchange.
    end = max(sum(stage.sent_by_link.values()) for _, stage in rows) * 1.02
    by_axis = [(name, stage.sent_by_axis) for name, stage in rows]
    by_link: list[tuple[str, Mapping[Any, int]]] = [(name, stage.sent_by_link) for name, stage in rows]
    return _sent_figure(by_axis, axes, end) + _sent_figure(by_link, _LINKS, end)


def _sent_figure(
    rows: Sequence[tuple[str, Mapping[Any, int]]], kinds: Mapping[Any, tuple[str, str]], end: float
) -> str:
    """Bytes by kind of each stage; ``kinds`` have the names and colours."""
    bars = []
    for name, sent in rows:
        title, total = title_of(name), sum(sent.get(kind, 0) for kind in kinds)
        parts = [
            Part(part, colour, size, f"{title}: {part}\n{gib(size)} GiB, {size / total:.0%}", gib(size))
            for kind, (part, colour) in kinds.items()
            if (size := sent.get(kind, 0))
        ]
        bars.append(Bar(title, "", f"{gib(total)} GiB", parts))
    ticks = [(tick * 2**30, f"{tick:g} GiB") for tick in nice_ticks(0.0, end / 2**30, 6)]
    return html.figure(stacked_bars(bars, ticks, end), html.legend((colour, part) for part, colour in kinds.values()))


def _stage_table(plan: Plan) -> str:
    """The figures of all charts."""
    # Columns that would be empty are left out.
    kinds = [kind for kind in plan.tightest.peak.by_kind if any(stage.peak.by_kind.get(kind) for stage in plan.stages)]
    axes = [axis for axis in _AXES if any(stage.sent_by_axis.get(axis) for stage in plan.stages)]
    headings = ("stage", "rank", "layers", "parameters", "GiB", *kinds, *(f"{axis} GiB" for axis in axes), "across")
    rows = []
    for stage in plan.stages:
        sizes = [stage.needed, *(stage.peak.by_kind.get(kind, 0) for kind in kinds)]
        sizes += [stage.sent_by_axis.get(axis, 0) for axis in axes] + [stage.sent_by_link.get("across", 0)]
        rows.append(
            [
                html.number(str(stage.stage), stage.stage),
                html.number(f"{stage.rank:,}", stage.rank),
                html.Cell(chunk_sizes(stage.layers), sum(stage.layers)),
                html.number(f"{stage.num_parameters:,}", stage.num_parameters),
                *(html.number(gib(size), size) for size in sizes),
            ]
        )
    return html.table(headings, rows)
