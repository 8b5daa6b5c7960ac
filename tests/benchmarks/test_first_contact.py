"""benchmarks/first_contact.py and gpu_day.py: rehearsals of both, and what a line that fails costs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import first_contact, first_contact_report, gpu_day, tiny_run
from benchmarks.benchmark_experts import SHAPES
from benchmarks.benchmark_step import parse
from benchmarks.first_contact import CallConfig
from benchmarks.gpu_day import DayConfig, lines_of
from benchmarks.gpu_lines import __main__ as worker
from benchmarks.gpu_lines import line_run, pytest_lines, real, session, steps
from benchmarks.gpu_lines.day_lines import LINES, STAGES
from benchmarks.gpu_lines.first_contact_lines import CALL_1, CALL_2, CALL_SECONDS, CALLS
from benchmarks.gpu_lines.gpu_state import GpuState, GpuWatch, extremes
from benchmarks.gpu_lines.line import (
    RESULTS,
    STARTED,
    WHOLE,
    Expectation,
    Line,
    Result,
    Verdict,
    append,
    figures_of,
    read_results,
    whole_of,
)
from benchmarks.gpu_lines.line_run import LineRun
from benchmarks.gpu_lines.pytest_lines import Recorder
from benchmarks.gpu_lines.real import device_time
from benchmarks.gpu_lines.runner import (
    ARCHIVE,
    LEFT_OUT,
    TABLE,
    Session,
    read_archive,
    run_lines,
    start_process,
    write_archive,
)
from benchmarks.gpu_lines.session import run_session
from benchmarks.gpu_lines.table import MOST_ROWS, MOST_WIDTH, as_text, verdict_of
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.errors import ConfigError
from tests.forked import ForkedProcess, fork_context

CPU = torch.device("cpu")


def start_forked(session: Session, line: Line, seconds: float, log: Path) -> ForkedProcess:
    return start_fork_of(run_forked, session, line, seconds, log)


def start_fork_of(run: Callable[..., None], *arguments: Any) -> ForkedProcess:
    """A line in a fork of a process that has imported torch."""
    process = fork_context().Process(target=run, args=arguments)
    process.start()
    forked = ForkedProcess(process)
    # On a busy machine the time of a line may end before its fork begins.
    with suppress(ProcessLookupError):
        while os.getpgid(forked.pid) != forked.pid:
            time.sleep(0.01)
    return forked


def run_forked(session: Session, line: Line, seconds: float, log: Path) -> None:
    with log.open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.setsid()
    worker.run_in_this_process(line, session.out, session.device, session.is_tiny, seconds)


def planted(name: str, seconds: float = 1.0, limit: float = 300.0, expects: Expectation | None = None) -> Line:
    return Line(name, f"tests.benchmarks.planted_lines.{name}", "", seconds, limit, expects)


def run_planted(out: Path, *lines: Line, seconds: float = 600.0, is_tiny: bool = False) -> dict[str, list[Result]]:
    run_lines(Session(out, "cpu", is_tiny, seconds, "a test"), lines, start_forked)
    return read_results(out)


# The rehearsal


def rehearse(out: Path, *names: str) -> Path:
    """Both calls, or the lines with these names; returns the directory. On a GPU each line has a Python of its own, as
    here "tiny" where all are rehearsed."""

    def start(session: Session, line: Line, seconds: float, log: Path) -> Any:
        is_cold = not names and line.name == "tiny"
        return (start_process if is_cold else start_forked)(session, line, seconds, log)

    for call, lines in CALLS.items():
        chosen = [line for line in lines if not names or line.name in names]
        config = CallConfig(str(out), device="cpu", tiny=True)
        assert run_session(config, chosen, CALL_SECONDS[call], start) == 0, (out / TABLE).read_text()
    return out


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a line of each kind."""
    return rehearse(tmp_path_factory.mktemp("first_contact"), "facts", "tiny", "405b-tp8", "attention")


def test_a_line_of_each_kind_is_right_in_a_rehearsal(rehearsal: Path) -> None:
    results = read_results(rehearsal)
    assert {name: verdict_of(found) for name, found in results.items()} == dict.fromkeys(results, Verdict.RIGHT)
    assert (figures_of(results, "tiny", "fp64") or {})["difference"] <= 1e-9
    assert all((whole_of(found) or found[0]).seconds > 0 for found in results.values())
    memory = [one.figures.get("peak_memory_bytes", 0) for found in results.values() for one in found]
    assert sum(value > 2**25 for value in memory) == len(results)


@pytest.mark.slow(reason="minutes; a line of each kind runs by default. Run it before a call on a GPU")
def test_a_rehearsal_runs_every_line_of_both_calls(tmp_path: Path) -> None:
    results = read_results(rehearse(tmp_path))
    assert list(results) == [line.name for line in (*CALL_1, *CALL_2)]
    assert {name: verdict_of(found) for name, found in results.items()} == dict.fromkeys(results, Verdict.RIGHT)
    assert (figures_of(results, "70b-tp4") or {})["stand_in_ms"] > 0
    assert "speed / bound, FP8 kernels" in (figures_of(results, "8b-fp8") or {})
    assert "speed / transformers eager" in (figures_of(results, "8b") or {})
    assert (figures_of(results, "real", "dry run") or {})["peak_bytes"] > 0
    assert (figures_of(results, "products") or {})["passed"] >= 5
    with tarfile.open(tmp_path / ARCHIVE) as tar:
        assert any(name.endswith("trace.json") for name in tar.getnames()), "the profile of the real run"


def test_its_table_is_short_and_its_archive_has_all(rehearsal: Path, tmp_path: Path) -> None:
    table = (rehearsal / TABLE).read_text()
    assert len(table.splitlines()) <= MOST_ROWS
    assert all(any(row.startswith(name) for row in table.splitlines()) for name in read_results(rehearsal))
    read_archive(rehearsal / ARCHIVE, tmp_path, (RESULTS, TABLE))
    assert (tmp_path / RESULTS).read_bytes() == (rehearsal / RESULTS).read_bytes()
    with tarfile.open(rehearsal / ARCHIVE) as tar:
        names = tar.getnames()
    assert {"tiny.log", "steps.jsonl"} <= set(names)
    assert (rehearsal / ARCHIVE).stat().st_size < 16 * 2**20


@pytest.mark.parametrize("from_archive", [False, True])
def test_the_report_is_written_into_a_copy_of_the_page(rehearsal: Path, tmp_path: Path, from_archive: bool) -> None:
    page = Path(shutil.copy(first_contact_report.PAGE, tmp_path))
    before = page.read_text(encoding="utf-8")
    place = rehearsal / ARCHIVE if from_archive else rehearsal
    assert first_contact_report.main(["--out", str(place), "--page", str(page)]) == 0
    found = page.read_text(encoding="utf-8")
    begin, end = first_contact_report.BEGIN, first_contact_report.END
    assert [text.partition(begin)[0] for text in (before, found)] == [before.partition(begin)[0]] * 2
    assert before.partition(end)[2] == found.partition(end)[2]
    section = found.partition(begin)[2].partition(end)[0]
    assert "| 405b-tp8 | right |" in section
    assert "ms of a layer, measured (predicted)" in section
    assert re.search(r"^- 20\d\d-\d\d-\d\d: `python benchmarks/", section, re.MULTILINE)


def test_a_page_without_marks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_planted(tmp_path, planted("good"))
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    assert first_contact_report.main(["--out", str(tmp_path), "--page", str(page)]) == 2
    assert "has no section to replace" in capsys.readouterr().err
    assert first_contact_report.main(["--out", str(tmp_path / "no"), "--page", str(page)]) == 2
    assert "first_contact.py --call 1" in capsys.readouterr().err


def test_figures_of_a_gpu_stand_beside_what_was_predicted_and_planned() -> None:
    step = {"ms_per_layer": 20.0, "step_ms": 320.0, "kernel_ms": {"matrix products": 240.0, "attention": 64.0}}
    whole = Result("8b", WHOLE, Verdict.SLOW, {"figure": 0.51, "figure_name": "mfu", "expected": "0.53 to 0.62"})
    sizes = {"peak_bytes": 40 * 2**30, "held_bytes": 30 * 2**30, "outside_allocator_bytes": 2**30}
    plan = {"peak_bytes": 32 * 2**30, "held_bytes": 30 * 2**30, "allowance_bytes": 2 * 2**30}
    results = {
        "8b": [Result("8b", "8b", Verdict.RIGHT, step | {"speed / bound, our kernels": 0.9}), whole],
        "real": [Result("real", "real", Verdict.RIGHT, sizes), Result("real", "dry run", Verdict.RIGHT, plan)],
    }
    text = first_contact_report.section([first_contact_report.Measured(results, [])])
    assert "| 8b | slow | mfu 0.51 | 0.53 to 0.62 |" in text
    assert "| 8b | 15.00 (15.8) | 4.00 (4.2) | 0.00 (1.5) | 20.00 (21.5) | 0.900 |" in text
    assert "| real | peak | 40.00 | 32.00 | 1.250 |" in text
    assert "| real | outside of torch's allocator | 1.00 | 2.00 | 0.500 |" in text


SELECTION = "selection/8B with head and optimizer"


def rehearse_day(out: Path, *names: str) -> dict[str, list[Result]]:
    config, lines = lines_of(DayConfig(str(out), only=names, device="cpu", tiny=True))
    assert run_session(config, lines, 600.0, start_forked) == 0, (out / TABLE).read_text()
    results = read_results(out)
    assert list(results) == list(names)
    return results


def test_the_lines_of_a_day_can_be_chosen(tmp_path: Path) -> None:
    assert len({line.name for line in LINES}) == len(LINES)
    results = rehearse_day(tmp_path, SELECTION)
    assert "fp8_weight_gradient" in (figures_of(results, SELECTION, "FP8 delayed") or {})
    # The next call runs what this one has not reached.
    _, left = lines_of(DayConfig(str(tmp_path)))
    assert {line.name for line in LINES} - {line.name for line in left} == {SELECTION}
    stages, _ = lines_of(DayConfig(str(tmp_path), only=("ranks", "bench/8B")))
    assert stages.only == (*(line.name for line in STAGES["ranks"]), "bench/8B")


@pytest.mark.slow(reason="minutes; the flags of every line are checked by default")
def test_a_rehearsal_of_a_day_is_right(tmp_path: Path) -> None:
    names = ["tiny/deterministic mode", "tiny/killed and resumed", "tiny/profile", "real/saves"]
    names += ["bench/8B, attention flash", "fp8/parts of 8B", "documents/cudnn, fewer plans", "tests/products"]
    rehearse_day(tmp_path, *names)


# Lines that fail


def test_every_failure_costs_its_own_line_alone(tmp_path: Path) -> None:
    lines = [
        planted("good"),
        planted("hang", limit=3.0),
        planted("crash"),
        planted("out_of_memory"),
        planted("wrong"),
        planted("broken"),
        planted("without_a_package"),
        planted("slow", expects=Expectation("mfu", 0.5, 0.7)),
        replace(planted("good"), name="good again"),
    ]
    started = time.monotonic()
    results = run_planted(tmp_path, *lines)
    assert time.monotonic() - started < 300
    assert {name: verdict_of(found) for name, found in results.items()} == {
        "good": Verdict.RIGHT,
        "hang": Verdict.HUNG,
        "crash": Verdict.CRASHED,
        "out_of_memory": Verdict.OUT_OF_MEMORY,
        "wrong": Verdict.WRONG,
        "broken": Verdict.CRASHED,
        "without_a_package": Verdict.CRASHED,
        "slow": Verdict.SLOW,
        "good again": Verdict.RIGHT,
        # Once more, one kernel at a time.
        "broken, blocking": Verdict.CRASHED,
    }
    # The table names the kernel, the first error and its place; what a line had found before it is kept.
    table = (tmp_path / TABLE).read_text()
    rows = {line.name: next(row for row in table.splitlines() if row.startswith(f"{line.name} ")) for line in lines}
    assert re.search(r"ended after ([3-9]|\d\d+) s \(tests/benchmarks/planted_lines\.py:\d+ hang\)", rows["hang"])
    assert (figures_of(results, "hang", "before") or {})["kept"] == 1
    assert "ended by SIGSEGV" in rows["crash"] and "planted_lines.py" in rows["crash"]
    assert "Tried to allocate 2.00 GiB" in rows["out_of_memory"]
    assert "losses differ by 1.0e-01" in rows["wrong"]
    assert [result.verdict for result in results["wrong"][:2]] == [Verdict.WRONG, Verdict.RIGHT]
    assert "--kernel rope=triton" in rows["broken"]
    assert "illegal memory access" in next(one.error or "" for one in results["broken"])
    assert [result.name for result in results["broken"]] == ["kernels", "the process", WHOLE]
    assert "it needs no_such_package" in rows["without_a_package"]
    assert "0.3" in rows["slow"] and "0.5 to 0.7" in rows["slow"]


def test_a_line_is_not_started_with_less_than_half_of_its_time(tmp_path: Path) -> None:
    lines = [planted("good", seconds=1000.0), planted("hang", seconds=4.0), planted("slow", seconds=3.0)]
    results = run_planted(tmp_path, *lines, seconds=5.0)
    verdicts = [verdict_of(found) for found in results.values()]
    assert verdicts == [Verdict.NOT_STARTED, Verdict.HUNG, Verdict.NOT_STARTED]
    said = (whole_of(results["good"]) or results["good"][0]).error or ""
    assert re.fullmatch(r"[2-5] s were left, and it takes 1000", said)
    # The limit of a line is also what is left.
    assert 2 < (whole_of(results["hang"]) or results["hang"][0]).seconds < 300
    assert (tmp_path / ARCHIVE).exists()


def test_what_a_line_has_started_ends_with_it(tmp_path: Path) -> None:
    assert verdict_of(run_planted(tmp_path, planted("hang_in_a_child", limit=3.0))["hang_in_a_child"]) == Verdict.HUNG
    process = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    deadline = time.monotonic() + 20
    # It may not have been reaped.
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_line_is_passed_to_its_process_in_json() -> None:
    for line in (*CALL_1, *CALL_2, *LINES):
        assert Line.from_json(json.loads(json.dumps(asdict(line)))) == line


def test_an_expectation_knows_slow_and_too_good_to_be_true() -> None:
    mfu, time_ = Expectation("mfu", 0.5, 0.6), Expectation("ms", 0.0, 4.0, better="lower")
    assert [mfu.verdict(value) for value in (0.4, 0.5, 0.65, 0.9)] == ["slow", "right", "right", "wrong"]
    assert [time_.verdict(value) for value in (1.0, 4.1)] == ["right", "slow"]


def test_a_figure_may_be_relative_to_another_line(tmp_path: Path) -> None:
    expects = Expectation("mfu", 0.9, 1.3, relative_to="slow")
    results = run_planted(tmp_path, planted("slow"), planted("good", expects=expects))
    whole = whole_of(results["good"])
    assert whole is not None and whole.verdict == Verdict.WRONG  # 0.5 / 0.3 is more than any card gains
    assert whole.figures["figure"] == pytest.approx(0.5 / 0.3) and whole.figures["figure_name"] == "mfu / slow"


# Results


def test_a_later_run_replaces_a_line_and_a_torn_record_is_left_out(tmp_path: Path) -> None:
    for name in ("first", "second"):
        append(tmp_path, Result("line", STARTED, Verdict.RIGHT, {"resumes": False}))
        append(tmp_path, Result("line", name, Verdict.RIGHT))
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"line": "line", "name": "thi')
    assert [result.name for result in read_results(tmp_path)["line"]] == ["second"]
    append_to = tmp_path / "metrics.jsonl"
    append_to.write_text('{"lm_loss": 1.5}\n{"run": 1}\n{"lm_loss": 2')
    assert tiny_run.losses_of(append_to) == [1.5]
    assert tiny_run.losses_of(tmp_path / "absent.jsonl") == []


def test_the_table_has_at_most_sixty_rows() -> None:
    results = {
        f"line {number}": [
            Result(f"line {number}", "part", Verdict.WRONG, error="x" * 500),
            Result("", "b", Verdict.RIGHT),
        ]
        for number in range(80)
    }
    rows = as_text(results).splitlines()
    assert len(rows) == MOST_ROWS
    assert rows[-1] == "80 lines: 80 hung" and "rows more in results.jsonl" in rows[-2]
    assert max(map(len, rows)) <= MOST_WIDTH


def test_an_archive_is_cut_to_its_limit_and_says_what_it_lacks(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "small.txt").write_text("kept")
    (directory / "deep" / "er" / "trace.json").write_text("{}" * 10_000)
    (directory / "large.bin").write_bytes(os.urandom(200_000))
    write_archive(directory, directory / ARCHIVE, most_bytes=100_000)
    with tarfile.open(directory / ARCHIVE) as tar:
        assert set(tar.getnames()) == {"small.txt", "deep/er/trace.json", LEFT_OUT}
    read_archive(directory / ARCHIVE, tmp_path / "read", ("small.txt", LEFT_OUT, "absent"))
    assert (tmp_path / "read" / "small.txt").read_text() == "kept"
    assert (tmp_path / "read" / LEFT_OUT).read_text() == "large.bin: 200000 bytes\n"
    write_archive(directory, directory / ARCHIVE)
    with tarfile.open(directory / ARCHIVE) as tar:
        assert "large.bin" in tar.getnames() and ARCHIVE not in tar.getnames()


# The state of the GPU


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A driver whose GPU draws 650 W under a power cap."""
    module = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1755,
        nvmlDeviceGetPowerUsage=lambda handle: 650_000,
        nvmlDeviceGetTemperature=lambda handle, kind: 61,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x04,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=40 * 2**30),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=99),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    yield module


def test_each_line_has_the_state_of_the_gpu_before_and_after(nvml: SimpleNamespace, tmp_path: Path) -> None:
    whole = whole_of(run_planted(tmp_path, planted("hang", limit=2.0))["hang"])
    assert whole is not None
    state = {"sm_clock_mhz": 1755, "power_w": 650.0, "temperature_c": 61, "throttle": "power cap"}
    for moment in ("before", "after"):
        assert state.items() <= whole.figures[moment].items()
    assert whole.figures["most_memory_bytes"] == 40 * 2**30
    assert "40.0  1755" in (tmp_path / TABLE).read_text()


def test_a_driver_that_does_not_answer_leaves_no_state(nvml: SimpleNamespace) -> None:
    def failing(handle: int) -> int:
        raise RuntimeError("GPU is lost")

    nvml.nvmlDeviceGetPowerUsage = failing
    with GpuWatch() as watch:
        assert watch.read() is None
        assert watch.since(0.0) == {}


def test_extremes_are_those_of_busy_readings() -> None:
    def state(clock: int, power: float, throttle: int, busy: int) -> GpuState:
        return GpuState(0.0, clock, power, 50, throttle, 1, busy)

    found = extremes([state(345, 70.0, 0x01, 0), state(1980, 500.0, 0, 99), state(1700, 690.0, 0x04, 100)])
    assert found["least_busy_sm_clock_mhz"] == 1700 and found["most_power_w"] == 690.0
    assert found["throttle_while_busy"] == "power cap"


# Tests as lines

FOUR_TESTS = """
import os
import pytest

def test_right():
    pass

def test_wrong():
    assert 1 == 2, "no"

def test_that_ends_its_process():
    os._exit(7)

def test_broken():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_skipped():
    pytest.skip("not here")

def test_last():
    pass
"""


def run_four_tests(out: Path, file: Path) -> list[Result]:
    arguments = f"'' -p tests.conftest --rootdir {file.parent} {file}"
    line = Line("tests", "benchmarks.gpu_lines.pytest_lines.run", arguments, 5.0, 120.0, resumes=True)
    run_lines(Session(out, "cpu", False, 120.0, "a test"), [line], partial(start_fork_of, run_with_broken_device))
    return read_results(out)["tests"]


def run_with_broken_device(session: Session, line: Line, seconds: float, log: Path) -> None:
    """As on a GPU that fails in a test: what the test raises is what CUDA raises from then on."""
    interact, broken = Recorder.pytest_exception_interact, [False]

    def pytest_exception_interact(recorder: Recorder, node: Any, call: Any, report: Any) -> None:
        broken[0] = "CUDA error" in str(call.excinfo.value)
        interact(recorder, node, call, report)

    with mock.patch.object(Recorder, "pytest_exception_interact", pytest_exception_interact):
        with mock.patch.object(pytest_lines, "device_is_broken", lambda: broken[0]):
            run_forked(session, line, seconds, log)


def test_a_test_that_ends_its_process_or_breaks_the_gpu_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "test_four.py"
    file.write_text(FOUR_TESTS)
    found = {result.name.rpartition("::")[2]: result for result in run_four_tests(tmp_path, file)}
    assert {name: found[f"test_{name}"].verdict for name in ("right", "wrong", "that_ends_its_process", "last")} == {
        "right": Verdict.RIGHT,
        "wrong": Verdict.WRONG,
        "that_ends_its_process": Verdict.CRASHED,
        "last": Verdict.RIGHT,
    }
    assert found["test_broken"].verdict == Verdict.CRASHED
    assert "illegal memory access" in (found["test_broken"].error or "")
    assert found["tests"].error == "3 tests failed, 2 passed"
    assert found[WHOLE].verdict == Verdict.CRASHED
    # Again: what has passed is not repeated.
    file.write_text(FOUR_TESTS.replace("1 == 2", "1 == 1").replace("os._exit(7)", "pass").replace("raise", "return"))
    before = (tmp_path / RESULTS).read_text().count("test_right")
    again = {result.name.rpartition("::")[2]: result for result in run_four_tests(tmp_path, file)}
    assert again[WHOLE].verdict == Verdict.RIGHT and again["tests"].figures["passed"] == 5
    assert (tmp_path / RESULTS).read_text().count("test_right") == before


# Flags


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (CallConfig("out", device="cpu"), "add --tiny"),
        (CallConfig("s3://out"), "--out"),
        (CallConfig("out", only=("8b", "nothing"), tiny=True), "--only nothing is not a line: choose from facts, tiny"),
        (CallConfig("out", device="cuda"), "--device cuda needs a GPU"),
    ],
)
def test_what_cannot_run_is_refused(config: CallConfig, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=sentence):
        config.check([line.name for line in CALL_1])


def test_the_recorded_command_has_no_directory_of_the_machine() -> None:
    words = ["/home/me/benchmarks/gpu_day.py", "--out", "/tmp/day", "--only", "bench/8B"]
    assert session.command(words) == "python benchmarks/gpu_day.py --out day --only bench/8B"


def test_a_mistake_is_a_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--out", str(tmp_path), "--device", "cpu", "--tiny"]
    assert first_contact.main([*flags, "--only", "nothing"]) == 2
    assert first_contact.main([*flags, "--seconds", "-1"]) == 2
    assert gpu_day.main([*flags, "--only", "bench/nothing"]) == 2
    assert capsys.readouterr().err.count("ERROR: ") == 3
    assert gpu_day.main(["--out", str(tmp_path), "--list"]) == 0
    assert "ranks/sanitizer  90 s" in capsys.readouterr().out


def test_the_command_starts_without_torch_and_with_few_packages() -> None:
    """``None`` in ``sys.modules`` is a package that is not installed. torch is imported by the lines' processes."""
    absent = ("tensorboard", "pytest", "transformers", "wandb", "datasets", "matplotlib")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import benchmarks.first_contact
try:
    benchmarks.first_contact.main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=line_run.REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "--archive" in found.stdout


# What the lines measure


@pytest.mark.parametrize("line", [*CALL_1, *LINES], ids=lambda line: line.name)
def test_the_flags_of_every_line_are_valid_at_full_size(line: Line) -> None:
    """A rehearsal has other shapes."""
    place, words = line.function.removeprefix("benchmarks.gpu_lines."), shlex.split(line.flags)
    if place in ("steps.run", "steps.documents", "steps.kernel_choices", "steps.parts"):
        more = f"{steps.SLICE} " if place == "steps.documents" else ""
        parse([*more.split(), *(words[2:] if place == "steps.parts" else words)]).check()
    elif place.startswith("real."):
        check_run(parse_command_line([*words, *real.RUN.split(), "--train-iters", "20"]), 1)
    elif place == "tiny.run":
        assert set(words) <= set(tiny_run.VARIANTS)
    elif place == "steps.experts":
        assert set(words) <= set(SHAPES)


def test_deterministic_mode_never_shares_a_process() -> None:
    """torch reads the variable that the mode sets at the first product of a process."""
    assert [line.function.rpartition(".")[2] for line in LINES].count("deterministic") == 1


def test_figures_of_documents_and_steps_that_run_out_of_time_are_kept(tmp_path: Path) -> None:
    """A kernel that builds plans for minutes is the one that the line is about."""
    (documents,) = (line for line in LINES if line.name == "documents/the kernel of a run")
    bench = next(line for line in LINES if line.name == "bench/8B")
    for line in (documents, bench):
        run = LineRun(line, tmp_path, CPU, True, deadline=time.monotonic())
        worker.run_line(run)
    results = read_results(tmp_path)
    assert (figures_of(results, documents.name) or {})["microbatches"] == 1
    assert (figures_of(results, bench.name) or {})["step_ms"] > 0


def test_the_share_of_kernels_counts_overlapping_kernels_once() -> None:
    spans = [(0.0, 10.0), (5.0, 10.0), (30.0, 10.0), (32.0, 1.0)]
    figures = device_time([{"ts": start, "dur": duration} for start, duration in spans])
    assert figures == {"kernels": 4, "busy_share": 25 / 40, "longest_gap_ms": 0.015, "gaps_ms": 0.015}
    assert device_time([]) == {}


# The tiny run


def test_differences_of_losses() -> None:
    assert tiny_run.difference([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)
    assert tiny_run.difference([1.0], [1.0, 2.0]) == float("inf")
    assert tiny_run.difference([float("nan"), 1.0], [1.0, 1.0]) == float("inf")


def test_the_bands_tell_a_missing_mask_from_rounding() -> None:
    stored = tiny_run.stored_losses()
    assert {len(losses) for losses in stored.values()} == {tiny_run.STEPS}
    without_mask = tiny_run.difference(stored["bf16"], stored["bf16, documents"])
    assert tiny_run.band("bf16", stored) == tiny_run.band("bf16, documents", stored) < 0.2 * without_mask
    assert tiny_run.band("FP8 delayed", stored) < 0.05
    assert stored["fp64"][-1] < 0.6 * stored["fp64"][0]
    assert json.loads(tiny_run.LOSSES.read_text())["command"].endswith("benchmarks/tiny_run.py")
