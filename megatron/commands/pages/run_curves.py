"""The training of a run over tokens: losses, learning rate, gradient norm, speed, memory, and what was unusual."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.metrics.jsonl import History, Record
from megatron.operation.attempts import Attempt
from megatron.reports import svg
from megatron.reports.page import Lane, lanes, legend
from megatron.reports.svg import Point, Scale

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
    charts = [_loss(history, axis)]
    charts += [
        lane
        for lane in (
            _curve(history, axis, "learning_rate", "learning rate"),
            _curve(history, axis, "grad_norm", "gradient norm"),
            _curve(history, axis, "tokens_per_s_per_gpu", "tokens/s per GPU", from_zero=True),
            _curve(history, axis, "mfu", "MFU", from_zero=True, factor=100.0, unit=" %"),
            _curve(history, axis, "peak_memory_gib", "peak GPU memory of rank 0", from_zero=True, unit=" GiB"),
        )
        if lane is not None
    ]
    found = alarms(history, attempts)
    if found:
        places = [(axis.percent(history.place({"iteration": alarm.iteration})), alarm) for alarm in found]
        charts.append(Lane("alarms", alarm_marks(places)))
    charts.append(Lane("", _axis(axis, "tokens" if history.tokens is not None else "iterations")))
    return lanes(charts) + alarm_legend(found)


def _loss(history: History, axis: Scale) -> Lane:
    training, validation = svg.thin(history.curve("lm_loss")), history.curve("validation_loss")
    values = sorted(value for _, value in (*training.means, *validation))
    # The first losses of a run from random weights would flatten the rest.
    scale = _padded(values[0], values[math.ceil(0.98 * (len(values) - 1))])
    ticks = svg.nice_ticks(scale.low, scale.high, 5)
    shapes = [svg.horizontal(scale.pixel(tick, _TALL), "grid") for tick in ticks]
    shown = [(place, value if value <= scale.high else math.nan) for place, value in training.means]
    shapes.append(svg.band([one for one in training.extremes if one[2] <= scale.high], axis, scale, _TALL, "band"))
    shapes.append(svg.curve(shown, axis, scale, _TALL, "line"))
    step = math.ceil(len(validation) / _MOST_DOTS) or 1
    shapes += [
        svg.dot(axis.percent(place), scale.pixel(loss, _TALL), 3.5, "own", f"validation loss {loss:.4f}")
        for place, loss in validation[::-step]
        if loss <= scale.high
    ]
    name = "loss, and validation loss (dots)" if validation else "loss"
    chart = svg.svg(_TALL, *shapes, label="loss over tokens")
    return Lane(name, chart, [(scale.pixel(tick, _TALL), f"{tick:.4g}") for tick in ticks])


def _curve(
    history: History, axis: Scale, key: str, name: str, from_zero: bool = False, factor: float = 1.0, unit: str = ""
) -> Lane | None:
    """The lane of a metric; None if no record has it."""
    points = [(place, factor * value) for place, value in history.curve(key)]
    if not points:
        return None
    curve = svg.thin(points)
    values = sorted(value for _, value in curve.means)
    highest = values[math.ceil(0.99 * (len(values) - 1))]
    scale = Scale(0.0, 1.08 * highest or 1.0) if from_zero else _padded(min(0.0, values[0]), highest)
    ticks = svg.nice_ticks(scale.low, scale.high, 3)
    shapes = [svg.horizontal(scale.pixel(tick, _LOW), "grid") for tick in ticks]
    shapes.append(svg.curve(_below(curve.means, scale.high), axis, scale, _LOW, "line"))
    chart = svg.svg(_LOW, *shapes, label=f"{name} over tokens")
    caption = f"{name}, last value {points[-1][1]:.4g}{unit}"
    return Lane(caption, chart, [(scale.pixel(tick, _LOW), _short(tick)) for tick in ticks])


def _padded(low: float, high: float) -> Scale:
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low if low == 0.0 else low - margin, high + margin)


def _below(points: Sequence[Point], limit: float) -> list[Point]:
    """The points, those above ``limit`` at the limit."""
    return [(place, min(value, limit)) for place, value in points]


def _axis(axis: Scale, unit: str) -> str:
    ticks = svg.nice_ticks(axis.low, axis.high, 6)
    shapes = [svg.horizontal(1, "axis")]
    for index, tick in enumerate(ticks):
        anchor = "start" if tick == 0 else "end" if axis.fraction(tick) > 0.94 else "middle"
        css = "sparse" if index % 2 else ""
        label = f"{_short(tick)} {unit}" if index == len(ticks) - 1 else _short(tick)
        x = axis.percent(tick)
        shapes += [svg.vertical(x, 1, 5, "axis"), svg.text(x, 18, label, "" if label.endswith(unit) else css, anchor)]
    return svg.svg(22, *shapes)


def _short(value: float) -> str:
    """3e-4, 250, 1.5 k, 20 M, 2 G, 15 T."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == ' k' else size):.4g}{unit}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
