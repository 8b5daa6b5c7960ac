"""benchmarks/gpu_day.py: a rehearsal of all stages on a CPU, and what it does with checks that fail."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch

from benchmarks import gpu_day, gpu_day_report, tiny_run
from benchmarks.gpu_day import DayConfig, StageName, run_day, run_stage
from benchmarks.gpu_day_stages import __main__ as stages
from benchmarks.gpu_day_stages import pytest_stages
from benchmarks.gpu_day_stages.checks import FILE, WHOLE_STAGE, Check, StageRun, append, read_checks, require
from benchmarks.gpu_day_stages.pytest_stages import run_pytest
from benchmarks.gpu_day_stages.real import device_time
from benchmarks.gpu_day_stages.summary import GOALS, TABLE, as_text
from megatron.errors import ConfigError
from megatron.training.initialize import Process, prepare_cpu
from tests.forked import fork_context

CPU = torch.device("cpu")


def run_forked(config: DayConfig, stage: StageName, out: Path, limit: float) -> None:
    """:func:`~benchmarks.gpu_day.run_stage` without the seconds in which a new process imports torch."""
    process = fork_context().Process(target=run_logged, args=(stage, out))
    started = time.monotonic()
    process.start()
    process.join(limit)
    append(out, Check(stage, WHOLE_STAGE, process.exitcode == 0, seconds=time.monotonic() - started))
    process.kill()


def run_logged(stage: StageName, out: Path) -> None:
    with (out / f"{stage}.log").open("wb") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    prepare_cpu(Process.from_environment(os.environ))
    stages.run_stage(StageRun(stage, out, CPU, True))


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a rehearsal. The first stage has a process as on a GPU, the others are forked."""
    out = tmp_path_factory.mktemp("day")
    flags = ["--out", str(out), "--device", "cpu", "--tiny"]
    first, *others = get_args(StageName)
    assert gpu_day.main([*flags, "--only", first]) == 0, (out / TABLE).read_text()
    with mock.patch.object(gpu_day, "run_stage", run_forked):
        assert gpu_day.main([*flags, "--only", *others]) == 0, (out / TABLE).read_text()
    return out


def test_a_rehearsal_runs_every_stage(rehearsal: Path) -> None:
    checks = read_checks(rehearsal)
    assert [check.name for check in checks if not check.ok] == []
    by_stage = {stage: [check for check in checks if check.stage == stage] for stage in get_args(StageName)}
    assert all(len(found) >= 2 for found in by_stage.values()), by_stage
    figures = {(check.stage, check.name): check.figures for check in checks}
    assert figures["tiny", "fp64"]["difference"] <= 1e-9
    assert figures["ranks", "layouts on one device"]["passed"] == 1
    assert figures["tests", "tests/gpu"]["failed"] == 0
    assert figures["bench", "70B TP4"]["stand_in_ms"] > 0
    assert "bound, FP8 kernels" in figures["fp8", "8B, delayed"]["our_speed_relative_to"]
    assert figures["real", "train, evaluate, save in the background"]["saves"] == ["iter_0000015", "iter_0000030"]
    assert Path(figures["tiny", "profile"]["trace"]).is_file()
    assert (rehearsal / TABLE).read_text().count("not measured") >= 3


def test_a_rehearsal_is_written_into_a_copy_of_the_page(rehearsal: Path, tmp_path: Path) -> None:
    page = Path(shutil.copy(gpu_day_report.PAGE, tmp_path))
    before = page.read_text(encoding="utf-8")
    assert gpu_day_report.main(["--out", str(rehearsal), "--page", str(page)]) == 0
    found = page.read_text(encoding="utf-8")
    outside = [
        (text.partition(gpu_day_report.BEGIN)[0], text.partition(gpu_day_report.END)[2]) for text in (before, found)
    ]
    assert outside[0] == outside[1]
    section = found.partition(gpu_day_report.BEGIN)[2].partition(gpu_day_report.END)[0]
    assert "| 8B, bf16: share of the peak | 0.60 |" in section
    assert "| tiny | fp64 |" in section
    assert "nothing has been measured" in before.lower() and "nothing has been measured" not in section.lower()


def test_a_page_without_marks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path, Check("facts", "versions", True))
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    assert gpu_day_report.main(["--out", str(tmp_path), "--page", str(page)]) == 1
    assert "has no section to replace" in capsys.readouterr().err
    assert gpu_day_report.main(["--out", str(tmp_path / "no"), "--page", str(page)]) == 1
    assert "gpu_day.py --out" in capsys.readouterr().err


# Checks


def test_a_check_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    stage = StageRun("facts", tmp_path, CPU, True)
    with stage.check("first") as figures:
        figures["before"] = 1
        require(False, "it is wrong\nin two lines")
    with stage.check("second") as figures:
        figures["value"] = 2.5
    first, second = read_checks(tmp_path)
    assert (first.ok, first.error, first.figures) == (False, "it is wrong", {"before": 1})
    assert (second.ok, second.error, second.figures) == (True, None, {"value": 2.5})
    append(tmp_path, Check("facts", WHOLE_STAGE, True))
    assert [check.ok for check in read_checks(tmp_path)] == [False, True, True]
    # A second run of the stage replaces the first.
    with stage.check("first"):
        pass
    assert [(check.name, check.ok) for check in read_checks(tmp_path)] == [("first", True)]


def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    config = DayConfig(str(tmp_path), device="cpu", tiny=True)
    started = time.monotonic()
    run_stage(config, "real", tmp_path, limit=0.3)
    assert time.monotonic() - started < 30
    (check,) = read_checks(tmp_path)
    assert (check.stage, check.ok, check.error) == ("real", False, "ended after 0 s: see real.log")


def test_a_stage_that_crashes_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    run_stage(DayConfig(str(tmp_path), device="cpu", tiny=True), "facts", tmp_path, limit=20)
    assert [check.error for check in read_checks(tmp_path)] == ["exit code 1: see facts.log"]


def test_stages_for_which_there_is_no_time_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, float]] = []
    monkeypatch.setattr(gpu_day, "run_stage", lambda config, stage, out, limit: started.append((stage, limit)))
    run_day(DayConfig(str(tmp_path), budget_minutes=4.0, only=("ranks", "facts")))
    run_day(DayConfig(str(tmp_path), budget_minutes=0.4))
    assert [stage for stage, _ in started] == ["ranks", "facts"]
    assert started[0][1] == pytest.approx(240, abs=1) and started[1][1] == 120


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (DayConfig("day", device="cpu"), "add --tiny"),
        (DayConfig("day", budget_minutes=0.0), "--budget-minutes"),
        (DayConfig("s3://day"), "--out"),
    ],
)
def test_what_cannot_run_is_refused(config: DayConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config.check()


def test_a_test_that_fails_is_a_check(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_wrong():\n    assert 1 == 2, 'no'\n\ndef test_right():\n    pass\n")
    stage = StageRun("tests", tmp_path, CPU, True)
    with stage.check("all"):
        # The repository's conftest has the option --device.
        run_pytest(stage, "all", ["-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")])
    failed, whole = read_checks(tmp_path)
    assert (failed.ok, failed.name) == (False, "test_it::test_wrong")
    assert "no" in str(failed.error)
    assert (whole.ok, whole.error) == (False, "1 tests failed, 1 passed")


# Packages that are not installed


def test_the_command_starts_with_torch_numpy_and_tyro_alone() -> None:
    """``None`` in ``sys.modules`` is a package that is not installed."""
    absent = ("rich", "tqdm", "xxhash", "tensorboard", "pytest", "transformers", "wandb", "datasets", "gigatoken")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import benchmarks.gpu_day, benchmarks.gpu_day_stages.__main__
try:
    benchmarks.gpu_day.main(["--help"])
except SystemExit as end:
    assert end.code == 0
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=gpu_day.REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "--budget-minutes" in found.stdout


def test_a_stage_names_the_package_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.gpu_day_stages.selection", raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks.step_sweep", None)
    stages.run_stage(StageRun("selection", tmp_path, CPU, True))
    monkeypatch.setattr(pytest_stages, "PACKAGES", ("pytest", "no_such_package"))
    stages.run_stage(StageRun("tests", tmp_path, CPU, True))
    assert [(check.stage, check.name, check.ok, check.error) for check in read_checks(tmp_path)] == [
        ("selection", "packages", False, "the stage needs benchmarks.step_sweep: install it"),
        ("tests", "tests/gpu", False, "the tests need no_such_package: install what is missing"),
    ]


# The table


def measured(name: str, stage: str = "fp8", **figures: object) -> Check:
    return Check(stage, name, True, figures)


def test_goals_are_read_from_the_checks() -> None:
    checks = [
        measured("8B", "bench", mfu=0.62),
        measured("70B TP4", "bench", mfu=0.5),
        Check("bench", "405B TP8", False, {"mfu": 0.9}, "out of memory"),
        measured("8B, bf16, 4 microbatches", tokens_per_s=100.0),
        measured("8B, delayed, 4 microbatches", tokens_per_s=130.0),
        measured("70B TP4, delayed, 4 microbatches", tokens_per_s=130.0),
        measured("8B, documents", "bench", our_speed_relative_to={"without documents": 0.97}),
    ]
    found = {goal.name.partition(",")[0] + goal.stage: goal.found(checks) for goal in GOALS}
    assert found == {
        "8Bbench": 0.97,
        "70B TP4bench": 0.5,
        "405B TP8bench": None,
        "8Bfp8": 1.3,
        "70B TP4fp8": None,
        "405B TP8fp8": None,
    }
    text = as_text(checks)
    for line, verdict in (
        ("8B, bf16: share", "reached"),
        ("70B TP4, bf16: share", "missed"),
        ("405B TP8, bf", "not mea"),
    ):
        assert verdict in next(row for row in text.splitlines() if line in row)
    assert "7 checks, 1 failed" in text and "out of memory" in text


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
    assert FILE.endswith(".jsonl")
