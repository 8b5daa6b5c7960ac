"""The result of a search as JSON and as tables."""

import shlex
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.flags import words_of
from megatron.planner.search.layout import Job
from megatron.planner.search.result import PlannedLayout, ScalePoint, SearchResult, first_of_families

_TABLE_TITLE = (
    "layouts: = within 2 % of the fastest, the simplest first; ~ memory without the dry run; without variants that "
    "differ in recompute, in chunks per stage or in the sharding of gradients"
)


def as_json(result: SearchResult) -> dict[str, Any]:
    """The result; docs/planner.md explains its fields."""
    job = result.job
    return {
        "model": job.name,
        "cluster": job.cluster.name,
        "num_gpus": job.num_gpus,
        "seq_length": job.seq_length,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision,
        "tokens": job.tokens,
        "num_enumerated": result.num_enumerated,
        "num_fitting": result.num_fitting,
        "seconds": result.seconds,
        "warnings": list(result.warnings),
        "layouts": [_layout(one) for one in result.layouts],
        "scaling": [_point(point) for point in result.scaling],
    }


def _layout(one: PlannedLayout) -> dict[str, Any]:
    return {
        "flags": dict(one.flags),
        "step_time_s": one.step_time_s,
        "interval_s": list(one.interval_s),
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
        "mfu": one.mfu,
        "memory_gib": one.memory_bytes / 2**30,
        "limits": one.limits,
        "advice": one.advice,
        "is_tie": one.is_tie,
        "is_rehearsed": one.is_rehearsed,
        "changes_numerics": one.layout.reduces_in_bf16,
        "tightest_stage": one.tightest_stage,
        "bubble_fraction": one.bubble_fraction,
        "terms_s": dict(one.terms),
        "memory_by_stage": [dict(kinds) for kinds in one.memory_by_stage],
    }


def _point(point: ScalePoint) -> dict[str, Any]:
    named = ("num_gpus", "step_time_s", "tokens_per_s_per_gpu", "goodput", "save_interval_s", "days", "gpu_hours")
    return {**{name: getattr(point, name) for name in named}, "price": point.price, "flags": point.layout.flags()}


def print_result(result: SearchResult, console: Console, top: int) -> None:
    """The ranked layouts, the best one in full, and the cost of a run."""
    parts = [_summary(result), _layout_table(result, top), _best(result), _scaling_table(result)]
    notes = [Text(f"WARNING: {warning}", style="yellow") for warning in result.warnings]
    for part in (*parts, *notes):
        console.print(part)


def _summary(result: SearchResult) -> Text:
    job = result.job
    return Text(
        f"{job.name} on {job.num_gpus:,} GPUs of {job.cluster.name}: {job.global_batch_size:,} sequences of "
        f"{job.seq_length:,} tokens, {job.precision}\n"
        f"{result.num_enumerated:,} layouts, of which {result.num_fitting:,} fit and {len(result.ties):,} are within "
        f"2 % of the fastest; {result.seconds:.0f} s\n"
    )


def _layout_table(result: SearchResult, top: int) -> Table:
    table = Table(title=_TABLE_TITLE, title_justify="left")
    for name in ("", "layout", "schedule", "sharding", "mbs", "recompute"):
        table.add_column(name)
    for name in ("s/step", "tokens/s/GPU", "MFU", "GiB", "bubble"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    for number, one in enumerate(islice(first_of_families(result.layouts), top), start=1):
        layout = one.layout
        recompute = layout.recompute + (f", {layout.recompute_layers}" if layout.recompute_layers else "")
        table.add_row(
            f"{number}{' =' if one.is_tie else ''}",
            one.name,
            layout.schedule if layout.pp > 1 else "",
            layout.sharding + (", gradients in bf16 (!)" if layout.reduces_in_bf16 else ""),
            str(layout.micro_batch_size),
            recompute,
            f"{one.step_time_s:.3f}",
            f"{one.tokens_per_s_per_gpu:,.0f}",
            f"{one.mfu:.1%}",
            f"{one.memory_bytes / 2**30:.1f}" + ("" if one.is_rehearsed else " ~"),
            f"{one.bubble_fraction:.1%}",
            one.limits,
        )
    return table


def command(job: Job, one: PlannedLayout) -> list[str]:
    """The command line of a run with the layout, but for data, tokenizer, learning rate and length."""
    words = ["pretrain_llama.py", *job.arguments]
    for name, value in one.flags.items():
        field = name.replace("-", "_")
        if field not in job.given:
            words += words_of(field, tuple(value) if isinstance(value, list) else value)
    return words


def _best(result: SearchResult) -> Text:
    """The first layout in sentences."""
    one, job = result.best, result.job
    low, high = one.interval_s
    rows = [
        f"\nbest: {one.name}, {one.step_time_s:.3f} s per step ({low:.3f} to {high:.3f}), "
        f"{one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {one.mfu:.1%} of {job.peak_flops / 1e12:,.0f} TFLOP/s",
        f"memory: {one.memory_bytes / 2**30:.1f} of {job.config.dry_run.gpu_memory / 2**30:g} GiB on stage "
        f"{one.tightest_stage}, {'by the dry run' if one.is_rehearsed else 'by its units'}; bubble "
        f"{one.bubble_fraction:.1%}",
        f"limited by {one.limits}. To change that: {one.advice}.",
    ]
    rows += [sentence for sentence in [_numerics(result)] if sentence]
    rows.append("\n" + shlex.join(command(job, one)))
    return Text("\n".join(rows))


def _numerics(result: SearchResult) -> str:
    """How much faster the best layout is with gradients in bf16, or a warning that it has them."""
    text = "gradients that are accumulated and reduced in bf16 (--grad-reduce-in-bf16), which changes the numerics"
    if result.best.layout.reduces_in_bf16:
        return f"It has {text}."
    narrow = [one for one in result.layouts if one.layout.reduces_in_bf16]
    faster = min(narrow, key=lambda one: one.step_time_s, default=None)
    if faster is None or faster.step_time_s >= result.best.step_time_s:
        return ""
    gain = 1 - faster.step_time_s / result.best.step_time_s
    return f"{gain:.1%} faster: {faster.name} with {text}."


def _scaling_table(result: SearchResult) -> Table:
    job = result.job
    title = f"a run over {job.tokens:.3g} tokens, a failure in {job.gpu_hours_per_failure:,.0f} GPU-hours"
    table = Table(title=title, title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("layout")
    for name in ("s/step", "tokens/s/GPU", "goodput", "save every", "days", "GPU-hours", "price"):
        table.add_column(name, justify="right")
    for point in result.scaling:
        interval = point.save_interval_s
        table.add_row(
            f"{point.num_gpus:,}",
            point.name,
            f"{point.step_time_s:.3f}",
            f"{point.tokens_per_s_per_gpu:,.0f}",
            f"{point.goodput:.1%}",
            f"{interval / 60:.0f} min ({max(1, round(interval / point.step_time_s)):,} steps)",
            f"{point.days:,.1f}",
            f"{point.gpu_hours:,.0f}",
            "" if point.price is None else f"{point.price:,.0f}",
        )
    return table
