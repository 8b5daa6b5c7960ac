"""The tiny run in every precision against its losses on a CPU, killed and resumed, and profiled."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tiny_run
from benchmarks.gpu_day_stages.checks import StageRun, require

REPOSITORY = Path(__file__).resolve().parents[2]
REHEARSED = ("fp64", "fp64, documents", "bf16, documents", "FP8 delayed")
SAVE_INTERVAL, KILLED_AFTER, START_TIMEOUT = 5, 7, 120.0


def run(stage: StageRun) -> None:
    stored = tiny_run.stored_losses()
    for name, variant in tiny_run.VARIANTS.items():
        if stage.is_tiny and name not in REHEARSED:
            continue
        with stage.check(name) as figures:
            losses = tiny_run.train(name, stage.device.type)
            figures["last_loss"], figures["tolerance"] = losses[-1], tiny_run.band(name, stored)
            figures["difference"] = tiny_run.difference(losses, stored[variant.reference])
            require_close(figures["difference"], figures["tolerance"])
    with stage.check("deterministic mode") as figures:
        losses, again = (tiny_run.train("bf16", stage.device.type, "--deterministic-mode") for _ in range(2))
        figures["last_loss"] = losses[-1]
        require(losses == again, "two runs with --deterministic-mode have different losses")
    with stage.check("killed and resumed") as figures:
        losses = killed_and_resumed(stage)
        figures["difference"] = tiny_run.difference(losses, stored["fp64"])
        require_close(figures["difference"], 1e-9)
    with stage.check("profile") as figures:
        trace = profile(stage)
        figures["trace"], figures["bytes"] = str(trace), trace.stat().st_size


def require_close(difference: float, tolerance: float) -> None:
    require(difference <= tolerance, f"losses differ by {difference:.1e}, allowed are {tolerance:.1e}")


def killed_and_resumed(stage: StageRun) -> list[float]:
    """Losses of a run that is killed between two checkpoints and started again."""
    directory = stage.out / "killed_run"
    metrics = directory / "metrics.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    paths = ["--save", directory, "--load", directory, "--save-interval", SAVE_INTERVAL, "--metrics-jsonl", metrics]
    # In fp64 a step of the GPU is so quick that the run could end before it is killed.
    longer = tiny_run.flags_of("fp64", stage.device.type, *paths, "--log-interval", 1)
    process = start(longer, stage)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while process.poll() is None and len(logged(metrics)) < KILLED_AFTER and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    seen = len(logged(metrics))
    require(KILLED_AFTER <= seen < tiny_run.STEPS, f"the run was killed after {seen} of {tiny_run.STEPS} steps")
    exit_code = start(longer, stage).wait(START_TIMEOUT)
    require(exit_code == 0, f"the resumed run ended with exit code {exit_code}")
    return logged(metrics)


def start(flags: Sequence[str], stage: StageRun) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "WANDB_MODE": "offline"}
    return subprocess.Popen([sys.executable, str(REPOSITORY / "pretrain_llama.py"), *flags], env=environment)


def logged(metrics: Path) -> list[float]:
    return tiny_run.losses_of(metrics) if metrics.exists() else []


def profile(stage: StageRun) -> Path:
    """The trace of two steps."""
    directory = stage.out / "profiled_run"
    window = ("--profile-step-start", 10, "--profile-step-end", 12)
    tiny_run.train(
        "bf16", stage.device.type, "--profile", "--use-pytorch-profiler", "--tensorboard-dir", directory, *window
    )
    return next(directory.rglob("*.trace.json"))
