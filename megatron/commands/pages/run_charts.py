"""The charts of the report of a run: the timeline, and the effective time over the save interval."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from megatron.commands.pages.run_charts import alarm_legend, alarm_marks, alarms
from megatron.metrics.jsonl import History
from megatron.operation.attempts import Attempt, TimeClass, gaps
from megatron.operation.run_summary import RecordedRun, RunSummary, SaveIntervals, cause_of, host_of
from megatron.reports import svg
from megatron.reports.page import Lane, lanes, legend, plural
from megatron.reports.svg import Point, Scale, duration, percentage

EXPLANATIONS: Mapping[TimeClass, tuple[str, str]] = {
    "step": ("training", "iterations that were kept"),
    "evaluation": ("evaluation", ""),
    "data": ("data", "waiting for data"),
    "save": ("saves", "training blocked by a save"),
    "start": ("start", "processes, groups and model"),
    "load": ("load", "reading the checkpoint"),
    "lost": ("lost work", "iterations that were repeated or dropped"),
    "hang": ("hang", "from the last sign of life to the decision"),
    "idle": ("idle", "between and at the end of attempts, and spare ranks"),
}
BEFORE: tuple[TimeClass, ...] = ("start", "load")
DURING: tuple[TimeClass, ...] = ("step", "evaluation", "data", "save")
AFTER: tuple[TimeClass, ...] = ("lost", "hang", "idle")
_BARS, _LOSS, _SHARE, _CURVE = 44.0, 150.0, 72.0, 190.0
"""Heights of charts, in pixels."""
_MOST_TRIANGLES, _MOST_TICKS, _MOST_DOTS = 80, 400, 60


@dataclass(frozen=True)
class Curves:
    """Losses over wall time: (seconds since the epoch, loss)."""

    training: Sequence[Point] = ()
    validation: Sequence[Point] = ()


@dataclass(frozen=True)
class Report:
    """What a report shows."""

    name: str
    run: RecordedRun
    summary: RunSummary
    curves: Curves
    history: History | None = None
    """The records of the metrics file."""

    @property
    def start(self) -> float:
        return self.run.attempts[0].start

    @property
    def end(self) -> float:
        return max(attempt.end for attempt in self.run.attempts)

    @property
    def time(self) -> Scale:
        return Scale(self.start, max(self.end, self.start + 1e-3))


def date(epoch: float) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%d %H:%M")


def timeline(report: Report) -> str:
    charts = [Lane("attempts", _bars(report))]
    if any(attempt.is_failure for attempt in report.run.attempts):
        charts.insert(0, Lane("failures", _fault_marks(report)))
    if report.summary.saves:
        charts.append(Lane("saves", _saves(report)))
    if report.curves.training or report.curves.validation:
        charts.append(_loss_lane(report))
    unusual = [] if report.history is None else alarms(report.history)
    places = [(report.time.percent(alarm.time), alarm) for alarm in unusual if alarm.time is not None]
    if places:
        charts.append(Lane("alarms", alarm_marks(places)))
    charts += [_share_lane(report), Lane("", _time_axis(report))]
    used = [name for name in (*BEFORE, *DURING, *AFTER) if report.summary.time.seconds[name] > 0]
    return lanes(charts) + legend((name, EXPLANATIONS[name][0]) for name in used) + alarm_legend(unusual)


def _fault_marks(report: Report) -> str:
    failed = [attempt for attempt in report.run.attempts if attempt.is_failure]
    marks = []
    for attempt in failed:
        place, tip = report.time.percent(attempt.end), fault_tip(report, attempt)
        is_rare = len(failed) <= _MOST_TRIANGLES
        marks.append(svg.marker(place, 12, "fault", tip) if is_rare else svg.vertical(place, 0, 12, "fault line", tip))
    return svg.svg(13, *marks, label=plural(len(failed), "failure"))


def fault_tip(report: Report, attempt: Attempt) -> str:
    host, found = host_of(attempt, report.run), report.run.failures.get(attempt.attempt, {})
    rank = attempt.rank if attempt.rank is not None else found.get("rank")
    place = " ".join(
        text for text in (f"rank {rank}" if rank is not None else "", f"on {host}" if host else "") if text
    )
    lines = [f"attempt {attempt.attempt}: {cause_of(attempt, report.run).replace('_', ' ')}", place]
    lines.append(
        f"{date(attempt.end)} UTC" + (f", iteration {attempt.last_iteration:,}" if attempt.last_iteration else "")
    )
    return "\n".join(line for line in lines if line)


def _bars(report: Report) -> str:
    shapes: list[str] = []
    for attempt in report.run.attempts:
        shapes += _attempt_shapes(attempt, report.time)
    return svg.svg(_BARS, *shapes, label="attempts, coloured by what their time was used for")


def _attempt_shapes(attempt: Attempt, time: Scale) -> list[str]:
    """Areas are seconds: start and load, then training with its evaluations, waits and saves, which alternate and are
    therefore stacked, then what was lost, and the end."""
    shapes, now = [], attempt.start

    def tip(name: TimeClass) -> str:
        seconds = attempt.second(name)
        share = f" ({100 * seconds / attempt.wall_s:.1f} %)" if attempt.wall_s else ""
        return f"attempt {attempt.attempt}: {EXPLANATIONS[name][0]} {duration(seconds)}{share}\n{_summary(attempt)}"

    def full(names: Sequence[TimeClass]) -> None:
        nonlocal now
        for name in names:
            seconds = attempt.second(name)
            if seconds > 0:
                width = time.width(now, now + seconds)
                shapes.append(svg.rect(time.percent(now), 0, width, _BARS, name, tip(name)))
                now += seconds

    full(BEFORE)
    during = sum(attempt.second(name) for name in DURING)
    top = 0.0
    for name in reversed(DURING):
        height = _BARS * attempt.second(name) / during if during else 0.0
        if height > 0:
            width = time.width(now, now + during)
            shapes.append(svg.rect(time.percent(now), top, width, height, name, tip(name)))
            top += height
    now += during
    full(AFTER)
    return shapes


def _summary(attempt: Attempt) -> str:
    first, last = attempt.first_iteration, attempt.last_iteration
    iterations = f", iterations {first:,} to {last:,}" if first is not None and last is not None else ""
    return f"{date(attempt.start)} UTC, {duration(attempt.wall_s)}, {attempt.outcome}{iterations}"


def _saves(report: Report) -> str:
    commits = [
        (attempt.start + seconds, iteration)
        for attempt in report.run.attempts
        for seconds, iteration in attempt.commits
    ]
    step = math.ceil(len(commits) / _MOST_TICKS)
    ticks = [
        svg.vertical(report.time.percent(moment), 1, 11, "commit", f"checkpoint of iteration {iteration:,}")
        for moment, iteration in commits[:: step or 1]
    ]
    return svg.svg(12, *ticks, label=plural(len(commits), "checkpoint"))


def _loss_lane(report: Report) -> Lane:
    training = svg.thin([point for point in report.curves.training if math.isfinite(point[1])])
    validation = [point for point in report.curves.validation if math.isfinite(point[1])]
    values = sorted(value for _, value in (*training.means, *validation))
    # The first losses of a run from random weights would flatten the rest.
    low, high = values[0], values[math.ceil(0.98 * (len(values) - 1))]
    margin = 0.06 * (high - low) or 0.5
    scale = Scale(low - margin, high + margin)
    ticks = svg.nice_ticks(scale.low, scale.high, 4)
    shapes = [svg.horizontal(scale.pixel(tick, _LOSS), "grid") for tick in ticks]
    shapes.append(svg.band(training.extremes, report.time, scale, _LOSS, "band"))
    starts = [attempt.start for attempt in report.run.attempts]
    shapes.append(svg.curve(interrupted(training.means, starts), report.time, scale, _LOSS, "line"))
    step = math.ceil(len(validation) / _MOST_DOTS) or 1
    shapes += [
        svg.dot(report.time.percent(moment), scale.pixel(loss, _LOSS), 3.5, "own", f"validation loss {loss:.4f}")
        for moment, loss in validation[::-step]
        if loss <= scale.high
    ]
    chart = svg.svg(_LOSS, *shapes, label="loss over wall time")
    name = "loss, and validation loss (dots)" if validation else "loss"
    return Lane(name, chart, [(scale.pixel(tick, _LOSS), f"{tick:.3g}") for tick in ticks])


def interrupted(points: Sequence[Point], moments: Sequence[float]) -> list[Point]:
    """The curve with an interruption at each of ``moments``, which increase."""
    found: list[Point] = []
    for point in points:
        if found and bisect.bisect(moments, found[-1][0]) < bisect.bisect(moments, point[0]):
            found.append((point[0], math.nan))
        found.append(point)
    return found


_PARTS = [(2 * index + 1) / 12**2 for index in range(12)]


def effective_time_points(attempts: Sequence[Attempt]) -> list[Point]:
    """(seconds since the epoch, effective time so far), at the corners of the curve."""
    points: list[Point] = []
    wall, kept = 0.0, 0.0
    for attempt, gap in zip(attempts, [*gaps(attempts), 0.0]):
        now = attempt.start
        during = sum(attempt.second(name) for name in DURING)
        spans = (
            (sum(attempt.second(name) for name in BEFORE), 0.0),
            # Short ones first, where the curve is steep.
            *[(during * part, attempt.second("step") * part) for part in _PARTS],
            (sum(attempt.second(name) for name in AFTER), 0.0),
            (gap, 0.0),
        )
        for seconds, step in spans:
            now, wall, kept = now + seconds, wall + seconds, kept + step
            if wall > 0 and seconds > 0:
                points.append((now, kept / wall))
    return points


def _share_lane(report: Report) -> Lane:
    points = effective_time_points(report.run.attempts)
    settled = [share for moment, share in points if report.time.fraction(moment) > 0.05] or [1.0]
    low = min(0.9, max(0.0, math.floor(10.0 * min(settled) - 0.3) / 10.0))
    scale = Scale(low, 1.0)
    ticks = [low, (1.0 + low) / 2.0, 1.0]
    shapes = [svg.horizontal(scale.pixel(tick, _SHARE), "grid") for tick in ticks]
    shapes += [
        svg.area(points, report.time, scale, _SHARE, "area"),
        svg.curve(points, report.time, scale, _SHARE, "line"),
    ]
    chart = svg.svg(_SHARE, *shapes, label="effective time so far")
    return Lane("effective time", chart, [(scale.pixel(tick, _SHARE), f"{100 * tick:.0f} %") for tick in ticks])


def _time_axis(report: Report) -> str:
    length = report.end - report.start
    shapes = [svg.horizontal(1, "axis")]
    for index, tick in enumerate(svg.duration_ticks(length)):
        x = report.time.percent(report.start + tick)
        anchor = "start" if tick == 0 else "end" if tick > 0.97 * length else "middle"
        css = "sparse" if index % 2 else ""
        shapes += [svg.vertical(x, 1, 5, "axis"), svg.text(x, 18, svg.tick_label(tick), css, anchor)]
    return svg.svg(22, *shapes)


def interval_chart(intervals: SaveIntervals) -> str:
    """Effective time over the save interval, with the run's own interval and the best one."""
    best = intervals.daly_s
    own = intervals.own_s or best
    x = Scale(min(best, own) / 6.0, max(best, own) * 6.0, is_log=True)
    places = [x.low * (x.high / x.low) ** (index / 120.0) for index in range(121)]
    points = [(place, intervals.share(place)) for place in places]
    shares_shown = [share for _, share in points]
    y = Scale(max(0.0, min(shares_shown) - 0.01), min(1.0, max(shares_shown) + 0.02))
    y_ticks, x_ticks = svg.nice_ticks(y.low, y.high, 4), _interval_ticks(x.low, x.high)
    shapes = [svg.horizontal(y.pixel(tick, _CURVE), "grid") for tick in y_ticks]
    shapes += [svg.area(points, x, y, _CURVE, "area"), svg.curve(points, x, y, _CURVE, "line")]
    # The labels of two near marks point away from each other; others begin at their mark, off the labels of the axis.
    left = "end" if abs(x.fraction(own) - x.fraction(best)) < 0.4 else "start"
    marks = [("best", best, "point", left if own > best else "start")]
    if intervals.own_s is not None:
        marks.append(("this run", own, "own", "start" if own > best else left))
    for name, seconds, css, anchor in marks:
        top = y.pixel(intervals.share(seconds), _CURVE)
        shapes.append(svg.vertical(x.percent(seconds), top, _CURVE, "reference"))
        tip = f"{name}: {duration(seconds)}, {percentage(intervals.share(seconds))}"
        shapes.append(svg.dot(x.percent(seconds), top, 6, css, tip))
        shapes.append(svg.text(x.percent(seconds), top - 12, f"{name}: {duration(seconds)}", "strong", anchor))
    axis = [svg.horizontal(1, "axis")]
    for index, tick in enumerate(x_ticks):
        css = "sparse" if index % 2 else ""
        axis += [svg.vertical(x.percent(tick), 1, 5, "axis"), svg.text(x.percent(tick), 18, svg.tick_label(tick), css)]
    labels = [(y.pixel(tick, _CURVE), f"{100 * tick:.3g} %") for tick in y_ticks]
    chart = svg.svg(_CURVE, *shapes, label="effective time over the save interval")
    return lanes([Lane("effective time", chart, labels), Lane("", svg.svg(22, *axis))])


def _interval_ticks(low: float, high: float) -> list[float]:
    round_ones = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000]
    found = [float(seconds) for seconds in round_ones if low <= seconds <= high]
    return found or [svg.nice_ticks(low, high, 2)[0]]
