"""The tiny run: in every precision against its losses on a CPU, twice in deterministic mode, killed and resumed, and
profiled."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tiny_run
from benchmarks.gpu_lines.line_run import REPOSITORY, LineRun, require

SAVE_INTERVAL, KILLED_AFTER, START_TIMEOUT = 5, 7, 120.0


def run(run: LineRun, *variants: str) -> None:
    """Train ``variants``."""
    stored = tiny_run.stored_losses()
    for name in variants:
        with run.result(name) as figures:
            losses = tiny_run.train(name, run.device.type)
            figures["last_loss"], figures["tolerance"] = losses[-1], tiny_run.band(name, stored)
            figures["difference"] = tiny_run.difference(losses, stored[tiny_run.VARIANTS[name].reference])
            require_close(figures["difference"], figures["tolerance"])


def deterministic(run: LineRun) -> None:
    """Two runs in this process, which has multiplied nothing before: torch reads CUBLAS_WORKSPACE_CONFIG, which the
    mode sets, at the first product of a process."""
    with run.result() as figures:
        losses, again = (tiny_run.train("bf16", run.device.type, "--deterministic-mode") for _ in range(2))
        figures["last_loss"] = losses[-1]
        require(losses == again, "two runs with --deterministic-mode have different losses")


def killed(run: LineRun) -> None:
    """A run that is killed between two checkpoints and started again."""
    with run.result() as figures:
        figures["difference"] = tiny_run.difference(killed_and_resumed(run), tiny_run.stored_losses()["fp64"])
        require_close(figures["difference"], 1e-9)


def profiled(run: LineRun) -> None:
    """Two steps under torch's profiler."""
    with run.result() as figures:
        directory = run.out / "profiled_tiny_run"
        window = ("--profile-step-start", 10, "--profile-step-end", 12)
        traces = ("--profile", "--use-pytorch-profiler", "--tensorboard-dir", directory)
        tiny_run.train("bf16", run.device.type, *traces, *window)
        trace = next(directory.rglob("*.trace.json"))
        figures["trace"], figures["bytes"] = str(trace.relative_to(run.out)), trace.stat().st_size


def require_close(difference: float, tolerance: float) -> None:
    require(difference <= tolerance, f"losses differ by {difference:.1e}, allowed are {tolerance:.1e}")


def killed_and_resumed(run: LineRun) -> list[float]:
    """The losses of both processes."""
    directory = run.out / "killed_run"
    metrics = directory / "metrics.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    paths = ["--save", directory, "--load", directory, "--save-interval", SAVE_INTERVAL, "--metrics-jsonl", metrics]
    # In fp64 a step of the GPU is so quick that the run could end before it is killed.
    flags = tiny_run.flags_of("fp64", run.device.type, *paths, "--log-interval", 1)
    process = start(flags)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while process.poll() is None and len(logged(metrics)) < KILLED_AFTER and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    seen = len(logged(metrics))
    require(KILLED_AFTER <= seen < tiny_run.STEPS, f"the run was killed after {seen} of {tiny_run.STEPS} steps")
    exit_code = start(flags).wait(START_TIMEOUT)
    require(exit_code == 0, f"the resumed run ended with exit code {exit_code}")
    return logged(metrics)


def start(flags: Sequence[str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "WANDB_MODE": "offline"}
    return subprocess.Popen([sys.executable, str(REPOSITORY / "pretrain_llama.py"), *flags], env=environment)


def logged(metrics: Path) -> list[float]:
    return tiny_run.losses_of(metrics)
