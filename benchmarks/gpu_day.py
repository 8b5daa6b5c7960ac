#!/usr/bin/env python3
"""Check on a GPU that everything computes what it should, and measure how fast, in one command:

    python benchmarks/gpu_day.py --out DIR                            # 25 minutes, the most valuable stages first
    python benchmarks/gpu_day.py --out DIR --only documents ranks     # these stages, into the same table
    python benchmarks/gpu_day.py --out DIR --device cpu --tiny        # a rehearsal in a minute or two, without a GPU

Every stage runs in a process with a time limit. One line per check is appended to DIR/checks.jsonl as soon as it is
over. DIR/STAGE.log is the output of a stage; DIR/table.txt has the checks and the goals, after every stage. A failure
does not end the other stages. The command needs torch, numpy and tyro; a stage that needs another package says so in
its line (docs/performance.md lists what to install). Compiled kernels need a C compiler and Triton.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import tyro

from benchmarks.gpu_day_stages.checks import WHOLE_STAGE, Check, append, read_checks
from benchmarks.gpu_day_stages.summary import TABLE, as_text
from megatron.errors import ConfigError, UserError
from megatron.ranges import require_positive
from megatron.urls import refuse_urls

REPOSITORY = Path(__file__).resolve().parents[1]

StageName = Literal["facts", "tests", "tiny", "selection", "bench", "fp8", "documents", "ranks", "real"]
MINUTES: dict[StageName, float] = {
    "facts": 2,
    "tests": 5,
    "tiny": 5,
    "selection": 3,
    "bench": 9,
    "fp8": 8,
    "documents": 6,
    "ranks": 8,
    "real": 8,
}
"""The time limit of every stage, in the order in which they run: the most valuable first."""

LEAST_MINUTES = 0.5
"""A stage is not started if less time is left."""


@dataclass(frozen=True)
class DayConfig:
    """What runs, where, and for how long."""

    out: str
    """Directory of all results; further stages add to it."""
    budget_minutes: float = 25.0
    """Minutes in all: stages start in order until they are over, and the stage that runs then is killed."""
    only: tuple[StageName, ...] = ()
    """Stages to run, in this order (default: all for which there is time)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU where there is one."""
    tiny: bool = False
    """Rehearse with tiny shapes and a part of the checks."""

    def check(self) -> None:
        """Raise :class:`ConfigError` for what cannot run."""
        require_positive({"--budget-minutes": self.budget_minutes})
        refuse_urls({"--out": self.out}, "name a local directory")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda needs a GPU, and torch finds none: rehearse with --device cpu --tiny.")
        if self.resolved_device == "cpu" and not self.tiny:
            raise ConfigError("A CPU takes days for the shapes of a GPU: add --tiny for a rehearsal.")

    @property
    def resolved_device(self) -> str:
        """``cpu`` or ``cuda``."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def run_day(config: DayConfig) -> list[Check]:
    """Run the stages; returns all checks of the directory."""
    out = Path(config.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * config.budget_minutes
    for stage in config.only or get_args(StageName):
        limit = min(60 * MINUTES[stage], end - time.monotonic())
        if limit < 60 * LEAST_MINUTES:
            print(f"{stage}: not started, the --budget-minutes are over", flush=True)
            continue
        print(f"{stage}: at most {limit / 60:.1f} minutes", flush=True)
        run_stage(config, stage, out, limit)
        checks = read_checks(out)
        (out / TABLE).write_text(as_text(checks), encoding="utf-8")
        found = [check for check in checks if check.stage == stage]
        failed = [check.name for check in found if not check.ok]
        print(f"{stage}: {len(found)} checks, failed: {', '.join(failed) or 'none'}", flush=True)
    return read_checks(out)


def run_stage(config: DayConfig, stage: StageName, out: Path, limit: float) -> None:
    """Run a stage in a process group of its own, which is killed after ``limit`` seconds. A stage that is killed, or
    whose exit code is not 0, is a failed check."""
    command = [sys.executable, "-m", "benchmarks.gpu_day_stages", stage, "--out", str(out)]
    command += ["--device", config.resolved_device, *(["--tiny"] if config.tiny else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.getenv("PYTHONPATH")])),
    }
    started = time.monotonic()
    with (out / f"{stage}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code = process.wait(limit)
            error = None if exit_code == 0 else f"exit code {exit_code}: see {stage}.log"
        except subprocess.TimeoutExpired:
            error = f"ended after {limit:.0f} s: see {stage}.log"
        finally:
            end_group(process)
    append(out, Check(stage, WHOLE_STAGE, error is None, error=error, seconds=time.monotonic() - started))


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process of a stage, and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and print the tables; the exit code is 1 if a check has failed."""
    config = tyro.cli(DayConfig, args=arguments, description=__doc__)
    try:
        config.check()
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    checks = run_day(config)
    print(as_text(checks), end="")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
