"""The SLURM script goes back into the queue when its time is up or its step failed, and only then."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "pretrain.sbatch"
STEP = """
trap 'sleep 0.2; exit 0' USR1   # the run saves
echo $$ > pid
printf '%s\\n' "$@" > step
[ -n "$STATUS" ] && exit "$STATUS"
while true; do sleep 0.05; done
"""
COMMANDS = {
    "srun": STEP,
    "scancel": 'echo "scancel $*" >> record; kill -USR1 "$(cat pid)"',
    "scontrol": 'if [ "$1" = show ]; then echo node4; echo node5; else echo "scontrol $*" >> record; fi',
}


def submit(directory: Path, **changes: str) -> subprocess.Popen[str]:
    """Start the script as SLURM would, with commands of SLURM that write down how they were called."""
    for name, body in COMMANDS.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (directory / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "10042", "SLURM_JOB_NODELIST": "node[4-5]", "STATUS": ""}
    return subprocess.Popen(
        ["bash", str(SCRIPT), "recipe.sh", "--seed", "7"],
        cwd=directory,
        env={"PATH": f"{directory}:{os.environ['PATH']}", **job, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def failures(directory: Path) -> Path:
    return directory / "pretrain-10042.failures"


def record(directory: Path) -> str:
    path = directory / "record"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_a_job_whose_time_is_up_saves_and_is_queued_again(tmp_path: Path) -> None:
    failures(tmp_path).write_text("failed\n" * 20)
    job = submit(tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "step").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 0
    assert record(tmp_path) == "scancel --signal=USR1 10042\nscontrol requeue 10042\n"
    assert not failures(tmp_path).exists()
    words = (tmp_path / "step").read_text(encoding="utf-8").split("\n")
    assert words[-7:] == ["recipe.sh", "--exit-signal-handler", "--exit-signal", "SIGUSR1", "--seed", "7", ""]


@pytest.mark.parametrize(
    ("status", "failed_before", "seconds", "is_queued", "failed"),
    [
        ("0", 3, 0, False, 0),
        ("1", 0, 0, True, 1),
        ("1", 18, 0, True, 19),
        ("1", 19, 0, False, 20),
        # It ran for an hour before it failed.
        ("1", 19, 3600, True, 1),
    ],
)
def test_a_job_is_queued_again_after_a_failure_but_not_for_ever(
    tmp_path: Path, status: str, failed_before: int, seconds: int, is_queued: bool, failed: int
) -> None:
    """However often it was started before: SLURM counts the starts that went well, too."""
    if failed_before:
        failures(tmp_path).write_text("failed\n" * failed_before)
    job = submit(tmp_path, STATUS=status, SLURM_RESTART_COUNT="99", SECONDS=str(seconds))
    assert job.wait(timeout=30) == int(status)
    assert ("scontrol requeue 10042" in record(tmp_path)) is is_queued
    found = failures(tmp_path).read_text().splitlines() if failures(tmp_path).exists() else []
    assert len(found) == failed
