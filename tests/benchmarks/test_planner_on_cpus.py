"""Layouts of real processes on this machine take about as long as a calibration of the machine predicts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.run_process import REPOSITORY, environment


@pytest.mark.slow(reason="compares times, which needs two quiet cores for minutes")
def test_ten_layouts_take_as_long_as_predicted(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/benchmark_planner_cpu.py", "--json", str(figures)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    print(done.stdout)
    assert len(found["rows"]) == 10
    assert found["median_error"] <= 0.10
    assert found["pairs_in_order"] >= 0.9 * found["pairs_apart"]
