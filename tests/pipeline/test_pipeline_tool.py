"""tools/pipeline_schedule.py as it is called, the traces that it reads, and the page that it illustrates."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron.commands import pipeline_schedule
from megatron.commands.tool import write_file
from megatron.errors import DataError
from megatron.schedules.catalog import ScheduleName, build_schedule
from megatron.schedules.schedule import Schedule
from megatron.schedules.simulator import Durations, Span, Timeline, peak_live_activations, simulate
from megatron.training.pipeline_trace import from_chrome_trace, median_durations, to_chrome_trace

REPOSITORY = Path(__file__).parents[2]
NAMES = get_args(ScheduleName)

every_schedule = pytest.mark.parametrize("name", NAMES)


SMALL = ("--schedule", "zb-v", "--stages", 2, "--microbatches", 3)
RunTool = Callable[..., str]


@pytest.fixture
def run_tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunTool:
    """Runs the tool, with a terminal of so many columns; its output, or the one sentence with which it refuses."""

    def run(*flags: object, code: int = 0, columns: int = 200) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert pipeline_schedule.main([str(flag) for flag in flags]) == code
        captured = capsys.readouterr()
        if code == 0:
            return captured.out
        assert captured.out == ""
        assert captured.err.startswith("ERROR: ") and captured.err.count("\n") == 1
        return captured.err

    return run


def uneven_run(name: ScheduleName, stages: int = 3, microbatches: int = 5) -> tuple[Schedule, Timeline]:
    """As if measured: stages differ, messages take time, and the clock starts somewhere."""
    schedule = build_schedule(name, stages, microbatches)
    count = schedule.placement.num_virtual_stages
    forward, backward, weight = (
        tuple(time * (1 + 0.1 * number) for number in range(count)) for time in (0.01, 0.012, 0.008)
    )
    spans = simulate(schedule, Durations(forward, backward, weight, send=0.003)).spans
    return schedule, Timeline(
        stages, tuple(replace(span, start=span.start + 1000, end=span.end + 1000) for span in spans)
    )


# What is printed and written


def test_the_json_holds_what_scripts_read(run_tool: RunTool, tmp_path: Path) -> None:
    flags = ["--schedule", "interleaved", "--stages", 4, "--microbatches", 8, "--virtual", 3, "--forward-time", 1.5]
    flags += ["--backward-time", 3, "--weight-time", 0.75, "--send-time", 0.1]
    run_tool(*flags, "--json", tmp_path / "new" / "out.json")
    data = json.loads((tmp_path / "new" / "out.json").read_text())
    schedule = build_schedule("interleaved", 4, 8, 3)
    timeline = simulate(schedule, Durations.uniform(schedule.placement, 1.5, 3, 0.75, 0.1))
    spans = data.pop("timeline")
    assert data == {
        "schedule": "interleaved",
        "stages": 4,
        "microbatches": 8,
        "virtual": 3,
        "microbatch_group_size": 4,
        "forward_time": 1.5,
        "backward_time": 3.0,
        "weight_time": 0.75,
        "send_time": 0.1,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "stage_idle_fractions": list(timeline.stage_idle_fractions),
        "peak_live_activations": list(peak_live_activations(schedule)),
    }
    assert data["bubble_fraction"] == pytest.approx((data["makespan"] - 8 * 5.25) / data["makespan"])
    assert sorted(spans[0]) == ["chunk", "end", "kind", "microbatch", "stage", "start"]
    assert len(spans) == 4 * 8 * 3 * 2
    assert spans[0] == {"stage": 0, "kind": "F", "microbatch": 0, "chunk": 0, "start": 0.0, "end": 0.5}
    assert os.listdir(tmp_path / "new") == ["out.json"]


def test_times_are_1_1_1_and_0_unless_given(run_tool: RunTool, tmp_path: Path) -> None:
    run_tool("--schedule", "zb-h1", "--stages", 4, "--microbatches", 8, "--json", tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert [data[f"{kind}_time"] for kind in ("forward", "backward", "weight", "send")] == [1, 1, 1, 0]
    assert data["makespan"] == 27
    assert data["peak_live_activations"] == [4, 4, 4, 4]
    assert data["microbatch_group_size"] is None


def test_the_summary_of_a_small_schedule(run_tool: RunTool) -> None:
    assert run_tool("--schedule", "1f1b", "--stages", 2, "--microbatches", 3) == (
        "1f1b: 2 stages, 3 microbatches\n"
        "\n"
        "makespan            12\n"
        "bubble              25.0 % of all stages' time\n"
        "work of a stage     9\n"
        "\n"
        "stage  idle in its span  peak live activations\n"
        "    0            25.0 %                      2\n"
        "    1             0.0 %                      1\n"
        "\n"
        "stage 0  F0-F1-......B0----F2-B1----...B2----\n"
        "stage 1  ...F0-B0----F1-B1----F2-B2----......\n"
        "\n"
        "Letter and microbatch of each pass; -: going on; .: idle.\n"
    )


def test_a_second_chunk_is_in_lower_case_and_counts_as_half_a_stage(run_tool: RunTool) -> None:
    output = run_tool(*SMALL, columns=47)
    assert "stage 0  F0F1F2f0b0w0f1b1w1B0W0f2b2w2B1W1B2W2..\n" in output
    assert "stage 1  ..F0f0F1f1b0w0F2B0W0f2b1w1B1b2B2W1w2W2\n" in output
    assert "    1             0.0 %                      4                 2\n" in output


def test_a_timeline_that_does_not_fit_is_left_to_the_pictures(run_tool: RunTool) -> None:
    assert "The timeline does not fit in 47 columns" not in run_tool(*SMALL, columns=47)
    output = run_tool(*SMALL, columns=46)
    assert "stage 0 " not in output
    assert "The timeline does not fit in 46 columns: draw it with --svg or --png." in output


# Pictures


def texts(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.processes
def test_pictures_are_what_their_names_say_and_do_not_change_by_themselves(run_tool: RunTool, tmp_path: Path) -> None:
    flags = ("--schedule", "zb-v", "--stages", 2, "--microbatches", 4)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    run_tool(*flags, "--svg", first, "--png", tmp_path / "out.png")
    command = [sys.executable, "tools/pipeline_schedule.py", *map(str, flags), "--svg", str(second)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
    svg = first.read_bytes()
    assert svg == second.read_bytes()
    png = (tmp_path / "out.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    # Without a font, text would be left out without a word.
    assert png != pipeline_schedule._to_png(re.sub("<text.*?</text>", "", first.read_text()))
    found = texts(svg)
    bubble = 1 - 4 * 3 / simulated("zb-v", 2, 4).makespan
    assert f"zb-v: 2 stages, 4 microbatches, 2 chunks per stage, bubble {100 * bubble:.1f} %" in found
    # Each of 2 stages has 3 passes of 2 chunks of each microbatch; the time axis has a few numbers of its own.
    assert all(found.count(str(microbatch)) >= 12 for microbatch in range(4))
    legend = ["forward, chunks 0 to 1", "input gradient, chunks 0 to 1", "weight gradient, chunks 0 to 1", "idle"]
    assert found[-4:] == legend
    drawn = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    looks = {(box.get("class"), box.get("fill-opacity")) for box in drawn if "pass" in box.get("class", "")}
    assert looks == {(f"pass {kind}", faded) for kind in ("forward", "backward", "weight") for faded in (None, "0.5")}


def simulated(name: ScheduleName, stages: int, microbatches: int, chunks: int | None = None) -> Timeline:
    """With passes of equal length."""
    schedule = build_schedule(name, stages, microbatches, chunks)
    return simulate(schedule, Durations.uniform(schedule.placement, 1, 1, 1))


def test_numbers_that_do_not_fit_are_left_out(run_tool: RunTool, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    run_tool("--schedule", "gpipe", "--stages", 2, "--microbatches", 200, "--svg", path)
    assert "199" not in texts(path.read_bytes())
    assert len(path.read_bytes()) < 100_000


# What is refused

GOOD = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "4"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stages", "2"], "--schedule, --stages and --microbatches are required"),
        ([*GOOD, "--stages", "0"], "--stages 0 must be at least 1"),
        ([*GOOD, "--microbatches", "-3"], "--microbatches -3 must be at least 1"),
        ([*GOOD, "--virtual", "2"], "--virtual 2: 1f1b runs one chunk per stage; remove it"),
        ([*GOOD, "--schedule", "interleaved", "--virtual", "1"], "interleaved runs several chunks .* use 2 or more"),
        ([*GOOD, "--schedule", "zb-v", "--virtual", "3"], "--virtual 3: zb-v runs two chunks"),
        ([*GOOD, "--microbatch-group-size", "4"], "--microbatch-group-size has no effect with 1f1b: remove it"),
        (
            [*GOOD, "--schedule", "interleaved", "--microbatch-group-size", "1"],
            "--microbatch-group-size 1 is below the number of stages 2.*: use 2 or more",
        ),
        ([*GOOD, "--forward-time", "-1"], "--forward-time -1.0 must be finite and not negative"),
        ([*GOOD, "--send-time", "nan"], "--send-time nan must be finite"),
        ([*GOOD, "--forward-time", "0", "--backward-time", "0", "--weight-time", "0"], "are all 0: one must be above"),
        ([*GOOD, "--svg", "picture.png"], r"--svg picture.png does not end in \.svg"),
        ([*GOOD, "--png", "picture"], r"--png picture does not end in \.png"),
        (
            [*GOOD, "--json", "/dev/null/out.json"],
            "--json /dev/null/out.json cannot be written .*: choose another path",
        ),
        ([*GOOD, "--json", "/"], "--json / cannot be written .*: choose another path"),
        (["--measured", "/no/such/trace.json"], "--measured /no/such/trace.json cannot be read .*: check the path"),
        (["--measured", __file__], "--measured .* is not JSON"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(run_tool: RunTool, flags: list[str], message: str) -> None:
    assert re.search(message, run_tool(*flags, code=2))


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    open_before = path.open()
    write_file("--json", str(path), b"new")
    assert path.read_text() == "new"
    assert open_before.read() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, replacing /dev/stdout would take it away from everybody."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_file("--json", str(link), b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"


# Measured traces


def written_trace(tmp_path: Path, schedule: Schedule, timeline: Timeline) -> str:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(to_chrome_trace(schedule, timeline)))
    return str(path)


def test_a_measured_run_is_set_beside_its_simulation(run_tool: RunTool, tmp_path: Path) -> None:
    schedule, timeline = uneven_run("zb-v")
    trace = written_trace(tmp_path, schedule, timeline)
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    output = run_tool("--measured", trace, "--json", out, "--svg", svg)
    on_paper = simulate(schedule, median_durations(schedule, timeline))
    assert timeline.bubble_fraction > on_paper.bubble_fraction + 0.01
    data = json.loads(out.read_text())
    assert data["bubble_fraction"] == pytest.approx(on_paper.bubble_fraction)
    assert data["measured"]["bubble_fraction"] == pytest.approx(timeline.bubble_fraction)
    assert data["measured"]["makespan"] == pytest.approx(timeline.makespan)
    assert data["measured"]["stage_idle_fractions"] == pytest.approx(timeline.stage_idle_fractions)
    assert (data["schedule"], data["stages"], data["microbatches"], data["virtual"]) == ("zb-v", 3, 5, 2)
    assert data["forward_time"] == pytest.approx(2 * 0.01 * 1.25)  # two chunks, whose mean is 0.01 x 1.25
    measured, simulated = (f"{100 * one.bubble_fraction:.1f} %" for one in (timeline, on_paper))
    assert f"measured bubble     {measured} of all stages' time\n" in output
    assert f"simulated bubble    {simulated} of all stages' time\n" in output
    titles = [text for text in texts(svg.read_bytes()) if "bubble" in text]
    assert titles == [
        f"measured zb-v: 3 stages, 5 microbatches, 2 chunks per stage, bubble {measured}",
        f"simulated with its median times, bubble {simulated}",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule", "gpipe"], "--schedule gpipe contradicts --measured, whose trace has 1f1b: remove --schedule"),
        (["--stages", "4"], "--stages 4 contradicts --measured, whose trace has 3"),
        (["--microbatches", "4"], "--microbatches 4 contradicts --measured, whose trace has 5"),
        (["--virtual", "2"], "--virtual 2 contradicts --measured, whose trace has 1"),
        (["--weight-time", "1"], "--weight-time comes from the trace of --measured: remove it"),
        (["--microbatch-group-size", "8"], "--microbatch-group-size comes from the trace of --measured: remove it"),
    ],
)
def test_flags_that_contradict_the_trace_are_refused(
    run_tool: RunTool, tmp_path: Path, flags: list[str], message: str
) -> None:
    trace = written_trace(tmp_path, *uneven_run("1f1b"))
    assert message in run_tool("--measured", trace, *flags, code=2)


def test_flags_that_agree_with_the_trace_are_fine(run_tool: RunTool, tmp_path: Path) -> None:
    trace = written_trace(tmp_path, *uneven_run("1f1b"))
    flags = ["--schedule", "1f1b", "--stages", "3", "--microbatches", "5", "--virtual", "1", "--send-time", "0.5"]
    assert re.search(r"simulated makespan +[2-9]\.\d+ s", run_tool("--measured", trace, *flags))


def test_a_trace_in_which_a_pass_ran_twice_is_refused(run_tool: RunTool, tmp_path: Path) -> None:
    schedule, timeline = uneven_run("1f1b")
    trace = written_trace(tmp_path, schedule, Timeline(3, (*timeline.spans, timeline.spans[0])))
    message = run_tool("--measured", trace, code=2)
    assert "trace.json: 1f1b, stage 0: missing nothing; too many F0.0" in message


@every_schedule
def test_a_trace_is_read_back_as_it_was_written(name: ScheduleName) -> None:
    schedule, timeline = uneven_run(name)
    data = json.loads(json.dumps(to_chrome_trace(schedule, timeline)))
    found, read = from_chrome_trace(data)
    assert found == schedule
    for stage in range(3):
        theirs, ours = timeline.stage_spans(stage), read.stage_spans(stage)
        assert [span.action for span in ours] == [span.action for span in theirs]
        assert [span.start + 1000 for span in ours] == pytest.approx([span.start for span in theirs])
        assert [span.end - span.start for span in ours] == pytest.approx([span.end - span.start for span in theirs])


def test_a_trace_has_what_perfetto_reads() -> None:
    schedule = build_schedule("zb-v", 2, 4)
    span = Span(1, schedule.actions[1][1], 5.0, 5.25)
    data = to_chrome_trace(schedule, Timeline(2, (span, Span(0, schedule.actions[0][0], 4.5, 5.0))))
    assert data["traceEvents"][:2] == [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in (0, 1)
    ]
    assert data["traceEvents"][2:] == [
        {"name": name, "cat": "F", "ph": "X", "ts": start, "dur": duration, "pid": 0, "tid": stage, "args": arguments}
        for name, start, duration, stage, arguments in (
            ("F0.1", 500_000.0, 250_000.0, 1, {"microbatch": 0, "chunk": 1, "stage": 1}),
            ("F0.0", 0.0, 500_000.0, 0, {"microbatch": 0, "chunk": 0, "stage": 0}),
        )
    ]
    assert data["otherData"] == {"schedule": "zb-v", "stages": 2, "microbatches": 4, "virtual": 2}


def test_the_order_is_that_of_the_clock_and_other_events_are_left_out() -> None:
    schedule, timeline = uneven_run("1f1b")
    data = to_chrome_trace(schedule, timeline)
    data["traceEvents"].reverse()
    data["traceEvents"].append({"name": "all-reduce", "ph": "X", "cat": "communication", "ts": 1, "dur": 1})
    assert from_chrome_trace(data)[0] == schedule


def test_medians_are_by_virtual_stage_over_the_microbatches() -> None:
    schedule = build_schedule("zb-v", 2, 3)
    times = Durations((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), (9.0, 10.0, 11.0, 12.0))
    spans = list(simulate(schedule, times).spans)
    # One of three microbatches ten times slower everywhere: the median does not see it.
    slow = [
        replace(span, end=span.start + 10 * (span.end - span.start)) if span.action.microbatch == 2 else span
        for span in spans
    ]
    assert median_durations(schedule, Timeline(2, tuple(slow))) == times


def test_an_unsplit_backward_pass_is_measured_as_a_whole() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    timeline = simulate(schedule, Durations((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)))
    assert median_durations(schedule, timeline) == Durations((1.0, 2.0), (8.0, 10.0), (0.0, 0.0))


def without_spans_of_the_last_stage(data: dict[str, Any]) -> None:
    for event in data["traceEvents"]:
        event["tid"] %= 2


def setting(*keys: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    """Set one value deep in the trace; event 3 is the first pass."""

    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("otherData", to=None), "otherData is not a JSON object"),
        (setting("otherData", "schedule", to="2f2b"), "schedule is '2f2b', not one of 1f1b, dualpipe-v, gpipe"),
        (setting("otherData", "schedule", to=["1f1b"]), "schedule is .*, not one of"),
        (setting("otherData", "stages", to=0), "stages is 0, not an integer of 1 or more"),
        (setting("otherData", "stages", to=True), "stages is True, not an integer"),
        (setting("otherData", "microbatches", to=5.0), r"microbatches is 5\.0, not an integer"),
        (setting("otherData", "microbatches", to=10**12), "the trace has 30 passes, but 3000000000000 .* truncated"),
        (setting("otherData", "virtual", to=2), "1f1b needs one chunk per stage, not 2"),
        (setting("traceEvents", to={}), "traceEvents is not a list"),
        (setting("traceEvents", 3, to=7), "an event is not a JSON object"),
        (setting("traceEvents", 3, "args", to=[]), "event 'F0.0': args is not a JSON object"),
        (setting("traceEvents", 3, "tid", to=3), "event 'F0.0': tid is 3, not an integer of 0 to 2"),
        (setting("traceEvents", 3, "args", "microbatch", to=5), "microbatch is 5, not an integer of 0 to 4"),
        (setting("traceEvents", 3, "args", "chunk", to=-1), "chunk is -1, not an integer of 0 to 0"),
        (setting("traceEvents", 3, "ts", to=math.nan), "ts is nan, not a time"),
        (setting("traceEvents", 3, "ts", to=10**400), "not a time"),
        (setting("traceEvents", 3, "dur", to="1"), "dur is '1', not a time"),
        (setting("traceEvents", 3, "dur", to=-1.0), r"dur is -1\.0, not a time in microseconds"),
        (without_spans_of_the_last_stage, "stage 2 has no measured time"),
    ],
)
def test_a_damaged_trace_is_refused_by_what_is_wrong(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = to_chrome_trace(*uneven_run("1f1b"))
    from_chrome_trace(data)
    change(data)
    with pytest.raises(DataError, match=message):
        from_chrome_trace(data)


@pytest.mark.parametrize("data", [None, [], 3, "trace", {}])
def test_what_is_no_trace_at_all_is_refused(data: object) -> None:
    with pytest.raises(DataError, match="is not a JSON object"):
        from_chrome_trace(data)


# The page

PAGE = (REPOSITORY / "docs/pipeline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("row", "name", "chunks"),
    [
        ("`gpipe`", "gpipe", None),
        ("`1f1b`", "1f1b", None),
        ("`interleaved`, V = 2", "interleaved", 2),
        ("`interleaved`, V = 4", "interleaved", 4),
        ("`zb-h1`", "zb-h1", None),
        ("`zb-v`", "zb-v", None),
        ("`dualpipe-v`", "dualpipe-v", None),
    ],
)
def test_the_pages_table_is_what_the_simulator_says(row: str, name: ScheduleName, chunks: int | None) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    expected = []
    for stages, microbatches in ((4, 8), (16, 64)):
        schedule = build_schedule(name, stages, microbatches, chunks)
        bubble = simulated(name, stages, microbatches, chunks).bubble_fraction
        held = max(peak_live_activations(schedule)) / schedule.placement.num_chunks
        expected += [f"{100 * bubble:.1f} %", f"{held:g}"]
    assert [cells[2], cells[4], cells[3], cells[5]] == expected


@every_schedule
def test_the_pages_pictures_are_of_today(name: ScheduleName) -> None:
    path = REPOSITORY / f"docs/images/{name}.svg"
    assert f"images/{path.name})" in PAGE
    bubble = simulated(name, 4, 8).bubble_fraction
    assert any(text.endswith(f"bubble {100 * bubble:.1f} %") for text in texts(path.read_bytes()))
