"""The report of a run as a page and as text."""

from collections.abc import Mapping
from typing import Any

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
from megatron.operation.attempts import TIME_CLASSES, Attempt
from megatron.operation.causes import advice
from megatron.operation.run_summary import RunSummary, cause_of, in_iterations, interval_choices
from megatron.reports.page import (
    Card,
    Cell,
    Mood,
    Share,
    Tile,
    cards,
    columns,
    number,
    page,
    paragraph,
    plural,
    section,
    shares,
    table,
    tiles,
)
from megatron.reports.svg import duration, percentage

_MOODS: Mapping[str, Mood] = {"complete": "good", "running": "good", "stopped": "warn", "failed": "bad", "lost": "bad"}
_MOST_CARDS = 20
_SHORTEST_FOR_ADVICE_S = 3600.0
"""The save interval of a shorter run does not matter."""
_INTERVAL_NAMES = {
    "own": "this run",
    "young": "Young",
    "nvidia": "NVIDIA",
    "daly": "best (Daly)",
}


def report_page(report: Report) -> str:
    """The HTML file."""
    parts = [
        tiles(_tiles(report)),
        _training(report),
        section("Where the time went", shares(_shares(report.summary))),
        section("Timeline", timeline(report), note="Wall time from the start of the first attempt."),
        _save_interval(report),
        _failures(report),
        section("Attempts", _attempts_table(report)),
    ]
    return page(report.name, _subtitle(report), [part for part in parts if part], footer=_footer(report))


def _training(report: Report) -> str:
    if report.history is None:
        return ""
    return section(
        "Training",
        training_charts(report.history, report.run.attempts),
        note="The newest weights: what a resume trained again is shown once.",
    )


def _subtitle(report: Report) -> str:
    last = report.run.attempts[-1]
    hosts = f" on {len(last.hosts)} host{'s' * (len(last.hosts) != 1)}" if last.hosts else ""
    state = {"running": "running", "complete": "complete"}.get(last.outcome, f"last attempt {last.outcome}")
    ranks = f"{last.world_size:,} rank{'s' * (last.world_size != 1)}{hosts}"
    dates = f"{date(report.start)} to {date(report.end)} UTC"
    return f"{dates} · {ranks} · iteration {report.summary.iterations:,} · {state}"


def _footer(report: Report) -> str:
    return f"State of {date(report.end)} UTC. Effective time: seconds of iterations that were kept, over wall time."


def _losses(report: Report) -> tuple[str, str]:
    """The last loss, and what is said beside it; empty without metrics of the run."""
    if report.history is None:
        return "", ""
    training, validation = (report.history.curve(key) for key in ("lm_loss", "validation_loss"))
    last = training[-1:] or validation[-1:]
    beside = f"validation {validation[-1][1]:.4f}" if training and validation else "" if training else "validation"
    return f"{last[0][1]:.4f}", beside


def _tiles(report: Report) -> list[Tile]:
    summary = report.summary
    share = summary.time.effective_time
    lost = summary.time.seconds["lost"]
    loss, beside = _losses(report)
    found = [Tile("loss", loss, beside, is_main=True)] if loss else []
    found += [
        Tile("effective time", "-" if share is None else percentage(share), "of the wall time", is_main=not loss),
        Tile("wall time", duration(summary.time.wall_s), f"in {plural(summary.num_attempts, 'attempt')}"),
        Tile(
            "failures",
            f"{summary.interruptions:,}",
            "none so far" if summary.mtbf_s is None else f"one in {duration(summary.mtbf_s)}{_bounds(summary)}",
        ),
    ]
    if summary.interruptions or summary.lost_iterations:
        found.append(Tile("lost work", f"{summary.lost_iterations:,}", f"iterations, {duration(lost)}"))
    if summary.restart_s is not None:
        label = "failure to first step" if summary.interruptions else "start to first step"
        found.append(Tile(label, duration(summary.restart_s), "mean"))
    if summary.save_s is not None:
        found.append(Tile("blocked by a save", duration(summary.save_s), f"mean of {plural(summary.saves, 'save')}"))
    return found


def _bounds(summary: RunSummary) -> str:
    least, most = summary.mtbf_bounds_s
    return f" ({duration(least)} to {duration(most)})" if summary.interruptions >= 3 else ""


def _shares(summary: RunSummary) -> list[Share]:
    return [
        Share(name, EXPLANATIONS[name][0], summary.time.seconds[name], duration(summary.time.seconds[name]), text)
        for name in (*DURING, *BEFORE, *AFTER)
        for text in (EXPLANATIONS[name][1],)
    ]


# --- save interval -------------------------------------------------------------------------------------------


def _save_interval(report: Report) -> str:
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
                Cell(_INTERVAL_NAMES[name]),
                number(duration(seconds), seconds),
                number("" if iterations is None else f"{iterations:,}", iterations),
                number(percentage(share), share),
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
    return section(
        "Save interval",
        paragraph(advice),
        interval_chart(intervals),
        table(headings, rows, is_sortable=False),
        note=note,
    )


# --- failures and attempts -----------------------------------------------------------------------------------


def _failures(report: Report) -> str:
    failed = [attempt for attempt in report.run.attempts if attempt.is_failure]
    if not failed:
        return ""
    causes = [
        [Cell(cause.replace("_", " ")), number(f"{count:,}", count)] for cause, count in report.summary.causes.items()
    ]
    parts = [table(("cause", "failures"), causes)]
    if report.summary.hosts:
        rows = [
            [
                Cell(record.host),
                number(f"{record.failures:,}", record.failures),
                Cell(", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in record.causes.items())),
                Cell(f"{date(record.last)} UTC", record.last),
            ]
            for record in report.summary.hosts[:12]
        ]
        parts.append(table(("worst hosts", "failures", "causes", "last"), rows))
    listed = cards([_card(report, attempt) for attempt in failed[: -_MOST_CARDS - 1 : -1]])
    note = f"The last {_MOST_CARDS} of {len(failed):,}, the newest first." if len(failed) > _MOST_CARDS else ""
    return section("Failures", columns(*parts), paragraph(note, "note") if note else "", listed)


def _card(report: Report, attempt: Attempt) -> Card:
    found: Mapping[str, Any] = report.run.failures.get(attempt.attempt, {})
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
    return Card(heading, sentences, stack if isinstance(stack, str) else "")


def _attempts_table(report: Report) -> str:
    headings = (
        "attempt",
        "start (UTC)",
        "wall time",
        "end",
        "cause",
        "iterations",
        "saves",
        "kept",
        "lost",
        "start",
        "hang",
    )
    rows = []
    for attempt in report.run.attempts:
        first, last = attempt.first_iteration, attempt.last_iteration
        iterations = "" if first is None or last is None else f"{first:,} → {last:,}"
        cause = cause_of(attempt, report.run).replace("_", " ") if attempt.is_failure else ""
        times = [attempt.second("step"), attempt.second("lost")]
        times += [attempt.second("start") + attempt.second("load"), attempt.second("hang")]
        rows.append(
            [
                number(str(attempt.attempt), attempt.attempt),
                Cell(date(attempt.start), attempt.start),
                number(duration(attempt.wall_s), attempt.wall_s),
                Cell(attempt.outcome, mood=_MOODS[attempt.outcome]),
                Cell(cause),
                number(iterations, last),
                number(f"{attempt.saves:,}", attempt.saves),
                *[number(duration(seconds) if seconds else "", seconds) for seconds in times],
            ]
        )
    return table(headings, rows)


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
    lines.append(_line("wall time", f"{duration(summary.time.wall_s)} in {plural(summary.num_attempts, 'attempt')}"))
    wall = summary.time.wall_s or 1.0
    for name in TIME_CLASSES:
        seconds = summary.time.seconds[name]
        if seconds > 0:
            lines.append(f"  {EXPLANATIONS[name][0]:<18}{duration(seconds):>10}  {100 * seconds / wall:5.1f} %")
    mtbf = "none" if summary.mtbf_s is None else f"one in {duration(summary.mtbf_s)}{_bounds(summary)}"
    causes = ", ".join(f"{cause} {count}" for cause, count in summary.causes.items())
    lines.append(_line("failures", f"{summary.interruptions}: {mtbf}" + (f" ({causes})" if causes else "")))
    lines.append(_line("lost iterations", f"{summary.lost_iterations:,} of {summary.iterations:,}"))
    for record in summary.hosts[:5]:
        lines.append(_line(f"host {record.host}", plural(record.failures, "failure")))
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
