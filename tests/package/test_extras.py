"""A training node needs no extra: training works without their packages, and who asks for one is told the command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.processes
def test_training_without_the_packages_of_the_extras(tmp_path: Path) -> None:
    flags = (
        "--model tiny --num-layers 1 --mock-data --vocab-size 100 --seq-length 16 --micro-batch-size 1 "
        "--global-batch-size 1 --train-iters 2 --log-interval 1 --lr 1e-3 --num-workers 0 --device cpu"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.package.without_extras", str(tmp_path), *flags.split()],
        cwd=REPOSITORY,
        env={**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(re.findall(r"^(\w+): (.*)$", done.stdout, re.MULTILINE))
    assert said["plain"] == "0" and done.stdout.count("] iteration ") == 2
    assert said["wandb"] == said["tensorboard"] == "2" and said["plot"] != "0"
    errors = re.findall(r"^ERROR: (.*)$", done.stderr, re.MULTILINE)
    assert errors == [
        "--wandb-project needs wandb: pip install wandb.",
        "--tensorboard-dir needs TensorBoard: pip install tensorboard.",
        "--output needs matplotlib: pip install matplotlib.",
    ]
    assert said["schedule"] == "--svg needs matplotlib: pip install matplotlib."
    assert said["histogram"] == "--plot needs matplotlib: pip install matplotlib."
    assert said["zst"] == "corpus.jsonl.zst needs the package pyarrow: pip install pyarrow."
    assert said["parquet"] == "corpus.parquet needs the package pyarrow: pip install pyarrow."
    assert said["datasets"] == "--input dataset:... needs the package datasets: pip install datasets."
