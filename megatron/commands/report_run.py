"""Report how a run trained and what became of its time: curves over tokens, effective time, failures, lost work, and
the save interval that fits its numbers.

Reads the records in the run directory (--run-dir of the training, by default its --save). Works while the run trains.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from megatron.commands.pages.run_charts import (
    AFTER,
    BEFORE,
    DURING,
    EXPLANATIONS,
    Report,
    date,
    fault_tip,
    interval_chart,
    timeline,
    training_charts,
)
from megatron.commands.tool import run_tool, write_file, write_json
from megatron.errors import DataError
from megatron.flags import Argument
from megatron.metrics.jsonl import History, read_history
from megatron.operation.attempts import TIME_CLASSES, Attempt
from megatron.operation.causes import advice
from megatron.operation.run_summary import (
    RunSummary,
    cause_of,
    in_iterations,
    interval_choices,
    read_run,
    summarize,
    to_json,
)
from megatron.reports import page as html
from megatron.reports.svg import duration, percentage
from megatron.urls import refuse_urls

_NOT_A_NAME = {"checkpoints", "checkpoint", "ckpts", "ckpt"}


@dataclass(frozen=True)
class ReportConfig:
    """The run, and what to write."""

    run: Annotated[str, Argument(is_positional=True)]
    """Run directory, with attempts.jsonl."""
    html: str | None = None
    """Write a page with the timeline of the run: one file without references to others."""
    json: str | None = None
    """Write the figures and the attempts as JSON."""
    metrics: str | None = None
    """The run's --metrics-jsonl file, for the curves (default: metrics.jsonl in the run directory, if it is there
    and has losses)."""
    name: str | None = None
    """Name of the run on the page (default: its --wandb-exp-name, else the name of the directory, or of the one above a
    directory that is called checkpoints)."""


def history_of(config: ReportConfig, directory: Path) -> History | None:
    """The metrics of ``--metrics``, otherwise of the file with the usual name in the run directory, if it is there and
    has losses."""
    if config.metrics is not None:
        return read_history(config.metrics)
    with suppress(DataError):
        return read_history(str(directory / "metrics.jsonl"))
    return None


def name_of(directory: Path, history: History | None) -> str:
    """The name of a run that has none on the command line."""
    given = None if history is None else history.flag("logging", "wandb_exp_name", None)
    directory = directory.resolve()
    above = directory.parent.name if directory.name in _NOT_A_NAME else ""
    return str(given or above or directory.name)


def build_report(config: ReportConfig) -> Report:
    """Read the records; raises :class:`UserError`."""
    refuse_urls({"RUN": config.run, "--metrics": config.metrics}, "copy the files to a local directory")
    refuse_urls({"--html": config.html, "--json": config.json}, "name a local file")
    directory = Path(config.run)
    run = read_run(directory)
    history = history_of(config, directory)
    return Report(config.name or name_of(directory, history), run, summarize(run), history)


def write_report(config: ReportConfig) -> None:
    report = build_report(config)
    if config.json is not None:
        attempts = [{**asdict(attempt), "hosts": len(attempt.hosts)} for attempt in report.run.attempts]
        figures = {**to_json(report.summary), "records": attempts}
        write_json(config.json, figures)
    if config.html is not None:
        write_file("--html", config.html, report_page(report))
    print(report_text(report))


main = partial(run_tool, ReportConfig, write_report, __doc__)


# --- the page ------------------------------------------------------------------------------------------------

_MOST_CARDS = 20
_SHORTEST_FOR_ADVICE_S = 3600.0
"""The save interval of a shorter run does not matter."""
_INTERVAL_NAMES = {"own": "this run", "young": "Young", "nvidia": "NVIDIA", "daly": "best (Daly)"}


def report_page(report: Report) -> str:
    training = ""
    if report.history is not None:
        newest = "The newest weights: what a resume trained again is shown once."
        training = html.section("Training", training_charts(report.history, report.run.attempts), note=newest)
    footer = f"State of {date(report.end)} UTC. Effective time: seconds of iterations that were kept, over wall time."
    used = report.summary.time.seconds
    times = [
        html.Share(name, EXPLANATIONS[name][0], used[name], duration(used[name]), EXPLANATIONS[name][1])
        for name in (*DURING, *BEFORE, *AFTER)
    ]
    parts = [
        html.tiles(_tiles(report)),
        training,
        html.section("Where the time went", html.shares(times)),
        html.section("Timeline", timeline(report), note="Wall time from the start of the first attempt."),
        _save_interval(report),
        _failures(report),
        html.section("Attempts", _attempts_table(report)),
    ]
    return html.page(report.name, _subtitle(report), [part for part in parts if part], footer=footer)


def _subtitle(report: Report) -> str:
    last = report.run.attempts[-1]
    hosts = f" on {len(last.hosts)} host{'s' * (len(last.hosts) != 1)}" if last.hosts else ""
    state = {"running": "running", "complete": "complete"}.get(last.outcome, f"last attempt {last.outcome}")
    ranks = f"{last.world_size:,} rank{'s' * (last.world_size != 1)}{hosts}"
    dates = f"{date(report.start)} to {date(report.end)} UTC"
    return f"{dates} · {ranks} · iteration {report.summary.iterations:,} · {state}"


def _losses(report: Report) -> tuple[str, str]:
    """The last loss, and what is said beside it; empty without metrics of the run."""
    if report.history is None:
        return "", ""
    training, validation = (report.history.curve(key) for key in ("lm_loss", "validation_loss"))
    last = training[-1:] or validation[-1:]
    beside = f"validation {validation[-1][1]:.4f}" if training and validation else "" if training else "validation"
    return f"{last[0][1]:.4f}", beside


def _tiles(report: Report) -> list[html.Tile]:
    summary = report.summary
    share = summary.time.effective_time
    lost = summary.time.seconds["lost"]
    loss, beside = _losses(report)
    found = [html.Tile("loss", loss, beside, is_main=True)] if loss else []
    found += [
        html.Tile("effective time", "-" if share is None else percentage(share), "of the wall time", is_main=not loss),
        html.Tile("wall time", duration(summary.time.wall_s), f"in {html.plural(summary.num_attempts, 'attempt')}"),
        html.Tile(
            "failures",
            f"{summary.interruptions:,}",
            "none so far" if summary.mtbf_s is None else f"one in {duration(summary.mtbf_s)}{_bounds(summary)}",
        ),
    ]
    if summary.interruptions or summary.lost_iterations:
        found.append(html.Tile("lost work", f"{summary.lost_iterations:,}", f"iterations, {duration(lost)}"))
    if summary.restart_s is not None:
        label = "failure to first step" if summary.interruptions else "start to first step"
        found.append(html.Tile(label, duration(summary.restart_s), "mean"))
    if summary.save_s is not None:
        found.append(
            html.Tile("blocked by a save", duration(summary.save_s), f"mean of {html.plural(summary.saves, 'save')}")
        )
    return found


def _bounds(summary: RunSummary) -> str:
    least, most = summary.mtbf_bounds_s
    return f" ({duration(least)} to {duration(most)})" if summary.interruptions >= 3 else ""


# --- save interval -------------------------------------------------------------------------------------------


def _save_interval(report: Report) -> str:
    # Daly's formula: the interval that loses least to saves (C) and to repeated work after failures (M, R).
    summary, intervals = report.summary, report.summary.intervals
    if intervals is None or summary.time.wall_s < _SHORTEST_FOR_ADVICE_S:
        return ""
    costs = intervals.costs
    source = (
        "No failure yet: M follows from Llama 3's rate, one interruption per 50,700 GPU-hours."
        if summary.has_assumed_mtbf
        else "From this run's own numbers."
    )
    note = (
        f"{source} M = {duration(costs.mtbf_s)} between failures, R = {duration(costs.restart_s)} from a failure to "
        f"the first step, C = {duration(costs.save_s)} blocked by a save. Effective times by Daly's formula."
    )
    rows, best = [], intervals.share(intervals.daly_s)
    for name, seconds in interval_choices(intervals):
        if seconds is None:
            continue
        iterations = in_iterations(seconds, summary.iteration_s)
        share = intervals.share(seconds)
        rows.append(
            [
                html.Cell(_INTERVAL_NAMES[name]),
                html.number(duration(seconds), seconds),
                html.number("" if iterations is None else f"{iterations:,}", iterations),
                html.number(percentage(share), share),
            ]
        )
    headings = ("", "training between two saves", "iterations", "effective time")
    advice = ""
    if intervals.own_s is not None:
        gain = best - intervals.share(intervals.own_s)
        change = "more often" if intervals.own_s > intervals.daly_s else "less often"
        advice = (
            "The save interval is close to the best one."
            if gain < 0.002
            else f"Saving {change}, every {duration(intervals.daly_s)}, would gain {100 * gain:.1f} % of the wall time."
        )
    return html.section(
        "Save interval",
        html.paragraph(advice),
        interval_chart(intervals),
        html.table(headings, rows, is_sortable=False),
        note=note,
    )


# --- failures and attempts -----------------------------------------------------------------------------------


def _failures(report: Report) -> str:
    failed = [attempt for attempt in report.run.attempts if attempt.is_failure]
    if not failed:
        return ""
    causes = [
        [html.Cell(cause.replace("_", " ")), html.number(f"{count:,}", count)]
        for cause, count in report.summary.causes.items()
    ]
    parts = [html.table(("cause", "failures"), causes)]
    if report.summary.hosts:
        rows = [
            [
                html.Cell(record.host),
                html.number(f"{record.failures:,}", record.failures),
                html.Cell(", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in record.causes.items())),
                html.Cell(f"{date(record.last)} UTC", record.last),
            ]
            for record in report.summary.hosts[:12]
        ]
        parts.append(html.table(("worst hosts", "failures", "causes", "last"), rows))
    listed = html.cards([_card(report, attempt) for attempt in failed[: -_MOST_CARDS - 1 : -1]])
    note = f"The last {_MOST_CARDS} of {len(failed):,}, the newest first." if len(failed) > _MOST_CARDS else ""
    return html.section("Failures", html.columns(*parts), html.paragraph(note, "note") if note else "", listed)


def _card(report: Report, attempt: Attempt) -> html.Card:
    found: Mapping[str, Any] = report.run.failures.get(attempt.attempt, {})
    # What the tip of the chart says first, then what it cost, what was raised, and what to do.
    heading, *rest = fault_tip(report, attempt).split("\n")
    lost = attempt.second("lost") + attempt.second("hang")
    facts = [*rest, f"section {found['section']}" if isinstance(found.get("section"), str) else ""]
    facts.append(f"cost {duration(lost)} of lost work and waiting" if lost else "")
    message, stack = found.get("message"), found.get("stack")
    remedy = found.get("advice", advice(cause_of(attempt, report.run)))
    sentences = [
        ", ".join(fact for fact in facts if fact),
        message if isinstance(message, str) else "",
        f"→ {remedy}",
    ]
    return html.Card(heading, sentences, stack if isinstance(stack, str) else "")


def _attempts_table(report: Report) -> str:
    headings = ("attempt", "start (UTC)", "wall time", "end", "cause", "iterations", "saves")
    classes = ("kept", "lost", "start", "hang")
    rows = []
    for attempt in report.run.attempts:
        first, last = attempt.first_iteration, attempt.last_iteration
        iterations = "" if first is None or last is None else f"{first:,} → {last:,}"
        cause = cause_of(attempt, report.run).replace("_", " ") if attempt.is_failure else ""
        mood: html.Mood = "bad" if attempt.is_failure else "warn" if attempt.outcome == "stopped" else "good"
        times = [attempt.second("step"), attempt.second("lost")]
        times += [attempt.second("start") + attempt.second("load"), attempt.second("hang")]
        rows.append(
            [
                html.number(str(attempt.attempt), attempt.attempt),
                html.Cell(date(attempt.start), attempt.start),
                html.number(duration(attempt.wall_s), attempt.wall_s),
                html.Cell(attempt.outcome, mood=mood),
                html.Cell(cause),
                html.number(iterations, last),
                html.number(f"{attempt.saves:,}", attempt.saves),
                *[html.number(duration(seconds) if seconds else "", seconds) for seconds in times],
            ]
        )
    return html.table((*headings, *classes), rows)


# --- text ----------------------------------------------------------------------------------------------------


def report_text(report: Report) -> str:
    """The figures for a terminal."""
    summary = report.summary
    share = summary.time.effective_time
    lines = [report.name, _subtitle(report), ""]
    loss, beside = _losses(report)
    if loss:
        lines.append(_line("loss", f"{loss} ({beside})" if beside else loss))
    lines.append(_line("effective time", "-" if share is None else percentage(share)))
    lines.append(
        _line("wall time", f"{duration(summary.time.wall_s)} in {html.plural(summary.num_attempts, 'attempt')}")
    )
    wall = summary.time.wall_s or 1.0  # of a run that has just begun
    for name in TIME_CLASSES:
        seconds = summary.time.seconds[name]
        if seconds > 0:
            lines.append(f"  {EXPLANATIONS[name][0]:<18}{duration(seconds):>10}  {100 * seconds / wall:5.1f} %")
    mtbf = "none" if summary.mtbf_s is None else f"one in {duration(summary.mtbf_s)}{_bounds(summary)}"
    causes = ", ".join(f"{cause} {count}" for cause, count in summary.causes.items())
    lines.append(_line("failures", f"{summary.interruptions}: {mtbf}" + (f" ({causes})" if causes else "")))
    lines.append(_line("lost iterations", f"{summary.lost_iterations:,} of {summary.iterations:,}"))
    for record in summary.hosts[:5]:
        lines.append(_line(f"host {record.host}", html.plural(record.failures, "failure")))
    if summary.intervals is not None and summary.time.wall_s >= _SHORTEST_FOR_ADVICE_S:
        for choice, interval_s in interval_choices(summary.intervals):
            if interval_s is not None:
                iterations = in_iterations(interval_s, summary.iteration_s)
                gives = f"{iterations:,} iterations, " if iterations is not None else ""
                gives += f"effective time {percentage(summary.intervals.share(interval_s))}"
                lines.append(_line(f"save, {choice}", f"every {duration(interval_s)} ({gives})"))
        if summary.has_assumed_mtbf:
            lines.append("  (no failure yet: with Llama 3's rate of failures per GPU-hour)")
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"{name:<20}{value}"
