"""Stages that are tests: ``tests`` (tests/gpu) and ``ranks`` (layouts whose ranks share the device)."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_day_stages.checks import Check, StageRun, append, require

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("pytest", "pytest_timeout", "hypothesis")
"""Of pytest's command and of the tests' configuration."""


def run_tests(stage: StageRun) -> None:
    """Kernels against their references."""
    with stage.check("tests/gpu") as figures:
        # A rehearsal runs few of them: CI runs all that a CPU can.
        few = ["-k", "rehearsed and test_quantization"] if stage.is_tiny else []
        figures |= run_pytest(stage, "tests", ["tests/gpu", *few])


def run_ranks(stage: StageRun) -> None:
    """Layouts of two and four ranks on one device, over the staged transport."""
    layouts = "tests/parallel/test_staged_layouts.py"
    few = ["-k", "rehearsed and sequence"] if stage.is_tiny else ["--whole-matrix"]
    with stage.check("layouts on one device") as figures:
        figures |= run_pytest(stage, "layouts", [layouts, *few])
    if not figures and stage.device.type == "cuda":
        # Kernels one by one: what differs only without this is a missing order of streams.
        with stage.check("layouts with CUDA_LAUNCH_BLOCKING=1") as figures:
            figures |= run_pytest(stage, "blocking", [layouts, *few], {"CUDA_LAUNCH_BLOCKING": "1"})
    if stage.device.type == "cuda":
        with stage.check("layouts under the sanitizer of streams") as figures:
            figures |= run_pytest(stage, "sanitizer", [layouts, "-k", "rehearsed"], {"TORCH_CUDA_SANITIZER": "1"})


def run_pytest(
    stage: StageRun, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Numbers of tests by outcome; appends a failed check for every test that fails, and fails if one does."""
    absent = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    require(not absent, f"the tests need {', '.join(absent)}: install what is missing")
    report = stage.out / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", *arguments, "--device", stage.device.type, "--maxfail", "100"]
    command += ["--timeout", "120", "-p", "no:cacheprovider", "--junit-xml", str(report)]
    exit_code = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **(variables or {})}).returncode
    require(report.exists(), f"pytest ended with exit code {exit_code} and no report: see {stage.name}.log")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            counts["failed"] += 1
            error = (problem.get("message") or problem.text or "").strip().partition("\n")[0]
            identifier = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            append(stage.out, Check(stage.name, identifier, False, {}, error[:160], float(case.get("time", 0.0))))
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    require(counts["failed"] == 0, f"{counts['failed']} tests failed, {counts['passed']} passed")
    require(counts["passed"] > 0, f"no test ran: {counts['skipped']} were skipped")
    return counts
