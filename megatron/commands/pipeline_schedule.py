"""Verify, simulate and draw a pipeline schedule, or compare it with the measured timeline of a training run.

Times are per stage; each chunk of a stage takes an equal share.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from megatron.commands.schedule_drawing import Panel, PictureFormat, draw, draw_as_text
from megatron.errors import ConfigError, DataError, UserError
from megatron.flags import require_at_least
from megatron.schedules.registry import SCHEDULES, ScheduleName, build_schedule
from megatron.schedules.schedule import Schedule, ScheduleError, Shape
from megatron.schedules.simulator import Durations, Timeline, peak_live_activations, simulate, verify
from megatron.training.pipeline_trace import from_chrome_trace, median_durations
from megatron.urls import refuse_urls

_WIDTH_WITHOUT_TERMINAL = 120


@dataclass(frozen=True)
class PipelineScheduleConfig:
    """Schedule, durations and output files."""

    schedule: ScheduleName | None = None
    """Name of the schedule."""
    stages: int | None = None
    """Pipeline ranks."""
    microbatches: int | None = None
    """Microbatches per global batch."""
    virtual: int | None = None
    """Chunks per stage (default: 2 for schedules with several chunks, otherwise 1)."""
    microbatch_group_size: int | None = None
    """Interleaved: consecutive microbatches of a chunk (default: --stages)."""
    forward_time: float | None = None
    """Duration of the forward pass of a microbatch through a stage, in any unit (default: 1)."""
    backward_time: float | None = None
    """Duration of the gradient of the stage's input (default: 1)."""
    weight_time: float | None = None
    """Duration of the gradient of the stage's weights (default: 1)."""
    send_time: float | None = None
    """Duration of a message between two stages, which does not occupy them (default: 0)."""
    measured: str | None = None
    """Trace of a training run (--profile-pipeline): draw it above its schedule, simulated with its median durations (in
    seconds)."""
    json: str | None = None
    """JSON file to write."""
    svg: str | None = None
    """SVG file to write."""
    png: str | None = None
    """PNG file to write."""

    def check(self) -> None:
        files = {"--measured": self.measured, "--json": self.json, "--svg": self.svg, "--png": self.png}
        refuse_urls(files, "name a local file")
        for flag, path in (("--svg", self.svg), ("--png", self.png)):
            suffix = flag.replace("--", ".")
            if path is not None and Path(path).suffix.lower() != suffix:
                raise ConfigError(
                    f"{flag} {path} does not end in {suffix}: rename it, or use the other picture's flag."
                )
        require_at_least(0, self.times())
        if self.measured is not None:
            self._check_measured()
        else:
            self._check_schedule()

    def times(self) -> dict[str, float | None]:
        """Flags of times, with their values."""
        return {
            "--forward-time": self.forward_time,
            "--backward-time": self.backward_time,
            "--weight-time": self.weight_time,
            "--send-time": self.send_time,
        }

    def _check_measured(self) -> None:
        given = [flag for flag, time in self.times().items() if time is not None and flag != "--send-time"]
        given += [] if self.microbatch_group_size is None else ["--microbatch-group-size"]
        if given:
            raise ConfigError(f"{given[0]} comes from the trace of --measured: remove it.")

    def _check_schedule(self) -> None:
        """Whether there is such a schedule."""
        if self.schedule is None or self.stages is None or self.microbatches is None:
            raise ConfigError("--schedule, --stages and --microbatches are required: set all three, or --measured.")
        require_at_least(1, {"--stages": self.stages, "--microbatches": self.microbatches})
        traits = SCHEDULES[self.schedule]
        if not traits.allows(traits.resolve_chunks(self.virtual)):
            remedy = "use 2 or more" if traits.chunks == "several chunks" else "remove it"
            raise ConfigError(f"--virtual {self.virtual}: {self.schedule} runs {traits.chunks} per stage; {remedy}.")
        if self.microbatch_group_size is not None:
            self._check_group_size(self.microbatch_group_size, self.stages)
        if self.forward_time == self.backward_time == self.weight_time == 0:
            raise ConfigError("--forward-time, --backward-time and --weight-time are all 0: one must be above 0.")

    def _check_group_size(self, size: int, stages: int) -> None:
        assert self.schedule is not None
        if not SCHEDULES[self.schedule].groups_microbatches:
            raise ConfigError(f"--microbatch-group-size has no effect with {self.schedule}: remove it.")
        if size < stages:
            raise ConfigError(
                f"--microbatch-group-size {size} is below the number of stages {stages}, which would idle or deadlock: "
                f"use {stages} or more."
            )


@dataclass(frozen=True)
class WholeStage:
    """Times of a whole stage; where stages differ, their mean."""

    forward: float
    backward: float
    weight: float
    send: float

    @staticmethod
    def mean(durations: Durations, num_stages: int) -> "WholeStage":
        """Over the stages; their chunks together."""
        sums = (sum(times) for times in (durations.forward, durations.backward, durations.weight))
        forward, backward, weight = (total / num_stages for total in sums)
        return WholeStage(forward, backward, weight, durations.send)


@dataclass(frozen=True)
class Study:
    """A verified schedule, how it runs on paper and, where a trace was given, how it ran."""

    schedule: Schedule
    group_size: int | None
    times: WholeStage
    simulated: Timeline
    measured: Timeline | None = None

    @property
    def title(self) -> str:
        """The schedule in words."""
        placement = self.schedule.placement
        counts = [(placement.num_stages, "stage"), (self.schedule.num_microbatches, "microbatch")]
        words = [f"{count} {noun}{_plural(noun) if count > 1 else ''}" for count, noun in counts]
        if placement.num_chunks > 1:
            words.append(f"{placement.num_chunks} chunks per stage")
        if self.group_size not in (None, placement.num_stages):
            words.append(f"groups of {self.group_size}")
        return f"{self.schedule.name}: {', '.join(words)}"


def _plural(noun: str) -> str:
    return "es" if noun.endswith("h") else "s"


def study_on_paper(config: PipelineScheduleConfig) -> Study:
    """Build the schedule of the flags, verify it with the memory that it claims, and simulate it."""
    assert config.schedule is not None and config.stages is not None and config.microbatches is not None
    stages, microbatches = config.stages, config.microbatches
    schedule = build_schedule(config.schedule, stages, microbatches, config.virtual, config.microbatch_group_size)
    chunks = schedule.placement.num_chunks
    group_size = (config.microbatch_group_size or stages) if config.schedule == "interleaved" else None
    shape = Shape(stages, microbatches, chunks, group_size or stages)
    claim = SCHEDULES[config.schedule].live_activations
    verify(schedule, tuple(claim(stage, shape) for stage in range(stages)))
    forward, backward, weight = (
        1.0 if time is None else time for time in (config.forward_time, config.backward_time, config.weight_time)
    )
    times = WholeStage(forward, backward, weight, config.send_time or 0.0)
    durations = Durations.uniform(schedule.placement, forward, backward, weight, times.send)
    return Study(schedule, group_size, times, simulate(schedule, durations))


def study_of_trace(config: PipelineScheduleConfig, path: str) -> Study:
    """Read what ran, verify it, and simulate it with the medians of what its passes took."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"--measured {path} cannot be read ({error.strerror}): check the path.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--measured {path} is not JSON: give the trace that a training run wrote.") from error
    try:
        schedule, measured = from_chrome_trace(data)
        verify(schedule)
    except (DataError, ScheduleError) as error:
        raise DataError(f"--measured {path}: {error}") from error
    _refuse_contradiction(config, schedule)
    durations = replace(median_durations(schedule, measured), send=config.send_time or 0.0)
    times = WholeStage.mean(durations, schedule.placement.num_stages)
    return Study(schedule, None, times, simulate(schedule, durations), measured)


def _refuse_contradiction(config: PipelineScheduleConfig, schedule: Schedule) -> None:
    for flag, given, found in (
        ("--schedule", config.schedule, schedule.name),
        ("--stages", config.stages, schedule.placement.num_stages),
        ("--microbatches", config.microbatches, schedule.num_microbatches),
        ("--virtual", config.virtual, schedule.placement.num_chunks),
    ):
        if given is not None and given != found:
            raise ConfigError(f"{flag} {given} contradicts --measured, whose trace has {found}: remove {flag}.")


def to_json(study: Study) -> dict[str, Any]:
    """What was found out; times as they were given, or in seconds where they were measured."""
    placement, times = study.schedule.placement, study.times
    data: dict[str, Any] = {
        "schedule": study.schedule.name,
        "stages": placement.num_stages,
        "microbatches": study.schedule.num_microbatches,
        "virtual": placement.num_chunks,
        "microbatch_group_size": study.group_size,
        "forward_time": times.forward,
        "backward_time": times.backward,
        "weight_time": times.weight,
        "send_time": times.send,
        "peak_live_activations": peak_live_activations(study.schedule),
        **_timeline_to_json(study.simulated),
    }
    if study.measured is not None:
        data["measured"] = _timeline_to_json(study.measured)
    return data


def _timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "stage_idle_fractions": timeline.stage_idle_fractions,
        "timeline": [
            {"stage": span.stage, **span.action._asdict(), "start": span.start, "end": span.end}
            for span in timeline.spans
        ],
    }


def summary(study: Study, columns: int) -> str:
    """What was found out, for a terminal of so many ``columns``."""
    unit = "" if study.measured is None else " s"
    work = sum((study.times.forward, study.times.backward, study.times.weight)) * study.schedule.num_microbatches
    lines = [study.title, ""]
    if study.measured is not None:
        lines += _figures("measured", study.measured, unit)
    lines += _figures("simulated" if study.measured else "", study.simulated, unit)
    lines += [f"{'work of a stage':<19} {work:.6g}{unit}", "", *_stage_table(study)]
    if study.measured is None:
        lines += ["", *_drawn(study, columns)]
    return "\n".join(lines)


def _figures(kind: str, timeline: Timeline, unit: str) -> list[str]:
    makespan, bubble = f"{kind} makespan".lstrip(), f"{kind} bubble".lstrip()
    return [
        f"{makespan:<19} {timeline.makespan:.6g}{unit}",
        f"{bubble:<19} {_percent(timeline.bubble_fraction)} of all stages' time",
    ]


def _percent(fraction: float) -> str:
    # 0.0 turns the minus zero of a rounding error into zero.
    return f"{round(100 * fraction, 1) + 0.0:.1f} %"


def _stage_table(study: Study) -> list[str]:
    """A row per stage. Idle: between the stage's own first and last pass. Activations: what it holds at most."""
    chunks = study.schedule.placement.num_chunks
    peaks = peak_live_activations(study.schedule)
    runs = [study.simulated] if study.measured is None else [study.measured, study.simulated]
    idle = [run.stage_idle_fractions for run in runs]
    titles = ["idle in its span"] if study.measured is None else ["idle, measured", "idle, simulated"]
    titles += ["peak live activations", *(["of a whole stage"] if chunks > 1 else [])]
    lines = ["  ".join(["stage", *titles])]
    for stage, peak in enumerate(peaks):
        cells = [_percent(fractions[stage]) for fractions in idle]
        cells += [str(peak), *([f"{peak / chunks:g}"] if chunks > 1 else [])]
        lines.append("  ".join([f"{stage:>5}", *(f"{cell:>{len(title)}}" for cell, title in zip(cells, titles))]))
    return lines


def _drawn(study: Study, columns: int) -> list[str]:
    chunks = study.schedule.placement.num_chunks
    rows = draw_as_text(study.simulated, chunks, columns)
    if rows is None:
        return [f"The timeline does not fit in {columns} columns: draw it with --svg or --png."]
    second = "; lower case: second chunk" if chunks == 2 else ""
    return [*rows, "", f"Letter and microbatch of each pass; -: going on; .: idle{second}."]


def picture(study: Study, picture_format: PictureFormat) -> bytes:
    """The drawn timelines: measured, where there is one, above simulated."""
    runs = [(study.title, study.simulated)]
    if study.measured is not None:
        runs = [(f"measured {study.title}", study.measured), ("simulated with its median times", study.simulated)]
    panels = [
        Panel(
            f"{title}, bubble {_percent(timeline.bubble_fraction)}",
            timeline,
            study.schedule.placement.num_chunks,
            study.schedule.splits_backward,
        )
        for title, timeline in runs
    ]
    return draw(panels, "time" if study.measured is None else "time (s)", picture_format)


def write(flag: str, path: str, content: bytes) -> None:
    """Write a file as a whole or not at all; raises :class:`ConfigError` where it cannot be written."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            target.write_bytes(content)  # /dev/stdout and its like are to be written to, not replaced
        else:
            _replace(target, content)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written ({error.strerror}): choose another path.") from error


def _replace(target: Path, content: bytes) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Study the schedule as ``arguments`` say (by default, the command line), print and write what was found; the exit
    code."""
    try:
        config = tyro.cli(PipelineScheduleConfig, description=__doc__, args=arguments)
        config.check()
        study = study_on_paper(config) if config.measured is None else study_of_trace(config, config.measured)
        if config.json is not None:
            write("--json", config.json, (json.dumps(to_json(study), indent=1) + "\n").encode())
        if config.svg is not None:
            write("--svg", config.svg, picture(study, "svg"))
        if config.png is not None:
            write("--png", config.png, picture(study, "png"))
        print(summary(study, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns))
    except (UserError, ScheduleError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0
