"""Conversion of a pipeline's timeline to and from Chrome's trace event format, for chrome://tracing and Perfetto."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from statistics import median
from typing import Any, get_args

from megatron.errors import DataError
from megatron.schedules.catalog import SCHEDULES
from megatron.schedules.schedule import Action, Kind, Placement, Schedule
from megatron.schedules.simulator import Durations, Span, Timeline

_MICROSECONDS = 1e6
_LONGEST = 1e18  # microseconds; refuses infinity, and integers too long for a float
_REMEDY = "a training run writes traces that can be read"


def to_chrome_trace(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """A ``timeline`` of ``schedule`` (seconds, starting anywhere) in Chrome's trace event format.

    The trace is in microseconds from the first start. Each stage is a thread of process 0.
    """
    origin = min((span.start for span in timeline.spans), default=0.0)
    placement = schedule.placement
    return {
        "traceEvents": [
            *(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
                for stage in range(placement.num_stages)
            ),
            *(_complete_event(span, origin) for span in timeline.spans),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": schedule.name,
            "stages": placement.num_stages,
            "microbatches": schedule.num_microbatches,
            "virtual": placement.num_chunks,
        },
    }


def _complete_event(span: Span, origin: float) -> dict[str, Any]:
    kind, microbatch, chunk = span.action
    return {
        "name": str(span.action),
        "cat": kind,
        "ph": "X",
        "ts": (span.start - origin) * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "pid": 0,
        "tid": span.stage,
        "args": {"microbatch": microbatch, "chunk": chunk, "stage": span.stage},
    }


def from_chrome_trace(data: object) -> tuple[Schedule, Timeline]:
    """The inverse of :func:`to_chrome_trace`: the schedule in the order in which it ran, and its timeline in seconds.

    Events of categories other than F, B and W are ignored. Raises :class:`DataError` unless it is the trace of one
    batch with passes on every stage. The schedule is not verified.
    """
    trace = _mapping(data, "the trace")
    name, placement, microbatches = _header(_mapping(trace.get("otherData"), "otherData"))
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise DataError(f"traceEvents is not a list: {_REMEDY}.")
    passes = [
        event
        for event in (_mapping(event, "an event") for event in events)
        if event.get("ph") == "X" and event.get("cat") in get_args(Kind)
    ]
    spans = sorted((_span(event, placement, microbatches) for event in passes), key=attrgetter("start", "end"))
    _check_complete(spans, placement, microbatches)
    actions: dict[int, list[Action]] = defaultdict(list)
    for span in spans:
        actions[span.stage].append(span.action)
    by_stage = tuple(tuple(actions[stage]) for stage in range(placement.num_stages))
    schedule = Schedule(name, placement, microbatches, SCHEDULES[name].kinds, by_stage)
    return schedule, Timeline(placement.num_stages, tuple(spans))


def _header(header: Mapping[str, Any]) -> tuple[str, Placement, int]:
    name = header.get("schedule")
    if not isinstance(name, str) or name not in SCHEDULES:
        raise DataError(f"otherData: schedule is {name!r}, not one of {', '.join(SCHEDULES)}: {_REMEDY}.")
    stages, microbatches, chunks = (_count(header, key, 1) for key in ("stages", "microbatches", "virtual"))
    if not SCHEDULES[name].allows(chunks):
        raise DataError(f"otherData: {name} needs {SCHEDULES[name].chunks} per stage, not {chunks}: {_REMEDY}.")
    return name, Placement(stages, chunks, SCHEDULES[name].placement), microbatches


def _span(event: Mapping[str, Any], placement: Placement, microbatches: int) -> Span:
    where = f"event {event.get('name')!r}"
    arguments = _mapping(event.get("args"), f"{where}: args")
    stage = _count(event, "tid", 0, placement.num_stages, where)
    microbatch = _count(arguments, "microbatch", 0, microbatches, where)
    chunk = _count(arguments, "chunk", 0, placement.num_chunks, where)
    start, duration = _time(event, "ts", -_LONGEST, where), _time(event, "dur", 0, where)
    return Span(stage, Action(event["cat"], microbatch, chunk), start, start + duration)


def _check_complete(spans: list[Span], placement: Placement, microbatches: int) -> None:
    """Raise :class:`DataError` for missing passes and for a stage without measured time."""
    forwards = placement.num_virtual_stages * microbatches
    if len(spans) < forwards:
        raise DataError(f"the trace has {len(spans)} passes, but {forwards} forward passes ran: it is truncated.")
    busy = {span.stage for span in spans if span.end > span.start}
    for stage in range(placement.num_stages):
        if stage not in busy:
            raise DataError(f"stage {stage} has no measured time: {_REMEDY}.")


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} is not a JSON object: {_REMEDY}.")
    return value


def _count(values: Mapping[str, Any], key: str, least: int, end: int | None = None, where: str = "otherData") -> int:
    """The integer at ``key``, at least ``least`` and below ``end``."""
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (end is not None and value >= end):
        limits = f"{least} or more" if end is None else f"{least} to {end - 1}"
        raise DataError(f"{where}: {key} is {value!r}, not an integer of {limits}: {_REMEDY}.")
    return value


def _time(event: Mapping[str, Any], key: str, least: float, where: str) -> float:
    """The time at ``key``, in seconds; at least ``least`` microseconds."""
    value = event.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < _LONGEST:
        raise DataError(f"{where}: {key} is {value!r}, not a time in microseconds: {_REMEDY}.")
    return value / _MICROSECONDS


def median_durations(schedule: Schedule, timeline: Timeline) -> Durations:
    """The median over microbatches of each pass's duration, by virtual stage; 0 for passes that did not run."""
    measured: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        kind, _, virtual_stage = schedule.result(span.stage, span.action)
        measured[kind, virtual_stage].append(span.end - span.start)

    def medians(kind: Kind) -> Iterable[float]:
        for virtual_stage in range(schedule.placement.num_virtual_stages):
            times = measured.get((kind, virtual_stage))
            yield median(times) if times else 0.0

    return Durations(tuple(medians("F")), tuple(medians("B")), tuple(medians("W")))
