"""The charts of the report of a run: the curves of its training, its timeline, and the effective time over the save
interval."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from megatron.metrics.jsonl import History, Record
from megatron.operation.attempts import Attempt, TimeClass, gaps
from megatron.operation.run_summary import RecordedRun, RunSummary, SaveIntervals, cause_of, host_of
from megatron.reports import svg
from megatron.reports.page import Lane, lanes, legend, plural
from megatron.reports.svg import Axis, Point, Scale, Thinned, duration, horizontal_axis, percentage

_TALL, _LOW, _MARKS = 190.0, 84.0, 13.0
"""Heights of charts, in pixels."""
_MOST_DOTS, _MOST_MARKS = 60, 400
_SLOWEST = "operation/slowest_rank_ratio"
_COLOURS = {"spike": "orange", "skipped update": "violet", "slow rank": "blue", "failure": "red"}


@dataclass(frozen=True)
class Alarm:
    """Something that a person should see."""

    kind: str
    """A key of the colours."""
    iteration: int
    time: float | None
    """Seconds since the epoch."""
    text: str


def alarms(history: History, attempts: Sequence[Attempt] = ()) -> list[Alarm]:
    """Spikes, skipped updates, slow ranks and failed attempts, by iteration."""
    limit = float(history.flag("operation", "straggler_threshold", 0.0) or math.inf)
    found = [alarm for record in history.iterations for alarm in _alarms_of(record, limit)]
    for attempt in attempts:
        if attempt.is_failure and attempt.last_iteration is not None:
            text = f"attempt {attempt.attempt} failed"
            found.append(Alarm("failure", attempt.last_iteration, attempt.end, text))
    return sorted(found, key=lambda alarm: alarm.iteration)


def _alarms_of(record: Record, limit: float) -> list[Alarm]:
    def number(key: str) -> float:
        value = record.get(key)
        return float(value) if isinstance(value, int | float) else 0.0

    kinds = []
    # A record may have several.
    if number("spike"):
        kinds.append(("spike", f"spike {number('spike'):.3g}"))
    if number("skipped"):
        kinds.append(("skipped update", f"{number('skipped'):.0f} updates skipped"))
    if number(_SLOWEST) > limit:
        kinds.append(("slow rank", f"slowest rank {number(_SLOWEST):.2f} times the median"))
    iteration, time = int(record["iteration"]), number("time") or None
    return [Alarm(kind, iteration, time, f"{text}\niteration {iteration:,}") for kind, text in kinds]


def alarm_marks(found: Sequence[tuple[str, Alarm]]) -> str:
    """A lane of marks at (position, alarm)."""
    step = math.ceil(len(found) / _MOST_MARKS) or 1
    shapes = [svg.rect(place, 1, "3px", _MARKS - 2, _COLOURS[alarm.kind], alarm.text) for place, alarm in found[::step]]
    return svg.svg(_MARKS, *shapes, label=f"{len(found):,} alarms")


def alarm_legend(found: Sequence[Alarm]) -> str:
    used = {alarm.kind for alarm in found}
    return legend((colour, kind) for kind, colour in _COLOURS.items() if kind in used)


def training_charts(history: History, attempts: Sequence[Attempt]) -> str:
    """All curves over one axis."""
    last = max((history.place(record) for record in [*history.iterations, *history.evaluations]), default=1.0)
    axis = Scale(0.0, max(last, 1.0))
    training = svg.thin(history.curve("lm_loss"))
    curves = (
        _loss_lane(training, training.means, history.curve("validation_loss"), axis, _TALL, "tokens"),
        _curve(history, axis, "learning_rate", "learning rate"),
        _curve(history, axis, "grad_norm", "gradient norm"),
        _curve(history, axis, "tokens_per_s_per_gpu", "tokens/s per GPU", from_zero=True),
        _curve(history, axis, "mfu", "MFU", from_zero=True, factor=100.0, unit=" %"),
        _curve(history, axis, "peak_memory_gib", "peak GPU memory of rank 0", from_zero=True, unit=" GiB"),
    )
    charts = [lane for lane in curves if lane is not None]
    found = alarms(history, attempts)
    if found:
        places = [(axis.percent(history.place({"iteration": alarm.iteration})), alarm) for alarm in found]
        charts.append(Lane("alarms", alarm_marks(places)))
    labels = [(tick, svg.short(tick, 4)) for tick in svg.nice_ticks(axis.low, axis.high, 6)]
    labels[-1] = labels[-1][0], f"{labels[-1][1]} {'tokens' if history.tokens is not None else 'iterations'}"
    charts.append(Lane("", horizontal_axis(Axis(axis, labels, ""))))
    return lanes(charts) + alarm_legend(found)


def _loss_lane(
    training: Thinned, line: Sequence[Point], validation: Sequence[Point], axis: Scale, height: float, over: str
) -> Lane:
    """Losses ``over`` tokens or wall time: a ``line`` of training within its extremes, and dots of validation."""
    values = sorted(value for _, value in (*training.means, *validation))
    # The first losses of a run from random weights would flatten the rest.
    scale = _padded(values[0], values[math.ceil(0.98 * (len(values) - 1))])
    ticks = [(tick, f"{tick:.4g}") for tick in svg.nice_ticks(scale.low, scale.high, 5)]
    shown = [(place, value if value <= scale.high else math.nan) for place, value in line]
    shapes = [svg.band([one for one in training.extremes if one[2] <= scale.high], axis, scale, height, "band")]
    shapes.append(svg.curve(shown, axis, scale, height, "line"))
    step = math.ceil(len(validation) / _MOST_DOTS) or 1
    shapes += [
        svg.dot(axis.percent(place), scale.pixel(loss, height), 3.5, "own", f"validation loss {loss:.4f}")
        for place, loss in validation[::-step]
        if loss <= scale.high
    ]
    name = "loss, and validation loss (dots)" if validation else "loss"
    return svg.lane(Axis(scale, ticks, name), height, shapes, f"loss over {over}")


def _curve(
    history: History, axis: Scale, key: str, name: str, from_zero: bool = False, factor: float = 1.0, unit: str = ""
) -> Lane | None:
    """The lane of a metric; None if no record has it."""
    points = [(place, factor * value) for place, value in history.curve(key)]
    if not points:
        return None
    curve = svg.thin(points)
    values = sorted(value for _, value in curve.means)
    highest = values[math.ceil(0.99 * (len(values) - 1))]  # spikes would flatten the rest
    scale = Scale(0.0, 1.08 * highest or 1.0) if from_zero else _padded(min(0.0, values[0]), highest)
    ticks = [(tick, svg.short(tick, 4)) for tick in svg.nice_ticks(scale.low, scale.high, 3)]
    below = [(place, min(value, scale.high)) for place, value in curve.means]
    caption = f"{name}, last value {points[-1][1]:.4g}{unit}"
    line = svg.curve(below, axis, scale, _LOW, "line")
    return svg.lane(Axis(scale, ticks, caption), _LOW, [line], f"{name} over tokens")


def _padded(low: float, high: float) -> Scale:
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low if low == 0.0 else low - margin, high + margin)


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
_MOST_TRIANGLES, _MOST_TICKS = 80, 400
_INTERVALS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000)
"""Round seconds."""
_FILLED = ((svg.area, "area"), (svg.curve, "line"))
"""A curve, and the area below it."""


@dataclass(frozen=True)
class Report:
    """What a report shows."""

    name: str
    run: RecordedRun
    summary: RunSummary
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
    bars = [shape for attempt in report.run.attempts for shape in _attempt_shapes(attempt, report.time)]
    used_for = "attempts, coloured by what their time was used for"
    charts = [Lane("attempts", svg.svg(_BARS, *bars, label=used_for))]
    if any(attempt.is_failure for attempt in report.run.attempts):
        charts.insert(0, Lane("failures", _fault_marks(report)))
    if report.summary.saves:
        charts.append(Lane("saves", _saves(report)))
    history = report.history or History((), (), None)
    training = _over_time(history.iterations, "lm_loss")
    validation = _over_time(history.evaluations, "validation_loss")
    if training or validation:
        thinned = svg.thin(training)
        line = interrupted(thinned.means, [attempt.start for attempt in report.run.attempts])
        charts.append(_loss_lane(thinned, line, validation, report.time, _LOSS, "wall time"))
    unusual = alarms(history)
    places = [(report.time.percent(alarm.time), alarm) for alarm in unusual if alarm.time is not None]
    if places:
        charts.append(Lane("alarms", alarm_marks(places)))
    ticks = [(report.start + tick, svg.tick_label(tick)) for tick in svg.duration_ticks(report.end - report.start)]
    charts += [_share_lane(report), Lane("", horizontal_axis(Axis(report.time, ticks, "")))]
    used = [name for name in (*BEFORE, *DURING, *AFTER) if report.summary.time.seconds[name] > 0]
    return lanes(charts) + legend((name, EXPLANATIONS[name][0]) for name in used) + alarm_legend(unusual)


def _over_time(records: Sequence[Record], key: str) -> list[Point]:
    """(seconds since the epoch, value) of the records with a finite value."""
    pairs = [(record.get("time"), record.get(key)) for record in records]
    points = [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return sorted(point for point in points if math.isfinite(point[1]))


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


def _attempt_shapes(attempt: Attempt, time: Scale) -> list[str]:
    """Areas are seconds: start and load, then training with its evaluations, waits and saves, which alternate and are
    therefore stacked, then what was lost, and the end."""
    shapes, now = [], attempt.start

    def tip(name: TimeClass) -> str:
        seconds = attempt.second(name)
        share = f" ({100 * seconds / attempt.wall_s:.1f} %)" if attempt.wall_s else ""
        first, last = attempt.first_iteration, attempt.last_iteration
        iterations = f", iterations {first:,} to {last:,}" if first is not None and last is not None else ""
        return (
            f"attempt {attempt.attempt}: {EXPLANATIONS[name][0]} {duration(seconds)}{share}\n"
            f"{date(attempt.start)} UTC, {duration(attempt.wall_s)}, {attempt.outcome}{iterations}"
        )

    def full(names: Sequence[TimeClass]) -> None:
        nonlocal now
        for name in names:
            seconds = attempt.second(name)
            if seconds > 0:
                width = time.width(now, now + seconds)
                shapes.append(svg.rect(time.percent(now), 0, width, _BARS, name, tip(name)))
                now += seconds

    # |  start  |  load  | evaluation / data / save / training, stacked |  lost  |  hang  |  idle  |
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
        # The curve bends where a span ends: kept seconds over all seconds so far.
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
    ticks = [(tick, f"{100 * tick:.0f} %") for tick in (low, (1.0 + low) / 2.0, 1.0)]
    shapes = [draw(points, report.time, scale, _SHARE, css) for draw, css in _FILLED]
    return svg.lane(Axis(scale, ticks, "effective time"), _SHARE, shapes, "effective time so far")


def interval_chart(intervals: SaveIntervals) -> str:
    """Effective time over the save interval, with the run's own interval and the best one."""
    best = intervals.daly_s
    own = intervals.own_s or best
    # Six times shorter and longer than both intervals, on a logarithmic axis.
    x = Scale(min(best, own) / 6.0, max(best, own) * 6.0, is_log=True)
    places = [x.low * (x.high / x.low) ** (index / 120.0) for index in range(121)]
    points = [(place, intervals.share(place)) for place in places]
    shares_shown = [share for _, share in points]
    y = Scale(max(0.0, min(shares_shown) - 0.01), min(1.0, max(shares_shown) + 0.02))
    y_ticks = [(tick, f"{100 * tick:.3g} %") for tick in svg.nice_ticks(y.low, y.high, 4)]
    x_ticks = [float(seconds) for seconds in _INTERVALS if x.low <= seconds <= x.high]
    x_ticks = x_ticks or [svg.nice_ticks(x.low, x.high, 2)[0]]
    shapes = [draw(points, x, y, _CURVE, css) for draw, css in _FILLED]
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
    axis = Axis(x, [(tick, svg.tick_label(tick)) for tick in x_ticks], "")
    chart = svg.lane(Axis(y, y_ticks, "effective time"), _CURVE, shapes, "effective time over the save interval")
    return lanes([chart, Lane("", horizontal_axis(axis))])
