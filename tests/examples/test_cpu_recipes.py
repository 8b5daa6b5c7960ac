"""Recipes for a CPU, short: they train as they say, and have nothing left to do the second time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    environment,
    free_port,
    iterations,
    latest_iteration,
    losses,
    records,
    write_documents,
)

pytestmark = pytest.mark.slow(reason="trains tiny models in processes")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(recipe: str, *flags: str, **settings: object) -> str:
    """The output of a recipe, which must succeed."""
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables |= {name: str(value) for name, value in settings.items()}
    command = ["bash", str(EXAMPLES / recipe), *flags]
    process = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_experts_train_on_two_processes(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    run("moe_cpu.sh", "--metrics-jsonl", str(metrics), OUTPUT=tmp_path / "run")
    found = [record for record in records(metrics) if "expert_load_max" in record]
    assert found[-1]["iteration"] == 20
    assert 1 <= found[-1]["expert_load_max"] < 8
    assert found[-1]["lm_loss"] < found[0]["lm_loss"]


def test_llama_4_trains_writes_text_and_exports(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_documents(tmp_path / "data/corpus.jsonl", documents=60)
    metrics = tmp_path / "run/metrics.jsonl"
    settings: dict[str, object] = {"RUN": tmp_path / "run", "DATA": tmp_path / "data"}
    settings |= {"VOCABULARY": 384, "ITERATIONS": 6, "MASTER_PORT": free_port()}
    first = run("llama4_cpu.sh", "--log-interval", "1", **settings)
    found = losses(metrics)
    assert len(found) == 6 and found[-1] < found[0]
    assert [record["iteration"] for record in records(metrics) if "validation_loss" in record] == [6]
    assert latest_iteration(tmp_path / "run/checkpoints") == 6
    assert f"training loss {found[0]:.3f} to {found[-1]:.3f}, validation loss " in first
    config = json.loads((tmp_path / "run/hugging_face/config.json").read_text())
    assert (config["model_type"], config["attention_chunk_size"], config["floor_scale"]) == ("llama4_text", 64, 64)
    second = run("llama4_cpu.sh", "--log-interval", "1", **settings)
    assert "== Training" not in second and "== Export" not in second
    _, heading, text = first.partition("== Text")
    assert heading and text.partition("== Export")[0].strip() == second.partition("== Text")[2].strip()


def test_decays_continue_the_stable_run_and_all_are_compared(tmp_path: Path) -> None:
    """A stable run, two decays, two averages, and a table of their losses."""
    settings: dict[str, object] = {"RUN": tmp_path, "STABLE": 24, "DECAY": 6, "EVERY": 3}
    first = run("wsd_cpu.sh", **settings)
    assert (latest_iteration(tmp_path / "decay_12"), latest_iteration(tmp_path / "decay_24")) == (18, 30)
    stable, decay = (iterations(tmp_path / f"{name}.jsonl")[-1] for name in ("stable", "decay_24"))
    assert stable["learning_rate"] == 3e-3
    assert decay["iteration"] == 30 and 0.0 <= decay["learning_rate"] < 1.5e-3
    table = first.partition("== Validation loss\n")[2]
    assert re.findall(r"^ +(\d+)  +[\d.]+  +[\d.]+  +[\d.]+$", table, re.MULTILINE) == ["12", "24"]
    second = run("wsd_cpu.sh", **settings)
    assert "== Stable run" not in second and "== Decay" not in second
    assert second.partition("== Validation loss\n")[2] == table
