"""The timeline of a pipeline schedule, a row for each stage and a box for each pass: in a page, as a file, as text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.reports import svg
from megatron.reports.page import figure, legend, paragraph
from megatron.reports.svg import Axis, Box, Scale, boxes_over_time, duration, nice_ticks, seconds_axis
from megatron.schedules.schedule import Kind, Schedule
from megatron.schedules.simulator import Durations, Span, Timeline, simulate

_MOST_BOXES = 160
"""Boxes in a row of a page."""
_COLOURS: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight"}

# Pixels of a file.
_WIDTH, _LEFT, _RIGHT = 1056.0, 72.0, 14.0
_CHART = _WIDTH - _LEFT - _RIGHT
_TITLE, _ROW, _AXIS, _LEGEND = 32.0, 25.0, 46.0, 28.0
_NUMBER = 9.2
"""The least width of a box with a number of one digit."""
_ENTRY, _SWATCH = 258.0, 36.0


@dataclass(frozen=True)
class Tail:
    """What all stages do after the passes."""

    name: str
    colour: str
    seconds: float


def schedule_figure(
    build: Callable[[int], Schedule],
    num_microbatches: int,
    durations: Durations,
    tail: Sequence[Tail] = (),
    is_in_seconds: bool = True,
) -> str:
    """The timeline of a step, one row of passes for each stage. ``build`` returns the schedule of a number of
    microbatches. Without seconds the axis shows shares of the step."""
    # Interleaved schedules work in groups of one microbatch per stage: draw as many as give about 160 boxes in a row.
    first = build(1)
    stages, boxes = first.placement.num_stages, first.placement.num_chunks * len(first.kinds)
    schedule = build(min(num_microbatches, max(1, _MOST_BOXES // (boxes * stages)) * stages))
    timeline = simulate(schedule, durations)
    ends = timeline.makespan + sum(one.seconds for one in tail)
    shares = [(share * ends, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    axis = seconds_axis(ends) if is_in_seconds else Axis(Scale(0.0, ends), shares, "")
    # All stages go through data parallelism and the optimizer together, after the last pass of any.
    after, start = [], timeline.makespan
    for one in tail:
        tip = f"{one.name}\n{duration(one.seconds)}, from {duration(start)}"
        after.append(Box(start, start + one.seconds, one.name, one.colour, tip=tip))
        start += one.seconds

    def tip_of(span: Span) -> str:
        where = f", chunk {span.action.chunk}" if schedule.placement.num_chunks > 1 else ""
        took = span.end - span.start
        size = f"{duration(took)}, from {duration(span.start)}" if is_in_seconds else f"{took / ends:.1%} of the step"
        return f"{_name(span.action.kind, schedule)}, microbatch {span.action.microbatch}{where}\n{size}"

    rows = [
        (f"stage {stage}", [*_boxes(timeline, stage, schedule, tip_of), *after]) for stage in range(timeline.num_stages)
    ]
    chart = boxes_over_time(rows, axis, f"schedule {schedule.name}")
    entries = [(_COLOURS[kind], _name(kind, schedule)) for kind in schedule.kinds]
    entries += [(one.colour, one.name) for one in tail if one.seconds > 0]
    return figure(chart, legend([*entries, ("idle-row", "idle")])) + _explanation(schedule, num_microbatches)


def _explanation(schedule: Schedule, num_microbatches: int) -> str:
    chunks = schedule.placement.num_chunks
    sentences = [f"Fainter colours are later chunks; each stage has {chunks}."] if chunks > 1 else []
    if schedule.num_microbatches < num_microbatches:
        sentences.append(
            f"Drawn with {schedule.num_microbatches} of the {num_microbatches} microbatches of a step; the others "
            "repeat the pattern in the middle, so the step is longer, and its bubble a smaller share."
        )
    return paragraph(" ".join(sentences), "note") if sentences else ""


def _name(kind: Kind, schedule: Schedule) -> str:
    if kind == "B":
        return "input gradient" if schedule.splits_backward else "backward"
    return {"F": "forward", "W": "weight gradient"}[kind]


def _boxes(timeline: Timeline, stage: int, schedule: Schedule, tip_of: Callable[[Span], str] | None) -> list[Box]:
    """The passes of a stage, from the start of the timeline; without tips there are no names either."""
    boxes, origin = [], min(span.start for span in timeline.spans)
    for span in timeline.stage_spans(stage):
        kind, microbatch, chunk = span.action
        part, tip = ("", "") if tip_of is None else (_name(kind, schedule), tip_of(span))
        shade = _shade(chunk, schedule)
        boxes.append(Box(span.start - origin, span.end - origin, part, _COLOURS[kind], shade, str(microbatch), tip))
    return boxes


def _shade(chunk: int, schedule: Schedule) -> float:
    return chunk / (schedule.placement.num_chunks - 1) if chunk else 0.0


def schedule_picture(schedule: Schedule, runs: Sequence[tuple[str, Timeline]], time_label: str) -> str:
    """An SVG file of the (title, timeline) of ``runs`` above each other on one time axis."""
    longest = max(timeline.makespan for _, timeline in runs)
    axis = Axis(Scale(0.0, longest), [(tick, f"{tick:g}") for tick in nice_ticks(0.0, longest, 8)], time_label)
    shapes, top = [], 0.0
    for title, timeline in runs:
        width = _CHART * timeline.makespan / longest
        shapes.append(svg.text(f"{_LEFT:g}", top + 21, title, "heading", "start"))
        top += _TITLE
        for stage in range(timeline.num_stages):
            boxes, scale = _boxes(timeline, stage, schedule, None), Scale(0.0, timeline.makespan)
            chart = svg.row_of_boxes(boxes, scale, f"stage {stage}", _NUMBER / width)
            shapes.append(svg.text(f"{_LEFT - 8:g}", top + 14, f"stage {stage}", anchor="end"))
            shapes.append(svg.placed(_LEFT, top, width, chart))
            top += _ROW
        shapes.append(svg.placed(_LEFT, top, _CHART, svg.horizontal_axis(axis)))
        top += _AXIS
    shapes += _picture_legend(schedule, top)
    # The white line around a box leaves most of the narrowest one.
    took = [span.end - span.start for _, timeline in runs for span in timeline.spans if span.end > span.start]
    edge = f".pass {{ stroke-width: {min(0.7, 0.15 * min(took) / longest * _CHART):.3f}; }}\n"
    return svg.picture(_WIDTH, top + _LEGEND, *shapes, style=edge)


def _picture_legend(schedule: Schedule, top: float) -> list[str]:
    chunks = schedule.placement.num_chunks
    suffix, width = (f", chunks 0 to {chunks - 1}" if chunks > 1 else ""), _SWATCH / chunks
    shapes, left = [], _LEFT
    for kind in schedule.kinds:
        for chunk in range(chunks):
            faded = svg.opacity(_shade(chunk, schedule))
            shapes.append(svg.rect(f"{left + chunk * width:g}", top, f"{width:g}", 11, _COLOURS[kind], opacity=faded))
        label = f"{_name(kind, schedule)}{suffix}"
        shapes.append(svg.text(f"{left + _SWATCH + 8:g}", top + 10, label, anchor="start"))
        left += _ENTRY
    shapes.append(svg.rect(f"{left:g}", top, f"{_SWATCH:g}", 11, "idle-row"))
    return [*shapes, svg.text(f"{left + _SWATCH + 8:g}", top + 10, "idle", anchor="start")]


def schedule_text(timeline: Timeline, num_chunks: int, columns: int) -> list[str] | None:
    """A line per stage, at most ``columns`` wide; None where that leaves no room for the passes' names."""
    names = [_short_name(*span.action, num_chunks) for span in timeline.spans]
    origin = min(span.start for span in timeline.spans)
    shortest = min(span.end - span.start for span in timeline.spans if span.end > span.start)
    indent = len(f"stage {timeline.num_stages - 1}  ")
    # With a blank after the longest name, or else without.
    for room in (max(map(len, names)) + 1, max(map(len, names))):
        scale = room / shortest
        if indent + timeline.makespan * scale > columns:
            continue
        rows = [["."] * _column(timeline.makespan, scale) for _ in range(timeline.num_stages)]
        for name, span in zip(names, timeline.spans):
            start, end = _column(span.start - origin, scale), _column(span.end - origin, scale)
            rows[span.stage][start:end] = name.ljust(end - start, "-")[: end - start]
        return [f"stage {stage}".ljust(indent) + "".join(row) for stage, row in enumerate(rows)]
    return None


def _column(time: float, scale: float) -> int:
    # Halves always up: round() to even would give equal passes unequal widths.
    return math.floor(time * scale + 0.5 + 1e-6)


def _short_name(kind: str, microbatch: int, chunk: int, num_chunks: int) -> str:
    if num_chunks > 2:
        return f"{kind}{microbatch}.{chunk}"
    return f"{kind.lower() if chunk else kind}{microbatch}"
