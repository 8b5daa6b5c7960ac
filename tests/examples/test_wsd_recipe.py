"""examples/wsd_cpu.sh, short: a stable run, two decays, two averages, and a table of their losses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.run_process import environment, iterations, latest_iteration

pytestmark = pytest.mark.slow(reason="starts eleven processes")

RECIPE = Path(__file__).parents[2] / "examples/wsd_cpu.sh"


def run(directory: Path) -> str:
    """The output of the recipe, which must succeed."""
    settings = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUN": str(directory),
        "STABLE": "24",
        "DECAY": "6",
        "EVERY": "3",
    }
    process = subprocess.run(
        ["bash", str(RECIPE)], env=environment() | settings, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_decays_continue_the_stable_run_and_all_are_compared(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert (latest_iteration(tmp_path / "decay_12"), latest_iteration(tmp_path / "decay_24")) == (18, 30)
    stable, decay = (iterations(tmp_path / f"{name}.jsonl")[-1] for name in ("stable", "decay_24"))
    assert stable["learning_rate"] == 3e-3
    assert decay["iteration"] == 30 and 0.0 <= decay["learning_rate"] < 1.5e-3
    table = first.partition("== Validation loss\n")[2]
    assert re.findall(r"^ +(\d+)  +[\d.]+  +[\d.]+  +[\d.]+$", table, re.MULTILINE) == ["12", "24"]
    second = run(tmp_path)
    assert "== Stable run" not in second and "== Decay" not in second
    assert second.partition("== Validation loss\n")[2] == table
