"""Verify, simulate and draw a pipeline schedule, or compare it with the measured timeline of a training run.

Times are per stage; each chunk of a stage takes an equal share.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.commands.pages.schedule_chart import schedule_picture, schedule_text
from megatron.commands.tool import run_tool, write_file, write_json
from megatron.errors import ConfigError, DataError
from megatron.flags import require_at_least, values_of
from megatron.reports.page import plural
from megatron.schedules.catalog import SCHEDULES, ScheduleName, build_schedule
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
        times = values_of(self, "forward_time", "backward_time", "weight_time")
        times_and_send = {**times, "--send-time": self.send_time}
        require_at_least(0, times_and_send)
        too_long = [f"{flag} {value:g}" for flag, value in times_and_send.items() if (value or 0) > 1e30]
        if too_long:  # sums of them would not be finite
            raise ConfigError(f"{too_long[0]} is too long for a schedule: use another unit of time.")
        if self.measured is None:
            self._check_schedule()
            return
        given = {**times, "--microbatch-group-size": self.microbatch_group_size}
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(f"{flag} comes from the trace of --measured: remove it.")

    def _check_schedule(self) -> None:
        if self.schedule is None or self.stages is None or self.microbatches is None:
            raise ConfigError("--schedule, --stages and --microbatches are required: set all three, or --measured.")
        require_at_least(1, {"--stages": self.stages, "--microbatches": self.microbatches})
        traits = SCHEDULES[self.schedule]
        if not traits.allows(traits.resolve_chunks(self.virtual)):
            remedy = "use 2 or more" if traits.chunks == "several chunks" else "remove it"
            raise ConfigError(f"--virtual {self.virtual}: {self.schedule} runs {traits.chunks} per stage; {remedy}.")
        size = self.microbatch_group_size
        if size is not None and not traits.groups_microbatches:
            raise ConfigError(f"--microbatch-group-size has no effect with {self.schedule}: remove it.")
        if size is not None and size < self.stages:
            raise ConfigError(
                f"--microbatch-group-size {size} is below the number of stages {self.stages}, which would idle or "
                f"deadlock: use {self.stages} or more."
            )
        if self.forward_time == self.backward_time == self.weight_time == 0:
            raise ConfigError("--forward-time, --backward-time and --weight-time are all 0: one must be above 0.")


@dataclass(frozen=True)
class WholeStage:
    """Times of a whole stage; where stages differ, their mean."""

    forward: float
    backward: float
    weight: float
    send: float


@dataclass(frozen=True)
class Study:
    """A verified schedule, its simulated timeline and, where a trace was given, its measured one."""

    schedule: Schedule
    group_size: int | None
    times: WholeStage
    simulated: Timeline
    measured: Timeline | None = None

    @property
    def title(self) -> str:
        """The schedule in words."""
        placement = self.schedule.placement
        words = [plural(placement.num_stages, "stage"), plural(self.schedule.num_microbatches, "microbatch", "es")]
        if placement.num_chunks > 1:
            words.append(f"{placement.num_chunks} chunks per stage")
        if self.group_size not in (None, placement.num_stages):
            words.append(f"groups of {self.group_size}")
        return f"{self.schedule.name}: {', '.join(words)}"


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
    given = config.forward_time, config.backward_time, config.weight_time
    forward, backward, weight = (1.0 if time is None else time for time in given)
    times = WholeStage(forward, backward, weight, config.send_time or 0.0)
    durations = Durations.uniform(schedule.placement, forward, backward, weight, times.send)
    return Study(schedule, group_size, times, simulate(schedule, durations))


def study_of_trace(config: PipelineScheduleConfig, path: str) -> Study:
    """The schedule of a trace, verified, and simulated with the median times of its passes."""
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
    for flag, given, found in (
        ("--schedule", config.schedule, schedule.name),
        ("--stages", config.stages, schedule.placement.num_stages),
        ("--microbatches", config.microbatches, schedule.num_microbatches),
        ("--virtual", config.virtual, schedule.placement.num_chunks),
    ):
        if given is not None and given != found:
            raise ConfigError(f"{flag} {given} contradicts --measured, whose trace has {found}: remove {flag}.")
    durations = replace(median_durations(schedule, measured), send=config.send_time or 0.0)
    # The chunks of a stage together, and the mean over the stages.
    sums = (sum(one) for one in (durations.forward, durations.backward, durations.weight))
    forward, backward, weight = (total / schedule.placement.num_stages for total in sums)
    times = WholeStage(forward, backward, weight, durations.send)
    return Study(schedule, None, times, simulate(schedule, durations), measured)


def to_json(study: Study) -> dict[str, Any]:
    """The figures of a study; times as they were given, or in seconds where they were measured."""
    placement = study.schedule.placement
    data: dict[str, Any] = {
        "schedule": study.schedule.name,
        "stages": placement.num_stages,
        "microbatches": study.schedule.num_microbatches,
        "virtual": placement.num_chunks,
        "microbatch_group_size": study.group_size,
        **{f"{name}_time": time for name, time in asdict(study.times).items()},
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
    """The figures and the timeline, for a terminal of so many ``columns``."""
    unit = "" if study.measured is None else " s"
    work = sum((study.times.forward, study.times.backward, study.times.weight)) * study.schedule.num_microbatches
    lines = [study.title, ""]
    if study.measured is not None:
        lines += _figures("measured", study.measured, unit)
    lines += _figures("simulated" if study.measured else "", study.simulated, unit)
    lines += [f"{'work of a stage':<19} {work:.6g}{unit}", "", *_stage_table(study)]
    if study.measured is None:
        chunks = study.schedule.placement.num_chunks
        rows = schedule_text(study.simulated, chunks, columns)
        second = "; lower case: second chunk" if chunks == 2 else ""
        lines += ["", *(rows or [])]
        if rows is None:
            lines.append(f"The timeline does not fit in {columns} columns: draw it with --svg or --png.")
        else:
            lines += ["", f"Letter and microbatch of each pass; -: going on; .: idle{second}."]
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


def picture(study: Study) -> str:
    """An SVG of the timelines: the measured one, if there is one, above the simulated one."""
    runs = [(study.title, study.simulated)]
    if study.measured is not None:
        runs = [(f"measured {study.title}", study.measured), ("simulated with its median times", study.simulated)]
    titled = [(f"{title}, bubble {_percent(timeline.bubble_fraction)}", timeline) for title, timeline in runs]
    return schedule_picture(study.schedule, titled, "time" if study.measured is None else "time (s)")


def _to_png(svg: str) -> bytes:
    """The picture at 150 dots per inch, with the font of matplotlib: many machines have none."""
    try:
        import matplotlib
        import resvg_py
    except ImportError as error:
        raise ConfigError("--png needs resvg_py and matplotlib: pip install resvg_py matplotlib.") from error
    font = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    return resvg_py.svg_to_bytes(svg, zoom=150 / 96, skip_system_fonts=True, font_files=[str(font)])


def study(config: PipelineScheduleConfig) -> None:
    """Study the schedule, print and write what was found."""
    config.check()
    try:
        found = study_on_paper(config) if config.measured is None else study_of_trace(config, config.measured)
    except ScheduleError as error:
        raise ConfigError(str(error)) from error
    if config.json is not None:
        write_json(config.json, to_json(found))
    if config.svg is not None:
        write_file("--svg", config.svg, picture(found))
    if config.png is not None:
        write_file("--png", config.png, _to_png(picture(found)))
    print(summary(found, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns))


main = partial(run_tool, PipelineScheduleConfig, study, __doc__)
