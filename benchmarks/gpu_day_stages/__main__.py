"""Run one stage in this process: ``python -m benchmarks.gpu_day_stages STAGE --out DIR --device cuda``."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_day_stages import documents, facts, pytest_stages, real, selection, sweep, tiny
from benchmarks.gpu_day_stages.checks import StageRun
from megatron.training.initialize import Process, choose_device, prepare_cpu

RUNS: dict[str, Callable[[StageRun], None]] = {
    "facts": facts.run,
    "tests": pytest_stages.run_tests,
    "tiny": tiny.run,
    "selection": selection.run,
    "bench": sweep.run_bf16,
    "fp8": sweep.run_fp8,
    "documents": documents.run,
    "ranks": pytest_stages.run_ranks,
    "real": real.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=RUNS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true")
    flags = parser.parse_args()
    process = Process.from_environment(os.environ)
    device = choose_device(flags.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    RUNS[flags.stage](StageRun(flags.stage, flags.out, device, flags.tiny))


if __name__ == "__main__":
    main()
