"""Charts with a row for each pipeline stage, of the dry run and of a search: memory by kind, and the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.planner.memory import KINDS
from megatron.reports.page import figure, legend, paragraph
from megatron.reports.svg import (
    Axis,
    Bar,
    Box,
    Limit,
    Part,
    Scale,
    boxes_over_time,
    duration,
    gib,
    nice_ticks,
    seconds_axis,
    stacked_bars,
)
from megatron.schedules.schedule import Kind, Schedule
from megatron.schedules.simulator import Durations, Timeline, simulate

ALLOWANCE_NAME = "allowance"
COLOURS: Mapping[str, str] = {
    "weights": "blue",
    "gradients": "sky",
    "master weights": "violet",
    "moments": "lilac",
    "activations": "teal",
    "logits and loss": "mint",
    "communication buffers": "orange",
    "working memory": "sand",
    ALLOWANCE_NAME: "grey",
}


@dataclass(frozen=True)
class MemoryOfStage:
    """A stage, or neighbouring stages with equal memory."""

    name: str
    detail: str
    by_kind: Mapping[str, int]
    """Bytes, with the allowance."""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def equal_neighbours(by_stage: Sequence[tuple[int, Mapping[str, int]]]) -> list[MemoryOfStage]:
    """One row for neighbouring stages with equal memory, from ``(stage, bytes by kind)``."""
    rows = []
    for by_kind, group in groupby(by_stage, key=lambda stage: dict(stage[1])):
        stages = [stage for stage, _ in group]
        name = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
        rows.append(MemoryOfStage(name, "", by_kind))
    return rows


def memory_figure(rows: Sequence[MemoryOfStage], limit: int) -> str:
    """Stacked bars with the GPU's ``limit`` in bytes as a line; the tightest stage is strong."""
    most = max(row.total for row in rows)
    # Room for the label of the limit, or of the longest bar.
    end = max(most, limit) * 1.04
    bars = [_bar(row, limit, row.total == most) for row in rows]
    ticks = [(tick * 2**30, f"{tick:g} GiB") for tick in nice_ticks(0.0, end / 2**30, 6)]
    chart = stacked_bars(bars, ticks, end, Limit(limit, f"GPU: {gib(limit)} GiB"))
    shown = [kind for kind in (*KINDS, ALLOWANCE_NAME) if any(row.by_kind.get(kind) for row in rows)]
    return figure(chart, legend([(COLOURS[kind], kind) for kind in shown]))


def _bar(row: MemoryOfStage, limit: int, is_tightest: bool) -> Bar:
    parts = [
        Part(kind, COLOURS[kind], size, f"{row.name}: {kind}\n{gib(size)} GiB, {size / row.total:.0%}", gib(size))
        for kind in (*KINDS, ALLOWANCE_NAME)
        if (size := row.by_kind.get(kind, 0)) > 0
    ]
    return Bar(row.name, row.detail, f"{gib(row.total)} GiB ({row.total / limit:.0%})", parts, is_tightest)


_MOST_BOXES = 160
"""Boxes in a row of a schedule."""
_COLOURS: dict[Kind, str] = {"F": "blue", "B": "orange", "W": "slate"}


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
    rows = [
        (f"stage {stage}", [*_boxes(timeline, stage, schedule, ends, is_in_seconds), *after])
        for stage in range(timeline.num_stages)
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


def _boxes(timeline: Timeline, stage: int, schedule: Schedule, end: float, is_in_seconds: bool) -> list[Box]:
    boxes, chunks = [], schedule.placement.num_chunks
    for span in timeline.stage_spans(stage):
        kind, microbatch, chunk = span.action
        name, took = _name(kind, schedule), span.end - span.start
        where = f", chunk {chunk}" if chunks > 1 else ""
        size = f"{duration(took)}, from {duration(span.start)}" if is_in_seconds else f"{took / end:.1%} of the step"
        shade = round(3 * chunk / (chunks - 1)) if chunks > 1 else 0
        tip = f"{name}, microbatch {microbatch}{where}\n{size}"
        boxes.append(Box(span.start, span.end, name, _COLOURS[kind], shade, str(microbatch), tip))
    return boxes
