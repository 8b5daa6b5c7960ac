"""``--dry-run-html``: a plan as a page in one file."""

from collections.abc import Mapping, Sequence

from megatron.commands.pages.dry_run_report import (
    TO_SEARCH,
    chunk_sizes,
    expert_load_sentence,
    groups,
    neighbours,
    warnings,
)
from megatron.commands.pages.stage_charts import ALLOWANCE_NAME, MemoryOfStage, memory_figure, schedule_figure
from megatron.config.dry_run import ALLOWANCE
from megatron.planner.plan import Plan, StagePlan
from megatron.planner.traffic import Link
from megatron.reports.charts import Bar, Part, stacked_bars
from megatron.reports.page import (
    Cell,
    Tile,
    copyable,
    figure,
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
from megatron.reports.svg import gib, nice_ticks

_AXIS_COLOURS: Mapping[str, str] = {
    "tp": "orange",
    "cp": "sand",
    "pp": "rose",
    "dp": "red",
    "etp": "brown",
    "ep": "violet",
    "edp": "lilac",
}
_AXIS_NAMES: Mapping[str, str] = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "etp": "expert tensor parallel",
    "ep": "expert parallel",
    "edp": "expert data parallel",
}
_LINK_COLOURS: Mapping[Link, str] = {"in node": "teal", "across": "red"}
_LINK_NAMES: Mapping[Link, str] = {"in node": "inside a node", "across": "across nodes"}


def dry_run_page(plan: Plan, plan_command: str | None, fitting_load: float | None, seconds: float) -> str:
    """The HTML file; ``plan_command`` searches a layout if this one does not fit, and ``fitting_load`` is the largest
    load of the experts that fits."""
    run = plan.run
    parts = [
        tiles(_tiles(plan)),
        _verdict(plan, plan_command, fitting_load),
        section("Memory by stage", _memory(plan), note=_memory_note(plan)),
        section("Bytes sent", _traffic(plan), note="By a rank of each stage in one step."),
        section("Schedule", _schedule(plan), note=_schedule_note(plan)),
        section("Layout", _layout_table(plan)),
        section("Stages", _stage_table(plan)),
    ]
    title = f"{run.config.model.model or 'model'} on {run.grid.world_size:,} ranks: dry run"
    return page(title, _subtitle(plan), parts, footer=_footer(plan, seconds))


def _subtitle(plan: Plan) -> str:
    run = plan.run
    return (
        f"{run.config.precision.name} · {run.config.parallel.sharding_strategy} · {run.global_batch_size:,} sequences "
        f"of {run.config.seq_length:,} tokens per step · {run.num_microbatches} microbatches of "
        f"{run.config.micro_batch_size} per rank"
    )


def _footer(plan: Plan, seconds: float) -> str:
    simulated = len({stage.simulated_rank for stage in plan.stages})
    return (
        f"{plural(simulated, 'rank')} simulated in {seconds:.0f} s. The allowance of {gib(ALLOWANCE)} GiB is for the "
        "CUDA context, the buffers of libraries and fragmentation."
    )


def _tiles(plan: Plan) -> list[Tile]:
    run, tightest = plan.run, plan.tightest
    architecture = run.architecture
    active = f"{architecture.num_active_parameters() / 1e9:,.1f} B active" if architecture.num_experts else ""
    room = plan.limit - tightest.needed
    return [
        Tile(
            "tightest stage",
            f"{gib(tightest.needed)} GiB",
            f"stage {tightest.stage}, {gib(abs(room))} GiB {'free' if room >= 0 else 'too many'}",
            is_main=True,
        ),
        Tile("parameters", f"{architecture.num_parameters() / 1e9:,.2f} B", active),
        Tile("pipeline bubble", f"{run.bubble_fraction():.1%}", "of the stages' time"),
        Tile("model FLOPs per step", f"{run.flops_per_step:.3g}", f"{run.flops_per_token:.3g} per token"),
        Tile("ranks", f"{run.grid.world_size:,}", _sizes(plan)),
    ]


def _sizes(plan: Plan) -> str:
    grid = plan.run.grid
    sizes = {"TP": grid.tp, "PP": grid.pp, "CP": grid.cp, "DP": grid.dp}
    if plan.run.architecture.num_experts is not None:
        sizes |= {"ETP": grid.etp, "EP": grid.ep}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP")


def _verdict(plan: Plan, plan_command: str | None, fitting_load: float | None) -> str:
    """Whether it fits, the command that searches what fits, and warnings."""
    load = expert_load_sentence(plan, fitting_load if plan.fits else None)
    found = notes([*warnings(plan), *([load] if load else [])])
    if plan_command is None:
        return found
    tightest = plan.tightest
    sentence = (
        f"Does not fit: stage {tightest.stage} needs {gib(tightest.needed)} GiB, "
        f"{gib(tightest.needed - plan.limit)} more than a GPU has."
    )
    return notes([sentence]) + found + section(TO_SEARCH.capitalize(), copyable(plan_command))


def _memory(plan: Plan) -> str:
    rows = [
        MemoryOfStage(
            f"stage{'s' * ('-' in name)} {name}",
            f"{chunk_sizes(stage.layers)} layers",
            dict(stage.peak.by_kind) | {ALLOWANCE_NAME: ALLOWANCE},
        )
        for name, stage in neighbours(plan, lambda stage: (stage.layers, stage.num_parameters, stage.peak.by_kind))
    ]
    return memory_figure(rows, plan.limit)


def _memory_note(plan: Plan) -> str:
    return "At the peak of a step; stages with equal memory are one row."


def _traffic(plan: Plan) -> str:
    """Two charts: by axis, and by link."""
    rows = neighbours(plan, lambda stage: (stage.sent_by_axis, stage.sent_by_link))
    axes = [axis for axis in _AXIS_COLOURS if any(stage.sent_by_axis.get(axis) for _, stage in rows)]
    if not axes:
        return paragraph("A rank sends nothing.")
    end = max(sum(stage.sent_by_link.values()) for _, stage in rows) * 1.02
    ticks = [(tick * 2**30, f"{tick:g} GiB") for tick in nice_ticks(0.0, end / 2**30, 6)]
    by_axis = [
        _sent(name, stage, [(_AXIS_NAMES[axis], _AXIS_COLOURS[axis], stage.sent_by_axis.get(axis, 0)) for axis in axes])
        for name, stage in rows
    ]
    links = tuple(_LINK_COLOURS)
    by_link = [
        _sent(
            name, stage, [(_LINK_NAMES[link], _LINK_COLOURS[link], stage.sent_by_link.get(link, 0)) for link in links]
        )
        for name, stage in rows
    ]
    return figure(
        stacked_bars(by_axis, ticks, end), legend([(_AXIS_COLOURS[axis], _AXIS_NAMES[axis]) for axis in axes])
    ) + figure(stacked_bars(by_link, ticks, end), legend([(_LINK_COLOURS[link], _LINK_NAMES[link]) for link in links]))


def _sent(name: str, stage: StagePlan, sizes: Sequence[tuple[str, str, int]]) -> Bar:
    total = sum(size for *_, size in sizes)
    title = f"stage{'s' * ('-' in name)} {name}"
    parts = [
        Part(part, colour, size, f"{title}: {part}\n{gib(size)} GiB, {size / total:.0%}", gib(size))
        for part, colour, size in sizes
        if size
    ]
    return Bar(title, "", f"{gib(total)} GiB", parts)


def _schedule(plan: Plan) -> str:
    run = plan.run
    return schedule_figure(run.schedule, run.num_microbatches, run.pass_durations(), is_in_seconds=False)


def _schedule_note(plan: Plan) -> str:
    run = plan.run
    return (
        f"{run.schedule(1).name}, {plural(run.num_microbatches, 'microbatch', 'es')}. The time of a pass is "
        "proportional to its FLOPs; messages take no time."
    )


def _layout_table(plan: Plan) -> str:
    rows = []
    for axis, group in groups(plan).items():
        ranks = list(map(str, group["ranks"]))
        shown = ranks if len(ranks) <= 8 else [*ranks[:3], "…", ranks[-1]]
        rows.append(
            [
                Cell(f"{_AXIS_NAMES[axis]} ({axis})"),
                number(str(group["size"]), group["size"]),
                number(f"{group['groups']:,}", group["groups"]),
                Cell("yes" if group["in_node"] else "no"),
                Cell(" ".join(shown)),
            ]
        )
    headings = ("axis", "size", "groups", "stays in a node", f"group of rank {plan.stages[0].rank}")
    return table(headings, rows, is_sortable=False)


def _stage_table(plan: Plan) -> str:
    """The figures of all charts."""
    kinds = [kind for kind in plan.tightest.peak.by_kind if any(stage.peak.by_kind.get(kind) for stage in plan.stages)]
    axes = [axis for axis in _AXIS_COLOURS if any(stage.sent_by_axis.get(axis) for stage in plan.stages)]
    headings = ("stage", "rank", "layers", "parameters", "GiB", *kinds, *(f"{axis} GiB" for axis in axes), "across")
    rows = []
    for stage in plan.stages:
        sizes = [stage.needed, *(stage.peak.by_kind.get(kind, 0) for kind in kinds)]
        sizes += [stage.sent_by_axis.get(axis, 0) for axis in axes] + [stage.sent_by_link.get("across", 0)]
        rows.append(
            [
                number(str(stage.stage), stage.stage),
                number(f"{stage.rank:,}", stage.rank),
                Cell(chunk_sizes(stage.layers), sum(stage.layers)),
                number(f"{stage.num_parameters:,}", stage.num_parameters),
                *(number(gib(size), size) for size in sizes),
            ]
        )
    return table(headings, rows)
