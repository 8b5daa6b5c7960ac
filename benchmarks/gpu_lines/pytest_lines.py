"""Tests as lines: every test is a result, and behind a test that ends its process another process goes on."""

import importlib.util
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_lines.line import (
    BROKEN,
    RESULTS,
    STARTED,
    Result,
    Verdict,
    append,
    own_results,
    read_results,
)
from benchmarks.gpu_lines.line_run import LineRun, place_of, require, verdict_of
from benchmarks.lib.results import complete_records, error_line
from megatron.core.device import device_is_broken

PACKAGES = ("pytest", "pytest_timeout", "hypothesis")
"""Packages that pytest's command and the tests' configuration need."""
TIMEOUT = 60.0
"""Seconds of a test. Then the process ends, because a wait in the driver cannot be interrupted otherwise."""


def run(run: LineRun, rehearsal: str, *arguments: str) -> None:
    """Run pytest with ``arguments``; a rehearsal selects by the expression ``rehearsal``."""
    absent = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    require(not absent, f"the tests need {', '.join(absent)}: install what is missing")
    import pytest

    recorder = Recorder(run)
    words = [*arguments, "--device", run.device.type, "-p", "no:cacheprovider", "-v"]
    words += ["--timeout", str(TIMEOUT), "--timeout-method", "thread", *(["-k", rehearsal] if run.is_tiny else [])]
    exit_code = pytest.main(words, plugins=[recorder])
    if exit_code == BROKEN:
        raise SystemExit(BROKEN)
    results = [one for one in own_results(read_results(run.out)[run.line.name]) if one.name != run.line.name]
    with run.result() as figures:
        figures["passed"] = sum(result.verdict == Verdict.RIGHT for result in results)
        figures["failed"], figures["skipped"] = len(results) - figures["passed"], recorder.skipped
        require(figures["failed"] == 0, f"{figures['failed']} tests failed, {figures['passed']} passed")
        require(figures["passed"] > 0, f"no test ran: {recorder.skipped} were skipped, pytest's exit code {exit_code}")


class Recorder:
    """A plugin of pytest: appends a result for every test as soon as it is over, and leaves out the tests that have
    passed, and those that have failed in this run of the line."""

    def __init__(self, run: LineRun) -> None:
        self._run = run
        self._running = run.out / f"{run.line.name.replace('/', '-')}.running"
        self.skipped = 0
        if self._running.exists():
            self._record_ended_process()
        self._done = tests_that_are_done(run)

    def _record_ended_process(self) -> None:
        """A result for the test that the last process ran when it ended."""
        test, started = json.loads(self._running.read_text(encoding="utf-8"))
        seconds = time.time() - started
        verdict = Verdict.HUNG if seconds >= TIMEOUT else Verdict.CRASHED
        error = f"its process ended with it after {seconds:.0f} s or less: see the log"
        append(self._run.out, Result(self._run.line.name, test, verdict, error=error))
        self._running.unlink()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        done = [item for item in items if item.nodeid in self._done]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.write_text(json.dumps([nodeid, time.time()]), encoding="utf-8")

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        error = call.excinfo.value
        verdict, text, place = verdict_of(error), error_line(error), place_of(error.__traceback__)
        self._record(report.nodeid or node.nodeid, verdict, text, place, getattr(report, "duration", 0.0))
        if device_is_broken():
            import pytest

            self._running.unlink(missing_ok=True)
            pytest.exit("the process cannot use its GPU any more", returncode=BROKEN)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self.skipped += 1
        elif report.when == "call" and report.passed:
            self._record(report.nodeid, Verdict.RIGHT, None, None, report.duration)

    def pytest_runtest_logfinish(self) -> None:
        self._running.unlink(missing_ok=True)

    def _record(self, test: str, verdict: Verdict, error: str | None, place: str | None, seconds: float) -> None:
        append(self._run.out, Result(self._run.line.name, test, verdict, {}, error, place, round(seconds, 3)))


def tests_that_are_done(run: LineRun) -> set[str]:
    """Tests that have passed in any run of the line, and those that have failed in this one."""
    records = [record for record in complete_records(run.out / RESULTS) if record["line"] == run.line.name]
    return _passed(records) | {record["name"] for record in records[_last_start(records) :]}


def _passed(records: Sequence[dict[str, Any]]) -> set[str]:
    latest = {record["name"]: record["verdict"] for record in records}
    return {name for name, verdict in latest.items() if verdict == Verdict.RIGHT}


def _last_start(records: Sequence[dict[str, Any]]) -> int:
    return max((place for place, record in enumerate(records) if record["name"] == STARTED), default=0)
