"""examples/llama4_cpu.sh, short: it trains, writes text, exports, and has nothing left to do the second time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.run_process import environment, free_port, latest_iteration, records, write_documents

pytestmark = pytest.mark.slow(reason="trains a tiny model in two processes")

RECIPE = Path(__file__).parents[2] / "examples/llama4_cpu.sh"
ITERATIONS = 6


def run(directory: Path) -> str:
    """The output of the recipe, which must succeed."""
    settings = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUN": str(directory / "run"),
        "DATA": str(directory / "data"),
        "VOCABULARY": "384",
        "ITERATIONS": str(ITERATIONS),
        "MASTER_PORT": str(free_port()),
    }
    command = ["bash", str(RECIPE), "--log-interval", "1"]
    process = subprocess.run(command, env=environment() | settings, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_recipe_trains_writes_text_and_exports(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_documents(tmp_path / "data/corpus.jsonl", documents=60)
    first = run(tmp_path)
    found = records(tmp_path / "run/metrics.jsonl")
    losses = [record["lm_loss"] for record in found if "lm_loss" in record]
    assert len(losses) == ITERATIONS and losses[-1] < losses[0]
    assert [record["iteration"] for record in found if "validation_loss" in record] == [ITERATIONS]
    assert latest_iteration(tmp_path / "run/checkpoints") == ITERATIONS
    assert f"training loss {losses[0]:.3f} to {losses[-1]:.3f}, validation loss " in first
    config = json.loads((tmp_path / "run/hugging_face/config.json").read_text())
    assert (config["model_type"], config["attention_chunk_size"], config["floor_scale"]) == ("llama4_text", 64, 64)
    second = run(tmp_path)
    assert "== Training" not in second and "== Export" not in second
    _, heading, text = first.partition("== Text")
    assert heading and text.partition("== Export")[0].strip() == second.partition("== Text")[2].strip()
